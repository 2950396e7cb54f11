"""From logits to the next token id: the only sampler for engines that hand out logits, and raw logprobs.

Pure numpy. It knows nothing of text, engines or requests beyond their sampling fields, and keeps no state that
is not a function of (params, seed, choice, prompt ids, generated ids).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.frames import Logprob
from shared.sampling import SamplingParams
from workers.generation.constraint import State

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_WORD = 0xFFFF_FFFF_FFFF_FFFF
#: Mass floors that `_nucleus` tries before the exact one: most nuclei are a few dozen ids out of 50,000, and
#: sorting is what costs.
_FLOORS = (1e-2, 1e-3, 1e-4, 1e-5)
#: Between a position and what is drawn there another time: no text has so many tokens.
_AGAIN = 1 << 40
#: Weights summed as one block when drawing: float64 prefix sums over a whole vocabulary cost more than the rest.
_BLOCK = 256


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) that belongs to `position` (ids sampled so far) of a choice.

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with key (seed, choice)
    and counter (position, 0, 0, 0): addressed, so a resumed or moved choice needs no generator state. In plain
    ints this takes 5 us; building numpy's Philox takes 14 us. A test holds it against numpy's.
    """
    c0, c1, c2, c3 = position & _WORD, 0, 0, 0
    k0, k1 = seed & _WORD, choice & _WORD
    for _ in range(10):
        a, b = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & _WORD, (a >> 64) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _WORD, (k1 + 0xBB67AE8584CAA73B) & _WORD
    return (c0 >> 11) * 2.0**-53


def largest(row: Logits, count: int) -> Ids:
    """Ids of the `count` highest values of `row` [n], highest first, of equal ones the lower id first."""
    count = min(count, len(row))
    if count <= 0:
        return np.empty(0, np.int64)
    least = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= least)
    return ids[np.argsort(-row[ids], kind="stable")[:count]]


def log_normaliser(logits: Logits, vocab_size: int) -> float:
    """log(sum(exp(logits))) over the vocabulary; the head's padding has no part in it."""
    row = logits[:vocab_size]
    shift = float(row.max())
    return shift + math.log(float(np.exp(row - np.float32(shift)).sum(dtype=np.float64)))


def log_softmax(logits: Logits, vocab_size: int) -> npt.NDArray[np.float64]:
    """Raw logprobs [vocab_size] of logits [head]."""
    return logits[:vocab_size].astype(np.float64) - log_normaliser(logits, vocab_size)


def raw_logprob(logits: Logits, token: int, top: int, vocab_size: int) -> Logprob:
    """Logprobs of `token` and of the best `top` ids, from raw logits [head]: before bias, masks and temperature.

    The first number is the very one that stands in the list; a token outside the best `top` comes last in it.
    """
    total = log_normaliser(logits, vocab_size)
    best = [(int(i), float(logits[i]) - total) for i in largest(logits[:vocab_size], top)]
    own = float(logits[token]) - total
    if all(i != token for i, _ in best):
        best.append((token, own))
    return own, best


class _Tally:
    """How often each id occurred, as parallel arrays that penalties can index with."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._slot: dict[int, int] = {}
        self._ids: Ids = np.empty(64, np.int64)
        self._counts: npt.NDArray[np.float32] = np.zeros(64, np.float32)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(slot, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(slot, np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._slot)]


class Sampler:
    """The sampler of one choice.

    Parameters
    ----------
    params: the sampling fields.
    seed, choice: the key of the random numbers.
    vocab_size: ids beyond it are never sampled, however wide the head is.
    end_ids: ids that end a text; banned by `ignore_eos` and, with `stop_token_ids`, before `min_tokens`.
    prompt, generated: the ids so far. Random numbers and `min_tokens` count `generated` only.
    constraint: what the text is held to, behind `generated`.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        choice: int,
        vocab_size: int,
        end_ids: Sequence[int],
        prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
        constraint: State | None = None,
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._seed, self._choice = seed, choice
        self._vocab_size = vocab_size
        self._position = len(generated)
        self._bias_ids: Ids = np.array(list(params.logit_bias), np.int64)
        self._bias: Weights = np.array(list(params.logit_bias.values()), np.float32)
        ends = [i for i in end_ids if 0 <= i < vocab_size]
        self._end_ids: Ids = np.array(ends, np.int64)
        self._early_ids: Ids = np.array([*ends, *params.stop_token_ids], np.int64)
        penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._generated = _Tally(generated) if penalised else None
        self._seen = _Tally([*prompt, *generated]) if params.repetition_penalty != 1 else None

    @property
    def position(self) -> int:
        """Ids sampled so far."""
        return self._position

    @property
    def complete(self) -> bool:
        """The constraint is met, and nothing but the text's end could follow."""
        return self._constraint is not None and self._constraint.complete

    def accept(self, token: int) -> None:
        """Records `token` as the one sampled at this position."""
        self._position += 1
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._generated is not None:
            self._generated.add(token)
        if self._seen is not None:
            self._seen.add(token)

    def sample(self, logits: Logits, mask: npt.NDArray[np.uint32] | None = None) -> int:
        """The id for this position from raw `logits` [head], which stay as they are.

        `mask`: allowed ids as a bitmask, id i = bit i % 32 of word i // 32; ids beyond it are not allowed.
        A constraint brings its own. Equal inputs give equal ids; greedy ties go to the lowest id. Raises
        FloatingPointError for logits that hold NaN or +inf, or nothing that may be sampled, and StructuredOutputFailed
        where the constraint lets nothing follow.
        """
        if self._constraint is None:
            return self._pick(logits, mask)
        again = 0
        while not self._constraint.takes(token := self._pick(logits, self._constraint.mask(), again)):
            self._constraint.refuse(token)
            again += 1
        return token

    def _pick(self, logits: Logits, mask: npt.NDArray[np.uint32] | None, again: int = 0) -> int:
        """`again`: how many picks of this position were refused; each has a random number of its own."""
        row = self._adjusted(logits, mask)
        if self._params.greedy:
            return int(row.argmax())
        ids, weights = self._kept(row)
        drawn = _draw(weights, uniform(self._seed, self._choice, self._position + again * _AGAIN))
        return drawn if ids is None else int(ids[drawn])

    def distribution(
        self, logits: Logits, mask: npt.NDArray[np.uint32] | None = None
    ) -> tuple[Ids, npt.NDArray[np.float64]]:
        """The ids that `sample` draws from, ascending, and their probabilities."""
        row = self._adjusted(logits, mask)
        if self._params.greedy:
            return np.array([row.argmax()], np.int64), np.ones(1)
        ids, weights = self._kept(row)
        if ids is None:
            ids = np.arange(len(weights))
        drawable = weights > 0
        kept = weights[drawable].astype(np.float64)
        return ids[drawable], kept / kept.sum()

    def _adjusted(self, logits: Logits, mask: npt.NDArray[np.uint32] | None) -> Logits:
        """Logits [vocab_size] after bias, bans, mask and penalties; a view where nothing changes them."""
        row = self._changed(logits[: self._vocab_size], mask, bans=True)
        best = row[row.argmax()]
        if best == -math.inf:
            # A finished grammar allows the end token only: the ban on it has to give way, or nothing is left.
            row = self._changed(logits[: self._vocab_size], mask, bans=False)
            best = row[row.argmax()]
        if not math.isfinite(best):
            raise FloatingPointError("The model's logits are not numbers, or its mask allows no token.")
        return row

    def _changed(self, row: Logits, mask: npt.NDArray[np.uint32] | None, *, bans: bool) -> Logits:
        params = self._params
        banned: Ids | None = None
        if bans and self._position < params.min_tokens:
            banned = self._early_ids
        elif bans and params.ignore_eos:
            banned = self._end_ids
        unpenalised = self._generated is None and self._seen is None
        if unpenalised and banned is None and mask is None and not len(self._bias_ids):
            return row
        row = row.copy()
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias
        if banned is not None:
            row[banned] = -math.inf
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little").view(np.bool_)
            np.copyto(row, -math.inf, where=~allowed)
        if self._seen is not None:
            # CTRL (Keskar et al., 2019), as transformers and vLLM do it, and before the additive ones as there.
            values = row[self._seen.ids]
            factor = np.float32(params.repetition_penalty)
            row[self._seen.ids] = np.where(values > 0, values / factor, values * factor)
        if self._generated is not None:
            penalty = params.frequency_penalty * self._generated.counts + params.presence_penalty
            row[self._generated.ids] -= penalty.astype(np.float32)
        return row

    def _kept(self, row: Logits) -> tuple[Ids | None, Weights]:
        """What temperature, top_k, top_p, min_p and typical_p leave, in this order: ids ascending (None: all) and
        unnormalised weights. Each filter sees the renormalised rest of the one before."""
        params = self._params
        ids: Ids | None = None
        best = row.max()
        if 0 < params.top_k < len(row):
            ids = np.sort(largest(row, params.top_k))
            row = row[ids]
        weights = row - best
        weights *= np.float32(1 / params.temperature)
        np.exp(weights, out=weights)
        if params.top_p < 1:
            ids, weights = _narrowed(ids, weights, _nucleus(weights, params.top_p))
        if params.min_p > 0:
            ids, weights = _narrowed(ids, weights, np.flatnonzero(weights >= np.float32(params.min_p) * weights.max()))
        if params.typical_p < 1:
            ids, weights = _narrowed(ids, weights, _typical(weights, params.typical_p))
        return ids, weights


def _narrowed(ids: Ids | None, weights: Weights, kept: Ids) -> tuple[Ids, Weights]:
    return (kept if ids is None else ids[kept]), weights[kept]


def _nucleus(weights: Weights, top_p: float) -> Ids:
    """Indices of the nucleus (Holtzman et al., 2019): the fewest, heaviest weights that hold `top_p` of the mass."""
    mass = top_p * float(weights.sum(dtype=np.float64))
    # What lies below this floor cannot hold 1 - top_p of the mass even if all weights lie there.
    exact = (1 - top_p) / len(weights)
    for floor in (*(f for f in _FLOORS if f > exact), exact, 0.0):
        candidates: Ids = np.flatnonzero(weights >= np.float32(floor * mass))
        heavy = weights[candidates]
        if float(heavy.sum(dtype=np.float64)) >= mass:
            break
    # Sorting the values alone is vectorised, sorting indices by them is not: 20 times as fast on wide nuclei.
    ranked = np.sort(heavy)[::-1]
    count = min(int(np.searchsorted(np.cumsum(ranked.astype(np.float64)), mass)) + 1, len(ranked))
    lightest = ranked[count - 1]
    kept = heavy > lightest
    ties = np.flatnonzero(heavy == lightest)
    kept[ties[: count - int(kept.sum())]] = True
    nucleus: Ids = candidates[kept]
    return nucleus


def _typical(weights: Weights, typical_p: float) -> Ids:
    """Indices kept by locally typical sampling (Meister et al., 2022): those whose surprise is closest to the
    entropy, until they hold `typical_p` of the mass."""
    drawable = np.flatnonzero(weights > 0)
    probabilities = weights[drawable] / weights.sum(dtype=np.float64)
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - float((probabilities * surprise).sum()))
    for reach in (1.0, 2.0, 4.0, 8.0, math.inf):
        near = np.flatnonzero(distance <= reach)
        if len(near) and float(probabilities[near].sum()) >= typical_p:
            break
    order = near[np.argsort(distance[near], kind="stable")]
    count = int(np.searchsorted(np.cumsum(probabilities[order]), typical_p)) + 1
    return np.sort(drawable[order[:count]])


def _draw(weights: Weights, u: float) -> int:
    """Index of the weight that `u` in [0, 1) falls into, the weights laid side by side in order."""
    whole = len(weights) // _BLOCK * _BLOCK
    blocks = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    edges = np.cumsum(np.append(blocks, weights[whole:].sum(dtype=np.float64)))
    target = u * float(edges[-1])
    block = min(int(np.searchsorted(edges, target, side="right")), len(edges) - 1)
    before = float(edges[block - 1]) if block else 0.0
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target - before, side="right"))
    if index == len(inside) or not inside[index] > 0:
        # The two ways of summing differ in the last bits: the nearest weight before that can be drawn.
        return int(np.flatnonzero(weights[: block * _BLOCK + index + 1] > 0)[-1])
    return block * _BLOCK + index
