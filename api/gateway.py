"""The API's side of the store: submits requests, lets go of them, knows the models and the state of the system.

Knows nothing of HTTP. One per process; its heartbeat tells the others that the process lives.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import redis
import structlog

from api import admission
from api.known_jobs import KnownJobs
from api.reaching import reaching_the_store
from shared import cards, connection, jobs, keys, results, scripts
from shared.cards import ModelCard
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    IdempotencyConflict,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    SluiceError,
    StoreUnavailable,
)
from shared.frames import ending_with
from shared.jobs import Job, Placement
from shared.reaper import Reaper
from shared.scripts import Place, Scripts
from shared.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds between two heartbeats of an API process.
BEAT = 3.0
#: Seconds for which what is known of models and workers is used again.
FRESH = 0.2
#: The same where another process may already have shown something newer: before a request is refused for what is not
#: known, and in the status.
JUST_NOW = 0.02
#: Grace for whoever runs or takes a request to end it at its deadline itself, ms.
OVERDUE_MS = 5000
#: How long after a background request was refused, as the store did not answer, it may still arrive there, s.
DOUBT = 60.0
#: The engine for tests and load; never a default where another model is served.
SCRIPTED = "scripted"


#: Ends what nobody follows any more.
GONE = ending_with(Cancelled("The client hung up."))


class _Look(NamedTuple):
    """What tells whether somebody goes on with a job; "" where the store has nothing."""

    status: str
    terminal: str
    dl: str
    a: str


class _Knowledge(NamedTuple):
    """What is known of models and workers. `served`: ids that a live worker has or that something can start; `failing`: those of
    them that it fails to load."""

    read_at: float
    cards: list[ModelCard]
    served: set[str]
    failing: set[str]
    workers: list[dict[str, Any]]


class Gateway:
    """Methods raise StoreUnavailable when the store does not answer, but for those that say they never raise."""

    def __init__(self, store: redis.Redis, settings: Settings) -> None:
        #: Name of this process: its channel and its list of followed requests. New at each start.
        self.proc = secrets.token_hex(8)
        self.known = KnownJobs(store, self.proc)
        self._store: Any = store  # its stubs know both bytes and str answers; ours are bytes
        self._scripts = Scripts(store)
        self._settings = settings
        self._left = threading.Event()
        self._known: _Knowledge | None = None
        self._unknown_at = -math.inf
        self._reading = threading.Lock()
        #: Background requests that were refused, and may be in the store all the same, until when.
        self._doubtful: dict[str, float] = {}
        self._reaper = Reaper(store, settings)

    # -- requests

    def submit(self, job: Job, placement: Placement = Placement(), *, followed: bool = True) -> str:  # noqa: B008 - frozen
        """Queues the request; `followed` by this process. Returns its id, or that of the earlier request that has its
        idempotency key and is the same: nothing is queued then.

        Raises NoWorker if nothing serves its model and nothing could start a worker for it, and IdempotencyConflict if
        another request has the key, and QueueFull."""
        self._check_served(job.model)
        arguments = self._submission(job, placement, self.proc if followed else "")
        for attempt in range(2):  # submit.lua may be repeated: the id decides
            try:
                answer = self._scripts.call("submit", *arguments)
            except redis.exceptions.OutOfMemoryError:
                raise StoreUnavailable("The store is full.") from None
            except redis.RedisError as error:
                if attempt:
                    if placement.background and not placement.idempotency:  # with a key, a repetition finds it
                        self._doubtful[job.id] = time.monotonic() + DOUBT
                    raise StoreUnavailable("The store does not answer.") from error
            else:
                break
        return _submitted(job, answer)

    def submit_all(self, requests: Sequence[tuple[Job, Placement]]) -> list[SluiceError | None]:
        """Queues many requests that nobody follows, in one round trip: what `submit` would raise for each."""
        try:
            for model in {job.model for job, _ in requests}:
                self._check_served(model)
            pipeline = self._store.pipeline(transaction=False)
            pipeline.script_load(scripts.text("submit"))
            for job, placement in requests:
                pipeline.evalsha(scripts.sha("submit"), 0, *self._submission(job, placement, ""))
            answers = pipeline.execute(raise_on_error=False)[1:]
        except (NoWorker, StoreUnavailable) as error:
            return [error] * len(requests)
        except redis.RedisError:
            return [StoreUnavailable("The store does not answer.")] * len(requests)
        told: list[SluiceError | None] = []
        for (job, _), answer in zip(requests, answers, strict=True):
            try:
                if isinstance(answer, redis.RedisError):
                    raise StoreUnavailable("The store is full, or does not answer.")
                _submitted(job, answer)
                told.append(None)
            except SluiceError as error:
                told.append(error)
        return told

    def _check_served(self, model: str) -> None:
        if model not in self._knowledge().served and model not in self._knowledge(JUST_NOW).served:
            raise NoWorker(f"No worker serves the model {model!r} at the moment.")
        if model in self._knowledge().failing and model in self._knowledge(JUST_NOW).failing:
            raise NoWorker(f"The model {model!r} cannot be loaded at the moment. The server's log says why.")

    def _submission(self, job: Job, placement: Placement, proc: str) -> list[str | bytes | int]:
        """The arguments of submit.lua."""
        settings = self._settings
        key, stands_for = placement.idempotency or ("", "")
        return [
            job.id,
            proc,
            placement.tenant,
            placement.klass,
            job.model,
            int(admission.timeout_s(settings, placement) * 1000),
            _result_ttl_s(settings, placement),
            settings.log_ttl_s if placement.keep else jobs.FORGET_S,
            job.choices,
            "1" if placement.background else "",
            jobs.to_rq(job),
            job.kind,
            "1" if placement.ahead else "",
            "1" if placement.fanout or settings.fanout_all else "",
            placement.view,
            placement.grace_s,
            key,
            stands_for,
            job.version,
            placement.webhook,
            admission.limits(settings, placement),
        ]

    def detach(self, job_id: str) -> None:
        """This process no longer follows the request; it is cancelled unless another one does. Never raises: what
        the store could not be told now, the heartbeat tells it."""
        try:
            if self._scripts.detach(job_id, self.proc, GONE) == "cancelled":
                results.keep(self._store, [job_id])
        except redis.RedisError as error:
            log.warning("detach_failed", job=job_id, error=str(error))

    def end_if_abandoned(self, job_id: str) -> None:
        """Ends a request that RQ has cancelled, or whose deadline has passed unnoticed. Never raises. (What dead workers
        leave behind, and what waits in vain, is the reaper's.)"""
        try:
            fields = self._store.hmget(keys.job(job_id), *_Look._fields)
            look = _Look(*(value.decode(errors="replace") if value is not None else "" for value in fields))
            error = None if look.terminal or not look.status else self._abandoned(look)
            if error is not None:
                status = "canceled" if isinstance(error, Cancelled) else "failed"
                ended, _ = self._scripts.end(job_id, "api", ending_with(error), status, attempt=_attempt(look.a))
                if ended == 1:
                    results.keep(self._store, [job_id])
        except (redis.RedisError, StoreUnavailable) as error:
            log.warning("look_failed", job=job_id, error=str(error))

    def _abandoned(self, look: _Look) -> SluiceError | None:
        if look.status in ("canceled", "stopped"):
            return Cancelled("The job was cancelled.")
        seconds, microseconds = self._store.time()
        now = seconds * 1000 + microseconds / 1000
        if now > _ms(look.dl) + OVERDUE_MS:
            return DeadlineExceeded("The request's deadline passed.")
        return None

    def position(self, job_id: str) -> Place | None:
        """Place in the queue over all tenants; None: not waiting."""
        with reaching_the_store():
            return self._scripts.place(job_id)

    # -- models

    def cards(self) -> list[ModelCard]:
        """The models that can be asked for: a live worker has them, or something can start one."""
        known = self._knowledge()
        return [card for card in known.cards if card.id in known.served]

    def tokenizer(self, sha: str) -> str | None:
        """The tokenizer.json of that digest, if the store has it."""
        with reaching_the_store():
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
        raise ModelNotFound(f"The model {name[:256]!r} does not exist.", param="model")

    def lanes(self, model: str) -> int:
        """Of its live workers, together."""
        return sum(worker["lanes"] for worker in self._knowledge().workers if worker["model"] == model)

    # -- state

    def ping(self) -> bool:
        try:
            return bool(self._store.ping())
        except redis.RedisError:
            return False

    def status(self) -> dict[str, Any]:
        """Models, workers, queues and API processes, as `GET /v1/status` shows them; at most JUST_NOW old."""
        _, every, served, _, workers = self._knowledge(JUST_NOW)
        live: dict[str, int] = {}
        for worker in workers:
            live[worker["model"]] = live.get(worker["model"], 0) + 1
        models = [
            {"id": c.id, "ready": bool(live.get(c.id)), "workers": live.get(c.id, 0)} for c in every if c.id in served
        ]
        with reaching_the_store():
            return {"models": models, "workers": workers, "queues": self._queues(every), "nodes": self._nodes()}

    def _queues(self, every: list[ModelCard]) -> list[dict[str, Any]]:
        names = sorted(
            name.decode(errors="replace").removeprefix(keys.RQ_QUEUE) for name in self._store.smembers(keys.RQ_QUEUES)
        )
        pipeline = self._store.pipeline(transaction=False)
        for name in names:
            pipeline.llen(keys.queue(name))
            pipeline.zcard(f"rq:wip:{name}")
        resumes = [name.decode(errors="replace") for name in self._store.smembers(keys.RESUMES)]
        for name in resumes:
            pipeline.llen(name)
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
        for name, count in zip(resumes, counts[2 * len(names) :], strict=True):
            for (model, klass), row in queues.items():
                if name.startswith(keys.resume(model, "")) and name.endswith(":batch") == (klass == "batch"):
                    row["waiting"] += count
        return list(queues.values())

    def _nodes(self) -> list[dict[str, Any]]:
        names = sorted(name.decode(errors="replace") for name in self._store.smembers(keys.PROCS))
        pipeline = self._store.pipeline(transaction=False)
        for name in names:
            pipeline.exists(keys.alive(name))
            pipeline.scard(keys.attached(name))
        answers = pipeline.execute()
        counts = zip(names, answers[::2], answers[1::2], strict=True)
        return [{"name": name, "streams": count} for name, alive, count in counts if alive]

    def _knowledge(self, oldest: float = FRESH) -> _Knowledge:
        """Read again when older than so many seconds, by one caller for all: whoever waited for it meanwhile has its failure,
        too, or they would wait for a store that does not answer one after the other."""
        began = time.monotonic()
        with self._reading:
            if self._known is None or time.monotonic() - self._known.read_at > oldest:
                if self._unknown_at > began:
                    raise StoreUnavailable("The store does not answer.")
                try:
                    self._known = self._read_knowledge()
                except StoreUnavailable:
                    self._unknown_at = time.monotonic()
                    raise
            return self._known

    def _read_knowledge(self) -> _Knowledge:
        now = time.monotonic()
        with reaching_the_store():
            ids = sorted(item.decode(errors="replace") for item in self._store.smembers(keys.CARDS))
            names = sorted(item.decode(errors="replace") for item in self._store.smembers(keys.WORKERS))
            pipeline = self._store.pipeline(transaction=False)
            for model in ids:
                pipeline.hget(keys.card(model), "card")
                pipeline.get(keys.starter(model))
            for name in names:
                pipeline.exists(keys.lease(name))
                pipeline.hgetall(keys.stat(name))
                pipeline.hlen(keys.lanes(name))
            answers = map(connection.unless_another_type, pipeline.execute(raise_on_error=False))
        every: list[ModelCard] = []
        served = {model for model in self._settings.scales_from_zero if model in ids}
        failing: set[str] = set()
        for model in ids:
            raw, starter = next(answers), next(answers)
            if raw and (card := _card(raw)) is not None:
                every.append(card)
            if starter:
                served.add(model)
                if starter.startswith(b"failed"):
                    failing.add(model)
        workers: list[dict[str, Any]] = []
        for name in names:
            lease, stat, busy = next(answers), next(answers), next(answers)
            if not lease or not (worker := _worker(name, stat or {}, busy)):
                continue
            workers.append(worker)
            served.add(worker["model"])
            failing.discard(worker["model"])
        return _Knowledge(now, every, served, failing, workers)

    # -- heartbeat

    def start(self, following: Callable[[], set[str]]) -> None:
        """Registers this process and keeps it registered; `following` tells which requests have a client here."""
        threading.Thread(target=self._heartbeat, args=(following,), name="gateway-heartbeat", daemon=True).start()
        self._reaper.start()

    def leave(self) -> None:
        """Takes this process off the list, at a clean stop."""
        self._left.set()
        self._reaper.stop()
        try:
            self._scripts.leave("proc", self.proc, GONE)
        except redis.RedisError as error:
            log.warning("leave_failed", error=str(error))

    def _heartbeat(self, following: Callable[[], set[str]]) -> None:
        register, unlike = True, set[str]()
        while not self._left.is_set():
            try:
                lease = int(self._settings.orphan_grace_s * 1000)
                ids = self._scripts.beat("proc", self.proc, lease, register=register)
                again, register = register, ids is None
                if ids is not None:
                    unlike = self._reconcile(set(ids), following(), unlike, again)
                    self._end_doubtful()
            except redis.RedisError as error:
                log.warning("heartbeat_failed", error=str(error))
            except Exception:
                log.exception("heartbeat_failed")
            self._left.wait(0.1 if register else BEAT)

    def _reconcile(self, theirs: set[str], here: set[str], before: set[str], again: bool) -> set[str]:
        """Repairs what the store thinks this process follows, where it is wrong two beats in a row: a detach or an
        attach that it never got. `again`: the process was not known any more, so all it follows is missing there.

        Returns the ids that are wrong now; `before`: those of the last beat."""
        wrong = theirs ^ here
        for job_id in wrong & here if again else wrong & before:
            if job_id in here:
                self._scripts.attach_again(job_id, self.proc)
            else:
                self.detach(job_id)
        return wrong

    def _end_doubtful(self) -> None:
        """Nobody waits for a request that was refused, and in the background it would run to its end, beside the one that
        its client sent instead. (Others are not followed here: `_reconcile` lets go of them.)"""
        frame = ending_with(StoreUnavailable("The store did not answer."))
        for job_id, until in list(self._doubtful.items()):
            ended, _ = self._scripts.end(job_id, "api", frame, "failed")
            if ended == 1:
                results.keep(self._store, [job_id])
            if ended >= 0 or time.monotonic() > until:
                del self._doubtful[job_id]


def _submitted(job: Job, answer: Sequence[bytes | int]) -> str:
    """The id that submit.lua's answer stands for. Raises what it refuses."""
    admission.judge(answer)
    if answer[0] == b"conflict":
        raise IdempotencyConflict("This Idempotency-Key was used for another request.", param="Idempotency-Key")
    return bytes(answer[1]).decode() if answer[0] == b"same" else job.id


def _result_ttl_s(settings: Settings, placement: Placement) -> int:
    if placement.result_ttl_s is not None:
        return placement.result_ttl_s
    return settings.result_ttl_s if placement.keep else jobs.FORGET_S


def _card(raw: bytes) -> ModelCard | None:
    """None for what is no card: anybody may have written it, and the other models are served all the same."""
    try:
        return cards.decode(raw)
    except ValueError as error:
        log.warning("card_unreadable", error=str(error))
        return None


def _worker(name: str, stat: dict[bytes, bytes], busy: int | None) -> dict[str, Any] | None:
    """A worker as the status shows it; None if its figures are not there, or are none."""
    try:
        return {
            "name": name,
            "model": stat[b"model"].decode(),
            "lanes": int(stat[b"lanes"]),
            "busy": busy or 0,
            "free": int(stat.get(b"free", 0)),
            "tokens_per_second": float(stat.get(b"tokens_per_second", 0)),
            "draining": stat.get(b"draining") == b"1",
            "out_of_memory": int(stat.get(b"out_of_memory", 0)),
        }
    except (KeyError, ValueError):
        return None


def _ms(text: str) -> float:
    """A time out of a job's hash; never, if somebody wrote something else there."""
    return int(text) if text.isascii() and text.isdigit() else math.inf


def _attempt(text: str) -> int | None:
    """A job's attempt; None, which stands for any, if it is no number."""
    return int(text or 0) if (text or "0").isascii() and (text or "0").isdigit() else None
