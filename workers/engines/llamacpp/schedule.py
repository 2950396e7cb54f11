"""Who gets how many tokens of the next batch. Pure arithmetic; knows no model and no requests."""

from __future__ import annotations

from collections.abc import Sequence


def shares(owed: Sequence[int], *, batch: int, chunk: int) -> list[int]:
    """Tokens to decode for each lane, oldest lane first; together at most `batch`.

    `owed`: tokens each lane has and the model has not seen yet: 1 for a lane that is generating, more for one in
    prefill. Generating lanes go first, one token each. While there are any, prefill gets `chunk` tokens in all,
    so that their next tokens are not late; else the whole batch. Of that the oldest lane in prefill gets half at
    least, and the rest goes to those with least left, so a long prompt neither starves nor holds up short ones.
    """
    given = [1 if tokens == 1 else 0 for tokens in owed]
    decoding = sum(given)
    if decoding > batch:
        raise ValueError("A batch must hold one token for each lane.")
    left = min(batch - decoding, chunk) if decoding else batch
    prefilling = [lane for lane, tokens in enumerate(owed) if tokens > 1]
    if prefilling:
        oldest, *others = prefilling
        given[oldest] = min(owed[oldest], (left + 1) // 2)
        left -= given[oldest]
        for lane in sorted(others, key=lambda lane: owed[lane]):
            given[lane] = min(owed[lane], left)
            left -= given[lane]
        given[oldest] += min(owed[oldest] - given[oldest], left)
    return given
