"""The sampler against naive references: order of the steps, formulas, edges, and randomness by address."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.sampling import SamplingParams
from workers.generation.sampling import Sampler, largest, log_softmax, raw_logprob, uniform

VOCAB = 300
PAD = 20  # the head is wider than the vocabulary
END = (7, 9)

Array = npt.NDArray[np.float64]


def logits_of(seed: int, width: int = VOCAB + PAD) -> npt.NDArray[np.float32]:
    """Random logits with some exact ties, the padding tempting."""
    row = (np.random.default_rng(seed).standard_normal(width) * 3).round(1).astype(np.float32)
    row[VOCAB:] = 50
    return row


def sampler(
    params: SamplingParams,
    *,
    prompt: list[int] | None = None,
    generated: list[int] | None = None,
    seed: int = 1,
    choice: int = 0,
) -> Sampler:
    return Sampler(
        params, seed=seed, choice=choice, vocab_size=VOCAB, end_ids=END, prompt=prompt or [], generated=generated or []
    )


def bitmask(allowed: set[int], width: int = VOCAB) -> npt.NDArray[np.uint32]:
    words = np.zeros((width + 31) // 32, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def reference(
    params: SamplingParams,
    row: npt.NDArray[np.float32],
    prompt: list[int],
    generated: list[int],
    allowed: set[int] | None,
) -> dict[int, float]:
    """The distribution by the letter of the contract: id by id, in float64, sorting everything."""
    values = {i: float(row[i]) for i in range(VOCAB)}
    for token, bias in params.logit_bias.items():
        values[token] += bias
    banned: set[int] = set()
    if len(generated) < params.min_tokens:
        banned = {*END, *params.stop_token_ids}
    elif params.ignore_eos:
        banned = set(END)
    values = {
        i: -math.inf if i in banned or (allowed is not None and i not in allowed) else v for i, v in values.items()
    }
    for token in {*prompt, *generated}:
        v = values[token]
        values[token] = v / params.repetition_penalty if v > 0 else v * params.repetition_penalty
    for token, count in Counter(generated).items():
        values[token] -= params.presence_penalty + params.frequency_penalty * count
    order = sorted(values, key=lambda i: (-values[i], i))
    if params.greedy:
        return {order[0]: 1.0}
    best = values[order[0]]
    p = {i: math.exp((values[i] - best) / params.temperature) for i in order if values[i] > -math.inf}

    def renormalised(q: dict[int, float]) -> dict[int, float]:
        total = math.fsum(q.values())
        return {i: v / total for i, v in q.items()}

    def head(q: dict[int, float], ranked: list[int], mass: float) -> dict[int, float]:
        kept: dict[int, float] = {}
        so_far = 0.0
        for i in ranked:
            kept[i] = q[i]
            so_far += q[i]
            if so_far >= mass:
                break
        return renormalised(kept)

    p = renormalised(p)
    if params.top_k > 0:
        p = renormalised({i: p[i] for i in list(p)[: params.top_k]})
    if params.top_p < 1:
        p = head(p, list(p), params.top_p)
    if params.min_p > 0:
        floor = params.min_p * max(p.values())
        p = renormalised({i: v for i, v in p.items() if v >= floor})
    if params.typical_p < 1:
        entropy = -math.fsum(v * math.log(v) for v in p.values() if v > 0)
        p = head(
            p,
            sorted((i for i in sorted(p) if p[i] > 0), key=lambda i: abs(-math.log(p[i]) - entropy)),
            params.typical_p,
        )
    return p


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 40, VOCAB, VOCAB + 5]),
    top_p=st.sampled_from([0.0, 0.013, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.053, 0.5, 1.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.6, 2.0]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 0.25, 2.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    min_tokens=st.sampled_from([0, 3]),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.25, 100.0]), max_size=4),
    stop_token_ids=st.sampled_from([(), (11, 12)]),
)
ids_strategy = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@settings(max_examples=300)
@given(
    params_strategy,
    st.integers(0, 10_000),
    ids_strategy,
    ids_strategy,
    st.none() | st.sets(st.integers(20, VOCAB - 1), min_size=3),
)
def test_distribution_follows_the_contract(
    params: SamplingParams, seed: int, prompt: list[int], generated: list[int], allowed: set[int] | None
) -> None:
    row = logits_of(seed)
    before = row.copy()
    mask = None if allowed is None else bitmask(allowed)
    lane = sampler(params, prompt=prompt, generated=generated)
    ids, probabilities = lane.distribution(row, mask)
    expected = reference(params, row, prompt, generated, allowed)
    got = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
    # Float32 weights may put a filter's edge one id further; what differs must weigh next to nothing at the edge.
    odd = got.keys() ^ expected.keys()
    assert len(odd) <= 1 or max(max(got.get(i, 0), expected.get(i, 0)) for i in odd) < 1e-6
    if not odd:
        for i, p in got.items():
            assert p == pytest.approx(expected[i], abs=2e-5, rel=1e-3)
    assert np.isfinite(probabilities).all() and (ids < VOCAB).all() and (np.diff(ids) > 0).all()
    assert lane.sample(row, mask) in got
    assert (row == before).all(), "the raw logits are not to be written"


@pytest.mark.parametrize("typical_p", [0.0, 0.2, 0.9])
def test_typical_keeps_what_is_closest_to_the_entropy(typical_p: float) -> None:
    params = SamplingParams(typical_p=typical_p, top_k=50)
    row = np.random.default_rng(3).standard_normal(VOCAB).astype(np.float32)
    ids, _ = sampler(params).distribution(row)
    assert set(ids.tolist()) == set(reference(params, row, [], [], None))


@settings(max_examples=50)
@given(params_strategy, st.integers(0, 1000), ids_strategy, ids_strategy)
def test_state_is_a_function_of_the_ids(
    params: SamplingParams, seed: int, prompt: list[int], generated: list[int]
) -> None:
    """A sampler that accepted the ids one by one, and one made with them, go on alike."""
    stepped = sampler(params, prompt=prompt, seed=seed)
    for token in generated:
        stepped.accept(token)
    resumed = sampler(params, prompt=prompt, generated=generated, seed=seed)
    row = logits_of(seed)
    assert stepped.position == resumed.position == len(generated)
    assert stepped.sample(row) == resumed.sample(row) == resumed.sample(row)


def test_philox_is_numpys() -> None:
    for seed, choice, position in [(0, 0, 0), (1, 2, 3), (-1, 0, 7), (2**63 - 1, 127, 10**6), (-(2**63), 1, 1)]:
        counter = np.array([position, 0, 0, 0], np.uint64)
        # numpy steps its counter before the first block, so it starts one below.
        counter = counter - np.array([1, 0, 0, 0], np.uint64) if position else np.full(4, 2**64 - 1, np.uint64)
        key = np.array([seed & (2**64 - 1), choice], np.uint64)
        word = int(np.random.Philox(key=key, counter=counter).random_raw())
        assert uniform(seed, choice, position) == (word >> 11) / 2**53


def test_random_numbers_differ_by_seed_choice_and_position() -> None:
    row = np.zeros(VOCAB, np.float32)

    def draw(seed: int, choice: int, position: int) -> int:
        return sampler(SamplingParams(), seed=seed, choice=choice, generated=[0] * position).sample(row)

    for varied in (
        [draw(s, 0, 0) for s in range(50)],
        [draw(0, c, 0) for c in range(50)],
        [draw(0, 0, p) for p in range(50)],
    ):
        assert len(set(varied)) > 35


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.95, temperature=1.3), SamplingParams(top_k=30)]
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 8,000 addressed draws; the numbers are fixed, so this passes or fails for good."""
    row = np.random.default_rng(5).standard_normal(1000).astype(np.float32)
    lane = Sampler(params, seed=0, choice=0, vocab_size=1000, end_ids=())
    ids, probabilities = lane.distribution(row)
    draws = 8_000
    counts: Counter[int] = Counter()
    for seed in range(draws):
        counts[Sampler(params, seed=seed, choice=0, vocab_size=1000, end_ids=()).sample(row)] += 1
    assert set(counts) <= set(ids.tolist())
    expected = probabilities * draws
    observed = np.array([counts[int(i)] for i in ids])
    common = expected >= 5
    statistic = float((((observed - expected) ** 2) / expected)[common].sum())
    freedom = int(common.sum())
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = np.zeros(VOCAB + PAD, np.float32)
    row[[40, 41, 299, 310]] = 5
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-5),
        SamplingParams(top_p=0),
        SamplingParams(top_k=1),
    ):
        assert sampler(params).sample(row) == 40
    assert sampler(SamplingParams(top_k=2)).distribution(row)[0].tolist() == [40, 41]


def test_padding_is_never_sampled_or_counted() -> None:
    row = logits_of(1)
    assert sampler(SamplingParams(temperature=0)).sample(row) < VOCAB
    assert all(sampler(SamplingParams(temperature=2), seed=s).sample(row) < VOCAB for s in range(200))
    assert log_softmax(row, VOCAB).shape == (VOCAB,)
    assert np.exp(log_softmax(row, VOCAB)).sum() == pytest.approx(1)


def test_top_p_edges() -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    row[[3, 5, 8]] = np.log([0.5, 0.25, 0.25]).astype(np.float32)
    assert sampler(SamplingParams(top_p=0.4)).distribution(row)[0].tolist() == [3]
    assert sampler(SamplingParams(top_p=0.6)).distribution(row)[0].tolist() == [3, 5]
    assert sampler(SamplingParams(top_p=0.8)).distribution(row)[0].tolist() == [3, 5, 8]
    assert sampler(SamplingParams(top_p=1.0)).distribution(row)[0].tolist() == [3, 5, 8]
    flat = np.zeros(50_000, np.float32)
    wide = Sampler(SamplingParams(top_p=0.999999), seed=1, choice=0, vocab_size=50_000, end_ids=())
    assert 49_990 <= len(wide.distribution(flat)[0]) <= 50_000


def test_bans() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[7], row[9], row[11] = 9, 8, 7
    early = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(11,))
    assert sampler(early, generated=[1]).sample(row) == 0
    assert sampler(early, generated=[1, 1]).sample(row) == 7
    assert sampler(SamplingParams(temperature=0, ignore_eos=True)).sample(row) == 11
    assert sampler(SamplingParams(temperature=0, ignore_eos=True, logit_bias={7: 100.0})).sample(row) == 11


def test_a_mask_that_leaves_only_the_end_token_overrules_its_ban() -> None:
    row = np.zeros(VOCAB, np.float32)
    params = SamplingParams(min_tokens=10)
    assert sampler(params).sample(row, bitmask({7})) == 7
    # A mask narrower than the vocabulary allows nothing beyond it.
    assert sampler(SamplingParams(temperature=0)).sample(np.arange(VOCAB, dtype=np.float32), bitmask({31}, 32)) == 31


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0)])
def test_logits_that_are_no_numbers_are_refused(bad: float, params: SamplingParams) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[5] = bad
    with pytest.raises(FloatingPointError):
        sampler(params).sample(row)
    with pytest.raises(FloatingPointError):
        sampler(params).sample(np.zeros(VOCAB, np.float32), bitmask(set()))


@settings(max_examples=100)
@given(st.integers(0, 1000), st.integers(0, 25), st.integers(0, VOCAB - 1))
def test_raw_logprob(seed: int, top: int, token: int) -> None:
    row = logits_of(seed)
    own, best = raw_logprob(row, token, top, VOCAB)
    exact = row[:VOCAB].astype(np.float64)
    exact = exact - exact.max() - math.log(np.exp(exact - exact.max()).sum())
    ranked = sorted(range(VOCAB), key=lambda i: (-row[i], i))[:top]
    assert [i for i, _ in best][: len(ranked)] == ranked
    assert dict(best)[token] == own == log_softmax(row, VOCAB)[token], "the very same number"
    assert len(best) == top + (token not in ranked)
    assert [lp for _, lp in best] == sorted((lp for _, lp in best), reverse=True)
    for i, lp in best:
        assert lp == pytest.approx(exact[i], abs=1e-5)


def test_largest_breaks_ties_by_id() -> None:
    row = np.array([1, 3, 3, 2, 3, 0], np.float32)
    assert largest(row, 2).tolist() == [1, 2]
    assert largest(row, 4).tolist() == [1, 2, 4, 3]
    assert largest(row, 0).tolist() == []
    assert largest(row, 99).tolist() == [1, 2, 4, 3, 0, 5]


@pytest.mark.parametrize("field", ["typical_p", "min_p", "top_p"])
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e-9, 1.0])
def test_extreme_filters_keep_a_token(field: str, value: float) -> None:
    for seed in range(20):
        row = np.zeros(VOCAB + PAD, np.float32)
        row[:2] = (0.0, float(seed))  # two-sided distributions have no id near their entropy
        row[2:VOCAB] = -1e4
        for logits in (row, logits_of(seed)):
            assert 0 <= sampler(SamplingParams(**{field: value})).sample(logits) < VOCAB
