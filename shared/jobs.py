"""The job: one request as it travels through the queue.

It is stored as the JSON arguments of an RQ job whose function name is the only one a worker accepts; nothing
it names is ever imported. Knows nothing of HTTP and of the store.
"""

from __future__ import annotations

import secrets
import zlib
from typing import Literal

import msgspec

from shared.errors import InvalidRequest
from shared.sampling import SamplingParams

#: The only function name a job may carry (RQ wants one; nothing is imported by it).
FUNCTION = "sluice.completion"

Class = Literal["interactive", "batch"]

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
    """

    tenant: str = "default"
    klass: Class = "interactive"
    ahead: bool = False
    fanout: bool = False
    keep: bool = True


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checked request. Choices are prompt-major: index = prompt * n + j.

    `max_tokens` None = all remaining context; 0 = generate nothing, only score the prompts. `seed` is drawn at submission if the request had none.
    `suffix`: the text after the gap that each prompt is to fill. `add_special` / `parse_special`: how string prompts
    are tokenised. `skip_special`: control tokens are not shown. `tail`: what of it a prompt lacks is appended to it
    (`shared/no_thinking.py`); the prompts themselves stay as sent. `created`: s, the API's clock.
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
    fit_max_tokens: bool = False
    stop: list[str] = []
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    add_special: bool = True
    parse_special: bool = True
    tail: str = ""
    skip_special: bool = True
    params: SamplingParams = SamplingParams()

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
