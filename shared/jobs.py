"""The job: one request as it travels through the queue.

It is stored as the JSON arguments of an RQ job whose function name is the only one a worker accepts; nothing
it names is ever imported. Knows nothing of HTTP and of the store.
"""

from __future__ import annotations

import secrets
import zlib
from itertools import pairwise
from typing import Literal

import msgspec

from shared.errors import InvalidRequest
from shared.reasoning import MAX_TAG, Reasoning
from shared.sampling import SamplingParams
from shared.structured import Constraint
from shared.tool_calls import Tools

#: The version of jobs that this code reads. A job says from which one on it is understood: a worker that would overlook what
#: it asks for leaves it to others. 2: with a constraint, cuts, or reasoning. (docs/protocol.md has the rules.)
VERSION = 2
#: The only function name a job may carry (RQ wants one; nothing is imported by it).
FUNCTION = "sluice.completion"

Class = Literal["interactive", "batch"]
#: The fields that bound how much is generated.
LimitField = Literal["max_tokens", "max_completion_tokens"]
#: Whose requests are those of clients without a key.
DEFAULT_TENANT = "default"

#: How long log and result of a request outlive its end that is not to be stored, s.
FORGET_S = 60
#: Largest n, and best_of where it equals n.
MAX_N = 128
#: What no setting can allow: bounds of what a worker takes from the store.
MAX_CHOICES, MAX_STOPS, MAX_STOP_LENGTH, MAX_LOGPROBS = 4096, 4096, 100_000, 1000
#: Largest RQ data, unpacked, bytes.
MAX_DATA = 100_000_000


class Placement(msgspec.Struct, frozen=True):
    """How a request is queued, and what is kept of it.

    `ahead`: before the tenant's own waiting requests. `fanout`: its frames also go to the channel `out:{id}`.
    `keep`: log and result stay readable for as long as the settings say; else for FORGET_S after the end.
    `background`: it runs on without a client. `grace_s`: how long it does after a hang-up. `view`: how its client sees
    it, for the API alone. `idempotency`: (key, what the key stands for).
    `deadline_s`: from its submission; its client waits no longer. `result_ttl_s`: how long the result is kept, if not as
    the settings and `keep` say. `webhook`: the URL that is told of its end, or "".
    """

    tenant: str = DEFAULT_TENANT
    klass: Class = "interactive"
    ahead: bool = False
    fanout: bool = False
    keep: bool = True
    background: bool = False
    grace_s: int = 0
    view: bytes = b""
    idempotency: tuple[str, str] | None = None
    deadline_s: float | None = None
    result_ttl_s: int | None = None
    webhook: str = ""


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checked request. Choices are prompt-major: index = prompt * n + j.

    `max_tokens` None = all remaining context; 0 = generate nothing, only score the prompts. `limit_field`: what the client
    calls it. `seed` is drawn at submission if the request had none.
    `suffix`: the text after the gap that each prompt is to fill. `add_special` / `parse_special`: how string prompts
    are tokenised. `skip_special`: control tokens are not shown. `tail`: what of it a prompt lacks is appended to it
    (`shared/no_thinking.py`); the prompts themselves stay as sent. `cuts`: places in the one prompt, in code points and
    ascending, at which it is tokenised in parts, so that no control token written in a message becomes one.
    `reasoning`: how the text's reasoning is told from the rest, None if it is not.
    `tools`: how calls of tools are told from the rest of it, None if they are not. `constraint`: what each choice's text
    must be. `created`: s, the API's clock. `request_id`: of the HTTP request, for the logs. `trace`: the W3C `traceparent`
    below which its spans belong, "" if there is none. A worker may overlook these two.

    A chat is a job with one prompt, which the model's template has made of its messages.
    """

    id: str
    model: str
    prompts: list[str | list[int]]
    seed: int
    created: int
    kind: Literal["completion", "chat"] = "completion"
    n: int = 1
    best_of: int = 1
    max_tokens: int | None = None
    limit_field: LimitField = "max_tokens"
    fit_max_tokens: bool = False
    stop: list[str] = []
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    add_special: bool = True
    parse_special: bool = True
    tail: str = ""
    cuts: tuple[int, ...] = ()
    reasoning: Reasoning | None = None
    tools: Tools | None = None
    skip_special: bool = True
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    request_id: str = ""
    trace: str = ""

    @property
    def version(self) -> int:
        """From which version on a worker understands all of it."""
        return 1 if self.constraint is None and self.reasoning is None and not self.cuts else VERSION

    @property
    def candidates(self) -> int:
        """Choices to generate for each prompt; best_of keeps n of them."""
        return max(self.n, self.best_of)

    @property
    def choices(self) -> int:
        """Choices to generate, over all prompts."""
        return len(self.prompts) * self.candidates

    @property
    def scores_only(self) -> bool:
        """Nothing is generated: only the prompts' logprobs are asked for."""
        return self.max_tokens == 0

    def check(self) -> None:
        """The worker's second look at what the API checked: a job may come from anybody who can write to the store.

        Raises InvalidRequest for what no engine could run; not for what depends on a model (`SamplingParams.check`)."""
        if not self.prompts:
            raise InvalidRequest("The job has no prompt.", param="prompt")
        if not (1 <= self.n <= MAX_N and 1 <= self.best_of <= MAX_N and self.choices <= MAX_CHOICES):
            raise InvalidRequest(f"The job asks for more than {MAX_CHOICES} choices, or for none.", param="n")
        if len(self.stop) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in self.stop):
            raise InvalidRequest("The job's stop strings are empty, too long or too many.", param="stop")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be from 0 to {MAX_LOGPROBS}.", param="logprobs")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest("max_tokens must not be negative.", param="max_tokens")
        if self.constraint is not None:
            self.constraint.check()
        if self.reasoning is not None:
            for tag in (self.reasoning.open, self.reasoning.close):
                if not 0 < len(tag) <= MAX_TAG or tag != tag.strip():
                    raise InvalidRequest(f"The job's think tags must have 1 to {MAX_TAG} characters.")
        if self.tools is not None:
            self.tools.check()
        if self.cuts and not (
            len(self.prompts) == 1 and isinstance(self.prompts[0], str) and _ascending(self.cuts, len(self.prompts[0]))
        ):
            raise InvalidRequest("The job's prompt cannot be cut there.")


def _ascending(cuts: tuple[int, ...], length: int) -> bool:
    """Strictly, and inside a text of that length."""
    return cuts[0] > 0 and cuts[-1] < length and all(a < b for a, b in pairwise(cuts))


def new_id(prefix: str = "cmpl") -> str:
    """128 random bits: ids are the only secret of a stream."""
    return f"{prefix}-{secrets.token_hex(16)}"


def new_seed() -> int:
    """A seed for a request that brought none: 63 bits, never negative."""
    return secrets.randbits(63)


def to_rq(job: Job) -> bytes:
    """RQ's `data` field: (function, instance, args, kwargs) by its JSON serializer, compressed as RQ does."""
    return zlib.compress(msgspec.json.encode((FUNCTION, None, [job], {})), 1)


def from_rq(data: bytes) -> Job:
    """The job in RQ's `data` field. Raises InvalidRequest for anything else, whoever wrote it."""
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(data, MAX_DATA)
        if unpacker.unconsumed_tail:
            raise InvalidRequest("The job is too large.")
    except zlib.error:
        raw = data
    try:
        function, _, args, _ = msgspec.json.decode(
            raw, type=tuple[str, None, list[msgspec.Raw], dict[str, msgspec.Raw]]
        )
        if function != FUNCTION or len(args) != 1:
            raise InvalidRequest("The job does not carry a Sluice request.")
        return msgspec.json.decode(args[0], type=Job)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"The job is not readable: {error}") from None
