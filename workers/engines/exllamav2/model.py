"""The package's model, with one thing more: the logits of a prefill.

The generator throws them away (`preprocess_only`); the logprobs of a prompt are made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from exllamav2 import ExLlamaV2

#: Takes the raw logits [n, head] of a prefill's positions.
Scorer = Callable[[npt.NDArray[np.float32]], None]


class Model(ExLlamaV2):
    """`scorer`: who wants the logits of the prefill under way."""

    scorer: Scorer | None = None

    def forward_chunk(self, input_ids: torch.Tensor, *args: Any, preprocess_only: bool = False, **kwargs: Any) -> Any:
        """See ExLlamaV2.forward_chunk."""
        scorer = self.scorer if preprocess_only else None
        result = super().forward_chunk(input_ids, *args, preprocess_only=preprocess_only and scorer is None, **kwargs)
        if scorer is not None:
            # Widened on the CPU: on the GPU it would take twice the memory of the logits themselves once more.
            scorer(result["logits"][0].cpu().float().numpy())
        return result
