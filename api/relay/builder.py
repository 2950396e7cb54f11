"""From frames to what a client of `/v1/completions` sees: stream chunks and the response object.

A pure function of the frames: the same for live streams, resumed ones and plain JSON. Knows nothing of sockets, SSE
framing, the store or the clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from api.relay.logprobs import ChoiceLogprobs, Entry, Vocabulary, as_object, prompt_entries
from api.schemas.stream_options import StreamOptions
from shared.errors import InternalError
from shared.frames import Delta, End, Error, Finish, Frame, Name, Prompt, Start, first_seq
from shared.jobs import Job

_encode = msgspec.json.encode


class Event(NamedTuple):
    """One event of a stream. `id`: the frame it was made of, `.k` from that frame's second event on; `data`: JSON."""

    id: str
    data: bytes


class _Choice:
    """What is known of one choice."""

    __slots__ = ("echoed", "finish", "length", "logprobs", "out", "released", "text", "tokens")

    def __init__(self, logprobs: ChoiceLogprobs | None) -> None:
        self.text: list[str] = []
        self.tokens = 0
        self.finish: Finish | None = None
        #: The prompt is out, or is not asked for.
        self.echoed = False
        #: Code points of prompt and completion that are out.
        self.length = 0
        #: Ids whose text is out; None: all.
        self.out: int | None = None
        self.logprobs = logprobs
        #: Logprob entries that are out, for the whole.
        self.released: list[Entry] = []


class CompletionBuilder:
    """Takes a request's frames in order, each once, from its first frame on.

    `tokens_as_ids`: logprobs write `token_id:N` for a token. Prompts that were token ids come decoded in `start`.
    The last finish chunk waits for `end`, which brings the usage it may have to carry.
    """

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
        self._prompt_texts = [prompt if isinstance(prompt, str) else "" for prompt in job.prompts]
        self._pick: list[int] | None = None
        self._choices = [
            _Choice(ChoiceLogprobs(self._vocabulary) if self._scored else None) for _ in range(job.choices)
        ]
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
        self._head = (
            b'{"id":%b,"object":"text_completion","created":%d,"model":%b,"system_fingerprint":%b,"choices":['
            % (
                _encode(job.id),
                job.created,
                _encode(job.model),
                _encode(fingerprint),
            )
        )
        running = self._options.continuous_usage
        self._tail = b"}" if running or self._options.include_usage is not True else b',"usage":null}'
        self._running = running
        self._before_text = self._head + b'{"text":'
        rest = b"" if running else self._tail
        self._after_text = [
            b',"index":%d,"logprobs":null,"finish_reason":null,"stop_reason":null}]%b' % (index, rest)
            for index in range(len(self._choices))
        ]

    # -- frames in

    def feed(self, last: Name, new: list[Frame]) -> list[Event]:
        """The events that these frames make; `last` names the last of them.

        Neighbouring deltas of one choice become one event with the id of the last one. A replay that skips to a
        cursor must therefore feed what lies before the cursor apart from what lies behind it.
        """
        events: list[Event] = []
        seq = first_seq(last, new)
        index = 0
        while index < len(new):
            frame = new[index]
            run = index + 1
            if isinstance(frame, Delta):
                neighbours = [frame]
                while run < len(new) and isinstance(following := new[run], Delta) and following.i == frame.i:
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
        if frame.echo is not None:
            self._prompt_texts = frame.echo
        for index, choice in enumerate(self._choices):
            choice.length = len(self._prompt_texts[index // self._job.candidates])
        if not self._job.echo or self._scored:  # a prompt with logprobs waits for them
            return []
        return [chunk for index in range(len(self._choices)) for chunk in self._echo_of(index)]

    def _echo_of(self, index: int) -> list[bytes]:
        """The chunk with the prompt, once a choice."""
        choice = self._choices[index]
        if choice.echoed or not self._job.echo:
            return []
        choice.echoed = True
        number = index // self._job.candidates
        text, scores = self._prompt_texts[number], self._prompt_scores[number]
        if not text and not scores:
            return []
        choice.text.append(text)
        return [self._chunk(index, text, scores)]

    def _delta(self, neighbours: list[Delta]) -> list[bytes]:
        index = neighbours[0].i
        choice = self._choices[index]
        made = self._echo_of(index)
        text = ""
        for frame in neighbours:
            if choice.logprobs is not None:
                choice.logprobs.add(frame, len(self._prompt_texts[index // self._job.candidates]))
            choice.tokens += len(frame.t)
            text += frame.text
        choice.out = neighbours[-1].n
        if not text:
            return made
        choice.text.append(text)
        choice.length += len(text)
        entries = choice.logprobs.release(choice.out, choice.length) if choice.logprobs is not None else []
        return [*made, self._chunk(index, text, entries)]

    def _finish(self, frame: Finish) -> list[bytes]:
        choice = self._choices[frame.i]
        if choice.finish is not None:
            return []
        choice.finish = frame
        made = self._echo_of(frame.i)
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
            made.append(self._head + b'],"usage":%b}' % _encode(self._usage))
        return made

    def _fail(self, frame: Error) -> list[bytes]:
        self.ended = True
        self.error = frame
        return [error_data(frame.error)]

    # -- chunks out

    def _chunk(self, index: int, text: str, entries: list[Entry]) -> bytes:
        if self._scored:
            self._choices[index].released += entries
            scores = _text(as_object(entries, self._vocabulary))
            chunk = b'%b%b,"index":%d,"logprobs":%b,"finish_reason":null,"stop_reason":null}]%b' % (
                self._before_text,
                _text(text),
                index,
                scores,
                b"" if self._running else self._tail,
            )
        else:
            chunk = self._before_text + _text(text) + self._after_text[index]
        return chunk + self._usage_so_far() if self._running else chunk

    def _finish_chunk(self, finish: Finish, usage: dict[str, Any] | None) -> bytes:
        choice, scores = self._choices[finish.i], b"null"
        if choice.logprobs is not None:
            entries = choice.logprobs.release(choice.out)
            choice.released += entries
            scores = _text(as_object(entries, self._vocabulary))
        return b'%b{"text":"","index":%d,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}]%b' % (
            self._head,
            finish.i,
            scores,
            _encode(finish.reason),
            _encode(finish.stop_reason),
            self._usage_so_far() if usage is None else b',"usage":%b}' % _encode(usage),
        )

    def _usage_so_far(self) -> bytes:
        return b',"usage":%b}' % _encode(self._count()) if self._running else self._tail

    def _count(self) -> dict[str, Any]:
        sampled = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self._prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _complete_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The worker's usage; a field it left out comes from the frames."""
        full = {**self._count(), **usage}
        full["total_tokens"] = full["prompt_tokens"] + full["completion_tokens"]
        return full

    # -- the whole

    def _kept(self) -> list[_Choice]:
        """The choices that the client gets: all, or of each prompt the n best of best_of."""
        if self._pick is not None:
            return [self._choices[index] for index in self._pick]
        if self._job.candidates == self._job.n:
            return self._choices
        return [choice for index, choice in enumerate(self._choices) if index % self._job.candidates < self._job.n]

    def response(self) -> dict[str, Any]:
        """The response object as far as the frames go; `usage` is null until the request has ended well."""
        return {
            "id": self._job.id,
            "object": "text_completion",
            "created": self._job.created,
            "model": self._job.model,
            "system_fingerprint": self._fingerprint,
            "choices": [
                {
                    "text": "".join(choice.text),
                    "index": index,
                    "logprobs": as_object(choice.released, self._vocabulary) if self._scored else None,
                    "finish_reason": choice.finish.reason if choice.finish else None,
                    "stop_reason": choice.finish.stop_reason if choice.finish else None,
                }
                for index, choice in enumerate(self._kept())
            ],
            "usage": self._usage,
        }


def error_data(error: dict[str, Any]) -> bytes:
    """The data of an error event."""
    return b'{"error":%b}' % _encode(error)


def _text(text: str | dict[str, Any]) -> bytes:
    """JSON of a text, or of an object with texts, in plain UTF-8 but for three characters.

    U+0085, U+2028 and U+2029 are escaped: clients that split a stream with str.splitlines() (httpx's iter_lines among
    them) would otherwise cut the event there.
    """
    raw = _encode(text)
    if raw.isascii():
        return raw
    return (
        raw.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )
