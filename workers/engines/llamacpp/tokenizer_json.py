"""tokenizer.json for a GGUF's vocabulary: byte-level BPE with the pre-tokenizers whose rules are known here.

Only an offer: the worker compares it with llama.cpp itself before anyone counts with it. Whatever is not built
here (SentencePiece, WordPiece, other pre-tokenizers) has no tokenizer.json. Regular expressions are those of
llama.cpp's src/llama-vocab.cpp (tag b11549), which differ from the models' own in details.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from workers.engines.llamacpp.gguf_head import read_head

#: llama.cpp's token attributes (enum llama_token_attr).
UNKNOWN, CONTROL, USER_DEFINED, LSTRIP, RSTRIP = 1, 8, 16, 128, 256

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Rules:
    """Expressions that cut a text into words, one after the other; `whole_words`: a word that is a token is not
    looked at for merges."""

    cuts: tuple[str, ...]
    whole_words: bool = False


_DIGITS_THEN_GPT2 = _Rules((r"\p{N}", _GPT2))
#: By `tokenizer.ggml.pre`.
RULES = {
    "gpt-2": _Rules((_GPT2,)),
    "phi-2": _Rules((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "llama-bpe": _Rules((_LLAMA3,), whole_words=True),
    "llama3": _Rules((_LLAMA3,), whole_words=True),
    "llama-v3": _Rules((_LLAMA3,), whole_words=True),
    "qwen2": _Rules((_QWEN2,)),
    "deepseek-r1-qwen": _Rules((_QWEN2,)),
}

_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges")


def tokenizer_json(path: Path, attributes: Sequence[int]) -> str | None:
    """tokenizer.json for the model at `path`, None for a kind that is not built here. `attributes`: llama.cpp's, by
    id; it corrects some of those in the file. Raises ValueError or OSError for a file that cannot be read."""
    head = read_head(path, _KEYS)
    if head.get("tokenizer.ggml.model") != "gpt2" or len(head) != len(_KEYS):
        return None
    rules = RULES.get(head["tokenizer.ggml.pre"])
    tokens: list[str] = head["tokenizer.ggml.tokens"]
    if rules is None or len(tokens) != len(attributes) or len(set(tokens)) != len(tokens):
        return None
    merges = [tuple(merge.split(" ", 1)) for merge in head["tokenizer.ggml.merges"]]
    return build(tokens, merges, attributes, rules).to_str()


def build(
    tokens: Sequence[str], merges: Sequence[tuple[str, ...]], attributes: Sequence[int], rules: _Rules
) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.whole_words)  # type: ignore[arg-type]
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in rules.cuts]
    steps = [*cuts, ByteLevel(add_prefix_space=False, use_regex=False)]
    lost = sorted(set(ByteLevel.alphabet()) - vocabulary.keys())
    if lost:
        # Bytes that are no token vanish in both; but llama.cpp merges nothing across the place where one was.
        steps.append(pre_tokenizers.Split(Regex("[" + "".join(f"\\x{{{ord(c):x}}}" for c in lost) + "]"), "removed"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = UNKNOWN | CONTROL
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=bool(attribute & special),
                normalized=False,
                lstrip=bool(attribute & LSTRIP),
                rstrip=bool(attribute & RSTRIP),
            )
            for token, attribute in zip(tokens, attributes, strict=True)
            if token and attribute & (special | USER_DEFINED)
        ]
    )
    return tokenizer
