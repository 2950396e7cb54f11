"""The models' tokenizers in an API process: loaded once each, by the digest on the card.

With one, a request that cannot fit is refused before it is queued. Knows jobs and cards, nothing of HTTP and of the
store behind `fetch`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import structlog

from api.real_thread import in_real_thread
from shared.cards import ModelCard
from shared.jobs import Job
from shared.prompts import check_cuts, check_limit, prompt_ids, room_for
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
        self._loading = threading.Lock()

    def of(self, card: ModelCard) -> JsonTokenizer | None:
        """The tokenizer of a model; None if its worker could not prove one equal to the engine's."""
        sha = card.tokenizer_sha
        if sha is None:
            return None
        key = f"{sha}:{card.bos_id if card.add_bos else None}"
        tokenizer = self._loaded.get(key)
        if tokenizer is None:
            with self._loading:  # by one caller for all: the first requests of a model come together
                tokenizer = self._loaded.get(key) or self._load(sha, card)
                if tokenizer is None:
                    return None
        self._loaded.pop(key, None)  # to the end; by steps that other threads may come between
        self._loaded[key] = tokenizer
        while len(self._loaded) > KEPT:
            self._loaded.popitem(last=False)
        return tokenizer

    def _load(self, sha: str, card: ModelCard) -> JsonTokenizer | None:
        json = self._fetch(sha)
        if json is None:
            log.warning("tokenizer_missing", model=card.id)
            return None
        try:
            return in_real_thread(lambda: JsonTokenizer(json, card.bos_id if card.add_bos else None))
        except ValueError as error:
            log.warning("tokenizer_unreadable", model=card.id, error=str(error))
            return None

    def rooms(self, job: Job, card: ModelCard) -> list[int] | None:
        """How many tokens a choice of each prompt may sample; None where that cannot be known here.

        Raises InvalidRequest or ContextLengthExceeded as the worker would, which checks again in any case."""
        if job.suffix:  # the order of the parts, and so their ids, is the worker's business
            check_limit(job, card.context)
            return None
        check_cuts(job.cuts, card.context)
        tokenizer = self.of(card)
        if tokenizer is not None:
            return aside(sum(map(len, job.prompts)), lambda: _rooms(job, card, tokenizer))
        counts = [len(prompt) for prompt in job.prompts if not isinstance(prompt, str)]
        if job.tail or len(counts) < len(job.prompts):
            check_limit(job, card.context)
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
    return {name: None if number is None else _written(number, card, tokenizer) for name, number in ids.items()}


def _written(number: int, card: ModelCard, tokenizer: JsonTokenizer | None) -> str | None:
    return card.special.get(number) or (None if tokenizer is None else tokenizer.name(number))


def template_tokens(card: ModelCard, tokenizer: JsonTokenizer | None) -> dict[str, str]:
    """`special_tokens` for a template: one that the model has not is left undefined, or it would be written "None"."""
    return {name: text for name, text in special_tokens(card, tokenizer).items() if text is not None}


def aside(size: int, work: Callable[[], T]) -> T:
    """The result of `work`; in a thread of its own if its input is large."""
    return work() if size <= LARGE else in_real_thread(work)
