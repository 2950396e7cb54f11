"""Takes jobs for free lanes and makes lanes of them: reads, checks and tokenises what the job carries.

Everything the API checked is checked again: whoever can write to the store can queue a job, and none may take a
worker down. Knows the scripts and the engine's tokenizer, nothing of steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis
import structlog

from shared import connection, frames, keys
from shared.cards import ModelCard
from shared.errors import DeadlineExceeded, InternalError, InvalidRequest, SluiceError, UnsupportedParameter
from shared.jobs import Job, from_rq
from shared.scripts import Scripts, Taken
from workers.engines.base import Engine
from workers.generation import fim
from workers.lane import Lane, PromptIds, room_for

log = structlog.get_logger(__name__)

#: Pause after the store did not answer, s.
RETRY = 0.5


def lane_of(taken: Taken, card: ModelCard, engine: Engine) -> Lane:
    """The lane of a job that was taken; one that has only its end if the job cannot run."""
    job = Job(id=taken.id, model=card.id, prompts=[""], seed=0, created=0)
    try:
        job = from_rq(taken.data)
        if job.id != taken.id:
            raise InvalidRequest("The job carries another request's id.")
        job.params.check(card.vocab_size)
        prompts = [_prompt(prompt, job, card, engine) for prompt in job.prompts]
    except SluiceError as error:
        return Lane.failed(job, taken.name, error, home=taken.home)
    except Exception:
        log.exception("job_unreadable", job=taken.id)
        return Lane.failed(job, taken.name, InternalError(), home=taken.home)
    deadline = time.monotonic() + taken.left
    return Lane(
        job,
        taken.name,
        prompts,
        home=taken.home,
        deadline=deadline,
        end_ids=card.end_ids,
        hidden=card.control_ids if job.skip_special else (),
        pieces=engine.pieces,
    )


def _prompt(prompt: str | list[int], job: Job, card: ModelCard, engine: Engine) -> PromptIds:
    """Raises InvalidRequest or ContextLengthExceeded."""
    if job.suffix:
        return _gap(prompt, job.suffix, job, card, engine)
    if isinstance(prompt, str):
        ids = engine.tokenize(prompt, add_special=job.add_special, parse_special=job.parse_special)
        if not ids and card.bos_id is not None:
            ids = [card.bos_id]
        return PromptIds(ids, room_for(job, ids, card.context), _added(prompt, ids, job, card, engine), prompt)
    _check_ids(prompt, card)
    room = room_for(job, prompt, card.context)
    text = engine.detokenize(prompt).decode(errors="replace") if job.echo or job.logprobs is not None else ""
    return PromptIds(prompt, room, 0, text, sent_as_text=False)


def _gap(prompt: str | list[int], suffix: str, job: Job, card: ModelCard, engine: Engine) -> PromptIds:
    """The prompt that asks for what stands before `suffix`. Raises InvalidRequest or ContextLengthExceeded."""
    if card.fim is None:
        raise UnsupportedParameter(f"{card.id} cannot fill in the middle.", param="suffix")

    def tokenize(text: str) -> list[int]:
        return engine.tokenize(text, add_special=False, parse_special=job.parse_special)

    if isinstance(prompt, str):
        before, text, add_bos = tokenize(prompt), prompt, job.add_special
    else:
        _check_ids(prompt, card)
        before, text, add_bos = prompt, engine.detokenize(prompt).decode(errors="replace"), False
    after = fim.suffix_ids(suffix, tokenize, engine.detokenize)
    ids = fim.prompt_ids(card, before, after, add_bos=add_bos)
    return PromptIds(ids, room_for(job, ids, card.context), 0, text, sent_as_text=isinstance(prompt, str))


def _check_ids(prompt: list[int], card: ModelCard) -> None:
    if any(type(token) is not int or not 0 <= token < card.vocab_size for token in prompt):
        raise InvalidRequest(f"prompt has token ids outside the vocabulary of {card.vocab_size}.", param="prompt")


def _added(prompt: str, ids: list[int], job: Job, card: ModelCard, engine: Engine) -> int:
    """How many of the ids the server put before the prompt: the BOS, unless the text itself begins with it."""
    if card.bos_id is None or ids[:1] != [card.bos_id]:
        return 0
    return int(engine.tokenize(prompt, add_special=False, parse_special=job.parse_special)[:1] != [card.bos_id])


class Taker(threading.Thread):
    """`free` tells how many lanes are free; `accept` gets each new lane. `freed` is set whenever a lane ends.

    `retired` is called when the store no longer knows this worker's name.
    """

    def __init__(
        self,
        url: str,
        worker: Callable[[], str],
        card: ModelCard,
        engine: Engine,
        *,
        timeout_s: float,
        free: Callable[[], int],
        accept: Callable[[Lane], None],
        retired: Callable[[], None],
    ) -> None:
        super().__init__(name="taker", daemon=True)
        self.freed = threading.Event()
        self._store = connection.connect(url, max_connections=1)
        self._scripts = Scripts(self._store)
        self._worker, self._card, self._engine = worker, card, engine
        self._free, self._accept, self._retired = free, accept, retired
        self._timeout_ms = int(timeout_s * 1000)
        late = DeadlineExceeded("The request's deadline passed while it was waiting.")
        self._late = frames.encode_frame(frames.Error(late.to_object(), late.status))
        self._stopping = threading.Event()

    def stop(self) -> None:
        """No job is taken after the call under way."""
        self._stopping.set()
        self.freed.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._round()
            except redis.RedisError as error:
                log.warning("take_failed", error=str(error))
                self._stopping.wait(RETRY)
            except Exception:
                log.exception("take_failed")
                self._stopping.wait(RETRY)

    def _round(self) -> None:
        self.freed.clear()
        free = self._free()
        if free <= 0:
            self.freed.wait(1.0)
            return
        card = self._card
        taken = self._scripts.take(
            self._worker(), free, card.lanes, card.id, card.fingerprint, self._late, self._timeout_ms
        )
        if taken is None:
            self._retired()
            self._stopping.wait(RETRY)
            return
        for job in taken:
            self._accept(lane_of(job, card, self._engine))
        if not taken:
            self._store.blpop([keys.bell(card.id)], timeout=connection.BLOCK_TIMEOUT / 2)
