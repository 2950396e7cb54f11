"""Runs the real server over an in-memory store: `python -m tests.unit.served_api PORT [drain seconds]`.

The prompt says what the store answers: `wait` nothing, `tick` a token each 20 ms for ever, `slow` five tokens in
half a second, anything else one token that repeats it. `/v1/status` tells what the store was asked to do.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402

from api.app import create_app  # noqa: E402
from api.relay.watcher import Watcher  # noqa: E402
from api.server import serve  # noqa: E402
from shared.frames import Delta, Start, Take  # noqa: E402
from shared.jobs import Job  # noqa: E402
from shared.settings import Settings  # noqa: E402
from tests.unit.completion_frames import told  # noqa: E402
from tests.unit.fakes import FakeStore  # noqa: E402


class TimedStore(FakeStore):
    def __init__(self) -> None:
        super().__init__()
        self.detach_times: list[float] = []
        self.watcher: Watcher | None = None

    def submit(self, job: Job, *_: Any, **__: Any) -> str:
        gevent.spawn(self._tell, job)
        return super().submit(job)

    def _tell(self, job: Job) -> None:
        subscription, prompt = self.open_subscriptions[job.id], str(job.prompts[0])
        if prompt == "wait":
            return
        if prompt == "tick":
            subscription.push([Take("w"), Start(1)])
            while job.id not in self.detached:
                subscription.push(Delta(0, [1], "tick "))
                time.sleep(0.02)
            return
        for frame in told(*["x"] * 5) if prompt == "slow" else told(prompt):
            subscription.push(frame)
            time.sleep(0.1 if prompt == "slow" else 0)

    def detach(self, job_id: str) -> None:
        super().detach(job_id)
        self.detach_times.append(time.monotonic())

    def status(self) -> dict[str, Any]:
        following = sum(not subscription.closed for subscription in self.open_subscriptions.values())
        return {
            "jobs": len(self.jobs),
            "detached": len(self.detached),
            "following": following,
            "watched": len(self.watcher or ()),
            "last_detach": max(self.detach_times, default=0),
        }


def make_app(settings: Settings, watcher: Watcher) -> Any:
    store = TimedStore()
    store.watcher = watcher
    return create_app(settings, gateway=store, hub=store, watcher=watcher)  # type: ignore[arg-type]


if __name__ == "__main__":
    serve(
        Settings(port=int(sys.argv[1]), drain_s=float(sys.argv[2]), sse_heartbeat_s=0.3, max_body_bytes=10_000_000),
        make_app,
    )
