"""lm-eval over our offline tasks, against a server and against transformers on the same weights, side by side.

Runs in the environment with lm_eval: `python lm_eval_run.py URL MODEL FOLDER [--tokenizer remote|huggingface] [--rounded]`, FOLDER as
`gguf_to_hf.py` made it. Prints scores and differences as JSON. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("HF_HOME", str(Path(sys.prefix) / "hf-home"))

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS = Path(__file__).parent / "tasks"
NAMES = ["sluice_two_way", "sluice_ends", "sluice_passages"]


def evaluate(backend: str | HFLM, **arguments: Any) -> dict[str, Any]:
    os.chdir(TASKS)  # the tasks name their data relative to themselves
    found = simple_evaluate(
        model=backend,
        model_args=arguments or None,
        tasks=NAMES,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        log_samples=True,
        batch_size=1,
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    assert found is not None
    return found


def answers(found: dict[str, Any]) -> dict[tuple[str, int, int], tuple[str, float, bool]]:
    """(task, document, choice) -> continuation, log-likelihood, whether it is what greedy decoding would say."""
    out = {}
    for task in NAMES:
        for sample in found["samples"][task]:
            asked = sample["arguments"]
            asked = list(asked.values()) if isinstance(asked, dict) else asked
            for index, (request, answer) in enumerate(zip(asked, sample["resps"], strict=True)):
                request = list(request.values()) if isinstance(request, dict) else request
                value, greedy = answer[0]
                out[task, sample["doc_id"], index] = (request[1], float(value), str(greedy) == "True")
    return out


def rounded(folder: str) -> HFLM:
    """The reference, but with the inputs of every matrix rounded as llama.cpp rounds them for 8-bit weights: 8 bits
    with one 16-bit scale for 32 values."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def round_input(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        blocks = inputs[0].reshape(-1, 32)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        steps = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
        return ((torch.round(blocks * steps) * scale.half().float()).reshape(inputs[0].shape),)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_input)
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=1, add_bos_token=False)


def scores(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        task: {key.split(",")[0]: value for key, value in found["results"][task].items() if isinstance(value, float)}
        for task in NAMES
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", choices=("remote", "huggingface"), default="remote")
    parser.add_argument("--rounded", action="store_true", help="also what rounding activations alone would change")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more only wait for each other beside a server
    folder = str(options.folder.resolve())
    local = {"tokenizer": folder} if options.tokenizer == "huggingface" else {}
    served = evaluate(
        "local-completions",
        model=options.model,
        base_url=f"{options.url}/v1/completions",
        tokenizer_backend=options.tokenizer,
        num_concurrent=1,
        max_retries=1,
        **local,
    )
    reference = evaluate("hf", pretrained=folder, dtype="float32", device="cpu", add_bos_token=False)
    cruder = answers(evaluate(rounded(folder))) if options.rounded else None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours, theirs = answers(served), answers(reference)
    assert ours.keys() == theirs.keys()
    rows = []
    for key, (text, value, greedy) in ours.items():
        tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        other = theirs[key]
        assert other[0] == text
        rows.append(
            {
                "task": key[0],
                "doc": key[1],
                "choice": key[2],
                "tokens": tokens,
                "served": value,
                "reference": other[1],
                "difference": value - other[1],
                "per_token": abs(value - other[1]) / tokens,
                "same_greedy": greedy == other[2],
                "rounded_per_token": abs(cruder[key][1] - other[1]) / tokens if cruder else None,
            }
        )
    report = {"scores": scores(served), "reference_scores": scores(reference), "rows": rows}
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
