"""Takes jobs for free lanes and makes lanes of them: reads, checks and tokenises what the job carries.

Everything the API checked is checked again: whoever can write to the store can queue a job, and none may take a
worker down. Knows the scripts and the engine's tokenizer, nothing of steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis
import structlog

from shared import connection, frames, keys
from shared.cards import ModelCard
from shared.errors import DeadlineExceeded, InternalError, InvalidRequest, LogLost, SluiceError, UnsupportedParameter
from shared.frames import Frame, ending_with
from shared.jobs import Job, from_rq
from shared.prompts import check_cuts, prompt_ids, room_for
from shared.scripts import Scripts, Taken
from workers.engines.base import Engine
from workers.generation import fim
from workers.generation.constraint import Grammars
from workers.grammars import grammars_of
from workers.lane import Lane, PromptIds
from workers.past import Past

log = structlog.get_logger(__name__)

#: Pause after the store did not answer, s.
RETRY = 0.5
#: Longest wait for the bell, s. With lanes running it is short: a request that waits for more lanes than are free does
#: not ring again when they become free.
IDLE_WAIT = connection.BLOCK_TIMEOUT / 2
BUSY_WAIT = 0.2
#: The same while batch work waits for lanes that are busy: those that become free do not ring.
HELD_WAIT = 0.01
#: Time between two looks at whether lanes with batch work are wanted, s. (No wait for the bell: a full worker would hear
#: what another one is to hear.)
YIELDING_WAIT = 0.1
#: Threads that compile grammars, and how much others come before them: an engine that computes on the CPU waits for its
#: slowest thread, so one that works beside it makes every step longer.
COMPILERS, NICENESS = 2, 10
#: Packed size from which a job is tokenised beside the taker, bytes: megabytes take seconds, and others shall not wait.
LONG_JOB = 20_000


def lane_of(taken: Taken, card: ModelCard, engine: Engine, grammars: Grammars | None = None) -> Lane:
    """The lane of a job that was taken; one that has only its end if the job cannot run. Never raises. `grammars`: the
    engine's, if there are some already."""
    try:
        return _lane(taken, card, engine, grammars or grammars_of(engine, card))
    except SluiceError as error:
        refused = error
    except Exception:
        log.exception("job_unreadable", job=taken.id)
        refused = InternalError()
    placeholder = Job(id=taken.id, model=card.id, prompts=[""], seed=0, created=0, **_told(taken))
    return Lane.failed(placeholder, taken.name, refused, **_placed(taken))


def _told(taken: Taken) -> dict[str, Any]:
    """What a job says for logs and traces, if it can be read."""
    try:
        job = from_rq(taken.data)
    except (SluiceError, RecursionError):
        return {}
    return {"request_id": job.request_id, "trace": job.trace}


def _placed(taken: Taken) -> dict[str, Any]:
    """What a lane needs of how its job was queued."""
    return {
        "home": taken.text("home"),
        "fanout": taken.text("fanout") == "1",
        "fields": taken.fields,
        "log": taken.log,
    }


def _lane(taken: Taken, card: ModelCard, engine: Engine, grammars: Grammars) -> Lane:
    deadline = time.monotonic() + taken.left
    job = from_rq(taken.data)
    if job.id != taken.id:
        raise InvalidRequest("The job carries another request's id.")
    job.check()
    job.params.check(card.vocab_size)
    past = Past.of(_logged(taken), choices=job.choices, prompts=len(job.prompts))
    prompts = [_prompt(prompt, job, card, engine) for prompt in job.prompts]
    return Lane(
        job,
        taken.name,
        prompts,
        deadline=deadline,
        past=past,
        **_placed(taken),
        end_ids=card.end_ids,
        hidden=card.control_ids if job.skip_special else (),
        pieces=engine.pieces,
        grammar=None if job.constraint is None else grammars.of(job.constraint, job.reasoning),
    )


def _logged(taken: Taken) -> list[Frame]:
    """The frames up to this take. Raises LogLost for a log with a hole: with a token missing, one would come twice."""
    logged: list[Frame] = []
    for name, entry in taken.log:
        try:
            logged += frames.decode_entry(entry)
        except (ValueError, RecursionError):
            raise LogLost("The log of this request cannot be read.") from None
        if name.s != len(logged):
            raise LogLost("The log of this request has a hole.")
    return logged


def _prompt(prompt: str | list[int], job: Job, card: ModelCard, engine: Engine) -> PromptIds:
    """Raises InvalidRequest or ContextLengthExceeded."""
    if job.suffix:
        return _gap(prompt, job.suffix, job, card, engine)
    if not isinstance(prompt, str):
        _check_ids(prompt, card)

    def decode(tokens: Sequence[int]) -> str:
        return engine.detokenize(tokens).decode(errors="replace")

    check_cuts(job.cuts, card.context)
    ids = prompt_ids(prompt, job, bos_id=card.bos_id, encode=engine.tokenize, decode=decode)
    room = room_for(job, len(ids.all), card.context)
    if isinstance(prompt, str):
        return PromptIds(ids.all, room, ids.added, prompt, hidden=ids.hidden)
    text = decode(prompt) if job.echo or job.logprobs is not None else ""
    return PromptIds(ids.all, room, 0, text, sent_as_text=False, hidden=ids.hidden)


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
    return PromptIds(ids, room_for(job, len(ids), card.context), 0, text, sent_as_text=isinstance(prompt, str))


def _check_ids(prompt: list[int], card: ModelCard) -> None:
    if any(type(token) is not int or not 0 <= token < card.vocab_size for token in prompt):
        raise InvalidRequest(f"prompt has token ids outside the vocabulary of {card.vocab_size}.", param="prompt")


def _give_way() -> None:
    """Has the calling thread get less of the CPU than those that compute (Linux counts niceness by thread)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Taker(threading.Thread):
    """`free` tells how many lanes are free; `accept` gets each new lane. `freed` is set whenever a lane ends.

    `preparing`: what was taken and is no lane yet, by its id; tokenising a long prompt takes its time.

    `reserve`: lanes that batch work leaves free, as long as any are in use.

    `retired` is called when the store no longer knows this worker's name. `make_room` is called when nothing can be taken
    and lanes run; True: some of them would give way to interactive requests, so that it should be called again soon.
    """

    def __init__(
        self,
        url: str,
        worker: Callable[[], str],
        card: ModelCard,
        engine: Engine,
        *,
        timeout_s: float,
        reserve: int,
        free: Callable[[], int],
        accept: Callable[[Lane], None],
        retired: Callable[[], None],
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name="taker", daemon=True)
        self.freed = threading.Event()
        self.preparing: dict[str, Taken] = {}
        self._long_jobs = ThreadPoolExecutor(1, "long-prompts")
        self._constrained = ThreadPoolExecutor(COMPILERS, "grammars", _give_way)
        self._grammars = grammars_of(engine, card)
        self._store = connection.connect(url, max_connections=1)
        self._scripts = Scripts(self._store)
        self._worker, self._card, self._engine = worker, card, engine
        self._free, self._accept, self._retired, self._make_room = free, accept, retired, make_room
        self._timeout_ms = int(timeout_s * 1000)
        self._reserve = reserve
        self._late = ending_with(DeadlineExceeded("The request's deadline passed while it was waiting."))
        self._broken = ending_with(InternalError())
        self._stopping = threading.Event()

    def warm_up(self) -> None:
        """Makes what the first grammar needs. Half a second with the GIL for 50,000 tokens: not beside running requests."""
        self._grammars.prepare()

    def stop(self) -> None:
        """No job is taken after the call under way."""
        self._stopping.set()
        self.freed.set()

    def finish_preparing(self) -> None:
        """Waits until what was taken is handed over."""
        self._long_jobs.shutdown()
        self._constrained.shutdown()

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

    def _prepare(self, job: Taken) -> None:
        self._accept(lane_of(job, self._card, self._engine, self._grammars))
        self.preparing.pop(job.id, None)

    def _round(self) -> None:
        self.freed.clear()
        free = self._free()
        if free <= 0:
            self.freed.wait(YIELDING_WAIT if self._make_room() else 1.0)
            return
        card = self._card
        answer = self._scripts.take(
            self._worker(),
            free,
            card.lanes,
            card.id,
            card.fingerprint,
            self._late,
            self._timeout_ms,
            self._broken,
            self._reserve,
        )
        if answer is None:
            self._retired()
            self._stopping.wait(RETRY)
            return
        taken, held = answer
        self.preparing |= {job.id: job for job in taken}
        for job in taken:
            if job.fields.get(b"v", b"1") != b"1":  # there is a grammar to compile
                self._constrained.submit(self._prepare, job)
            elif len(job.data) > LONG_JOB:
                self._long_jobs.submit(self._prepare, job)
            else:
                self._prepare(job)
        if not taken:
            bell = [keys.bell(card.id)]
            if free >= card.lanes:
                self._store.blpop(bell, timeout=IDLE_WAIT)
            elif held:
                self._store.blpop(bell, timeout=HELD_WAIT)
            else:
                self._make_room()
                self._store.blpop(bell, timeout=BUSY_WAIT)
