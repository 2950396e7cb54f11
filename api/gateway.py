"""The API's side of the store: submits requests, lets go of them, knows the models and the state of the system.

Knows nothing of HTTP. One per process; its heartbeat tells the others that the process lives.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
import structlog

from shared import cards, frames, jobs, keys
from shared.cards import ModelCard
from shared.errors import Cancelled, InvalidRequest, ModelNotFound, NoWorker, SluiceError, StoreUnavailable, WorkerLost
from shared.jobs import Job
from shared.scripts import Scripts
from shared.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds between two heartbeats of an API process.
BEAT = 3.0
#: Seconds for which what is known of models and workers is used again.
FRESH = 0.2
#: The engine for tests and load; never a default where another model is served.
SCRIPTED = "scripted"


def error_frame(error: SluiceError) -> bytes:
    """The terminal frame that ends a request with `error`."""
    return frames.encode_frame(frames.Error(error.to_object(), error.status, error.retryable))


class Gateway:
    """Raises StoreUnavailable wherever the store does not answer."""

    def __init__(self, store: redis.Redis, settings: Settings) -> None:
        #: Name of this process: its channel and its list of followed requests. New at each start.
        self.proc = secrets.token_hex(8)
        self._store: Any = store  # its stubs know both bytes and str answers; ours are bytes
        self._scripts = Scripts(store)
        self._settings = settings
        self._left = threading.Event()
        self._known: tuple[float, list[ModelCard], set[str], list[dict[str, Any]]] | None = None

    # -- requests

    def submit(self, job: Job, *, tenant: str = "default", klass: jobs.Class = "interactive") -> None:
        """Queues the request. Raises NoWorker if nothing serves its model and nothing could start a worker for it."""
        _, _, served, _ = self._knowledge()
        if job.model not in served:
            raise NoWorker(f"No worker serves the model {job.model!r} at the moment.")
        settings = self._settings
        data = jobs.to_rq(job)
        for attempt in range(2):  # submit.lua may be repeated: the id decides
            try:
                self._scripts.call(
                    "submit",
                    job.id,
                    self.proc,
                    tenant,
                    klass,
                    job.model,
                    int(settings.request_timeout_s * 1000),
                    settings.result_ttl_s,
                    settings.log_ttl_s,
                    job.choices,
                    "",
                    data,
                    job.kind,
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
        """Ends a request that nobody will go on with: its worker is gone, or none came for `cold_start_s`."""
        try:
            error = self._abandoned(
                *self._store.hmget(keys.job(job_id), "status", "owner", "queued", "model", "terminal")
            )
            if error is not None:
                self._scripts.end(job_id, None, "api", error_frame(error), "failed")
        except (redis.RedisError, StoreUnavailable) as error:
            log.warning("look_failed", job=job_id, error=str(error))

    def _abandoned(
        self,
        status: bytes | None,
        owner: bytes | None,
        queued: bytes | None,
        model: bytes | None,
        terminal: bytes | None,
    ) -> SluiceError | None:
        if terminal or not model:
            return None
        if status == b"started" and owner and not self._store.exists(keys.lease(owner.decode())):
            return WorkerLost("The worker that had this request is gone.")
        if (
            status == b"queued"
            and queued
            and model.decode() not in {worker["model"] for worker in self._knowledge()[3]}
        ):
            seconds, microseconds = self._store.time()
            if seconds + microseconds / 1e6 - int(queued) / 1e3 > self._settings.cold_start_s:
                return NoWorker(f"No worker for the model {model.decode()!r} came in time.")
        return None

    def position(self, job_id: str) -> tuple[int, float | None] | None:
        """Place in the queue, 1 = next, and the seconds it may take if a rate is known; None: not waiting."""
        with _reaching_the_store():
            origin, status = self._store.hmget(keys.job(job_id), "origin", "status")
            if status != b"queued" or not origin:
                return None
            place = self._store.lpos(keys.queue(origin.decode()), job_id)
        return None if place is None else (int(place) + 1, None)

    # -- models

    def cards(self) -> list[ModelCard]:
        """The models that can be asked for: a live worker has them, or something can start one."""
        _, every, served, _ = self._knowledge()
        return [card for card in every if card.id in served]

    def tokenizer(self, sha: str) -> str | None:
        """The tokenizer.json of that digest, if the store has it."""
        with _reaching_the_store():
            found: bytes | None = self._store.get(keys.tokenizer(sha))
        return None if found is None else found.decode()

    def card(self, model: str | None, *, unserved: bool = False) -> ModelCard:
        """The card of a model by id or alias; None = the default model. `unserved`: the default may be a model that
        nobody serves at the moment, if none is served.

        Raises ModelNotFound, or InvalidRequest if no model was named and there is no default."""
        name = model if model is not None else self._settings.default_model
        _, every, served, _ = self._knowledge()
        if name is None:
            real = [card for card in every if card.id in served and card.id != SCRIPTED]
            candidates = real or [card for card in every if card.id in served]
            if not candidates and unserved:
                candidates = [card for card in every if card.id != SCRIPTED] or every
            if len(candidates) == 1:
                return candidates[0]
            if not candidates:
                raise NoWorker("No model is being served at the moment.")
            names = ", ".join(card.id for card in candidates)
            raise InvalidRequest(f"model is missing and there is no default; served are: {names}.", param="model")
        for card in every:
            if name == card.id or name in card.aliases:
                return card
        raise ModelNotFound(f"The model {name!r} does not exist.", param="model")

    # -- state

    def ping(self) -> bool:
        try:
            return bool(self._store.ping())
        except redis.RedisError:
            return False

    def status(self) -> dict[str, Any]:
        """Models, workers, queues and API processes, as `GET /v1/status` shows them; at most 0.3 s old."""
        _, every, served, workers = self._knowledge()
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
            pipeline.scard(keys.attached(name))
        return [{"name": name, "streams": count} for name, count in zip(names, pipeline.execute(), strict=True)]

    def _knowledge(self) -> tuple[float, list[ModelCard], set[str], list[dict[str, Any]]]:
        """(when, every card, ids that are or can be served, live workers), read again when older than FRESH."""
        now = time.monotonic()
        if self._known and now - self._known[0] < FRESH:
            return self._known
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
        self._known = (now, every, served, workers)
        return self._known

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
