"""The language of the scripted engine: what a prompt may say about what comes out, and when.

A script is a JSON object of the fields of `Fields`; any other text is echoed word by word. Knows nothing of
lanes, time or events.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequest
from shared.sampling import BIAS_RANGE, SamplingParams

#: Ids 0-255 are bytes, 256-511 specials written `<|n|>`, from 512 on the pieces of the request's own script.
FIRST_SPECIAL = 256
END_ID = 257
FIRST_PIECE = 512
VOCAB_SIZE = 65_536
#: The head is wider than the vocabulary, as padded models' heads are: ids between are never sampled.
HEAD_WIDTH = 65_600
#: Raw logprob of what the script wants; the other ids have `other_logprob`.
DEFAULT_LOGPROB = -0.5

_WORD = re.compile(rb"\s*\S+|\s+")

Count = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class HexPiece(msgspec.Struct, forbid_unknown_fields=True):
    """A piece that is no text: its bytes in hexadecimal."""

    hex: str


class Fields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a script, as written in a prompt.

    `pieces`, then `hex`: one token each; all of them `repeat` times (0: endlessly). `start_delay_ms` before the
    first, `delay_ms` before every piece. After so many tokens in all: `error_after` this request fails,
    `fatal_after` the process dies, `hang_after` no step ends any more. `logprobs`: of each token, by position
    (the end token's too; -0.5 beyond the list). `finish` "length" or `eos` false: no end token, the script
    ends as if the context were full. `choices`: a script for each choice; what one leaves out is taken from
    the fields around it, and so is a choice beyond the list. `prefer` (texts), `prefer_ids`: ids with the
    highest logits, best first, instead of pieces; endless unless the end token (257) is the best one left.
    """

    pieces: list[str | HexPiece] = []
    hex: list[str] = []
    repeat: Count = 1
    delay_ms: Milliseconds = 0
    start_delay_ms: Milliseconds = 0
    error_after: Count | None = None
    fatal_after: Count | None = None
    hang_after: Count | None = None
    logprobs: list[Annotated[float, msgspec.Meta(le=0)]] = []
    finish: Literal["stop", "length"] = "stop"
    eos: bool = True
    choices: list[dict[str, Any]] = []
    prefer: list[str] = []
    prefer_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=HEAD_WIDTH)]] = []


#: What a choice's own script replaces altogether if it has any of it.
_CONTENT = ("pieces", "hex", "prefer", "prefer_ids")


@dataclass(frozen=True, slots=True)
class Script:
    """What one choice does. `total`: pieces in all, None = endless. `ends`: with an end token. Delays in s."""

    pieces: list[bytes]
    total: int | None
    ends: bool = True
    delay: float = 0.0
    start_delay: float = 0.0
    error_after: int | None = None
    fatal_after: int | None = None
    hang_after: int | None = None
    logprobs: Sequence[float] = ()
    prefer: Sequence[int] = ()

    def logprob(self, position: int) -> float:
        return self.logprobs[position] if position < len(self.logprobs) else DEFAULT_LOGPROB


def read_script(prompt: bytes, choice: int) -> Script:
    """The script in `prompt` for choice `choice` of it; any text that is no script is echoed word by word.

    Raises InvalidRequest naming `prompt` for an object that has fields of a script, but is none."""
    written: Any = None
    if prompt.lstrip()[:1] == b"{":
        # msgspec.DecodeError and UnicodeDecodeError are ValueErrors.
        with contextlib.suppress(ValueError, RecursionError):
            written = msgspec.json.decode(prompt)
    if not isinstance(written, dict) or written.keys().isdisjoint(Fields.__struct_fields__):
        words: list[bytes] = _WORD.findall(prompt)
        return Script(pieces=words, total=len(words))
    try:
        fields = msgspec.convert(written, Fields)
        if choice < len(fields.choices):
            own = fields.choices[choice]
            around = {
                k: v
                for k, v in written.items()
                if k != "choices" and not (k in _CONTENT and any(c in own for c in _CONTENT))
            }
            fields = msgspec.convert({**around, **own}, Fields)
        return _script(fields)
    except ValueError as error:  # msgspec.ValidationError is one, and what bytes.fromhex raises
        raise InvalidRequest(f"The prompt is not a script: {error}", param="prompt") from None


def _script(fields: Fields) -> Script:
    """Raises ValueError."""
    pieces = [bytes.fromhex(piece.hex) if isinstance(piece, HexPiece) else piece.encode() for piece in fields.pieces]
    pieces += [bytes.fromhex(piece) for piece in fields.hex]
    prefer = [token for text in fields.prefer for token in text.encode()] + fields.prefer_ids
    if prefer and pieces:
        raise ValueError("pieces and preferred ids exclude each other")
    return Script(
        pieces=pieces,
        total=None if prefer or (pieces and fields.repeat == 0) else len(pieces) * fields.repeat,
        ends=fields.eos and fields.finish == "stop",
        delay=fields.delay_ms / 1000,
        start_delay=fields.start_delay_ms / 1000,
        error_after=fields.error_after,
        fatal_after=fields.fatal_after,
        hang_after=fields.hang_after,
        logprobs=fields.logprobs,
        prefer=prefer,
    )


def other_logprob(token: int) -> float:
    """Raw logprob of an id that the script does not want: -10, -11, -12 ... for ids 0, 1, 2 ...; never so low that a
    bias of 100 could not make it the best."""
    return max(-10.0 - token, -60.0)


def highest_preferred(
    prefer: Sequence[int], params: SamplingParams, position: int, mask: npt.NDArray[np.uint32] | None = None
) -> tuple[int, float]:
    """The id with the highest logit and its raw logprob, for a script that prefers ids.

    Raw values: the preferred ones from -0.5 down to above -1, the others far below. Bias is added; out of the
    question are padded ids, a bias of -100, end and stop ids while `position` < min_tokens, the end id with
    ignore_eos (unless the mask leaves nothing else), and what `mask` (see `State.mask`) does not allow. Raises
    InvalidRequest if that leaves nothing."""
    raw = {token: DEFAULT_LOGPROB - 0.5 * rank / len(prefer) for rank, token in reversed(list(enumerate(prefer)))}
    bias = params.logit_bias
    allowed = np.ones(VOCAB_SIZE, np.bool_)
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little").view(np.bool_)
    allowed[[token for token, value in bias.items() if value <= BIAS_RANGE[0]]] = False
    ends = allowed[END_ID]
    if position < params.min_tokens:
        allowed[[END_ID, *params.stop_token_ids]] = False
    if params.ignore_eos:
        allowed[END_ID] = False
    if mask is not None and not allowed.any():
        allowed[END_ID] = ends
    candidates = [token for token in (*prefer, *bias) if token < VOCAB_SIZE and allowed[token]]
    # Of all the other ids the lowest one has the highest logit.
    allowed[[token for token in (*prefer, *bias) if token < VOCAB_SIZE]] = False
    if allowed.any():
        candidates.append(int(allowed.argmax()))
    if not candidates:
        raise InvalidRequest("Every token of the vocabulary is banned.", param="logit_bias")
    best = max(candidates, key=lambda token: raw.get(token, other_logprob(token)) + bias.get(token, 0.0))
    return best, raw.get(best, other_logprob(best))
