"""The store of a simulation: a real server that runs the product's own scripts, on connections that break on purpose.

The scripts run as they are, but for four things that are put in their way by name, each where the prelude says
`redis.call`: TIME is the simulation's, times to live are kept in `sim:ttl` and carried out at the simulation's time,
what is published is handed out with the answer, so that this file can deliver, delay or lose it, and what INFO says of
memory is read from `sim:full`, so that a replay of what was written comes to the same. A prelude that reaches the
server in another way is refused here.

redis-py's client, pipelines and pool are the real ones; `SimConnection` stands where their socket would be. Every
command travels for some milliseconds each way. An answer can be lost with its connection after the command was done;
a command can arrive after its sender has given it up, or is dead. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import collections
import random
import socket
import subprocess
import time
from collections.abc import Callable
from hashlib import sha1
from pathlib import Path
from typing import Any

import hiredis
import redis
from greenlet import GreenletExit
from redis._parsers.base import BaseParser
from redis.connection import UnixDomainSocketConnection

from shared import connection, scripts
from tests.protocol.scheduler import EPOCH, Scheduler, SimProcess, Waiters

#: What scripts call instead of redis.call.
DISPATCH = """
local SIM_SAID = {}
local function sim_ttl(key, ms)
  if redis.call('EXISTS', key) == 0 then return 0 end
  redis.call('ZADD', 'sim:ttl', string.format('%.0f', tonumber(redis.call('GET', 'sim:now')) + ms), key)
  return 1
end
local SIM_FORBIDDEN = { TTL = 1, PTTL = 1, SETEX = 1, PSETEX = 1, EXPIREAT = 1, PEXPIREAT = 1, PERSIST = 1, GETEX = 1,
  RENAME = 1, COPY = 1, RESTORE = 1, EXPIRETIME = 1, UNLINK = 1 }
local R = function(command, ...)
  local a = { ... }
  if command == 'TIME' then
    local now = tonumber(redis.call('GET', 'sim:now'))
    return { math.floor(now / 1000), (now % 1000) * 1000 }
  elseif command == 'EXPIRE' then return sim_ttl(a[1], tonumber(a[2]) * 1000)
  elseif command == 'PEXPIRE' then return sim_ttl(a[1], tonumber(a[2]))
  elseif command == 'PUBLISH' then
    SIM_SAID[#SIM_SAID + 1] = { a[1], a[2] }
    return 1
  elseif command == 'SET' then
    local kept, ms = {}, nil
    local i = 1
    while i <= #a do
      if a[i] == 'PX' or a[i] == 'EX' then
        ms = tonumber(a[i + 1]) * (a[i] == 'EX' and 1000 or 1)
        i = i + 2
      else
        kept[#kept + 1] = a[i]
        i = i + 1
      end
    end
    local answer = redis.call('SET', unpack(kept))
    if answer and ms then sim_ttl(kept[1], ms) elseif answer then redis.call('ZREM', 'sim:ttl', kept[1]) end
    return answer
  elseif command == 'DEL' then
    redis.call('ZREM', 'sim:ttl', ...)
  elseif SIM_FORBIDDEN[command] then
    error('the simulation does not know ' .. command)
  elseif command == 'LPUSH' or command == 'RPUSH' then
    SIM_SAID[#SIM_SAID + 1] = { '', a[1] }
  end
  return redis.call(command, ...)
end
"""
#: How the prelude asks for the store's memory, and what a full store says.
INFO = "redis.pcall('INFO', 'memory')"
FULL = "used_memory:2\r\nmaxmemory:1\r\n"
SCRIPT = "local function sim_main()\n{body}\nend\nlocal sim_answer = sim_main()\nif sim_answer == nil then sim_answer = false end\nreturn {{ sim_answer, SIM_SAID }}"
#: Carries out what is due.
TICK = """#!lua flags=allow-oom
redis.call('SET', 'sim:now', ARGV[1])
for _, key in ipairs(redis.call('ZRANGEBYSCORE', 'sim:ttl', '-inf', ARGV[1])) do
  redis.call('DEL', key)
  redis.call('ZREM', 'sim:ttl', key)
end
return 1"""
OWN = {
    "expire": "#!lua flags=allow-oom\n" + DISPATCH + "return R('PEXPIRE', ARGV[1], ARGV[2])",
    "del": "#!lua flags=allow-oom\n" + DISPATCH + "return R('DEL', unpack(ARGV))",
    "set": "#!lua\n" + DISPATCH + "return R('SET', unpack(ARGV))",
}
#: Commands that change nothing: no part of what a restart may lose.
READS = {
    *("XRANGE", "XREVRANGE", "HMGET", "HGET", "HGETALL", "HLEN", "EXISTS", "SMEMBERS", "SCARD", "SISMEMBER", "GET"),
    *("LLEN", "LPOS", "ZCARD", "HEXISTS", "TYPE", "KEYS", "ZRANGE", "XLEN", "LRANGE", "HSTRLEN"),
    *("XREAD", "LINDEX", "ZSCORE", "SRANDMEMBER"),
}  # fmt: skip
EXPIRING = {"SETEX", "PSETEX", "EXPIREAT", "PEXPIREAT", "PERSIST", "GETEX", "TTL", "PTTL", "RENAME", "UNLINK"}


def simulated(text: str) -> str:
    """The script's text with the simulation in the way. Raises AssertionError for a prelude it was not made for."""
    head, rest = text.split("\n", 1)
    assert head.startswith("#!lua"), head
    prelude = (scripts.files("shared") / "lua" / "_prelude.lua").read_text()
    assert rest.startswith(prelude)
    body = rest[len(prelude) :]
    call = "local R = redis.call\n"
    assert prelude.count(call) == 1
    reads = ("redis.pcall('HMGET', ", "redis.pcall('HGET', ", "redis.pcall('XREVRANGE', ", INFO)
    assert prelude.count("redis.") == 1 + len(reads) + prelude.count("redis.sha1hex(")
    reading = ("XRANGE", "XREVRANGE", "ZRANGEBYSCORE", "SMEMBERS", "SRANDMEMBER", "SISMEMBER", "GET", "HGETALL")
    may_fail = [f"redis.pcall('{name}', " for name in reading]
    assert body.count("redis.") == sum(map(body.count, may_fail))
    assert all(prelude.count(read) == 1 for read in reads)
    prelude = prelude.replace(call, DISPATCH).replace(INFO, "redis.call('GET', 'sim:full')")
    return head + "\n" + prelude + SCRIPT.format(body=body)


class Server:
    """A real server on a unix socket, and one connection to it."""

    def __init__(self, folder: Path, binary: Path) -> None:
        path = folder / "s"
        command = [
            str(binary),
            "--port",
            "0",
            "--unixsocket",
            str(path),
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(folder),
            "--maxmemory-policy",
            "noeviction",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while True:
            try:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect(str(path))
                break
            except OSError:
                self._socket.close()
                assert time.monotonic() < end and self._process.poll() is None, "the server did not start"
                time.sleep(0.02)
        self._names: dict[str, str] = {}
        try:
            for name in scripts.NAMES:
                self._names[scripts.sha(name)] = self._load(simulated(scripts.text(name)))
            self.own = {name: self._load(text) for name, text in OWN.items()}
            self.tick = self._load(TICK)
        except BaseException:  # or the server, which holds this process's output, would keep whoever reads that waiting
            self.close()
            raise

    def _load(self, text: str) -> str:
        answer = self.ask([("SCRIPT", "LOAD", text)])[0]
        assert isinstance(answer, bytes), answer
        return answer.decode()

    def simulated(self, sha: str) -> str:
        return self._names[sha]

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def ask(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Errors among the answers are returned."""
        return self.send(b"".join([hiredis.pack_command(command) for command in commands]), len(commands))

    def send(self, packed: bytes, count: int) -> list[Any]:
        self._socket.sendall(packed)
        reader = hiredis.Reader(protocolError=redis.InvalidResponse, replyError=BaseParser.parse_error)
        answers: list[Any] = []
        while len(answers) < count:
            reader.feed(self._socket.recv(1 << 20))
            while (answer := reader.gets()) is not False:
                answers.append(answer)
        return answers


class Store:
    """The server as the simulation's processes know it. `faults`: what may happen to commands."""

    def __init__(self, scheduler: Scheduler, server: Server, faults: set[str]) -> None:
        self.scheduler = scheduler
        self.server = server
        self.faults = faults
        self.quiet = False
        #: Counts starts of the store: connections to an earlier one are broken.
        self.run = 1
        self.down = False
        #: When data was last lost, s; how long the store was away, in all, s.
        self.lost_at: float | None = None
        self.away = 0.0
        #: When it last came back.
        self.up_at = 0.0
        self.commands = 0
        #: Called with (process, script's name, arguments, answer) after each script.
        self.watch: Callable[[SimProcess, str, list[bytes], Any], None] = lambda *_: None
        self.links: list[SimConnection] = []
        #: (command or script, what happens to the next one of it and to its sender).
        self.traps: list[tuple[str, str]] = []
        self._journal: list[tuple[float, bytes, int]] = []
        self._loaded: set[str] = set()
        self._names = {scripts.sha(name): name for name in scripts.NAMES}
        self._blocked: list[tuple[SimConnection, int, bytes]] = []
        server.ask([("CONFIG", "SET", "maxmemory", "0"), ("FLUSHALL",)])

    # -- faults

    def restart(self, seconds: float, lose: float) -> None:
        """Away for so long; comes back as it was, or as it was `lose` s before."""
        self.scheduler.say("STORE DOWN", round(seconds, 2), "loses", round(lose, 2))
        self.down = True
        self.away += seconds
        self.run += 1
        self._loaded.clear()
        self._blocked.clear()
        for link in list(self.links):
            link.broke()
        if lose:
            self.lost_at = self.scheduler.now
            self._forget(self.scheduler.now - lose)
        self.scheduler.at(seconds, self._up)

    def _up(self) -> None:
        self.down = False
        self.up_at = self.scheduler.now
        self.scheduler.say("STORE UP")

    def _forget(self, since: float) -> None:
        self._journal = [entry for entry in self._journal if entry[0] <= since]
        full = self.server.ask([("CONFIG", "GET", "maxmemory")])[0][1]
        self.server.ask([("CONFIG", "SET", "maxmemory", "0"), ("FLUSHALL",)])
        for begin in range(0, len(self._journal), 200):
            batch = self._journal[begin : begin + 200]
            self.server.send(b"".join(packed for _, packed, _ in batch), sum(count for _, _, count in batch))
        self._say_full(full != b"0")

    def _say_full(self, full: bool) -> None:
        """What the store takes from now on, and what it says of it."""
        self.server.ask([("CONFIG", "SET", "maxmemory", "0")])
        self._write(("SET", "sim:full", FULL) if full else ("DEL", "sim:full"))
        self.server.ask([("CONFIG", "SET", "maxmemory", "1" if full else "0")])

    def _write(self, command: tuple[str, ...]) -> None:
        self.server.ask([command])
        self._journal.append((self.scheduler.now, hiredis.pack_command(command), 1))

    def fill(self, seconds: float) -> None:
        """Full for so long."""
        self.scheduler.say("STORE FULL", round(seconds, 2))
        self._say_full(True)

        def room() -> None:
            self.scheduler.say("STORE HAS ROOM")
            self._say_full(False)

        self.scheduler.at(seconds, room)

    def trap(self, commands: list[list[bytes]]) -> str:
        """What happens to these on their way; "" = nothing."""
        for command in commands if self.traps else ():
            name = command[0].decode().upper()
            if name == "EVALSHA":
                name = self._names[command[1].decode()]
            for item in self.traps:
                if item[0] == name:
                    self.traps.remove(item)
                    return item[1]
        return ""

    # -- commands

    def ask(self, *command: str | bytes | int) -> Any:
        """For the checks: no fault, no delay."""
        return self.server.ask([tuple(command)])[0]

    def execute(self, process: SimProcess, link: SimConnection, commands: list[list[bytes]]) -> list[Any]:
        """Carries a batch out. An answer that comes later (BLPOP) is None here and given to the link by itself."""
        now = str(int((EPOCH + self.scheduler.now) * 1000))
        wire: list[tuple[Any, ...]] = [("EVALSHA", self.server.tick, "0", now)]
        answers: list[Any] = []
        sent: list[int] = []  # where each answer from the server belongs
        for command in commands:
            own, rewritten = self._rewrite(link, command)
            answers.append(own)
            if rewritten is not None:
                sent.append(len(answers) - 1)
                wire.append(rewritten)
        self.commands += len(wire)
        if sent:
            raw = self.server.ask(wire)[1:]
            kept = [wire[0], *(c for c, answer in zip(wire[1:], raw, strict=True) if not _is_void(c, answer))]
            if len(kept) > 1:
                packed = b"".join([hiredis.pack_command(command) for command in kept])
                self._journal.append((self.scheduler.now, packed, len(kept)))
            for place, answer in zip(sent, raw, strict=True):
                answers[place] = answer
        queued: list[list[bytes]] = []
        for place, command in enumerate(commands):
            name = command[0].upper()
            if name == b"MULTI":
                queued = []
            elif name == b"EXEC" and isinstance(answers[place], list):
                answers[place] = [self._said(process, c, a) for c, a in zip(queued, answers[place], strict=True)]
            elif answers[place] == b"QUEUED":
                queued.append(command)
            else:
                answers[place] = self._said(process, command, answers[place])
        return answers

    def _rewrite(self, link: SimConnection, command: list[bytes]) -> tuple[Any, tuple[Any, ...] | None]:
        """(answer, None) for what this file answers; (None, the command for the server)."""
        name = command[0].decode().upper()
        if name == "EVALSHA":
            sha = command[1].decode()
            if sha not in self._loaded:
                return redis.exceptions.NoScriptError("No matching script. Please use EVAL."), None
            return None, ("EVALSHA", self.server.simulated(sha), *command[2:])
        if name == "EVAL":
            sha = sha1(command[1]).hexdigest()
            self._loaded.add(sha)
            return None, ("EVALSHA", self.server.simulated(sha), *command[2:])
        if name == "SCRIPT":
            assert command[1].upper() == b"LOAD", command
            sha = sha1(command[2]).hexdigest()
            self.server.simulated(sha)
            self._loaded.add(sha)
            return sha.encode(), None
        if name in ("EXPIRE", "PEXPIRE"):
            assert len(command) == 3, command
            ms = int(command[2]) * (1000 if name == "EXPIRE" else 1)
            return None, ("EVALSHA", self.server.own["expire"], "0", command[1], ms)
        if name == "DEL":
            return None, ("EVALSHA", self.server.own["del"], "0", *command[1:])
        if name == "SET":
            return None, ("EVALSHA", self.server.own["set"], "0", *command[1:])
        if name == "TIME":
            now = EPOCH + self.scheduler.now
            return [str(int(now)).encode(), str(int(now % 1 * 1e6)).encode()], None
        if name == "PUBLISH":
            return self.publish(command[1], command[2]), None
        if name == "CLIENT":
            return (b"OK" if command[1].upper() == b"SETNAME" else b"id=1 addr=127.0.0.1:1 name=x"), None
        if name == "BLPOP":
            self.scheduler.at(0, lambda: self._block(link, command[1], float(command[2])))
            return _LATER, None
        if name == "PING":
            return [b"pong", b""] if link.channels else b"PONG", None
        if name == "SUBSCRIBE":
            link.channels |= set(command[1:])
            return [[b"subscribe", channel, 1] for channel in command[1:]], None
        assert name not in EXPIRING, f"the simulation does not know {name}"
        return None, tuple(command)

    def _said(self, process: SimProcess, command: list[bytes], answer: Any) -> Any:
        """What a script published goes out; its own answer."""
        name = command[0].upper()
        if name == b"DEL" or name == b"SET" or name in (b"EXPIRE", b"PEXPIRE") or isinstance(answer, Exception):
            return answer
        if name not in (b"EVALSHA", b"EVAL"):
            return answer
        answer, said = answer
        sha = command[1].decode() if name == b"EVALSHA" else sha1(command[1]).hexdigest()
        self.watch(process, self._names[sha], command[3:], answer)
        for channel, message in said:
            if channel:
                self.publish(channel, message)
            else:
                self._ring(message)
        return answer

    # -- channels and bells

    def publish(self, channel: bytes, message: bytes) -> int:
        heard = [link for link in self.links if channel in link.channels and not link.broken]
        for link in heard:
            if link.silent:
                self.scheduler.say("DROPPED", channel, message[:70])
                continue
            delay = self.scheduler.rng.uniform(0.0003, 0.01)
            link.deliver([[b"message", channel, message]], delay)
        return len(heard)

    def _ring(self, key: bytes) -> None:
        for item in [item for item in self._blocked if item[2] == key]:
            self._blocked.remove(item)
            self.scheduler.at(0, lambda item=item: self._pop(*item))

    def _block(self, link: SimConnection, key: bytes, seconds: float) -> None:
        serial = link.serial
        self._pop(link, serial, key)

        def nothing() -> None:
            for item in [item for item in self._blocked if item[:2] == (link, serial)]:
                self._blocked.remove(item)
                link.deliver([None], 0.001, serial)

        self.scheduler.at(seconds, nothing)

    def _pop(self, link: SimConnection, serial: int, key: bytes) -> None:
        if link.serial != serial or link.broken:
            return
        value = self.execute(link.process, link, [[b"LPOP", key]])[0]
        if value is None:
            self._blocked.append((link, serial, key))
        else:
            link.deliver([[key, value]], 0.001, serial)


_LATER = object()


def _is_void(command: tuple[Any, ...], answer: Any) -> bool:
    """Whether the data is the same as before."""
    name = command[0].decode() if isinstance(command[0], bytes) else command[0]
    return name.upper() in READS or isinstance(answer, redis.exceptions.OutOfMemoryError)


class SimConnection(UnixDomainSocketConnection):
    """One connection, as redis-py wants it, without a socket."""

    def __init__(self, *, store: Store, process: SimProcess, **options: Any) -> None:
        super().__init__(path="/nowhere", **options)
        self.store = store
        self.process = process
        self.broken = True
        self.silent = False
        #: Counts connects: what belongs to an earlier one is void.
        self.serial = 0
        self.channels: set[bytes] = set()
        self._answers: collections.deque[Any] = collections.deque()
        self._waiters = Waiters(store.scheduler)
        self._last_arrival = self._last_answer = 0.0
        self._open = False

    def _sane(self) -> Scheduler:
        if self.process.dead:
            raise GreenletExit
        return self.store.scheduler

    def connect(self) -> None:
        if self._open:
            return
        self._sane().sleep(self.store.scheduler.rng.uniform(0.0005, 0.004))
        if (wait := self.process.cut_off_until - self.store.scheduler.now) > 0:
            self._sane().sleep(min(wait, connection.SOCKET_TIMEOUT))
            if wait > connection.SOCKET_TIMEOUT:
                raise redis.TimeoutError("Timeout connecting to server")
        if self.store.down:
            raise redis.ConnectionError("the store is down")
        self._open, self.broken, self.silent = True, False, False
        self.store.links.append(self)

    def disconnect(self, *_: object, **__: object) -> None:
        if self._open:
            self._open, self.broken = False, True
            self.store.links.remove(self)
        self.serial += 1
        self.channels = set()
        self._answers.clear()
        self._last_arrival = 0.0

    def __del__(self) -> None:
        pass

    @property
    def is_connected(self) -> bool:
        return self._open

    def broke(self) -> None:
        """The other side is gone: whoever reads finds out."""
        self.broken = True
        self._waiters.wake_all()

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        scheduler = self._sane()
        self.connect()
        if self.broken:
            self.disconnect()
            raise redis.ConnectionError("Connection closed by server.")
        reader = hiredis.Reader()
        reader.feed(b"".join(command) if isinstance(command, list) else command)
        commands: list[list[bytes]] = []
        while (parsed := reader.gets()) is not False:
            commands.append(parsed)
        rng, store = scheduler.rng, self.store
        delay = rng.uniform(0.0002, 0.003 + self.process.lag)
        if "late" in store.faults and not store.quiet and rng.random() < 0.003:
            delay = rng.uniform(0.5, 9)
            scheduler.say(self.process.name, "LATE", round(delay, 2), _short(commands))
        if fate := store.trap(commands):
            scheduler.say(self.process.name, "TRAPPED:", fate, _short(commands))
            if fate == "held":  # its sender sleeps for longer, and is taken for dead
                delay = rng.uniform(7, 13)
                self.process.stop(delay + rng.uniform(-1, 2))
            elif fate == "killed":
                self.process.kill()
            elif fate == "never":
                delay = 1e9
                scheduler.at(0.01, self.broke)
        arrival = max(scheduler.now + delay, self.process.cut_off_until + delay, self._last_arrival + 1e-6)
        self._last_arrival = arrival
        serial, run = self.serial, store.run
        if delay < 1e6:
            scheduler.at(arrival - scheduler.now, lambda: self._arrive(commands, serial, run, fate == "unanswered"))

    def _arrive(self, commands: list[list[bytes]], serial: int, run: int, lost: bool) -> None:
        """The store has the commands, whatever has become of their sender."""
        store, rng = self.store, self.store.scheduler.rng
        if store.run != run or store.down:
            return
        lost = lost or ("reply" in store.faults and not store.quiet and rng.random() < 0.01)
        if lost and rng.random() < 0.3 and commands[0][0].upper() != b"MULTI":  # it broke while they were being sent
            commands = commands[: rng.randrange(len(commands))]
        answers = store.execute(self.process, self, commands)
        if lost and serial == self.serial:
            store.scheduler.say(self.process.name, "ANSWER LOST", _short(commands))
            store.scheduler.at(rng.uniform(0, 0.05), self.broke)
            return
        flat: list[Any] = []
        for command, answer in zip(commands, answers, strict=True):
            flat += answer if command[0].upper() == b"SUBSCRIBE" else [] if answer is _LATER else [answer]
        if not self.silent:
            self.deliver(flat, rng.uniform(0.0002, 0.003), serial)

    def deliver(self, answers: list[Any], delay: float, serial: int | None = None) -> None:
        serial = self.serial if serial is None else serial
        scheduler = self.store.scheduler
        begin = max(scheduler.now, self.process.cut_off_until)
        when = self._last_answer = max(begin + delay, self._last_answer + 1e-6)

        def arrive() -> None:
            if self.serial == serial and not self.broken:
                self._answers.extend(answers)
                self._waiters.wake_all()

        scheduler.at(when - scheduler.now, arrive)

    def can_read(self, timeout: float = 0) -> bool:
        scheduler = self._sane()
        until = scheduler.now + timeout
        while not self._answers:
            if self.broken:
                self.disconnect()
                raise redis.ConnectionError("Connection closed by server.")
            if timeout <= 0 or scheduler.now >= until or not self._waiters.wait(until - scheduler.now):
                return bool(self._answers)
        return True

    def read_response(self, *_: object, **__: object) -> Any:
        if not self.can_read(connection.SOCKET_TIMEOUT):
            self.disconnect()
            raise redis.TimeoutError("Timeout reading from socket")
        answer = self._answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _short(commands: list[list[bytes]]) -> str:
    return " | ".join(b" ".join(c[:6])[:90].decode(errors="replace") for c in commands[:4])


def clients(scheduler: Scheduler, store: Store) -> tuple[Callable[..., redis.Redis], Callable[..., Any]]:
    """`connect` and `raw` of shared/connection.py, for the process whose thread calls them."""

    def pool() -> redis.ConnectionPool:
        options = {**connection._options(), "store": store, "process": scheduler.process}
        return redis.ConnectionPool(connection_class=SimConnection, **options)

    def connect(url: str, *, max_connections: int = 32) -> redis.Redis:
        return redis.Redis(connection_pool=pool())

    def raw(url: str) -> Any:
        return pool().make_connection()

    return connect, raw


__all__ = ["Server", "Store", "clients", "random", "simulated"]
