"""How long a request, how large the pool and how wide a step may be: arithmetic, before anything is loaded.

Knows nothing of the package but the rules of its generator (exllamav2/generator/dynamic.py, 0.3.2).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from workers.engines.exllamav2.errors import LoadError
from workers.engines.exllamav2.options import PAGE, ExLlamaV2Options

log = logging.getLogger(__name__)

#: Tokens of the pool at least, where none is given and the model's context is shorter.
LEAST_POOL = 8192
#: Positions of a prompt scored in one step: each is a row of logits as wide as the vocabulary.
SCORED_ROWS = 256
#: Fewest tokens that make a request.
LEAST_CONTEXT = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """`context`: longest prompt + completion. `pool`: tokens of the cache, whole pages. `positions`: those the model can
    compute; more than the context, as drafting runs ahead of the text. `chunk`: prompt tokens of a lane in one step.
    `width`: tokens of a lane in one step of decoding. `input_len`, `batch_size`: of the package's configuration; their
    product is the most rows of one step. `output_len`: the most rows of logits of one step; where the package knows no
    limit, it makes room for a whole chunk of them."""

    context: int
    pool: int
    positions: int
    chunk: int
    width: int
    input_len: int
    batch_size: int
    output_len: int


def sizes(options: ExLlamaV2Options, native: int) -> Sizes:
    """`native`: the model's own context, in tokens. What had to be made smaller is logged. Raises LoadError.

    The package lets a request run past the end of its position table, which is memory of something else on a GPU, and
    drafting writes `draft_tokens` positions past the text. So the context ends that much earlier."""
    drafted = options.draft_tokens if options.draft_model is not None or options.ngram_draft else 0
    stretched = options.rope_scale is not None or options.rope_alpha is not None
    context = native - drafted
    if options.context_length is not None:
        if options.context_length > context and not stretched:
            log.warning("The context is %d tokens, not %d: the model has no more.", context, options.context_length)
        context = options.context_length if stretched else min(context, options.context_length)
    if options.cache_tokens is None:
        pool = max(_pages(context + drafted), LEAST_POOL)
    else:
        pool = options.cache_tokens // PAGE * PAGE
        if context + drafted > pool:
            log.warning("The context is %d tokens, not %d: the cache has no more.", pool - drafted, context)
            context = pool - drafted
    if context < LEAST_CONTEXT:
        raise LoadError(
            f"there is no room for a prompt and a token: the context would be {context} tokens (SLUICE_CONTEXT_LENGTH, "
            "SLUICE_CONTEXT_CELLS, SLUICE_EXL2_DRAFT_TOKENS)."
        )
    positions = _pages(context + drafted)
    width = drafted + 1
    rows = options.lanes * width
    # Wider steps cost memory once; a larger batch size would cost as much as another position table and cache.
    input_len = min(max(options.chunk, _pages(rows)), positions)
    return Sizes(
        context=context,
        pool=pool,
        positions=positions,
        chunk=min(options.chunk, input_len),
        width=width,
        input_len=input_len,
        batch_size=-(-rows // input_len),
        output_len=min(max(SCORED_ROWS, rows), input_len),
    )


def _pages(tokens: int) -> int:
    """Tokens of the whole pages that hold `tokens`."""
    return -(-tokens // PAGE) * PAGE
