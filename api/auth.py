"""The gate that every request passes before it is routed, and who asks.

With API keys: a key, or 401; the right one for what is asked, or 403. Without: only what comes to a known Host, and from no
foreign page. Knows paths and headers; what a key may use up is in `api/limits.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from flask import g, request

from api.cors import is_preflight
from api.keyring import Keyring
from shared.api_keys import Key
from shared.errors import Forbidden, Unauthorized
from shared.exposure import may_be_open
from shared.jobs import DEFAULT_TENANT, Placement
from shared.settings import Settings

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
#: Open whatever the key and the Host: probes come by address.
PROBES = frozenset({"/health", "/ready"})
#: Pages without any data in them; they ask for a key and send it with what they fetch. So do the files they load.
SHELLS = frozenset({"/", "/monitor"})
#: WebSockets: a browser cannot put a key into the handshake, so the first message may bring it.
SOCKETS = frozenset({"/v1/stream"})
#: Blueprint -> the scopes of which its routes need one; none: any key will do. One that is not here needs `admin`.
SCOPE_OF: dict[str, tuple[str, ...]] = {
    "completions": ("completions",),
    "jobs": ("completions",),
    "sockets": ("completions", "chat"),  # each message needs that of what it asks for
    "chat": ("chat",),
    "chat_jobs": ("chat",),
    "tokens": ("tokenize",),
    "files": ("batches",),
    "batches": ("batches",),
    "status": ("monitor",),
    "metrics": ("monitor",),
    "monitor": ("monitor",),
    "models": (),
    "pages": (),
    "reference": (),
    "health": (),
}

#: Kind of a job -> the scope that is needed to start, see and cancel it.
SCOPE_OF_KIND = {"completion": "completions", "chat": "chat"}

#: RFC 9110 section 11.4: the scheme in any case, one space or more. RFC 6750 section 2.1: what a key is made of.
_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE)
_KEY = re.compile(r"[!-~]{1,512}")
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]/@?#\s]+)(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `key` None: nobody had to show one."""

    tenant: str
    key: Key | None = None

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of jobs that are this caller's business."""
        return frozenset(kind for kind, scope in SCOPE_OF_KIND.items() if self.key is None or self.key.may(scope))

    def require(self, *scopes: str) -> None:
        """Raises Forbidden for a key with none of these."""
        if self.key is not None and not any(map(self.key.may, scopes)):
            raise Forbidden(f"This key may not do that: it lacks the scope {' or '.join(scopes)}.")

    @property
    def sees_all(self) -> bool:
        """Whether other tenants' requests are there for this caller too."""
        return self.key is not None and self.key.may("admin")

    def place(self, asked: Placement) -> Placement:
        """How a request of this caller is queued and kept: what the request asked for, within what its key allows."""
        if self.key is None:
            return msgspec.structs.replace(asked, tenant=self.tenant)
        klass = "batch" if self.key.klass == "batch" else asked.klass
        return msgspec.structs.replace(asked, tenant=self.tenant, klass=klass, keep=asked.keep and self.key.keep)


def caller() -> Caller:
    """Who sent the current request."""
    found: Caller = g.caller
    return found


class Gate:
    """`enter` sets `caller()`, or raises Unauthorized, Forbidden or StoreUnavailable."""

    def __init__(self, settings: Settings, keyring: Keyring, assets: Iterable[str] = ()) -> None:
        """`assets`: the paths of the files that the pages load."""
        self._keyring = keyring
        self._shells = SHELLS.union(assets)
        self._may_be_open = may_be_open(settings)
        self._hosts = LOOPBACK_HOSTS | {host.lower() for host in settings.allowed_hosts}
        self._origins = frozenset(settings.cors_origins)

    def enter(self, *, late: bool = False) -> None:
        """`late`: once more, for what comes on a connection that was let in to show its key later."""
        g.caller = Caller(DEFAULT_TENANT)
        look = request.method in ("GET", "HEAD")
        if look and request.path in PROBES:
            return
        if self._may_be_open and not self._keyring.configured():
            self._check_host()
            return
        if is_preflight() or (look and request.path in self._shells):
            return
        if not late and request.path in SOCKETS and request.blueprint is not None and not self.shown():
            del g.caller  # nobody yet
            return
        key = self._shown()
        found = Caller(key.tenant, key)
        scopes = SCOPE_OF.get(request.blueprint, ("admin",)) if request.blueprint is not None else ()
        if scopes:
            found.require(*scopes)
        g.caller = found

    def shown(self) -> bool:
        """Whether the current request has any key with it, right or wrong."""
        return bool(request.environ.get("HTTP_AUTHORIZATION") or request.environ.get("HTTP_X_API_KEY"))

    def _shown(self) -> Key:
        authorization = request.environ.get("HTTP_AUTHORIZATION", "")
        bearer = _BEARER.fullmatch(authorization)
        # a proxy's own Basic login does not hide an x-api-key; a Bearer that is wrong is not made good by one
        is_bearer = authorization[:6].lower() == "bearer"
        secret = bearer[1] if bearer else "" if is_bearer else request.environ.get("HTTP_X_API_KEY", "")
        if not secret and not authorization:
            raise Unauthorized("An API key is needed: Authorization: Bearer KEY, or x-api-key: KEY.")
        key = self._keyring.find(secret) if _KEY.fullmatch(secret) else None
        if key is None:
            raise Unauthorized("This API key is not known here.")
        return key

    def _check_host(self) -> None:
        """Without keys, a web page must not reach us by way of its visitor's browser: neither under a name of its own
        (DNS rebinding) nor by a request across origins. (With keys it has none to show: browsers send them by themselves
        to nobody.)"""
        host = _HOST.fullmatch(request.environ.get("HTTP_HOST", ""))
        if host is None or host["name"].lower() not in self._hosts:
            raise Forbidden("This Host is not known here; see the setting allowed_hosts.")
        origin = request.environ.get("HTTP_ORIGIN")
        if origin is None or origin in self._origins:
            return
        try:
            parts = urlsplit(origin)
            foreign = parts.scheme not in ("http", "https") or _host_of(parts.netloc) not in self._hosts
        except ValueError:
            foreign = True
        if foreign:
            raise Forbidden("Requests from this Origin are not allowed.")


def _host_of(netloc: str) -> str:
    match = _HOST.fullmatch(netloc)
    return match["name"].lower() if match else ""
