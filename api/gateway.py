"""The API's side of the store: submits requests, lets go of them, knows the models and the state of the system.

Knows nothing of HTTP. One per process; its heartbeat tells the others that the process lives.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import redis
import structlog

from shared import cards, frames, jobs, keys
from shared.cards import ModelCard
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    SluiceError,
    StoreUnavailable,
    WorkerLost,
)
from shared.jobs import Job, Placement
from shared.scripts import Scripts
from shared.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds between two heartbeats of an API process.
BEAT = 3.0
#: Seconds for which what is known of models and workers is used again.
FRESH = 0.2
#: The same where another process may already have shown something newer: before a request is refused for what is not
#: known, and in the status.
JUST_NOW = 0.02
#: How long a worker's lease must be missing before it counts as dead, s: its next beat may be under way.
MISSING = 2.0
#: Grace for whoever runs or takes a request to end it at its deadline itself, ms.
OVERDUE_MS = 5000
#: The engine for tests and load; never a default where another model is served.
SCRIPTED = "scripted"


def error_frame(error: SluiceError) -> bytes:
    """The terminal frame that ends a request with `error`."""
    return frames.encode_frame(frames.Error(error.to_object(), error.status, error.retryable))


class _Look(NamedTuple):
    """What tells whether somebody goes on with a job; "" where the store has nothing."""

    status: str
    owner: str
    queued: str
    model: str
    terminal: str
    dl: str
    a: str


class _Knowledge(NamedTuple):
    """What is known of models and workers. `served`: ids that a live worker has or that something can start."""

    read_at: float
    cards: list[ModelCard]
    served: set[str]
    workers: list[dict[str, Any]]


class Gateway:
    """Methods raise StoreUnavailable when the store does not answer, but for those that say they never raise."""

    def __init__(self, store: redis.Redis, settings: Settings) -> None:
        #: Name of this process: its channel and its list of followed requests. New at each start.
        self.proc = secrets.token_hex(8)
        self._store: Any = store  # its stubs know both bytes and str answers; ours are bytes
        self._scripts = Scripts(store)
        self._settings = settings
        self._left = threading.Event()
        self._known: _Knowledge | None = None
        self._reading = threading.Lock()
        #: When a worker's lease was first seen missing, by name.
        self._missing: dict[str, float] = {}

    # -- requests

    def submit(self, job: Job, placement: Placement = Placement()) -> None:  # noqa: B008 - frozen
        """Queues the request. Raises NoWorker if nothing serves its model and nothing could start a worker for it."""
        if job.model not in self._knowledge().served and job.model not in self._knowledge(JUST_NOW).served:
            raise NoWorker(f"No worker serves the model {job.model!r} at the moment.")
        settings = self._settings
        data = jobs.to_rq(job)
        for attempt in range(2):  # submit.lua may be repeated: the id decides
            try:
                self._scripts.call(
                    "submit",
                    job.id,
                    self.proc,
                    placement.tenant,
                    placement.klass,
                    job.model,
                    int(settings.request_timeout_s * 1000),
                    settings.result_ttl_s if placement.keep else jobs.FORGET_S,
                    settings.log_ttl_s if placement.keep else jobs.FORGET_S,
                    job.choices,
                    "",
                    data,
                    job.kind,
                    "1" if placement.ahead else "",
                    "1" if placement.fanout else "",
                )
                return
            except redis.exceptions.OutOfMemoryError:
                raise StoreUnavailable("The store is full.") from None
            except redis.RedisError as error:
                if attempt:
                    raise StoreUnavailable("The store does not answer.") from error

    def detach(self, job_id: str) -> None:
        """This process no longer follows the request; it is cancelled unless another one does. Never raises: what
        the store could not be told now, the heartbeat tells it."""
        try:
            self._scripts.detach(job_id, self.proc, error_frame(Cancelled("The client hung up.")))
        except redis.RedisError as error:
            log.warning("detach_failed", job=job_id, error=str(error))

    def end_if_abandoned(self, job_id: str) -> None:
        """Ends a request that nobody will go on with: its deadline has passed, RQ cancelled it, its worker is gone, or
        none came for `cold_start_s`. Never raises."""
        try:
            fields = self._store.hmget(keys.job(job_id), *_Look._fields)
            look = _Look(*(value.decode() if value is not None else "" for value in fields))
            error = None if look.terminal or not look.status else self._abandoned(job_id, look)
            if error is not None:
                status = "canceled" if isinstance(error, Cancelled) else "failed"
                self._scripts.end(job_id, "api", error_frame(error), status, attempt=int(look.a or 0))
        except (redis.RedisError, StoreUnavailable) as error:
            self._missing.clear()  # what was seen before the store was away counts for nothing
            log.warning("look_failed", job=job_id, error=str(error))

    def _abandoned(self, job_id: str, look: _Look) -> SluiceError | None:
        if look.status in ("canceled", "stopped"):
            return Cancelled("The job was cancelled.")
        seconds, microseconds = self._store.time()
        now = seconds * 1000 + microseconds / 1000
        if look.dl and now > int(look.dl) + OVERDUE_MS:
            return DeadlineExceeded("The request's deadline passed.")
        if look.status == "started" and look.owner:
            if self._store.exists(keys.lease(look.owner)):
                self._missing.pop(look.owner, None)
            elif time.monotonic() - self._missing.setdefault(look.owner, time.monotonic()) > MISSING:
                return WorkerLost("The worker that had this request is gone. The request can be repeated.")
            return None
        late = look.status == "queued" and look.queued and now - int(look.queued) > self._settings.cold_start_s * 1000
        if late and look.model not in {worker["model"] for worker in self._knowledge().workers}:
            return NoWorker(f"No worker for the model {look.model!r} came in time.")
        return None

    def position(self, job_id: str) -> tuple[int, float | None] | None:
        """Place among the tenant's own waiting requests, 1 = next, and the seconds it may take if a rate is known; None: not waiting."""
        with _reaching_the_store():
            origin, status = self._store.hmget(keys.job(job_id), "origin", "status")
            if status != b"queued" or not origin:
                return None
            place = self._store.lpos(keys.queue(origin.decode()), job_id)
        return None if place is None else (int(place) + 1, None)

    # -- models

    def cards(self) -> list[ModelCard]:
        """The models that can be asked for: a live worker has them, or something can start one."""
        known = self._knowledge()
        return [card for card in known.cards if card.id in known.served]

    def tokenizer(self, sha: str) -> str | None:
        """The tokenizer.json of that digest, if the store has it."""
        with _reaching_the_store():
            found: bytes | None = self._store.get(keys.tokenizer(sha))
        return None if found is None else found.decode()

    def card(self, model: str | None, *, unserved: bool = False) -> ModelCard:
        """The card of a model by id or alias; None = the default model. `unserved`: the default may be a model that
        nobody serves at the moment, if none is served.

        Raises ModelNotFound, or InvalidRequest if no model was named and there is no default; never for a model that
        came since the store was last asked."""
        try:
            return self._card(model, unserved)
        except (ModelNotFound, NoWorker, InvalidRequest):
            self._knowledge(JUST_NOW)
            return self._card(model, unserved)

    def _card(self, model: str | None, unserved: bool) -> ModelCard:
        name = model if model is not None else self._settings.default_model
        every = self._knowledge().cards
        if name is None:
            served = self.cards()
            candidates = [card for card in served if card.id != SCRIPTED] or served
            if not candidates and unserved:
                candidates = [card for card in every if card.id != SCRIPTED] or every
            if len(candidates) == 1:
                return candidates[0]
            if not candidates:
                raise NoWorker("No model is being served at the moment.")
            names = ", ".join(card.id for card in candidates)
            raise InvalidRequest(f"model is missing and there is no default; served are: {names}.", param="model")
        for card in every:
            if name == card.id:
                return card
        for card in (*self.cards(), *every):  # an alias is whose worker runs, else who had it last
            if name in card.aliases:
                return card
        raise ModelNotFound(f"The model {name!r} does not exist.", param="model")

    # -- state

    def ping(self) -> bool:
        try:
            return bool(self._store.ping())
        except redis.RedisError:
            return False

    def status(self) -> dict[str, Any]:
        """Models, workers, queues and API processes, as `GET /v1/status` shows them; at most JUST_NOW old."""
        _, every, served, workers = self._knowledge(JUST_NOW)
        live: dict[str, int] = {}
        for worker in workers:
            live[worker["model"]] = live.get(worker["model"], 0) + 1
        models = [
            {"id": c.id, "ready": bool(live.get(c.id)), "workers": live.get(c.id, 0)} for c in every if c.id in served
        ]
        with _reaching_the_store():
            return {"models": models, "workers": workers, "queues": self._queues(every), "nodes": self._nodes()}

    def _queues(self, every: list[ModelCard]) -> list[dict[str, Any]]:
        names = sorted(name.decode().removeprefix(keys.RQ_QUEUE) for name in self._store.smembers(keys.RQ_QUEUES))
        pipeline = self._store.pipeline(transaction=False)
        for name in names:
            pipeline.llen(keys.queue(name))
            pipeline.zcard(f"rq:wip:{name}")
        counts = pipeline.execute()
        queues: dict[tuple[str, str], dict[str, Any]] = {
            (card.id, "interactive"): {"model": card.id, "class": "interactive", "waiting": 0, "running": 0}
            for card in every
        }
        for index, name in enumerate(names):
            own = any(card.id == name for card in every)  # RQ's own list of a model; the others are model:class:tenant
            model, klass = (name, "interactive") if own else name.rpartition(":")[0].rpartition(":")[::2]
            row = queues.setdefault((model, klass), {"model": model, "class": klass, "waiting": 0, "running": 0})
            row["waiting"] += counts[2 * index]
            row["running"] += counts[2 * index + 1]
        return list(queues.values())

    def _nodes(self) -> list[dict[str, Any]]:
        names = sorted(name.decode() for name in self._store.smembers(keys.PROCS))
        pipeline = self._store.pipeline(transaction=False)
        for name in names:
            pipeline.exists(keys.alive(name))
            pipeline.scard(keys.attached(name))
        answers = pipeline.execute()
        counts = zip(names, answers[::2], answers[1::2], strict=True)
        return [{"name": name, "streams": count} for name, alive, count in counts if alive]

    def _knowledge(self, oldest: float = FRESH) -> _Knowledge:
        """Read again when older than so many seconds, by one caller for all."""
        with self._reading:
            if self._known is None or time.monotonic() - self._known.read_at > oldest:
                self._known = self._read_knowledge()
            return self._known

    def _read_knowledge(self) -> _Knowledge:
        now = time.monotonic()
        with _reaching_the_store():
            ids = sorted(item.decode() for item in self._store.smembers(keys.CARDS))
            names = sorted(item.decode() for item in self._store.smembers(keys.WORKERS))
            pipeline = self._store.pipeline(transaction=False)
            for model in ids:
                pipeline.hget(keys.card(model), "card")
                pipeline.exists(keys.starter(model))
            for name in names:
                pipeline.exists(keys.lease(name))
                pipeline.hgetall(keys.stat(name))
                pipeline.hlen(keys.lanes(name))
            answers = iter(pipeline.execute())
        every: list[ModelCard] = []
        served: set[str] = set()
        for model in ids:
            raw, starter = next(answers), next(answers)
            if raw:
                every.append(cards.decode(raw))
            if starter:
                served.add(model)
        workers: list[dict[str, Any]] = []
        for name in names:
            lease, stat, busy = next(answers), next(answers), next(answers)
            if not lease or not stat:
                continue
            workers.append(
                {
                    "name": name,
                    "model": stat[b"model"].decode(),
                    "lanes": int(stat[b"lanes"]),
                    "busy": busy,
                    "tokens_per_second": float(stat.get(b"tokens_per_second", 0)),
                    "draining": stat.get(b"draining") == b"1",
                }
            )
            served.add(stat[b"model"].decode())
        return _Knowledge(now, every, served, workers)

    # -- heartbeat

    def start(self, following: Callable[[], set[str]]) -> None:
        """Registers this process and keeps it registered; `following` tells which requests have a client here."""
        threading.Thread(target=self._heartbeat, args=(following,), name="gateway-heartbeat", daemon=True).start()

    def leave(self) -> None:
        """Takes this process off the list, at a clean stop."""
        self._left.set()
        try:
            self._scripts.leave("proc", self.proc)
        except redis.RedisError as error:
            log.warning("leave_failed", error=str(error))

    def _heartbeat(self, following: Callable[[], set[str]]) -> None:
        register, strays = True, set[str]()
        while not self._left.is_set():
            try:
                ids = self._scripts.beat(
                    "proc", self.proc, int(self._settings.orphan_grace_s * 1000), register=register
                )
                register = ids is None
                if ids is not None:
                    here = following()
                    unknown = {job_id for job_id in ids if job_id not in here}
                    for job_id in unknown & strays:  # twice in a row: a detach that the store never got
                        self.detach(job_id)
                    strays = unknown
            except redis.RedisError as error:
                log.warning("heartbeat_failed", error=str(error))
            except Exception:
                log.exception("heartbeat_failed")
            self._left.wait(0.1 if register else BEAT)


class _reaching_the_store:
    """Turns the store's failures into the error the client gets."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, redis.RedisError):
            raise StoreUnavailable("The store does not answer.") from error
