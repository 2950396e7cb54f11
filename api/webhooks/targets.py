"""Where webhooks may go: origins of an allow-list, and no private addresses. Pure, but for the one look-up of a name.

A server that calls addresses which clients name could be used to reach what only it can reach (server-side request
forgery).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from shared.errors import InvalidRequest, UnsupportedParameter

#: Longest address of a target, characters.
MAX_LENGTH = 2000

_PORTS = {"http": 80, "https": 443}
#: IPv4 addresses written as IPv6 ones (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Target(NamedTuple):
    """A URL in its parts. `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str


class NotAllowed(Exception):
    """The name stands for an address that webhooks may not go to, or for none."""


def parse(url: str) -> Target | None:
    """None for what is no plain http(s) URL: with a login or a fragment, or with characters that do not belong into
    one."""
    if len(url) > MAX_LENGTH or not url.isascii() or not url.isprintable() or any(c in url for c in " \\"):
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None or parts.fragment:
        return None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, parts.hostname.lower().rstrip("."), port or _PORTS[parts.scheme], path)


def allowed(target: Target, origins: Sequence[str]) -> bool:
    """Whether one of the origins is the target's: `https://hooks.example`, `https://*.example:8443`."""
    for origin in origins:
        known = parse(origin.replace("*.", "any.", 1) if "://*." in origin else origin)
        if known is None or (known.scheme, known.port) != (target.scheme, target.port):
            continue
        if "://*." in origin:
            if target.host.endswith(known.host[3:]) and len(target.host) > len(known.host) - 3:
                return True
        elif target.host == known.host:
            return True
    return False


def check(url: str, origins: Sequence[str]) -> None:
    """Raises InvalidRequest naming `webhook_url` for a target that is not on the list, UnsupportedParameter without a
    list."""
    if not origins:
        raise UnsupportedParameter("This server sends no webhooks (setting webhook_targets).", param="webhook_url")
    target = parse(url)
    if target is None:
        raise InvalidRequest(
            "webhook_url must be an http or https URL without login and fragment.", param="webhook_url"
        )
    if not allowed(target, origins):
        raise InvalidRequest("webhook_url is not one of the places that webhooks may go to.", param="webhook_url")


def address(target: Target, *, private: bool) -> str:
    """The IP address to connect to: looked up here, once, so that what was checked is what is connected to. `private`:
    addresses that are not public will do. Raises NotAllowed."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NotAllowed(f"{target.host} cannot be resolved ({error})") from None
    addresses = [str(sockaddr[0]) for *_, sockaddr in found]
    for one in addresses:
        if private or is_public(one):
            return one
    raise NotAllowed(f"{target.host} has no public address")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, also of those that hide another inside."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(one is not None and not is_public(str(one)) for one in inner):
            return False
        if ip.ipv4_mapped is not None:
            return True
    return ip.is_global and not ip.is_multicast
