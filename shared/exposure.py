"""Who may reach a server that asks nobody for a key: only this machine, unless the operator says otherwise."""

from __future__ import annotations

import ipaddress

from shared.settings import Settings


class Exposed(Exception):
    """The settings would open the server to everyone; the message says what to do."""


def check_exposure(settings: Settings) -> None:
    """Raises Exposed for an address beyond loopback without `insecure`. (No API keys can be configured yet.)"""
    if settings.insecure or _is_loopback(settings.host):
        return
    raise Exposed(
        f"Refusing to listen on {settings.host}: no API key is configured, so everyone who can reach this address could "
        "use the server. Listen on 127.0.0.1, or say --insecure (SLUICE_INSECURE=1) if that is meant; name the hosts it "
        "answers to in SLUICE_ALLOWED_HOSTS."
    )


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
