"""One run of the protocol under an adversary: the product's processes on simulated time, and a real store.

    python -m tests.protocol.run 0:100          seeds 0 to 99: what failed, with a short trace, and how requests ended
    python -m tests.protocol.run 17 --trace     one seed, with all that happened

Real: everything under shared/lua, shared/reaper.py, workers/ from the taker to the emitter, api/gateway.py, api/relay/
(hub, order, exchange, builder), redis-py, RQ, the server. What this test cannot see, since it is simulated:
- sockets and the framing of answers (store.py): a connection breaks between commands, never within an answer;
- threads (scheduler.py): they give way where they would block, nowhere else, so no race between two bytecodes is found;
- TTLs: carried out at simulated time by store.py. The server's eviction, persistence and replication are not used:
  lost data is a replay of what was written before a moment;
- HTTP, SSE, signals, processes; and the engines (the scripted one, with noise);
- API keys and their limits.

After a run: every accepted request whose server lives has ended exactly once for its client, with the response of an
undisturbed run (a noisy request's: with the text that its log holds), or with an error that its run explains. No frame
came twice, none out of order; nothing is left in the store or in a worker; nobody overtaken goes on; every request
was ended in RQ's books once; no innocent request counted as one that kills workers.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog

from api.relay.completion_builder import CompletionBuilder
from api.schemas.stream_options import StreamOptions
from scripts.store import server_binary
from shared import connection, keys, results
from shared.errors import Cancelled
from shared.frames import Delta, Name, Take, decode_entry, ending_with, first_seq
from shared.jobs import Job, Placement
from shared.reaper import reap_worker
from shared.scripts import Scripts
from shared.settings import Settings
from tests.protocol import scheduler as simulation
from tests.protocol.processes import MODEL, NOISY, Client, Request, SimApi, SimWorker, own_patches, undisturbed
from tests.protocol.scheduler import Scheduler, SimProcess
from tests.protocol.store import Server, Store, clients

#: Nothing goes wrong after this, s.
QUIET = 16.0
#: A run that has not come to rest by then is stuck, s.
LIMIT = 150.0
#: Lines of a failure's trace.
SHORT = 60
#: How long one that was overtaken may go on, s.
ZOMBIE = 8.0
ACTS = (
    *("kill", "kill", "killapi", "stop", "stop", "stopapi", "cut", "restart", "longdown", "cancel", "drain", "full"),
    *("dies", "hangs", "cutoff", "cutoff", "cutoffapi", "lag", "lag"),
    *("trap",) * 8,
)
TRAPPED = (
    *(
        "take",
        "emit",
        "XADD",
        "XADD",
        "PUBLISH",
        "end",
        "end",
        "put_back",
        "release",
        "book",
        "beat",
        "reap",
        "reap_proc",
    ),
    *("submit", "detach", "sweep", "page", "XRANGE", "HMGET"),
)
FATES = ("held", "held", "killed", "never", "unanswered")
LOSSES = ("rollback", "powerloss")
#: What some requests may run without a client, s.
GRACE = 8


@dataclass
class Plan:
    """What a seed decides before the run."""

    faults: set[str]
    acts: list[tuple[float, str, float, float]]
    fingerprints: list[str]
    undertaker: bool
    poison: bool
    requests: list[tuple[float, Request, float | None]] = field(default_factory=list)


def plan_of(seed: int) -> Plan:
    rng = random.Random(seed)
    poison = rng.random() < 0.12
    kinds: list[str] = ["cut", "cancel"] if poison else [*ACTS]
    if not poison and rng.random() < 0.4:
        kinds += LOSSES * 2
    acts = sorted(
        (rng.uniform(1, QUIET - 2), rng.choice(kinds), rng.random(), rng.random()) for _ in range(rng.randint(3, 7))
    )
    fingerprints = rng.choice((["a", "a"], ["a", "a", "a"], ["a", "b"], ["a", "a", "b"]))
    if not poison and len(set(fingerprints)) > 1 and rng.random() < 0.2:
        acts.append((rng.uniform(3, 10), "upgrade", 0.0, 0.0))
    plan = Plan({"reply"} if poison else {"reply", "late"}, acts, fingerprints, rng.random() < 0.5, poison)
    for number in range(rng.randint(8, 16)):
        request = a_request(rng, f"j{number}")
        hang_up = rng.uniform(0.1, 3) if rng.random() < 0.15 else None
        plan.requests.append((rng.uniform(0.5, 11), request, hang_up))
    if poison:
        job = Job(
            id="poison", model=MODEL, prompts=[json.dumps({"pieces": ["x"], "fatal_after": 0})], seed=1, created=1
        )
        plan.requests.append((rng.uniform(0.5, 4), Request(job, Placement(), poison=True), None))
    plan.requests = list(placed(random.Random(f"{seed}, placed"), plan.requests))
    return plan


def placed(
    rng: random.Random, requests: list[tuple[float, Request, float | None]]
) -> Iterator[tuple[float, Request, float | None]]:
    """Some of the requests with a grace, in the background, or with an Idempotency-Key and a repetition."""
    for at, request, hang_up in requests:
        kind = "" if request.poison else rng.choice(("", "", "", "grace", "background", "key"))
        place = msgspec.structs.replace
        if kind == "grace":
            hang_up = hang_up or rng.uniform(0.2, 3)
            returns = rng.uniform(0.1, 3) if rng.random() < 0.8 else None
            request = replace(request, placement=place(request.placement, grace_s=GRACE), returns=returns)
        elif kind == "background":
            hang_up = hang_up or (rng.uniform(0.1, 3) if rng.random() < 0.5 else None)
            request = replace(request, placement=place(request.placement, background=True))
        elif kind == "key":
            job = request.job
            request = replace(request, placement=place(request.placement, idempotency=(job.id, "the body")))
            again = replace(request, job=place(job, id=f"{job.id}again"))
            yield at + rng.choice((rng.uniform(0, 0.1), rng.uniform(0, 4))), again, None
        yield at, request, hang_up


def a_request(rng: random.Random, job_id: str) -> Request:
    length = rng.randint(4, 30)
    delay = rng.randint(50, 180)
    placement = Placement(
        tenant=rng.choice("AB"), klass="batch" if rng.random() < 0.3 else "interactive", fanout=rng.random() < 0.1
    )
    n = rng.choice((1, 1, 1, 2, 3))
    if rng.random() < 0.5:
        script = {"pieces": [word for p in range(length) for word in (f"{p} ", f"{p}~ ")], "delay_ms": delay}
        noisy = Job(
            id=job_id, model=MODEL, prompts=[json.dumps(script)], seed=NOISY + rng.randrange(1000), created=1,
            n=n, best_of=n, max_tokens=length, logprobs=rng.choice((None, None, 1)),
        )  # fmt: skip
        return Request(noisy, placement)
    prompts = []
    for number in range(rng.choice((1, 1, 2))):
        choices = [
            {
                "pieces": [f"{number}{j}.{p}é "[: rng.choice((3, 9))] for p in range(rng.randint(1, length))],
                "delay_ms": delay + 10 * j,
            }
            for j in range(4)
        ]
        prompts.append(json.dumps({"choices": choices, "start_delay_ms": rng.choice((0, 0, 400))}))
    logprobs = rng.choice((None, 0, 2))
    job = Job(
        id=job_id, model=MODEL, prompts=prompts, seed=rng.randrange(1000), created=1,
        n=n, best_of=rng.choice((n, n, n + 1)), max_tokens=rng.choice((None, None, length // 2)),
        stop=rng.choice(([], ["7é"], [".5é 0", "é 00.9"], ["1.2", "never comes"])), echo=rng.random() < 0.3, logprobs=logprobs,
    )  # fmt: skip
    return Request(job, placement)


class World:
    """A run. `wrong`: what it should not have come to."""

    def __init__(
        self, seed: int, server: Server, *, trace: bool = False, leave_out: frozenset[int] = frozenset()
    ) -> None:
        self.seed = seed
        self.plan = plan_of(seed)
        self.plan.acts = [act for number, act in enumerate(self.plan.acts) if number not in leave_out]
        self.scheduler = Scheduler(seed)
        if trace:
            self.scheduler.trace = []
        self.store = Store(self.scheduler, server, self.plan.faults)
        self.store.watch = self._watch
        self.wrong: list[str] = []
        self.settings = Settings(
            redis_url="unix:///simulation", lease_s=6, orphan_grace_s=9, cold_start_s=30, drain_s=1, store_wait_s=12,
            request_timeout_s=300, stall_s=4,
        )  # fmt: skip
        self.workers: list[SimWorker] = []
        self.apis: list[SimApi] = []
        self.clients: list[Client] = []
        self.deaths = 0
        self.cancelled: set[str] = set()
        self.upgraded = False
        self._names = collections.Counter[str]()
        self._takes: dict[str, tuple[int, float]] = {}
        #: Died at their start: what RQ was to book of them may arrive later. RQ's tools clean that up.
        self._stillborn = set[str]()
        self._begun_with: dict[bytes, str] = {}
        self._pauses = 0.0
        #: Clients on their way to another API process.
        self._returning = 0

    # -- processes

    def _name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind}{self._names[kind]}"

    def _start_worker(self, fingerprint: str) -> None:
        if fingerprint not in self.plan.fingerprints:
            fingerprint = self.plan.fingerprints[0]
        self.workers.append(SimWorker(self.scheduler, self.store, self.settings, self._name("w"), fingerprint))

    def _start_api(self) -> None:
        self.apis.append(SimApi(self.scheduler, self.store, self.settings, self._name("p")))

    def _supervise(self) -> None:
        """Starts again what has ended, and may tell the store of it, as `up` does."""
        for worker in [worker for worker in self.workers if worker.dead]:
            self.workers.remove(worker)
            if worker.worker is None or not worker.ready:
                self._stillborn.add(worker.name)
            if not worker.left:
                self.deaths += 1
            if self.plan.undertaker and not worker.left:
                self.supervisor.spawn(lambda worker=worker: self._undertake(worker))
            self.scheduler.at(
                self.scheduler.rng.uniform(0.5, 3), lambda worker=worker: self._start_worker(worker.fingerprint)
            )
        for api in [api for api in self.apis if api.dead]:
            self.apis.remove(api)
            for client in self.clients:
                if client.api is api and client.accepted and not (client.over or client.hung_up or client.ends):
                    self._returning += 1
                    self.scheduler.at(self.scheduler.rng.uniform(0.1, 2), lambda c=client: self._come_back(c, 0.0))
            self.scheduler.at(self.scheduler.rng.uniform(0.5, 3), self._start_api)
        self.scheduler.at(0.25, self._supervise)

    def _undertake(self, worker: SimWorker) -> None:
        with contextlib.suppress(Exception):  # the store is away: the lease does the same, later
            for name in sorted(worker.names):
                reap_worker(connection.connect(""), name, "killed", proven=True)

    # -- the run

    def run(self) -> None:
        connect, raw = clients(self.scheduler, self.store)
        changes = [*simulation.patches(self.scheduler), *own_patches(self.scheduler, self.scheduler.say)]
        changes += [(connection, "connect", connect), (connection, "raw", raw)]
        with simulation.patched(changes), heard(self):
            self._run()

    def _run(self) -> None:
        scheduler = self.scheduler
        self.supervisor = SimProcess(scheduler, "up")
        for _ in range(2):
            self._start_api()
        for fingerprint in self.plan.fingerprints:
            self._start_worker(fingerprint)
        self._supervise()
        for at, request, hang_up in self.plan.requests:
            scheduler.at(at, lambda request=request, hang_up=hang_up: self._open(request, hang_up))
        for at, kind, x, y in self.plan.acts:
            scheduler.at(at, lambda kind=kind, x=x, y=y: self._act(kind, x, y))

        def hush() -> None:
            self.store.quiet = True
            self.store.traps.clear()

        scheduler.at(QUIET, hush)
        scheduler.at(1, self._look_for_zombies)
        try:
            if not scheduler.run(self._at_rest, LIMIT):
                self.wrong += [f"still there at the end: {item}" for item in self._unfinished()]
            self._judge()
        finally:
            for process in [*self.workers, *self.apis, self.supervisor]:
                process.kill()
            scheduler.run(lambda: False, scheduler.now)
            scheduler.close()
        self.wrong += [f"a thread died: {t.process.name} {t.name}: {e!r}" for t, e in scheduler.deaths]

    def _again(self, client: Client, hang_up: float | None) -> None:
        """A refused request is repeated, as clients do: as another one."""
        job = client.request.job
        if client.refused and job.id.count("-") < 5 and not self.store.quiet:
            self._open(replace(client.request, job=msgspec.structs.replace(job, id=f"{job.id}-")), hang_up)

    def _open(self, request: Request, hang_up: float | None) -> None:
        apis = [api for api in self.apis if not api.dead and not api.stopped]
        if not apis:
            self.scheduler.at(0.5, lambda: self._open(request, hang_up))
            return
        client = Client(f"c{len(self.clients)}", request, self.scheduler.rng.choice(apis))
        self.scheduler.say(
            client.name, "ASKS", client.api.name, request.job.id, request.placement.klass, "n", request.job.n
        )
        self.clients.append(client)
        client.start(lambda: self.scheduler.at(2, lambda: self._again(client, hang_up)))
        if hang_up is not None:
            self.scheduler.at(hang_up, lambda: self._hang_up(client))

    def _hang_up(self, client: Client) -> None:
        client.hang_up()
        if client.hung_up and (pause := client.request.returns) is not None:
            self._returning += 1
            self.scheduler.at(pause, lambda: self._come_back(client, pause))

    def _come_back(self, before: Client, late: float) -> None:
        """A client that hung up, or whose API process died, asks any one for the rest."""
        if not before.accepted or before.ends:
            self._returning -= 1
            return
        apis = [api for api in self.apis if not api.dead and not api.stopped and api.gateway]
        if not apis or self.store.down:
            self.scheduler.at(0.5, lambda: self._come_back(before, late + 0.5))
            return
        self._returning -= 1
        api = self.scheduler.rng.choice(apis)
        client = Client(f"c{len(self.clients)}", before.request, api, before=before, late=late)
        self.scheduler.say(client.name, "COMES BACK", api.name, before.request.job.id, "as", before.name)
        self.clients.append(client)
        client.start(lambda: None)

    def _act(self, kind: str, x: float, y: float) -> None:
        scheduler, store = self.scheduler, self.store
        workers = [worker for worker in self.workers if not worker.dead]
        apis = [api for api in self.apis if not api.dead]
        worker = workers[int(x * len(workers))] if workers else None
        api = apis[int(x * len(apis))] if apis else None
        if kind in ("kill", "powerloss") and worker:
            scheduler.say("KILL", worker.name)
            worker.kill()
        if kind == "killapi" and api:
            scheduler.say("KILL", api.name)
            api.kill()
        if kind in ("stop", "stopapi"):
            process = worker if kind == "stop" else api
            if process and not process.stopped:
                seconds = 1 + (14 if kind == "stop" else 18) * y
                scheduler.say("STOP", process.name, round(seconds, 1))
                self.deaths += kind == "stop"
                self._pauses = max(self._pauses, scheduler.now + seconds)
                process.stop(seconds)
        if kind in ("cutoff", "cutoffapi"):
            process = worker if kind == "cutoff" else api
            if process:
                seconds = 3 + 11 * y
                scheduler.say("CUT OFF", process.name, round(seconds, 1))
                self.deaths += kind == "cutoff"
                self._pauses = max(self._pauses, scheduler.now + seconds)
                process.cut_off(seconds)
        if kind == "cut":
            links = [link for link in store.links if link.channels]
            if links:
                link = links[int(x * len(links))]
                scheduler.say("CUT" if y < 0.5 else "SILENCE", link.process.name, sorted(link.channels)[0])
                if y < 0.5:
                    link.broke()
                else:
                    link.silent = True
        if kind in ("restart", "longdown", *LOSSES) and not store.down:
            lose = 0.05 + 1.95 * x * x if kind in LOSSES else 0.0
            if lose:
                self._takes.clear()
            store.restart(6 + 12 * y if kind == "longdown" else 0.2 + 2 * y, lose)
        if kind == "full":
            store.fill(1 + 9 * y)
        if kind == "drain" and worker and worker.worker:
            scheduler.say("DRAIN", worker.name)
            self._terminate(worker)
        if kind == "lag" and (process := worker if y < 0.7 else api):
            scheduler.say("LAG", process.name)
            process.slow_down(6, 0.1 + x)
        if kind == "trap":
            trap = TRAPPED[int(x * len(TRAPPED))], FATES[int(y * len(FATES))]
            scheduler.say("TRAP", *trap)
            self.deaths += 1
            store.traps.append(trap)
        if kind in ("dies", "hangs") and worker and worker.engine:
            scheduler.say("ENGINE", kind, worker.name)
            worker.engine.fate = kind
        if kind == "upgrade":
            self.upgraded = True
            old = self.plan.fingerprints[0]
            self.plan.fingerprints = [f for f in self.plan.fingerprints if f != old]
            for worker in [w for w in workers if w.fingerprint == old and w.worker]:
                self._terminate(worker)
        if kind == "cancel" and api and self.clients:
            client = self.clients[int(y * len(self.clients))]
            self.cancelled.add(client.request.job.id)
            api.spawn(lambda: self._cancel(client.request.job.id), "cancel")

    def _terminate(self, worker: SimWorker) -> None:
        assert worker.worker is not None
        stop = worker.worker.request_stop
        worker.spawn(lambda: stop(15, None), "signal")

    def _cancel(self, job_id: str) -> None:
        with contextlib.suppress(Exception):
            Scripts(connection.connect("")).end(job_id, "cancel", ending_with(Cancelled("Cancelled.")), "canceled")

    # -- what is looked at while it runs

    def _watch(self, process: SimProcess, name: str, args: list[bytes], answer: Any) -> None:
        scheduler = self.scheduler
        if scheduler.trace is not None and (
            name not in ("beat", "sweep", "take") or answer not in ([b"ok"], [0, []], [b"ok", []])
        ):
            said = answer if name != "take" else [(*taken[:4], len(taken[4])) for taken in answer[1:]] or answer
            scheduler.say(
                process.name, name, *[arg[:60].decode(errors="replace") for arg in args[:5]], "->", str(said)[:110]
            )
        if name != "take" or answer[0] != b"ok":
            return
        fingerprint = args[4].decode()
        for job_id, a, _, _, begun, fields in answer[1:]:
            self._takes[job_id.decode()] = (int(a), scheduler.now)
            if (
                len(begun) > 1
                and self._begun_with.get(job_id, fingerprint) != fingerprint
                and self.store.lost_at is None
            ):
                self.wrong.append(f"{job_id.decode()} goes on with other numbers than it was begun with")
            self._begun_with[job_id] = fingerprint
            job = dict(zip(fields[::2], fields[1::2], strict=True))
            if job[b"class"] == b"batch" and not self.deaths:
                waiting = self.store.ask("ZCARD", f"sluice:ring:{MODEL}:interactive")
                waiting += self.store.ask("LLEN", keys.resume(MODEL, job[b"fp"].decode()))
                if waiting:
                    self.wrong.append(f"{job_id.decode()} of batch was taken before an interactive one")

    def _look_for_zombies(self) -> None:
        now = self.scheduler.now
        for worker in self.workers:
            if worker.dead or worker.stopped or worker.loop is None or self.store.down:
                continue
            for job_id, lane in worker.loop._lanes.items():
                a, at = self._takes.get(job_id, (0, 0.0))
                if a > lane.attempt and now - max(at, worker.continued_at, worker.cut_off_until, self.last_up) > ZOMBIE:
                    self.wrong.append(f"{worker.name} goes on with {job_id} {lane.attempt}, {a} was taken")
                    self._takes.pop(job_id)
        self.scheduler.at(1, self._look_for_zombies)

    @property
    def last_up(self) -> float:
        return self.store.up_at

    # -- the end

    def _at_rest(self) -> bool:
        now = self.scheduler.now
        if (
            now < max(QUIET, self._pauses + 1)
            or any(process.stopped for process in (*self.workers, *self.apis))
            or now < self._looked + 1
        ):
            return False
        self._looked = now
        return not self._unfinished()

    _looked = 0.0

    def _unfinished(self) -> list[str]:
        """What is not as it should be in the end."""
        left = [f"{c.name} {c.request.job.id} waits" for c in self.clients if not c.over and not c.api.dead]
        if self._returning or sum(client.before is None for client in self.clients) < len(self.plan.requests):
            left.append("requests to come")
        return left or self._leaks()

    def _leaks(self) -> list[str]:
        ask = self.store.ask
        found: list[str] = []
        for worker in self.workers:
            if worker.worker is None or worker.loop is None:
                found.append(f"{worker.name} is starting")
                continue
            own = worker.worker
            running = worker.loop.engine.stats()
            for what in (own._lanes, worker.loop._lanes, own._taker.preparing):
                if what:
                    found.append(f"{worker.name} runs {sorted(what)}")
            if running.running or running.waiting:
                found.append(f"{worker.name}'s engine runs {running}")
        for api in self.apis:
            if api.hub is None or api.hub.following():
                found.append(f"{api.name} follows something")
        expected = {"workers": {name for w in self.workers if w.worker for name in (str(w.worker.name),)}}
        expected["procs"] = {api.name for api in self.apis}
        ttls = {key.decode() for key in ask("ZRANGE", "sim:ttl", 0, -1)}
        for key in sorted(key.decode() for key in ask("KEYS", "*")):
            begin = ":".join(key.split(":")[:2])
            if (
                begin
                in (
                    "sluice:lanes",
                    "sluice:att",
                    "sluice:resume",
                    "sluice:ring",
                    "rq:queue",
                    "rq:wip",
                    "rq:executions",
                    "rq:execution",
                )
                or (begin == "rq:worker" and key.endswith(":executions"))
                or key in ("sluice:resumes", "sluice:unkept")
            ):
                found.append(f"{key} is left: {self._content(key)}")
            elif begin in ("sluice:log", "rq:job", "rq:results") and key not in ttls:
                found.append(f"{key} stays for ever")
            if begin == "rq:job" and not ask("HGET", key, "terminal"):
                found.append(f"{key} never ended: {ask('HMGET', key, 'status', 'owner', 'a')}")
            if begin in ("sluice:workers", "sluice:procs", "rq:workers"):
                names = {name.decode().removeprefix("rq:worker:") for name in ask("SMEMBERS", key)} - self._stillborn
                wanted = expected["procs" if begin == "sluice:procs" else "workers"]
                tenants = key.count(":") > 2  # RQ's list of a tenant's queue: only while the queue is there
                if names != wanted and not (
                    tenants
                    and names < wanted
                    and ask("SISMEMBER", "rq:queues", key.replace("rq:workers:", "rq:queue:"))
                ):
                    found.append(f"{key}: {sorted(names)} instead of {sorted(wanted)}")
        found += [f"{q.decode()} is listed" for q in ask("SMEMBERS", "rq:queues") if q.decode().count(":") > 2]
        return found

    def _content(self, key: str) -> str:
        kind = self.store.ask("TYPE", key)
        read = {
            "hash": ("HGETALL", key),
            "set": ("SMEMBERS", key),
            "list": ("LRANGE", key, 0, -1),
            "zset": ("ZRANGE", key, 0, -1),
        }
        return str(self.store.ask(*read[kind if isinstance(kind, str) else kind.decode()]))[:100] if kind else ""

    def _judge(self) -> None:
        for client in self.clients:
            self.wrong += [f"{client.name} {client.request.job.id}: {what}" for what in self._wrong_with(client)]
        for key in self.store.ask("KEYS", "rq:job:*"):
            self._judge_books(key.decode().removeprefix("rq:job:"))
        self._judge_keys()
        for key in self.store.ask("KEYS", "sluice:log:*"):
            seq = 0
            for name, fields in self.store.ask("XRANGE", key, "-", "+"):
                last, entry = Name.parse(name.decode()), decode_entry(fields[1])
                if first_seq(last, entry) != seq + 1:
                    self.wrong.append(f"{key.decode()} has a hole before {last}")
                seq = last.s

    def _wrong_with(self, client: Client) -> Iterator[str]:
        yield from client.wrong
        if client.hung_up or client.api.dead:
            if client.accepted and client.request.placement.background:
                yield from self._wrong_alone(client)
            return
        if len(client.ends) + bool(client.failed or client.refused) != 1:
            yield f"ended {len(client.ends)} times and {client.failed or client.refused}"
        error = client.error
        if not self._explained(client, error):
            yield f"ended with {error or 'a response'}"
        if not error:
            yield from self._wrong_response(client)

    def _explained(self, client: Client, error: str) -> bool:
        """Whether the run tells why a request ended so."""
        job, lost = client.request.job, self.store.lost_at is not None
        grace = min(self.settings.orphan_grace_s, GRACE)
        unseen = max(asked.api.longest_stop for asked in client.all())
        explained = {
            "": not client.request.poison or lost,
            "cancelled": job.id in self.cancelled
            or unseen > self.settings.orphan_grace_s - 3
            or (client.before is not None and client.late > grace - 5),
            "not_found": lost,
            "log_lost": lost,
            "job_lost": lost,
            "store_unavailable": client.refused is not None or self.store.away > self.settings.store_wait_s,
            "no_worker": client.refused is not None or self.upgraded,
            "worker_lost": self.upgraded or self.deaths >= 5,
            "poison_request": client.request.poison
            or ((lost or self._silent_attempts(job.id) >= 1 <= self.deaths - 1) and not self.plan.poison),
        }
        return explained.get(error, False)

    def _wrong_alone(self, client: Client) -> Iterator[str]:
        """A background request that nobody waited for to its end: what its log says."""
        builder, entries = self._logged(client.request.job)
        if not entries:
            if self.store.lost_at is None:
                yield "nothing is left of it"
        elif builder.error is not None:
            code = str(builder.error.error["code"])
            if (code == "cancelled" and client.request.job.id not in self.cancelled) or not self._explained(
                client, code
            ):
                yield f"ended in the background with {code}"
        else:
            yield from self._wrong_text(client.request.job, builder.response())

    def _logged(self, job: Job) -> tuple[CompletionBuilder, list[Any]]:
        """A request's log, and what a builder makes of it."""
        builder = CompletionBuilder(job, fingerprint="fp", options=StreamOptions(None))
        entries = self.store.ask("XRANGE", keys.log(job.id), "-", "+")
        for name, fields in entries:
            builder.feed(Name.parse(name.decode()), decode_entry(fields[1]))
        return builder, entries

    def _judge_keys(self) -> None:
        """An Idempotency-Key stands for one request, until that ends in a way that may be repeated."""
        kept = collections.defaultdict[bytes, list[bytes]](list)
        for job in self.store.ask("KEYS", "rq:job:*"):
            key, status, end = self.store.ask("HMGET", job, "idem", "status", "end")
            if key and status != b"canceled" and b'"retryable":true' not in (end or b""):
                kept[key].append(job)
        if self.store.lost_at is None:
            self.wrong += [f"{key.decode()} stands for {jobs}" for key, jobs in kept.items() if len(jobs) > 1]

    def _silent_attempts(self, job_id: str) -> int:
        """How many of a request's attempts ended without a token. (What arrives after the worker was reaped comes too late
        to speak for the request.)"""
        silent = set[int]()
        for name, fields in self.store.ask("XRANGE", keys.log(job_id), "-", "+"):
            a, frames = Name.parse(name.decode()).a, decode_entry(fields[1])
            silent |= {a} if any(isinstance(frame, Take) for frame in frames) else set()
            silent -= {a} if any(isinstance(frame, Delta) for frame in frames) else set()
        return len(silent)

    def _wrong_response(self, client: Client) -> Iterator[str]:
        job, got, lost = client.request.job, client.response, self.store.lost_at is not None
        if got is None:
            yield "no response"
            return
        yield from self._wrong_text(job, got)
        if job.candidates == job.n and (not lost or client.before is None):
            texts = [""] * len(got["choices"])
            for event in client.all_seen():
                for choice in json.loads(event.data)["choices"]:
                    texts[choice["index"]] += choice["text"]
            if texts != [choice["text"] for choice in got["choices"]]:
                yield f"streamed was another text: {texts}"
        if lost:  # the stream had ended: what the store has may be another run's, or be gone
            return
        builder, _ = self._logged(job)
        if builder.response() != got:
            yield f"the log says: {_difference(builder.response(), got)}"
        if result := self.store.ask("XREVRANGE", keys.results(job.id), "+", "-", "COUNT", 1):
            kept = CompletionBuilder(job, fingerprint="fp", options=StreamOptions(None))
            frames = results.read([(name, dict(zip(f[::2], f[1::2], strict=True))) for name, f in result])
            kept.feed(Name(1, len(frames)), frames)
            if kept.response() != got:
                yield f"the result says: {_difference(kept.response(), got)}"
        else:
            yield "no result was kept"

    def _wrong_text(self, job: Job, got: dict[str, Any]) -> Iterator[str]:
        if job.seed < NOISY:
            want = undisturbed(job)
            if got != want:
                yield f"another response: {_difference(want, got)}"
            return
        words = "".join(f"{p} " for p in range(job.max_tokens or 0))
        for choice in got["choices"]:
            if choice["text"].replace("~", "") != words or choice["finish_reason"] != "length":
                yield f"another text: {choice['text'][-80:]!r} {choice['finish_reason']}"

    def _judge_books(self, job_id: str) -> None:
        """RQ lists every ended job in one registry."""
        origin, status = self.store.ask("HMGET", keys.job(job_id), "origin", "status")
        held = [
            kind for kind in ("finished", "failed", "canceled")
            if self.store.ask("ZSCORE", f"rq:{kind}:{(origin or b'').decode()}", job_id) is not None
        ]  # fmt: skip
        if self.store.ask("HGET", keys.job(job_id), "terminal") and held != [(status or b"").decode()]:
            self.wrong.append(f"{job_id} is {status} and stands in {held}")


def _difference(want: Any, got: Any, path: str = "") -> str:
    if isinstance(want, dict) and isinstance(got, dict):
        return "; ".join(_difference(want.get(k), got.get(k), f"{path}.{k}") for k in want if want.get(k) != got.get(k))
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        return "; ".join(
            _difference(w, g, f"{path}[{k}]") for k, (w, g) in enumerate(zip(want, got, strict=True)) if w != g
        )
    return f"{path}: {str(want)[-120:]!r} became {str(got)[-120:]!r}"


@contextlib.contextmanager
def heard(world: World) -> Iterator[None]:
    """The product's log goes into the trace; a traceback in it is a failure."""

    def note(logger: object, method: str, event: Any) -> Any:
        thread = world.scheduler.threads.get(simulation.getcurrent())
        if event.get("exc_info"):
            world.wrong.append(f"{event['event']}: {sys.exc_info()[1]!r}")
        if event["event"] == "worker_ready" and thread and isinstance(thread.process, SimWorker):
            thread.process.ready = True
        world.scheduler.say(thread.process.name if thread else "-", "says", *[f"{k}={v}" for k, v in event.items()])
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[note], wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def run_seed(seed: int, server: Server, *, trace: bool = False, leave_out: frozenset[int] = frozenset()) -> World:
    world = World(seed, server, trace=trace, leave_out=leave_out)
    world.run()
    return world


@contextlib.contextmanager
def a_server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="protocol-") as folder:
        server = Server(Path(folder), server_binary(lambda line: None))
        try:
            yield server
        finally:
            server.close()


def shrunk(seed: int, server: Server) -> World:
    """The run, traced, without the planned faults that its failure does not need."""
    world, left_out = run_seed(seed, server, trace=True), frozenset[int]()
    for number in range(len(world.plan.acts)):
        smaller = run_seed(seed, server, trace=True, leave_out=left_out | {number})
        if smaller.wrong:
            world, left_out = smaller, left_out | {number}
    return world


#: What is of no interest in a short trace.
NOISE = re.compile(r" beat |_failed|_lost|says worker=|reaped")


def short(world: World) -> list[str]:
    """Of a failure's trace: faults, and what concerns the requests and processes that went wrong."""
    said = " ".join(world.wrong)
    names = {
        client.request.job.id for client in world.clients if re.search(rf"\b{client.request.job.id}(?![\w-])", said)
    }
    names |= set(re.findall(r"\b[wp]\d+\b", said)) if not names else set()
    about = re.compile(
        "|".join(
            [
                r"^ *[\d.]+ (STORE|STOP|KILL|START|CUT|CUT OFF|SILENCE|DRAIN|ENGINE|LAG)",
                *(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in names),
            ]
        )
    )
    trace = [line[:220] for line in world.scheduler.trace or () if about.search(line) and not NOISE.search(line)]
    return trace[-SHORT:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.run")
    parser.add_argument("seeds", help="one, or FROM:TO")
    parser.add_argument("--trace", action="store_true", help="print all that happened")
    options = parser.parse_args()
    first, colon, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if colon else int(first) + 1)
    began, commands, bad = time.monotonic(), 0, 0
    ends = collections.Counter[str]()
    with a_server() as server:
        for seed in seeds:
            world = run_seed(seed, server, trace=options.trace)
            commands += world.store.commands
            for client in world.clients:
                gone = "server died" if client.api.dead and not client.over else "hung up" if client.hung_up else ""
                back = ", come back" if client.before else ""
                ends[(gone or client.error or "well") + back] += 1
            if options.trace:
                print("\n".join(world.scheduler.trace or ()))
            if world.wrong:
                bad += 1
                if not options.trace:
                    world = shrunk(seed, server)
                acts = [(round(at, 1), kind) for at, kind, *_ in world.plan.acts]
                print(f"seed {seed}, with the faults {acts}", *world.wrong[:6], sep="\n    ")
                if not options.trace:
                    print(*short(world), sep="\n        ")
    seconds = time.monotonic() - began
    print(f"{len(seeds)} seeds, {bad} failed, {seconds:.1f} s, {commands} commands; requests: {dict(ends)}")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
