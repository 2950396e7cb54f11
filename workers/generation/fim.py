"""Fill-in-the-middle: which tokens a model has for it, and the ids of a prompt that has a text after the gap.

Pure; knows cards and ids, nothing of engines. Each family writes the same three parts in its own way:

| family | prompt |
|---|---|
| Qwen2.5-Coder, StarCoder2 | PREFIX before SUFFIX after MIDDLE |
| CodeLlama, DeepSeek-Coder | BOS PREFIX before SUFFIX after MIDDLE |
| Codestral | BOS SUFFIX after PREFIX before |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shared.cards import Fim, ModelCard
from shared.prompts import continued

#: (prefix, suffix, middle) as vocabularies write them. `▁` is what SentencePiece writes for a space.
_KNOWN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder: the hole is where the suffix begins
)
#: (prefix, suffix) of those that put the suffix first and need no third token: Codestral and its kin.
_KNOWN_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")


def known_tokens(ids: Mapping[str, int]) -> Fim | None:
    """The tokens of fill-in-the-middle in a vocabulary (text as it stands there -> id), by their well-known names."""
    for prefix, suffix, middle in _KNOWN:
        if prefix in ids and suffix in ids and middle in ids:
            return Fim(ids[prefix], ids[suffix], ids[middle])
    prefix, suffix = _KNOWN_SUFFIX_FIRST
    if prefix in ids and suffix in ids:
        return Fim(ids[prefix], ids[suffix], mode="spm")
    return None


def prompt_ids(card: ModelCard, before: Sequence[int], after: Sequence[int], *, add_bos: bool) -> list[int]:
    """The prompt that asks for what stands between `before` and `after`, neither with anything added.

    `add_bos`: the model's BOS comes first if its tokenizer adds one; else only if `before` begins with it. A BOS
    anywhere else is left out. The card has `fim`."""
    fim, bos = card.fim, card.bos_id
    assert fim is not None
    first = [bos] if bos is not None and ((add_bos and card.add_bos) or list(before[:1]) == [bos]) else []
    if bos not in (fim.prefix, fim.suffix, fim.middle):
        before, after = ([token for token in part if token != bos] for part in (before, after))
    middle = [] if fim.middle is None else [fim.middle]
    if fim.mode == "spm":
        return [*first, fim.suffix, *after, fim.prefix, *before, *middle]
    return [*first, fim.prefix, *before, fim.suffix, *after, *middle]


def suffix_ids(
    suffix: str, tokenize: Callable[[str], list[int]], detokenize: Callable[[Sequence[int]], bytes]
) -> list[int]:
    """Ids of the text after the gap, as it is: without the space that some tokenizers put before a text."""
    return continued(suffix, tokenize, lambda ids: detokenize(ids).decode(errors="replace"))
