"""Frames: what a worker says about a request, and how they lie in the log and travel on channels.

A frame is named `{a}-{s}`: `a` is the attempt (the fence), `s` counts from 1 without holes over all attempts
of one request. A log entry is a JSON array of frames; its stream id names the last one, the others count
back. A channel message is an object from job id to `["a-s", [frame, ...]]`, the same names. Readers ignore
fields they do not know. Knows nothing of Redis, HTTP or text.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from shared.errors import SluiceError

#: Version of frames; a reader that meets a higher one leaves them alone.
VERSION = 1

#: One token's raw logprobs: its own, and the N best as (id, logprob), best first; behind them the token itself if it
#: is none of them. So its own number always stands in the list, and N = 0 lists it alone.
Logprob = tuple[float, list[tuple[int, float]]]


#: A place in a list; nobody may count from its end.
Index = Annotated[int, msgspec.Meta(ge=0)]


class Take(msgspec.Struct, tag_field="k", tag="take"):
    """An attempt begins. Written by take.lua. `queued_ms`: since submission or the last hand-over."""

    worker: str
    queued_ms: int = 0


class Start(msgspec.Struct, tag_field="k", tag="start", omit_defaults=True):
    """Once a request, before any token. `echo`: the prompts' text, where token ids were sent and their text or its
    length is needed (echo, logprobs); a prompt that was sent as text is as sent."""

    prompt_tokens: int
    cached_tokens: int = 0
    echo: list[str] | None = None


class Prompt(msgspec.Struct, tag_field="k", tag="prompt", omit_defaults=True, rename={"from_": "from"}):
    """A piece of the logprobs of prompt `i`: its tokens `from` on, not counting what the server put before and behind.

    `o` and `p` as in Delta, offsets within the prompt. The first token of a prompt has no logprob. A frame stays below
    64 KB."""

    from_: Index
    t: list[int]
    lp: list[Logprob | None]
    o: list[int]
    p: dict[int, str] = {}
    i: Index = 0


class Delta(msgspec.Struct, tag_field="k", tag="delta", omit_defaults=True):
    """Tokens of choice `i`: every id sampled since its last delta, and the text that became final with them.

    `n`: how many ids of the choice, since its first, have all their text out; absent = all. With logprobs, one an id:
    `lp`, and `o`, where its text begins, in code points of the choice's text. `p`: bytes, in hex, of each id in `t` and
    `lp` that no earlier frame of the request told. `c`: cached tokens of the choice's prompt, with its first delta, where
    `start` did not tell. `r`: how many of the choice's ids, up to these, have turned out to be reasoning since the last
    delta.
    """

    i: Index
    t: list[int]
    text: str = ""
    n: int | None = None
    lp: list[Logprob] | None = None
    o: list[int] | None = None
    p: dict[int, str] = {}
    c: int = 0
    r: int = 0


class Finish(msgspec.Struct, tag_field="k", tag="finish", omit_defaults=True):
    """Choice `i` is done. `stop_reason`: the stop string or stop token id that did it."""

    i: Index
    reason: str
    stop_reason: str | int | None = None


class End(msgspec.Struct, tag_field="k", tag="end", omit_defaults=True):
    """The request is done: terminal. `usage` as in the API; `timings` in ms; `pick`: the candidates best_of keeps."""

    usage: dict[str, Any]
    timings: dict[str, float] = {}
    pick: list[int] | None = None


class Error(msgspec.Struct, tag_field="k", tag="error", omit_defaults=True):
    """The request failed: terminal. `error` is the API's error object, `status` its HTTP status."""

    error: dict[str, Any]
    status: int
    retryable: bool = False

    @classmethod
    def of(cls, error: SluiceError) -> Error:
        return cls(error.to_object(), error.status, error.retryable)


Frame = Take | Start | Prompt | Delta | Finish | End | Error
TERMINAL = (End, Error)


class Name(NamedTuple):
    """A frame's name. Compares as (attempt, seq); (0, 0) is before every frame."""

    a: int
    s: int

    def __str__(self) -> str:
        return f"{self.a}-{self.s}"

    @classmethod
    def parse(cls, text: str) -> Name:
        """Raises ValueError unless `text` is `a-s` in plain digits."""
        a, dash, s = text.partition("-")
        if not dash or not (a.isascii() and a.isdigit() and s.isascii() and s.isdigit()):
            raise ValueError(f"not a frame name: {text!r}")
        return cls(int(a), int(s))


#: ["a-s", frames], in a channel message; the frames not decoded yet.
Told = tuple[str, msgspec.Raw]

_encoder = msgspec.json.Encoder()
_entry_decoder = msgspec.json.Decoder(list[Frame])
_message_decoder = msgspec.json.Decoder(dict[str, int | Told])


def encode_frame(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def ending_with(error: SluiceError) -> bytes:
    """The terminal frame that ends a request with `error`, encoded."""
    return encode_frame(Error.of(error))


def encode_entry(frames: list[Frame]) -> bytes:
    """A log entry's field `f`."""
    return _encoder.encode(frames)


def decode_entry(raw: bytes | msgspec.Raw) -> list[Frame]:
    """Raises msgspec.ValidationError or msgspec.DecodeError, which are ValueErrors, or RecursionError."""
    return _entry_decoder.decode(raw)


def message(entries: list[tuple[str, Name, bytes]]) -> bytes:
    """A channel message of (job id, name of the last frame, encoded entry)."""
    body = b",".join(b'"%b":["%b",%b]' % (job.encode(), str(name).encode(), raw) for job, name, raw in entries)
    return b'{"v":%d,%b}' % (VERSION, body)


def decode_message(raw: bytes) -> dict[str, Told]:
    """What a channel message tells, by job id, for `decode_told`. Raises ValueError or RecursionError."""
    decoded = _message_decoder.decode(raw)
    return {job: told for job, told in decoded.items() if not isinstance(told, int)}


def decode_told(told: Told) -> tuple[Name, list[Frame]]:
    """(name of the last frame, frames). Raises ValueError or RecursionError; what else is in the message may be whole."""
    name, raw = told
    return Name.parse(name), decode_entry(raw)


def first_seq(last: Name, frames: list[Frame]) -> int:
    """`s` of the first of `frames`, of which `last` names the last."""
    return last.s - len(frames) + 1
