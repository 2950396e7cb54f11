"""Reasoning and answer, told apart in a text that a model writes, as it comes.

A pure function of the text: however it is cut, the parts are the same, so a stream, a resumed one and the whole agree.
The API splits with it; the worker counts with it which tokens were reasoning. Knows nothing of tokens and of HTTP.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec

#: Longest tag that a job may name.
MAX_TAG = 64
#: White space before an opening tag; behind more, there is none.
MAX_SPACE = 64


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tags of a request's model. `opened`: the prompt ends behind the opening tag, so the text begins inside."""

    open: str
    close: str
    opened: bool = False


class Parts(NamedTuple):
    """What became clear of a text: the reasoning comes before the content."""

    reasoning: str = ""
    content: str = ""


class Phase(Enum):
    """Where a text is. UNDECIDED: it may still turn out to begin with the opening tag."""

    UNDECIDED = "undecided"
    INSIDE = "inside"
    OUTSIDE = "outside"


class Splitter:
    """One text. Only a block at its beginning is reasoning; tags that come later are content.

    The tags and the white space around them belong to neither part. A block that is never closed is reasoning to the end.
    Without `reasoning` all is content, unchanged."""

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._tags = reasoning or Reasoning("", "")
        self.phase = Phase.OUTSIDE if reasoning is None else Phase.INSIDE if reasoning.opened else Phase.UNDECIDED
        #: There was reasoning, or its tags.
        self.reasoned = self.phase is Phase.INSIDE
        #: What may be the opening tag, with the white space before it.
        self._begin: str | None = None if reasoning is None else ""
        #: Inside: white space, which is only shown if something follows, and behind it a beginning of the closing tag.
        self._space: list[str] = []
        self._partial = ""
        #: White space is left out until something else has come: at the beginning of a part.
        self._trimming = False

    def feed(self, text: str) -> Parts:
        """What `text` makes clear."""
        if self._begin is not None:
            text = self._beginning(text)
        if not text:
            return Parts()
        if self.phase is Phase.INSIDE:
            return self._inside(text)
        return Parts(content=self._outside(text))

    def flush(self) -> Parts:
        """The end of the text: what was held back."""
        held, self._begin = self._begin or "", None
        if self.phase is Phase.INSIDE:
            partial, self._partial = (self._partial or held.strip()), ""
            return Parts(reasoning=self._shown(partial) if partial else "")
        return Parts(content=held)

    def _beginning(self, text: str) -> str:
        """What comes behind the opening tag; or all, if there is none; or nothing yet."""
        held = (self._begin or "") + text
        begun = held.lstrip()
        if len(held) - len(begun) <= MAX_SPACE:
            if begun.startswith(self._tags.open):
                self._begin, self.phase, self._trimming = None, Phase.INSIDE, True
                self.reasoned = True
                return begun[len(self._tags.open) :]
            if self._tags.open.startswith(begun):
                self._begin = held
                return ""
        self._begin = None
        if self.phase is Phase.INSIDE:
            self._trimming = True
        else:
            self.phase = Phase.OUTSIDE
        return held

    def _inside(self, text: str) -> Parts:
        text, self._partial = self._partial + text, ""
        end = text.find(self._tags.close)
        if end >= 0:
            self.phase = Phase.OUTSIDE
            reasoning = text[:end].rstrip()
            shown = self._shown(reasoning) if reasoning else ""
            self._trimming = True
            return Parts(shown, self._outside(text[end + len(self._tags.close) :]))
        cut = len(text) - overlap(text, self._tags.close)
        text, self._partial = text[:cut], text[cut:]
        reasoning = text.rstrip()
        shown = self._shown(reasoning) if reasoning else ""
        self._space.append(text[len(reasoning) :])
        return Parts(reasoning=shown)

    def _shown(self, reasoning: str) -> str:
        """With the white space before it; its own is gone behind it, and before it if it is the first."""
        shown = "".join(self._space) + reasoning
        self._space.clear()
        if self._trimming:
            self._trimming = False
            return shown.lstrip()
        return shown

    def _outside(self, text: str) -> str:
        if self._trimming:
            text = text.lstrip()
            self._trimming = not text
        return text


def overlap(text: str, tag: str) -> int:
    """How long a beginning of the tag the text ends with."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class Counter:
    """How many tokens of a text are reasoning: those up to the one that completes the closing tag, the tags included."""

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._splitter = Splitter(reasoning)
        self._undecided = 0
        self.count = 0

    def feed(self, text: str) -> None:
        """The text that became whole with one token."""
        if self._splitter.phase is Phase.OUTSIDE:
            return
        self._splitter.feed(text)
        self._undecided += 1
        if self._splitter.reasoned:
            self.count += self._undecided
            self._undecided = 0
