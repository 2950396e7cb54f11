"""From a job's prompts to the ids that an engine gets: the same rules for the API, which counts, and the worker.

Knows ids and texts; tokenizers come as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    if job.cuts:
        return Ids(encode_cut(prompt, job.cuts, add_special=job.add_special, encode=encode, decode=decode))
    ids = encode(prompt, add_special=job.add_special, parse_special=job.parse_special)
    if not ids and bos_id is not None and job.kind != "chat":
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


def encode_cut(text: str, cuts: Sequence[int], *, add_special: bool, encode: Encode, decode: Decode) -> list[int]:
    """Ids of a text that is tokenised in parts: special tokens are parsed, but none that a cut goes through."""

    def tokenize(part: str) -> list[int]:
        return encode(part, add_special=False, parse_special=True)

    borders = [*cuts, len(text)]
    ids = encode(text[: borders[0]], add_special=add_special, parse_special=True)
    for begin, end in pairwise(borders):
        ids += continued(text[begin:end], tokenize, decode)
    return ids


def continued(text: str, tokenize: Callable[[str], list[int]], decode: Decode) -> list[int]:
    """Ids of a text that something comes before: without the space that some tokenizers put before a text.

    CodeLlama's own code does the same: it tokenises the text behind a character and cuts that off again."""
    ids = tokenize(text)
    if decode(ids) != " " + text:
        return ids
    marked = tokenize("\n" + text)
    for first in range(1, len(marked)):
        if decode(marked[first:]) == text:
            return marked[first:]
    return ids


#: Characters of a text in which its first token certainly lies, if that is a BOS.
_BOS_TEXT = 256


def room_for(job: Job, prompt_tokens: int, context: int) -> int:
    """How many tokens a choice of a prompt of so many tokens may sample.

    Raises InvalidRequest for an empty prompt, ContextLengthExceeded if prompt and max_tokens do not fit."""
    if not prompt_tokens:
        if job.kind == "chat":
            raise InvalidRequest("The model's chat template makes an empty prompt of these messages.", param="messages")
        raise InvalidRequest("prompt is empty and the model has no token to begin with.", param="prompt")
    room = context - prompt_tokens
    if job.scores_only and room >= 0:
        return 0
    if room < 1:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens, but the prompt has {prompt_tokens} tokens and leaves no room.",
            param=_field(job),
        )
    if job.max_tokens is None:
        return room
    if job.max_tokens > room and not job.fit_max_tokens:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens, but the prompt has {prompt_tokens} tokens and "
            f"{job.limit_field} asks for {job.max_tokens}; {room} are left.",
            param=job.limit_field,
        )
    return min(job.max_tokens, room)


def _field(job: Job) -> str:
    """What the client calls its prompt."""
    return "messages" if job.kind == "chat" else "prompt"


def check_cuts(cuts: Sequence[int], context: int) -> None:
    """Raises ContextLengthExceeded for a chat's prompt of more parts than the context has tokens, before it is tokenised:
    that takes a while for each part."""
    if len(cuts) >= context:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens, but the prompt has more than {len(cuts)} and leaves no room.",
            param="messages",
        )


def check_limit(job: Job, context: int) -> None:
    """Raises ContextLengthExceeded for a max_tokens that fits behind no prompt, however short: for those who cannot
    tell how long the prompts are."""
    if job.max_tokens is not None and job.max_tokens >= context and not job.fit_max_tokens:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens for the prompt and the completion together, but "
            f"{job.limit_field} asks for {job.max_tokens}.",
            param=job.limit_field,
        )
