"""Names of everything in the store. The Lua scripts build the same names from the same prefixes.

RQ's own keys keep RQ's prefix, so that `rq info` and rq-dashboard see the truth.
"""

from __future__ import annotations

PREFIX = "sluice:"

#: set of the names of live workers, of live API processes, and of the models that have a card.
WORKERS = PREFIX + "workers"
PROCS = PREFIX + "procs"
CARDS = PREFIX + "cards"
#: set of the lists of handed-over requests.
RESUMES = PREFIX + "resumes"
#: zset of all files and of all batches, scored by their creation, us; of files that go by themselves, scored by when (s);
#: of unfinished batches, each as `{tenant} {id}`, scored by creation.
FILES = PREFIX + "files"
BATCHES = PREFIX + "batches"
FILES_EXPIRE = PREFIX + "files-expire"
BATCHES_OPEN = PREFIX + "batches-open"
#: zset of webhooks that are to be sent, scored by when, ms.
HOOKS = PREFIX + "hooks"
#: zset of the requests that have ended and whose results nobody has kept yet, by the time of their ends, ms.
UNKEPT = PREFIX + "unkept"
#: hash of all that was counted (`shared/measures.py`).
COUNTS = PREFIX + "counts"
#: stream of the last requests, where the request monitor is on: entries with one field `d`, JSON.
RECENT = PREFIX + "recent"
#: API keys: hash digest -> key, a string that changes with it, and hash id -> when it was last used. Not below PREFIX, so
#: that a user of the store may have all of that and none of these.
KEYS = "sluice-keys"
KEYS_VERSION = "sluice-keys:version"
KEYS_USED = "sluice-keys:used"
RQ_QUEUES = "rq:queues"
RQ_QUEUE = "rq:queue:"


def job(job_id: str) -> str:
    return f"rq:job:{job_id}"


def log(job_id: str) -> str:
    return f"{PREFIX}log:{job_id}"


def results(job_id: str) -> str:
    """stream of RQ's results of a job; ours has one."""
    return f"rq:results:{job_id}"


def idempotency(tenant: str, key: str) -> str:
    """string: id of the request that has the key, and what the key stands for."""
    return f"{PREFIX}idem:{tenant}:{key}"


def queue_name(model: str, klass: str, tenant: str) -> str:
    """The RQ queue in which a tenant's requests of one class wait."""
    return f"{model}:{klass}:{tenant}"


def queue(name: str) -> str:
    return RQ_QUEUE + name


def ring(model: str, klass: str) -> str:
    """zset of the tenants with waiting requests, scored by tokens served."""
    return f"{PREFIX}ring:{model}:{klass}"


def resume(model: str, fingerprint: str) -> str:
    """List of handed-over requests; those of the batch class have one of their own, with `:batch` at its end."""
    return f"{PREFIX}resume:{model}:{fingerprint}"


def served(model: str, klass: str) -> str:
    """zset of tenants, waiting or not: the tokens they were served. Whoever comes back goes on from there."""
    return f"{PREFIX}served:{model}:{klass}"


def lately(minute: int) -> str:
    """hash: of COUNTS the histograms, and of them what was counted in that minute since 1970."""
    return f"{PREFIX}lately:{minute}"


def pace(model: str) -> str:
    """hash: what the last requests of a model took and were served. See `_prelude.lua`."""
    return f"{PREFIX}pace:{model}"


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
    """string, present while something is known that starts workers for the model: `up` and who says so, or `failed` and who, as
    long as what it starts fails to load the model."""
    return f"{PREFIX}starter:{model}"


def work(model: str) -> str:
    """set of the ids that wait or run: what a model has to do."""
    return f"{PREFIX}work:{model}"


def loading(model: str) -> str:
    """hash of the workers that load the model. See `loading.lua`."""
    return f"{PREFIX}loading:{model}"


def file(file_id: str) -> str:
    """hash: what is known of a file; its bytes are in the file store."""
    return f"{PREFIX}file:{file_id}"


def files_of(tenant: str) -> str:
    """zset of a tenant's files, scored by creation, us; "*": everybody's."""
    return FILES if tenant == "*" else f"{FILES}:{tenant}"


def batch(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}"


def batches_of(tenant: str) -> str:
    """zset of a tenant's batches, scored by creation, us; "*": everybody's."""
    return BATCHES if tenant == "*" else f"{BATCHES}:{tenant}"


def batch_lines(batch_id: str) -> str:
    """string, a byte for each line: 0 not done, c completed, f failed, s not to be done (a replay's)."""
    return f"{PREFIX}batch-lines:{batch_id}"


def batch_parts(batch_id: str) -> str:
    """list: the pieces of a running batch's output and error file, JSON, oldest first."""
    return f"{PREFIX}batch-parts:{batch_id}"


def batch_lease(batch_id: str) -> str:
    """string, while a runner has the batch: its fence."""
    return f"{PREFIX}batch-lease:{batch_id}"


def hook(event_id: str) -> str:
    """hash: a webhook that has not arrived yet."""
    return f"{PREFIX}hook:{event_id}"
