"""What an engine's grammars need of it: its vocabulary, taken through the interface that every engine has."""

from __future__ import annotations

from shared.cards import ModelCard
from workers.engines.base import Engine
from workers.generation.constraint import Grammars, Vocabulary


def grammars_of(engine: Engine, card: ModelCard) -> Grammars:
    """The grammars of a loaded engine; its vocabulary is asked for with the first of them."""

    def encode(text: str) -> list[int]:
        return engine.tokenize(text, add_special=False, parse_special=False)

    def vocabulary() -> Vocabulary:
        pieces = [engine.detokenize((token,)) for token in range(card.vocab_size)]
        return Vocabulary(pieces, end_ids=card.end_ids, control_ids=card.control_ids, encode=encode)

    return Grammars(vocabulary)
