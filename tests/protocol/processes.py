"""The processes of a simulation: the product's worker and API side, whole, and the clients that use them.

A worker is workers/lane_worker.py with its engine loop, taker, emitter, control and reaper; the engine is the
scripted one, or one that says other words after each resume, so that mixed texts can be told. An API process is
api/gateway.py and api/relay/ without HTTP. Knows nothing of faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import redis

import workers.engines.scripted
import workers.lane_worker
from api.gateway import Gateway
from api.lifecycle import Lifecycle
from api.relay.builder import Event as Chunk
from api.relay.completion_builder import CompletionBuilder
from api.relay.cursor import BEGIN, Cursor
from api.relay.exchange import Exchange
from api.relay.grace import Graces
from api.relay.hub import ClientGone, Hub
from api.schemas.stream_options import StreamOptions
from shared import connection
from shared.errors import SluiceError
from shared.frames import Delta, End, Error, Frame, Name, first_seq
from shared.jobs import Job, Placement, to_rq
from shared.scripts import Taken
from shared.settings import Settings
from tests.protocol.scheduler import Scheduler, SimProcess
from tests.protocol.store import Store
from workers.engine_loop import EngineLoop
from workers.engines.base import EngineDied, Event
from workers.engines.script import FIRST_PIECE
from workers.engines.scripted import ScriptedEngine
from workers.lane_worker import LaneWorker
from workers.taker import lane_of

LANES = 3
#: A seed from here on marks a request whose words depend on the attempt.
NOISY = 1 << 40
URL = "unix:///simulation"
MODEL = "scripted"


class NoisyEngine(ScriptedEngine):
    """Of a noisy request, whose script has two words for each position, this engine takes one by chance."""

    def __init__(self, noise: random.Random, fingerprint: str, **options: Any) -> None:
        super().__init__(LANES, **options)
        self.card = msgspec.structs.replace(self.card, fingerprint=fingerprint)
        self._noise = noise
        #: What becomes of its next step with something to run: "dies" or "hangs".
        self.fate = ""

    def step(self) -> list[Event]:
        if self.fate and self._running:
            if self.fate == "dies":
                raise EngineDied("on purpose")
            self._sleep(1e9)
        return super().step()

    def _sample(self, lane: Any, now: float, events: list[Any]) -> Any:
        if lane.request.seed < NOISY or lane.count >= len(lane.script.pieces) // 2:
            return super()._sample(lane, now, events)
        last = super()._sample(lane, now, events)
        index = 2 * (lane.count - 1) + (self._noise.random() < 0.4)
        events[-1] = replace(events[-1], token=FIRST_PIECE + index, piece=lane.script.pieces[index])
        return last


class SimWorker(SimProcess):
    def __init__(self, scheduler: Scheduler, store: Store, settings: Settings, name: str, fingerprint: str) -> None:
        super().__init__(scheduler, name)
        self.store, self.settings, self.fingerprint = store, settings, fingerprint
        self.worker: LaneWorker | None = None
        self.loop: EngineLoop | None = None
        self.engine: NoisyEngine | None = None
        #: It has left in good order.
        self.left = False
        #: It has started whole.
        self.ready = False
        scheduler.say("START", name, fingerprint)
        self.spawn(self._main, "main")

    def _main(self) -> None:
        scheduler = self.scheduler
        self.engine = engine = NoisyEngine(
            random.Random(f"{self.name}"),
            self.fingerprint,
            clock=lambda: scheduler.now,
            sleep=scheduler.sleep,
            die=self.exit_now,
        )
        self.loop = EngineLoop(engine, lambda part, word: None)
        self.loop.start()
        card = self.loop.wait_loaded()
        try:
            self.worker = LaneWorker(self.loop, card, self.settings, URL, name=self.name)
            self.worker.work()
            self.left = True
        except (redis.RedisError, OSError) as error:
            scheduler.say(self.name, "COULD NOT START", error)
        self.kill()

    @property
    def names(self) -> set[str]:
        return {self.name} | ({str(self.worker.name)} if self.worker else set())


class SimApi(SimProcess):
    def __init__(self, scheduler: Scheduler, store: Store, settings: Settings, name: str) -> None:
        super().__init__(scheduler, name)
        self.settings = settings
        self.gateway: Gateway | None = None
        self.hub: Hub | None = None
        scheduler.say("START", name)
        self.spawn(self._main, "main")

    def _main(self) -> None:
        gateway = Gateway(connection.connect(URL), self.settings)
        gateway.proc = gateway.known._proc = self.name
        hub = Hub(URL, gateway.proc, store_wait=self.settings.store_wait_s, lost=gateway.end_if_abandoned)
        hub.start()
        self.lifecycle = Lifecycle()
        self.graces = graces = Graces(lambda job_id: job_id in hub.following() or gateway.detach(job_id))
        gateway.start(lambda: hub.following() | graces.kept())
        self.gateway, self.hub = gateway, hub


@dataclass
class Request:
    job: Job
    placement: Placement
    #: Keeps killing whoever runs it.
    poison: bool = False
    #: Its client hangs up and comes back after so long, s; None: it does not.
    returns: float | None = None


class Recorder(CompletionBuilder):
    """The builder, which also looks at what it gets."""

    def __init__(self, client: Client) -> None:
        super().__init__(client.request.job, fingerprint="fp", options=StreamOptions(None))
        self._client = client

    def feed(self, last: Name, new: list[Frame]) -> list[Chunk]:
        client = self._client
        first = first_seq(last, new)
        if client.last and (first != client.last.s + 1 or last.a < client.last.a):
            client.wrong.append(f"{last} with {len(new)} frames after {client.last}")
        if client.ends:
            client.wrong.append(f"{last} after the end")
        client.last = last
        client.tokens += sum(len(frame.t) for frame in new if isinstance(frame, Delta))
        client.ends += [frame for frame in new if isinstance(frame, End | Error)]
        return super().feed(last, new)


@dataclass(eq=False)
class Client:
    """One HTTP request, as its thread in the API process lives it."""

    name: str
    request: Request
    api: SimApi
    accepted: bool = False
    #: Why it was refused, or why its stream ended on this side.
    refused: SluiceError | None = None
    failed: SluiceError | None = None
    hung_up: bool = False
    over: bool = False
    last: Name | None = None
    tokens: int = 0
    ends: list[End | Error] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    response: dict[str, Any] | None = None
    exchange: Exchange | None = None
    #: It asked before, of a process that died, or hung up, and goes on behind what it has seen.
    before: Client | None = None
    #: When it came back, s after that.
    late: float = 0.0
    #: Events' ids and data, in order.
    seen: list[Chunk] = field(default_factory=list)

    def start(self, over: Callable[[], None]) -> None:
        def run() -> None:
            self.run()
            over()

        self.api.spawn(run, self.name)

    def run(self) -> None:
        api = self.api
        scheduler = api.scheduler
        while api.gateway is None or api.hub is None:
            scheduler.sleep(0.05)
        try:
            exchange = self._ask(api.gateway, api.hub)
            builder, self.accepted = exchange.builder, True
            while not builder.ended:
                events = exchange.next_events(60.0) or ()
                self.seen += () if self.hung_up else events
            self.response = builder.response()
        except ClientGone:
            pass
        except SluiceError as error:
            if self.accepted:
                self.failed = error
            else:
                self.refused = error
        finally:
            if not api.dead:
                if self.exchange is not None:
                    self.exchange.close()
                self.over = True
        scheduler.say(self.name, self.request.job.id, "ENDS", self.error or "well")

    def _ask(self, gateway: Gateway, hub: Hub) -> Exchange:
        if self.before is not None:
            return self._follow(gateway, hub, self.request.job.id)
        self.exchange = exchange = self._exchange(gateway, hub)
        job_id = exchange.submit()
        if job_id == self.request.job.id:
            return exchange
        exchange.close()  # an earlier request has the key
        return self._follow(gateway, hub, job_id)

    def _follow(self, gateway: Gateway, hub: Hub, job_id: str) -> Exchange:
        """As Exchange.resume, with a builder that looks."""
        known = gateway.known.find(job_id, self.request.placement.tenant, follow=True)
        self.request = replace(self.request, job=known.job)
        past = self.all_seen()
        cursor = Cursor.parse(past[-1].id, "cursor") if past else BEGIN
        subscription = hub.attach(job_id, pushed=known.home == gateway.proc)
        self.exchange = self._exchange(gateway, hub, subscription=subscription, cursor=cursor)
        return self.exchange

    def _exchange(self, gateway: Gateway, hub: Hub, **more: Any) -> Exchange:
        api = self.api
        return Exchange(
            self.request.job, Recorder(self), hub=hub, gateway=gateway, lifecycle=api.lifecycle, graces=api.graces,
            placement=self.request.placement, clock=lambda: api.scheduler.now,
            holds=lambda constraint, text: True, **more,
        )  # fmt: skip

    def all(self) -> list[Client]:
        """Each time that the request was asked for, the latest first."""
        return [self, *(self.before.all() if self.before else ())]

    def all_seen(self) -> list[Chunk]:
        """Events since the request was first asked for, on whatever process."""
        return [*(self.before.all_seen() if self.before else ()), *self.seen]

    @property
    def error(self) -> str:
        """What its client was told went wrong; "" = nothing."""
        if self.failed or self.refused:
            return str((self.failed or self.refused).to_object()["code"])  # type: ignore[union-attr]
        if self.ends and isinstance(self.ends[0], Error):
            return str(self.ends[0].error["code"])
        return ""

    def hang_up(self) -> None:
        """From outside of any thread."""
        if self.over or self.exchange is None or self.api.dead:
            return
        self.hung_up = True
        self.api.scheduler.say(self.name, "HANGS UP", self.request.job.id)
        self.api.spawn(self.exchange.hang_up, f"{self.name}-watcher")


def undisturbed(job: Job) -> dict[str, Any]:
    """The response of a run without faults, queue and store."""
    clock = iter(range(10**9))
    engine = ScriptedEngine(64, clock=lambda: float(next(clock)), sleep=lambda seconds: None)
    lane = lane_of(Taken(job.id, Name(1, 1), 1e9, [], {b"data": to_rq(job)}), engine.card, engine)
    for request in lane.requests():
        engine.add(request)
    builder = CompletionBuilder(job, fingerprint="fp", options=StreamOptions(None))
    seq = 1
    while True:
        for event in engine.step() if not lane.over else ():
            if lane.on_event(int(event.id.rpartition("/")[2]), event):
                engine.cancel(event.id)
        lane.flush()
        while lane.outbox:
            entry = list(lane.outbox.popleft())
            seq += len(entry)
            builder.feed(Name(1, seq), entry)
        if lane.terminal is not None:
            builder.feed(Name(2, seq + 1), [lane.terminal])
            return builder.response()


def own_patches(scheduler: Scheduler, say: Callable[..., None]) -> list[tuple[Any, str, object]]:
    """What of a worker's surroundings is replaced: signals, ids by chance, the end of the process, the engine's naps."""
    chance = random.Random(scheduler.rng.random())
    system = SimpleNamespace(
        urandom=lambda count: bytes(chance.randrange(256) for _ in range(count)),
        getpid=lambda: 1,
        _exit=lambda status: scheduler.process.exit_now(),
    )
    signals = SimpleNamespace(SIGTERM=15, SIGINT=2, signal=lambda *_: None)
    return [
        (workers.lane_worker, "os", system),
        (workers.lane_worker, "signal", signals),
        (workers.engines.scripted, "LONGEST_SLEEP_S", 0.2),
    ]
