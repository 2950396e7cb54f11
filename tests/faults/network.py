"""Machines that are none: network namespaces with addresses of their own, joined by bridges, that can be cut off and healed.

All of it lives in namespaces made here, the bridges in one of them; the network of this machine is not touched. Processes
run in a namespace with `ip netns exec`; sockets of the test itself are opened there by the thread that asks for one.
Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

#: How packets get lost. `silent`: they vanish, all interfaces stay up. `down`: the node's cable is out. `deaf`: what the
#: node sends arrives, and nothing comes back.
Cut = Literal["silent", "down", "deaf"]

#: Namespace of the bridges.
HUB = "hub"
#: From <linux/sched.h>.
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetwork(Exception):
    """Namespaces cannot be made here; the message says why."""


@functools.cache
def why_not() -> str:
    """Why there can be no networks of our own on this machine; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Network({"try": ["one"]}) as network:
            network.cut("one", "try")
            network.heal("one", "try")
    except NoNetwork as error:
        return f"no network namespaces: {error}"
    return ""


class Network:
    """`links`: bridge -> the nodes on it. A node's interface is called as its bridge.

    Neighbours are known for good: nobody is told by a failing ARP that a node is gone. The hub has the first address of
    each bridge's network, from which it can reach all nodes."""

    def __init__(self, links: Mapping[str, Sequence[str]]) -> None:
        self._links = {bridge: [HUB, *nodes] for bridge, nodes in links.items()}
        self._run = f"sluice-{os.getpid()}-{secrets.token_hex(3)}"
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes everything away; the interfaces go with their namespaces."""
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], capture_output=True, timeout=30)

    def namespace(self, node: str) -> str:
        return f"{self._run}-{node}"

    def address(self, node: str, bridge: str) -> str:
        # 198.18.0.0/15 is set aside for tests of networks (RFC 2544)
        return f"198.18.{self._number(bridge)}.{self._links[bridge].index(node) + 1}"

    def command(self, node: str, *words: str) -> list[str]:
        """A command line that runs there; the process has the pid of what is started."""
        return ["ip", "netns", "exec", self.namespace(node), *words]

    @contextlib.contextmanager
    def inside(self, node: str) -> Iterator[None]:
        """Sockets that this thread opens within belong to the node's network, wherever they are used later."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = os.open(Path("/run/netns") / self.namespace(node), os.O_RDONLY | os.O_CLOEXEC)
            try:
                _enter(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _enter(own)
        finally:
            os.close(own)

    def cut(self, node: str, *bridges: str, how: Cut = "silent") -> None:
        """No packet of the node passes; see `Cut`. Connections stay open on both sides."""
        for bridge in bridges:
            port = _port(node, bridge)
            if how == "silent":
                self._ip(HUB, "link", "set", port, "nomaster")
            elif how == "down":
                self._ip(HUB, "link", "set", port, "down")
            else:
                self._ip(
                    HUB, *("link", "set", port, "type", "bridge_slave", "learning", "off", "flood", "off", "fdb_flush")
                )

    def heal(self, node: str, *bridges: str) -> None:
        for bridge in bridges:
            port = _port(node, bridge)
            self._ip(HUB, "link", "set", port, "up")
            self._ip(HUB, "link", "set", port, "master", bridge)
            self._ip(HUB, "link", "set", port, "type", "bridge_slave", "learning", "on", "flood", "on")

    def _build(self) -> None:
        for node in dict.fromkeys(node for nodes in self._links.values() for node in nodes):
            _run("netns", "add", self.namespace(node))
            self._made.append(self.namespace(node))
            self._ip(node, "link", "set", "lo", "up")
        for bridge, nodes in self._links.items():
            self._ip(HUB, "link", "add", bridge, "address", self._mac(HUB, bridge), "type", "bridge")
            for node in nodes[1:]:
                port, mac = _port(node, bridge), self._mac(node, bridge)
                self._ip(
                    HUB,
                    *("link", "add", port, "type", "veth"),
                    *("peer", "name", bridge, "address", mac, "netns", self.namespace(node)),
                )
                self._ip(HUB, "link", "set", port, "master", bridge, "up")
            for node in nodes:
                self._ip(node, "address", "add", f"{self.address(node, bridge)}/24", "dev", bridge)
                self._ip(node, "link", "set", bridge, "up")
                for other in nodes:
                    if other != node:
                        self._ip(
                            node,
                            *("neighbour", "replace", self.address(other, bridge), "dev", bridge),
                            *("lladdr", self._mac(other, bridge), "nud", "permanent"),
                        )

    def _number(self, bridge: str) -> int:
        return [*self._links].index(bridge) + 1

    def _mac(self, node: str, bridge: str) -> str:
        return f"02:00:00:00:{self._number(bridge):02x}:{self._links[bridge].index(node) + 1:02x}"

    def _ip(self, node: str, *words: str) -> None:
        _run("-n", self.namespace(node), *words)


def _port(node: str, bridge: str) -> str:
    """The bridge's end of a node's cable. An interface's name has 15 characters at most."""
    return f"{node}-{bridge}"


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):  # os.setns came with Python 3.12
        raise OSError(ctypes.get_errno(), "setns")


def _run(*words: str) -> None:
    if shutil.which("ip") is None:
        raise NoNetwork("no `ip` on PATH (iproute2)")
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NoNetwork(f"`ip {' '.join(words)}`: {done.stderr.strip()}")
