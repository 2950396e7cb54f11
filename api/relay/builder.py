"""From frames to what a client sees: the part that raw completions and chats have in common.

A pure function of the frames: the same for live streams, resumed ones and plain JSON. What a chunk looks like is in
`completion_builder.py` and `chat_builder.py`. Knows nothing of sockets, SSE framing, the store or the clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from api.relay.line_ends import on_one_line
from api.relay.logprobs import ChoiceLogprobs, Entry, Vocabulary, prompt_entries
from api.schemas.stream_options import StreamOptions
from shared.errors import InternalError
from shared.frames import Delta, End, Error, Finish, Frame, Name, Prompt, Start, first_seq
from shared.jobs import Job

encode = msgspec.json.encode


class Event(NamedTuple):
    """One event of a stream. `id`: the frame it was made of, `.k` from that frame's second event on; `data`: JSON."""

    id: str
    data: bytes


class Choice:
    """What is known of one choice."""

    __slots__ = (
        "_whole",
        "calls",
        "echoed",
        "finish",
        "length",
        "logprobs",
        "out",
        "reasoned",
        "reasoning",
        "released",
        "text",
        "tokens",
    )

    def __init__(self, logprobs: ChoiceLogprobs | None) -> None:
        self._whole = True
        self.text: list[str] = []
        self.tokens = 0
        #: Of a chat: the reasoning before the text, and how many of the tokens were that.
        self.reasoning: list[str] = []
        self.reasoned = 0
        #: Of a chat: the calls of tools, each with its name and the pieces of its arguments.
        self.calls: list[tuple[str, list[str]]] = []
        self.finish: Finish | None = None
        #: The prompt is out, or is not asked for.
        self.echoed = False
        #: Code points that came, of the prompt too where offsets count it.
        self.length = 0
        #: Ids whose text is out; None: all.
        self.out: int | None = None
        self.logprobs = logprobs
        #: Logprob entries that are out, for the whole.
        self.released: list[Entry] = []

    def release(self, text_end: int | None = None) -> list[Entry]:
        """The logprob entries of the tokens whose text came, up to `text_end`, that were not released yet."""
        if self.logprobs is None:
            return []
        entries = self.logprobs.release(self.out, text_end)
        self.keep(scores=entries)
        return entries

    def keep(self, *, text: str = "", reasoning: str = "", scores: Sequence[Entry] = ()) -> None:
        """What is out, for the whole, if anybody will ask for that."""
        if self._whole:
            self.text += [text] if text else []
            self.reasoning += [reasoning] if reasoning else []
            self.released += scores

    def keep_arguments(self, call: int, arguments: str) -> None:
        """More of the arguments of a call."""
        if self._whole:
            self.calls[call][1].append(arguments)

    def only_streams(self) -> None:
        """Nobody will ask for the whole."""
        self._whole = False
        self.text, self.reasoning, self.released = [], [], []


class Builder(ABC):
    """Takes a request's frames in order, each once, from its first frame on.

    `tokens_as_ids`: logprobs write `token_id:N` for a token. Prompts that were token ids come decoded in `start`.
    The last finish chunk waits for `end`, which brings the usage it may have to carry.
    """

    #: `object` of the response and of its chunks.
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        job: Job,
        *,
        fingerprint: str,
        options: StreamOptions | None = None,
        tokens_as_ids: bool = False,
    ) -> None:
        self._job = job
        self._fingerprint = fingerprint
        self._options = options or StreamOptions()
        #: Whether a client sees logprobs, and how ids are written in them.
        self._scored = job.logprobs is not None
        self._vocabulary = Vocabulary(as_ids=tokens_as_ids)
        self._prompt_scores: list[list[Entry]] = [[] for _ in job.prompts]
        self._pick: list[int] | None = None
        self._choices = [Choice(ChoiceLogprobs(self._vocabulary) if self._scored else None) for _ in range(job.choices)]
        self._unfinished = len(self._choices)
        self._held: Finish | None = None
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._usage: dict[str, Any] | None = None
        #: A worker has the request: it waits in no queue any more.
        self.taken = False
        #: The `start` frame, once it was seen.
        self.start: Start | None = None
        #: A terminal frame was seen.
        self.ended = False
        #: The frame that ended the request, if that was an error.
        self.error: Error | None = None
        self._head = b'{"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,"choices":[' % (
            encode(job.id),
            encode(self.chunk_object),
            job.created,
            encode(job.model),
            encode(fingerprint),
        )
        running = self._options.continuous_usage
        self._tail = b"}" if running or self._options.include_usage is not True else b',"usage":null}'
        self._running = running

    # -- frames in

    def feed(self, last: Name, new: list[Frame]) -> list[Event]:
        """The events that these frames make; `last` names the last of them.

        Neighbouring deltas of one choice become one event with the id of the last one, but for a delta that brings
        something else along: which events a frame makes beyond its first never depends on what it was fed with. A
        replay that skips to a cursor must feed what lies before the cursor apart from what lies behind it.
        """
        events: list[Event] = []
        seq = first_seq(last, new)
        index = 0
        while index < len(new):
            frame = new[index]
            run = index + 1
            if isinstance(frame, Delta):
                neighbours = [frame]
                alone = self._brings_more(frame)
                while (
                    not alone and run < len(new) and isinstance(following := new[run], Delta) and following.i == frame.i
                ):
                    neighbours.append(following)
                    run += 1
                made = self._delta(neighbours)
            elif isinstance(frame, Finish):
                made = self._finish(frame)
            elif isinstance(frame, End):
                made = self._end(frame)
            elif isinstance(frame, Error):
                made = self._fail(frame)
            else:
                made = self._begin(frame)
            if made:
                name = f"{last.a}-{seq + run - 1}"
                events.append(Event(name, made[0]))
                if len(made) > 1:
                    events.extend(Event(f"{name}.{k}", data) for k, data in enumerate(made[1:], 1))
            if self.ended:
                break
            index = run
        return events

    def _begin(self, frame: Frame) -> list[bytes]:
        self.taken = True
        if isinstance(frame, Prompt):
            self._vocabulary.learn(frame.p)
            self._prompt_scores[frame.i] += prompt_entries(frame)
            return []
        if not isinstance(frame, Start):
            return []
        self.start = frame
        self._prompt_tokens, self._cached_tokens = frame.prompt_tokens, frame.cached_tokens
        return self._opening(frame)

    def _delta(self, neighbours: list[Delta]) -> list[bytes]:
        index = neighbours[0].i
        choice = self._choices[index]
        made = self._before(index)
        text = ""
        for frame in neighbours:
            if choice.logprobs is not None:
                choice.logprobs.add(frame, self._offset(index))
            choice.tokens += len(frame.t)
            choice.reasoned += frame.r
            text += frame.text
        choice.out = neighbours[-1].n
        if text:
            choice.length += len(text)
            made += self._text(index, text)
        return made

    def _finish(self, frame: Finish) -> list[bytes]:
        choice = self._choices[frame.i]
        if choice.finish is not None:
            return []
        choice.finish = frame
        made = self._rest(frame.i)
        self._unfinished -= 1
        if not self._unfinished:
            self._held = frame
            return made
        return [*made, self._finish_chunk(frame, None)]

    def _end(self, frame: End) -> list[bytes]:
        if self._held is None:
            return self._fail(Error(InternalError().to_object(), InternalError.status))
        self.ended = True
        self._pick = frame.pick
        self._usage = self._complete_usage(frame.usage)
        mode = self._options.include_usage
        made = [self._finish_chunk(self._held, self._usage if mode is None or self._running else None)]
        if mode is True:
            made.append(self._head + b'],"usage":%b}' % encode(self._usage))
        return made

    def _fail(self, frame: Error) -> list[bytes]:
        self.ended = True
        self.error = frame
        return [error_data(frame.error)]

    # -- what a kind of request adds

    def _brings_more(self, frame: Delta) -> bool:
        """Whether a delta makes another chunk before its own."""
        return False

    def _opening(self, start: Start) -> list[bytes]:
        """The chunks that come before any text."""
        return []

    def _before(self, index: int) -> list[bytes]:
        """The chunks that come before a choice's next text, if they are not out."""
        return []

    def _offset(self, index: int) -> int:
        """Code points before a choice's text, from which its tokens' offsets count."""
        return 0

    @abstractmethod
    def _text(self, index: int, text: str) -> list[bytes]:
        """The chunks that new text of a choice makes; at most one."""

    @abstractmethod
    def _rest(self, index: int) -> list[bytes]:
        """The chunks that come before a choice's finish: what was still to be sent."""

    @abstractmethod
    def _finish_object(self, finish: Finish) -> bytes:
        """The choice's entry in its finish chunk."""

    @abstractmethod
    def _choice_object(self, choice: Choice, number: int) -> dict[str, Any]:
        """A choice in the response, as number `number`."""

    # -- chunks out

    def _finish_chunk(self, finish: Finish, usage: dict[str, Any] | None) -> bytes:
        return b"%b%b]%b" % (
            self._head,
            self._finish_object(finish),
            self._usage_so_far() if usage is None else b',"usage":%b}' % encode(usage),
        )

    def _usage_so_far(self) -> bytes:
        return b',"usage":%b}' % encode(self._count()) if self._running else self._tail

    def _count(self) -> dict[str, Any]:
        sampled = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self._prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    @property
    def tokens_used(self) -> int | None:
        """Prompt and completion tokens as far as the frames go; None: a worker has the request and has not said."""
        if self._usage is None and self.start is None:
            return None if self.taken else 0
        used: int = (self._usage or self._count())["total_tokens"]
        return used

    def _complete_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The worker's usage; a field it left out comes from the frames."""
        full = {**self._count(), **usage}
        full["total_tokens"] = full["prompt_tokens"] + full["completion_tokens"]
        return full

    # -- the whole

    def usage_so_far(self) -> dict[str, Any]:
        """Tokens counted in the frames, also of a request that did not end well."""
        return self._usage if self._usage is not None else self._count()

    def _kept(self) -> list[Choice]:
        """The choices that the client gets: all, or of each prompt the n best of best_of."""
        if self._pick is not None:
            return [self._choices[index] for index in self._pick]
        if self._job.candidates == self._job.n:
            return self._choices
        return [choice for index, choice in enumerate(self._choices) if index % self._job.candidates < self._job.n]

    def only_streams(self) -> None:
        """Nobody will ask for the `response`: a stream holds no more than what is on its way."""
        for choice in self._choices:
            choice.only_streams()

    def response(self) -> dict[str, Any]:
        """The response object as far as the frames go; `usage` is null until the request has ended well."""
        return {
            "id": self._job.id,
            "object": self.whole_object,
            "created": self._job.created,
            "model": self._job.model,
            "system_fingerprint": self._fingerprint,
            "choices": [self._choice_object(choice, number) for number, choice in enumerate(self._kept())],
            "usage": self._usage,
        }


def error_data(error: dict[str, Any]) -> bytes:
    """The data of an error event."""
    return b'{"error":%b}' % encode(error)


def text_data(text: str | dict[str, Any]) -> bytes:
    """JSON of a text, or of an object with texts, in plain UTF-8; clients that cut a stream into lines must not cut an event there."""
    return on_one_line(encode(text))
