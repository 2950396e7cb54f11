"""A text that is held to a constraint: which token may come next, and whether the text is complete.

Compiled grammars are shared and never change. Each choice has a state of its own, a pure function of the grammar and the
ids: a choice that goes on elsewhere gets there by feeding its ids to a fresh one. Knows nothing of engines.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from shared.errors import LogLost, StructuredOutputFailed
from shared.grammars import LIMITS, behind_reasoning, plan
from shared.reasoning import Reasoning
from shared.structured import Constraint, Unmet
from workers.generation.json_watch import NUMBER, Full, JsonWatch

#: Allowed ids: id i is bit i % 32 of word i // 32.
Mask = npt.NDArray[np.uint32]

#: Compiled grammars that are kept; most have some 100 KB.
KEPT = 64
#: Tokens that may be refused in one place, one after the other, before the text has failed.
MOST_REFUSED = 256


#: Ids of a text, no special ones among them.
Encode = Callable[[str], list[int]]


class _Tokens(TokenizerWrapper):
    """A vocabulary as LLTokenizer wants it. It is called with text that a grammar forces, so that the model's own tokens
    come; where those are not that text (SentencePiece puts a space before it), the longest that fit, by `greedy`."""

    def __init__(self, pieces: Sequence[bytes], special: Iterable[int], end: int | None, encode: Encode) -> None:
        self.is_tokenizer_wrapper = True
        self.tokens = list(pieces)
        self.special_token_ids = sorted(special)
        self.bos_token_id = None
        # Without one it would be put behind the others, and is never sampled.
        self.eos_token_id = end  # type: ignore[assignment]
        self.greedy = encode
        self._own = encode

    def __call__(self, text: str) -> list[int]:
        ids = self._own(text)
        return ids if b"".join([self.tokens[token] for token in ids]) == text.encode() else self.greedy(text)


class Vocabulary:
    """A model's tokens as grammars need them; made once, in half a second for 50,000 tokens.

    `pieces`: raw bytes of every id; `end_ids`: those that end a text, `control_ids`: those that are no text."""

    def __init__(
        self, pieces: Sequence[bytes], *, end_ids: Iterable[int], control_ids: Iterable[int], encode: Encode
    ) -> None:
        self.pieces = pieces
        self.end_ids = frozenset(end_ids)
        ends = sorted(self.end_ids)
        special = self.end_ids.union(control_ids)
        tokens = _Tokens(pieces, special, ends[0] if ends else None, encode)
        self.trie = LLTokenizer(tokens, eos_token=ends or None)
        tokens.greedy = self.trie.greedy_tokenize
        #: Words of a mask.
        self.words = (self.trie.vocab_size + 31) // 32
        firsts = [-1 if token in special or not piece else piece[0] for token, piece in enumerate(pieces)]
        #: What may come where something has to end: a closing quote, or anything but more of a number.
        self.enders = {
            Full.STRING: self._mask(np.array([first == ord('"') for first in firsts])),
            Full.NUMBER: self._mask(
                np.array(
                    [
                        (first >= 0 and first not in NUMBER) or token in self.end_ids
                        for token, first in enumerate(firsts)
                    ]
                )
            ),
        }

        #: By digits, as bytes: all that does not begin with that one.
        self.changes = {digit: self._mask(np.array([first != digit for first in firsts])) for digit in b"0123456789"}
        #: What may begin another item of an array: outside of strings, and in them.
        self.commas = [token for token, first in enumerate(firsts) if first >= 0 and b"," in pieces[token]]
        self.closing_commas = [token for token in self.commas if b'"' in pieces[token]]
        self.blanks = self._mask(
            np.array([first >= 0 and not pieces[token].strip() for token, first in enumerate(firsts)])
        )

    def _mask(self, allowed: npt.NDArray[np.bool_]) -> Mask:
        packed = np.zeros(self.words * 4, np.uint8)
        bits = np.packbits(allowed, bitorder="little")
        packed[: len(bits)] = bits
        return packed.view(np.uint32)


@dataclass(frozen=True, slots=True)
class _Lead:
    """Where a text is before its answer begins: in its reasoning, or where that may still begin. `seen`: what may be the
    beginning of a tag."""

    open: bytes
    close: bytes
    inside: bool
    seen: bytes = b""

    def after(self, piece: bytes) -> tuple[_Lead | None, bytes]:
        """The place behind `piece`; None: the answer has begun, with these bytes."""
        seen, inside = self.seen + piece, self.inside
        if not inside:
            begun = seen.lstrip()
            if not begun.startswith(self.open):
                return (replace(self, seen=seen), b"") if self.open.startswith(begun) else (None, seen)
            seen, inside = begun[len(self.open) :], True
        _, closed, answer = seen.partition(self.close)
        if closed:
            return None, answer
        return replace(self, inside=True, seen=seen[-len(self.close) :]), b""


class Grammar:
    """A compiled constraint, on what comes behind the reasoning, if there is any. Raises Unmet for one that no text can be
    held to."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, reasoning: Reasoning | None = None) -> None:
        planned = plan(constraint)
        grammar, self._lead = planned.grammar, None
        if reasoning is not None:
            grammar = behind_reasoning(grammar, reasoning)
            self._lead = _Lead(reasoning.open.encode(), reasoning.close.encode(), reasoning.opened)
        if planned.missing is not None and not constraint.whole:
            raise Unmet(f"has {planned.missing}, which nothing here enforces", planned.path)
        self._vocabulary = vocabulary
        self._is_json = constraint.kind in ("json", "tools")  # what stands around arguments has no brackets of its own
        self._first = LLMatcher(vocabulary.trie, grammar, log_level=0, limits=LIMITS)
        self._first.compute_bitmask()  # what it makes the engine build is built here, in no step
        if self._first.is_error():
            raise Unmet("cannot be written with the model's tokens")

    def begin(self, ids: Sequence[int] = ()) -> State:
        """The state behind `ids`, a beginning of a text (or all of it). Raises LogLost for ids that do not follow the grammar."""
        state = State(self._vocabulary, self._first.deep_copy(), JsonWatch() if self._is_json else None, self._lead)
        try:
            for token in ids:
                state.accept(token)
        except StructuredOutputFailed:
            raise LogLost("What was sent of this request does not follow its grammar.") from None
        return state


class Grammars:
    """The grammars of a worker, compiled when they are first wanted and kept for a while. Any thread."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[tuple[Constraint, Reasoning | None], Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def prepare(self) -> None:
        """Makes what the first grammar needs."""
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make()

    def kept(self, constraint: Constraint, reasoning: Reasoning | None = None) -> Grammar | None:
        """The grammar, if it is at hand."""
        key = (constraint, reasoning)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def of(self, constraint: Constraint, reasoning: Reasoning | None = None) -> Grammar:
        """The grammar, compiled if need be: most in milliseconds, the largest in a second. Raises Unmet."""
        if (grammar := self.kept(constraint, reasoning)) is not None:
            return grammar
        self.prepare()
        assert self._vocabulary is not None
        grammar = Grammar(constraint, self._vocabulary, reasoning)
        with self._lock:
            self._kept[constraint, reasoning] = grammar
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar


def _is_in(mask: Mask, token: int) -> bool:
    return bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _take_out(mask: Mask, token: int) -> None:
    mask[token // 32] &= np.uint32(0xFFFF_FFFF ^ (1 << token % 32))


#: What of the reasoning is still to come, and where the answer is, if it is JSON.
_Place = tuple[_Lead | None, JsonWatch | None]


class State:
    """One choice. For each position: `mask`; `takes` of the token that was sampled by it, and if it does not, `refuse` and
    another one; then `accept`. `complete`: the text is finished, and nothing but its end could follow."""

    def __init__(
        self, vocabulary: Vocabulary, matcher: LLMatcher, watch: JsonWatch | None, lead: _Lead | None = None
    ) -> None:
        self.complete = False
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._place: _Place = (lead, watch)
        self._mask: Mask | None = None
        self._refused = 0

    def mask(self) -> Mask:
        """The ids that may come next. Raises StructuredOutputFailed if there are none, or nobody can say."""
        if self._mask is None:
            mask = np.zeros(self._vocabulary.words, np.uint32)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():  # a limit was reached, or nothing fits
                raise StructuredOutputFailed("The text cannot go on as its form demands, or that is too complex.")
            lead, watch = self._place
            if lead is None and watch is not None and (full := watch.full) is not None:
                ended = mask & self._vocabulary.enders[full]
                if not ended.any() and watch.digit is not None:  # a digit over and over may never make it right
                    ended = mask & self._vocabulary.changes[watch.digit]
                mask = ended if ended.any() else mask
            if lead is None and watch is not None and watch.tired is not None:
                mask = self._without_repeats(mask, watch)
            self._mask = mask
        return self._mask

    def _without_repeats(self, mask: Mask, watch: JsonWatch) -> Mask:
        """Without the tokens that begin another item of the tired array, unless there has to be one."""
        vocabulary, ended = self._vocabulary, mask.copy()
        for token in vocabulary.commas if watch.string is None else vocabulary.closing_commas:
            if _is_in(mask, token) and watch.repeats(vocabulary.pieces[token]):
                _take_out(ended, token)
        return ended if (ended & ~vocabulary.blanks).any() else mask

    def takes(self, token: int) -> bool:
        """Whether the text may go on with `token`, as far as the mask does not say: it might be a key's second time, or too
        deep."""
        return self._behind(token) is not None

    def refuse(self, token: int) -> None:
        """Takes it out of the mask. Raises StructuredOutputFailed when that leaves nothing, or after very many."""
        self._refused += 1
        mask = self.mask()
        _take_out(mask, token)
        if self._refused > MOST_REFUSED or not mask.any():
            raise StructuredOutputFailed(
                "The text cannot go on: a key would repeat, a number not end, or it would be nested too deep."
            )

    def accept(self, token: int) -> None:
        """`token` is the next one. Raises StructuredOutputFailed if it cannot be."""
        place = self._behind(token)
        ends = token in self._vocabulary.end_ids
        if place is None or not (ends or self._matcher.consume_token(token)):
            raise StructuredOutputFailed("The text does not have the form that it was to have.")
        self._place, self._mask, self._refused = place, None, 0
        self.complete = self.complete or (not ends and self._matcher.is_stopped())

    def _behind(self, token: int) -> _Place | None:
        """Where the text is behind `token`; None: it must not come."""
        lead, watch = self._place
        if watch is None or token in self._vocabulary.end_ids:
            return self._place
        piece = self._vocabulary.pieces[token]
        if lead is not None:
            lead, piece = lead.after(piece)
            if lead is not None:
                return lead, watch
        return None if (behind := watch.after(piece)) is None else (None, behind)
