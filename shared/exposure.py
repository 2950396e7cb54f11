"""Who may reach a server that asks nobody for a key: only this machine, unless the operator says otherwise."""

from __future__ import annotations

import ipaddress

from shared.settings import Settings


class Exposed(Exception):
    """The settings would open the server to everyone; the message says what to do."""


def may_be_open(settings: Settings) -> bool:
    """Whether the server may answer requests without a key while none is configured."""
    return not settings.require_keys and (settings.insecure or _is_loopback(settings.host))


def check_exposure(settings: Settings, *, keys: bool) -> None:
    """Raises Exposed for an address beyond loopback without `insecure`, unless there are `keys` to ask for."""
    if keys or settings.insecure or settings.require_keys or _is_loopback(settings.host):
        return
    raise Exposed(
        f"Refusing to listen on {settings.host}: no API key is configured, so everyone who can reach this address could "
        "use the server. Make a key first (sluice keys add) or listen on 127.0.0.1. If an open server is meant, say "
        "--insecure (SLUICE_INSECURE=1) and name the hosts it answers to in SLUICE_ALLOWED_HOSTS."
    )


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
