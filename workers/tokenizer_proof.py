"""The proof that a tokenizer.json tokenises as its engine does, before anybody counts with it.

An engine offers the file (`Engine.tokenizer_json`); here both tokenise the probe corpus, in every mode, and turn ids
back into text. One difference, and the model goes without: the API then counts nothing, and the worker alone says
what fits. Knows no engine in particular.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import msgspec
import structlog

from shared.cards import ModelCard
from shared.tokenizer import JsonTokenizer
from workers import probe_corpus
from workers.engines.base import Engine

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Proven:
    """A card with `tokenizer_sha`, and the file that belongs to it; or the card as it was, and None."""

    card: ModelCard
    tokenizer: str | None


def prove(engine: Engine, card: ModelCard) -> Proven:
    """Asks the engine for its tokenizer.json and compares. Takes a second at most; never raises."""
    try:
        offered = engine.tokenizer_json()
        if offered is None:
            log.info("no_tokenizer", model=card.id, reason="there is none for this kind of vocabulary")
            return Proven(card, None)
        tokenizer = JsonTokenizer(offered, card.bos_id if card.add_bos else None)
        difference = first_difference(engine, tokenizer, _specials(offered), card.vocab_size)
    except Exception:
        log.exception("no_tokenizer", model=card.id)
        return Proven(card, None)
    if difference is not None:
        log.warning("no_tokenizer", model=card.id, reason=difference)
        return Proven(card, None)
    sha = hashlib.sha256(offered.encode()).hexdigest()
    return Proven(msgspec.structs.replace(card, tokenizer_sha=sha), offered)


def first_difference(engine: Engine, tokenizer: JsonTokenizer, specials: list[str], vocab_size: int) -> str | None:
    """In words, where the two differ; None if they do not, on the whole corpus."""
    texts = probe_corpus.texts(specials)
    for parse_special in (True, False):
        for add_special in (True, False):
            ours = tokenizer.encode_all(texts, add_special=add_special, parse_special=parse_special)
            for text, ids in zip(texts, ours, strict=True):
                theirs = engine.tokenize(text, add_special=add_special, parse_special=parse_special)
                if ids != theirs:
                    return (
                        f"the text {text[:60]!a} becomes {len(theirs)} tokens in the engine and {len(ids)} in "
                        f"tokenizer.json, not the same ones (add_special={add_special}, parse_special={parse_special})"
                    )
    sequences = probe_corpus.ids(vocab_size) + tokenizer.encode_all(texts[:200])
    for ids in sequences:
        if tokenizer.decode(ids) != engine.detokenize(ids).decode(errors="replace"):
            return f"the ids {ids[:20]} become another text"
    return None


def _specials(offered: str) -> list[str]:
    """The tokens that are found as they are written, longest first."""
    added = json.loads(offered).get("added_tokens") or []
    return sorted((token["content"] for token in added), key=lambda content: (-len(content), content))
