"""From a job's prompts to the ids that an engine gets: the same rules for the API, which counts, and the worker.

Knows ids and texts; tokenizers come as functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.jobs import Job
from shared.no_thinking import missing


class Encode(Protocol):
    """Ids of a text, by the rules of `Engine.tokenize`."""

    def __call__(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


class Decode(Protocol):
    """The text of ids, special tokens shown."""

    def __call__(self, tokens: Sequence[int], /) -> str: ...


@dataclass(frozen=True, slots=True)
class Ids:
    """A prompt's ids. The first `added` (a BOS) and the last `hidden` (a no-thinking tail) are the server's."""

    all: list[int]
    added: int = 0
    hidden: int = 0


def prompt_ids(prompt: str | list[int], job: Job, *, bos_id: int | None, encode: Encode, decode: Decode) -> Ids:
    """What the engine gets for one prompt of the job.

    A string with a tail is tokenised together with it, as a rendered chat would be; only where special tokens in
    the prompt are not to be parsed, the tail, whose own are, comes by itself.
    """
    if not isinstance(prompt, str):
        tail = missing(decode(prompt), job.tail) if job.tail else ""
        if not tail:
            return Ids(prompt)
        more = encode(tail, add_special=False, parse_special=True)
        return Ids([*prompt, *more], hidden=len(more))
    ids = encode(prompt, add_special=job.add_special, parse_special=job.parse_special)
    if not ids and bos_id is not None:
        ids = [bos_id]
    added = 0
    if bos_id is not None and ids[:1] == [bos_id]:
        # Ours, unless the text itself begins with it.
        added = int(encode(prompt[:_BOS_TEXT], add_special=False, parse_special=job.parse_special)[:1] != [bos_id])
    tail = missing(prompt, job.tail) if job.tail else ""
    if not tail:
        return Ids(ids, added)
    if job.parse_special and prompt:
        together = encode(prompt + tail, add_special=job.add_special, parse_special=True)
        common = next((k for k, (a, b) in enumerate(zip(ids, together, strict=False)) if a != b), len(ids))
        # A token of both would have to be shown for the prompt's end and hidden for the tail's beginning.
        shown = job.echo and job.logprobs is not None
        if common == len(ids) or not shown:
            return Ids(together, added, len(together) - min(common, len(together)))
    more = encode(tail, add_special=False, parse_special=True)
    return Ids([*ids, *more], added, len(more))


#: Characters of a text in which its first token certainly lies, if that is a BOS.
_BOS_TEXT = 256


def room_for(job: Job, prompt_tokens: int, context: int) -> int:
    """How many tokens a choice of a prompt of so many tokens may sample.

    Raises InvalidRequest for an empty prompt, ContextLengthExceeded if prompt and max_tokens do not fit."""
    if not prompt_tokens:
        raise InvalidRequest("prompt is empty and the model has no token to begin with.", param="prompt")
    room = context - prompt_tokens
    if job.scores_only and room >= 0:
        return 0
    if room < 1:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens, but the prompt has {prompt_tokens} tokens and leaves no room.",
            param="prompt",
        )
    if job.max_tokens is None:
        return room
    if job.max_tokens > room and not job.fit_max_tokens:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens, but the prompt has {prompt_tokens} tokens and max_tokens asks "
            f"for {job.max_tokens}; {room} are left.",
            param="max_tokens",
        )
    return min(job.max_tokens, room)
