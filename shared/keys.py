"""Names of everything in the store. The Lua scripts build the same names from the same prefixes.

RQ's own keys keep RQ's prefix, so that `rq info` and rq-dashboard see the truth.
"""

from __future__ import annotations

PREFIX = "sluice:"

#: set of the names of live workers, of live API processes, and of the models that have a card.
WORKERS = PREFIX + "workers"
PROCS = PREFIX + "procs"
CARDS = PREFIX + "cards"
RQ_QUEUES = "rq:queues"
RQ_QUEUE = "rq:queue:"


def job(job_id: str) -> str:
    return f"rq:job:{job_id}"


def log(job_id: str) -> str:
    return f"{PREFIX}log:{job_id}"


def queue_name(model: str, klass: str, tenant: str) -> str:
    """The RQ queue in which a tenant's requests of one class wait."""
    return f"{model}:{klass}:{tenant}"


def queue(name: str) -> str:
    return RQ_QUEUE + name


def ring(model: str, klass: str) -> str:
    """zset of the tenants with waiting requests, scored by requests served."""
    return f"{PREFIX}ring:{model}:{klass}"


def resume(model: str, fingerprint: str) -> str:
    return f"{PREFIX}resume:{model}:{fingerprint}"


def bell(model: str) -> str:
    """List that workers of a model block on."""
    return f"{PREFIX}bell:{model}"


def lanes(worker: str) -> str:
    """hash id -> a: what the worker runs or has not booked out yet."""
    return f"{PREFIX}lanes:{worker}"


def lease(worker: str) -> str:
    return f"{PREFIX}lease:{worker}"


def alive(proc: str) -> str:
    return f"{PREFIX}alive:{proc}"


def attached(proc: str) -> str:
    """set of the ids that an API process has clients for."""
    return f"{PREFIX}att:{proc}"


def stat(worker: str) -> str:
    return f"{PREFIX}stat:{worker}"


def node_channel(proc: str) -> str:
    """Channel on which an API process gets the frames of the requests submitted there."""
    return f"{PREFIX}node:{proc}"


def out_channel(job_id: str) -> str:
    """Channel with one request's frames, for whoever listens; only where `fanout` was asked for."""
    return f"{PREFIX}out:{job_id}"


def control_channel(worker: str) -> str:
    return f"{PREFIX}ctl:{worker}"


def card(model: str) -> str:
    """hash with the model's card in field `card`."""
    return f"{PREFIX}card:{model}"


def tokenizer(sha: str) -> str:
    """string: a tokenizer.json, by its sha256."""
    return f"{PREFIX}tokenizer:{sha}"


def starter(model: str) -> str:
    """string, present while something is known that starts workers for the model."""
    return f"{PREFIX}starter:{model}"
