"""The models' tokenizers in an API process: loaded once each, by the digest on the card.

With one, a request that cannot fit is refused before it is queued. Knows jobs and cards, nothing of HTTP and of the
store behind `fetch`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar, cast

import gevent
import structlog
from gevent import monkey

from shared.cards import ModelCard
from shared.jobs import Job
from shared.prompts import prompt_ids, room_for
from shared.tokenizer import JsonTokenizer

log = structlog.get_logger(__name__)

#: Tokenizers kept, of the models last asked for; one takes some 20 MB.
KEPT = 8
#: Characters and ids beyond which a call goes to a thread: a greenlet would hold up all streams of its process for
#: more than a few milliseconds.
LARGE = 8192

T = TypeVar("T")


class Tokenizers:
    """`fetch` brings the tokenizer.json of a digest, or None."""

    def __init__(self, fetch: Callable[[str], str | None]) -> None:
        self._fetch = fetch
        self._loaded: OrderedDict[str, JsonTokenizer] = OrderedDict()

    def of(self, card: ModelCard) -> JsonTokenizer | None:
        """The tokenizer of a model; None if its worker could not prove one equal to the engine's."""
        sha = card.tokenizer_sha
        if sha is None:
            return None
        key = f"{sha}:{card.bos_id if card.add_bos else None}"
        tokenizer = self._loaded.get(key)
        if tokenizer is None:
            json = self._fetch(sha)
            if json is None:
                log.warning("tokenizer_missing", model=card.id)
                return None
            try:
                tokenizer = aside(LARGE + 1, lambda: JsonTokenizer(json, card.bos_id if card.add_bos else None))
            except ValueError as error:
                log.warning("tokenizer_unreadable", model=card.id, error=str(error))
                return None
        self._loaded[key] = tokenizer
        self._loaded.move_to_end(key)
        while len(self._loaded) > KEPT:
            self._loaded.popitem(last=False)
        return tokenizer

    def rooms(self, job: Job, card: ModelCard) -> list[int] | None:
        """How many tokens a choice of each prompt may sample; None where that cannot be known here.

        Raises InvalidRequest or ContextLengthExceeded as the worker would, which checks again in any case."""
        if job.suffix:  # the order of the parts, and so their ids, is the worker's business
            return None
        tokenizer = self.of(card)
        if tokenizer is not None:
            return aside(sum(map(len, job.prompts)), lambda: _rooms(job, card, tokenizer))
        counts = [len(prompt) for prompt in job.prompts if not isinstance(prompt, str)]
        if job.tail or len(counts) < len(job.prompts):
            return None
        return [room_for(job, count, card.context) for count in counts]


def _rooms(job: Job, card: ModelCard, tokenizer: JsonTokenizer) -> list[int]:
    return [
        room_for(
            job,
            len(prompt_ids(prompt, job, bos_id=card.bos_id, encode=tokenizer.encode, decode=tokenizer.decode).all),
            card.context,
        )
        for prompt in job.prompts
    ]


def special_tokens(card: ModelCard, tokenizer: JsonTokenizer | None) -> dict[str, str | None]:
    """bos_token, eos_token and pad_token of a model as strings, None for those it does not have."""
    first_end = card.end_ids[0] if card.end_ids else None
    ids = {
        "bos_token": card.bos_id,
        "eos_token": first_end if card.eos_id is None else card.eos_id,
        "pad_token": card.pad_id,
    }
    return {
        name: None if tokenizer is None or number is None else tokenizer.name(number) for name, number in ids.items()
    }


def template_tokens(card: ModelCard, tokenizer: JsonTokenizer | None) -> dict[str, str]:
    """`special_tokens` for a template: one that the model has not is left undefined, or it would be written "None"; one
    whose text is not known here is empty."""
    ids = {"bos_token": card.bos_id, "eos_token": card.eos_id, "pad_token": card.pad_id}
    return {
        name: text if text is not None else ""
        for name, text in special_tokens(card, tokenizer).items()
        if text is not None or ids[name] is not None
    }


def aside(size: int, work: Callable[[], T]) -> T:
    """The result of `work`; in a thread of its own if its input is large and greenlets share this one."""
    if size <= LARGE or not monkey.is_module_patched("threading"):
        return work()
    result, error = gevent.get_hub().threadpool.apply(_caught, (work,))
    if error is not None:
        raise error
    return cast(T, result)


def _caught(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """gevent prints what a pool's thread raises, and here that is a client's mistake most of the time."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - raised again by the caller
        return None, error
