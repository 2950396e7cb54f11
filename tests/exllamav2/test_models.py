"""The model folders themselves, and that the harness computes a Llama: against one written out from its definition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (requirements-harness.txt)")

from safetensors.torch import load_file
from tokenizers import Tokenizer

from scripts import carried_model
from shared.settings import Settings
from tests.exllamav2 import models

TEXT = "Once upon a time: naïve 你好 🙂 <s> zebra\n\n  def answer()"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "options", [{}, {"vocab": 500, "rows": 544, "fim": True}, {"tokenizer": "byte-fallback"}], ids=str
)
def test_the_same_arguments_give_the_same_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    first = files(models.write_tiny_llama(tmp_path / "a", **options))
    assert first == files(models.write_tiny_llama(tmp_path / "b", **options))
    other = files(models.write_tiny_llama(tmp_path / "c", seed=7, **options))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_the_tokenizer_gives_every_text_back(tmp_path: Path, kind: Any) -> None:
    tokenizer = Tokenizer.from_file(str(models.write_tiny_llama(tmp_path, tokenizer=kind) / "tokenizer.json"))
    encoded = tokenizer.encode(TEXT, add_special_tokens=False)
    # byte-fallback strips the space it put before; after a special token there is none to strip
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False).replace("<s>  ", "<s> ") == TEXT
    assert tokenizer.encode("a").tokens[0] == "<s>"
    if kind == "byte-fallback":
        assert {"<0x0A>", "<0xF0>"} <= set(encoded.tokens)


def test_the_options_are_in_the_files(tmp_path: Path) -> None:
    folder = models.write_tiny_llama(
        tmp_path, vocab=500, rows=544, max_positions=256, eos=["</s>"], generation_eos=["<|im_end|>", "</s>"],
        chat_template=None, add_bos=False, fim=True,
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 500
    assert all(tokenizer.token_to_id(token) is not None for token in models.FIM)
    assert tokenizer.encode("a").tokens == ["a"]
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    ids = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "</s>")]
    assert read["generation_config"]["eos_token_id"] == ids and read["config"]["eos_token_id"] == ids[1:]
    assert (read["config"]["vocab_size"], read["config"]["max_position_embeddings"]) == (544, 256)
    assert "chat_template" not in read["tokenizer_config"] and not read["tokenizer_config"]["add_bos_token"]
    assert load_file(folder / "model.safetensors")["lm_head.weight"].shape[0] == 544


def test_a_draft_model_has_the_vocabulary_or_another(tmp_path: Path, tiny: Path) -> None:
    target = Tokenizer.from_file(str(tiny / "tokenizer.json")).get_vocab()
    for same in (True, False):
        folder = models.write_draft_model(tmp_path / str(same), same_vocabulary=same)
        assert (Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab() == target) is same


class Model:
    """A loaded model, its tokenizer, and a paged generator on the product's attention."""

    def __init__(self, package: ModuleType, folder: Path, cache: str = "ExLlamaV2Cache") -> None:
        import exllamav2.generator as generation

        from workers.engines.exllamav2 import attention

        attention.install()
        self.generation = generation
        config = package.ExLlamaV2Config(str(folder))
        config.max_input_len = 512
        config.no_sdpa = True  # without flash-attn its prefill has no causal mask
        self.model = package.ExLlamaV2(config)
        self.cache = getattr(package, cache)(self.model, max_seq_len=1024, lazy=True)
        self.model.load_autosplit(self.cache)
        self.tokenizer = package.ExLlamaV2Tokenizer(config)
        self.generator = generation.ExLlamaV2DynamicGenerator(
            model=self.model, cache=self.cache, tokenizer=self.tokenizer, max_batch_size=4, max_chunk_size=256
        )

    def logits(self, ids: list[int]) -> torch.Tensor:
        """`[tokens, rows]`, without a cache."""
        return self.model.forward(torch.tensor([ids]))[0].float()

    def greedy(self, *prompts: str, tokens: int = 24) -> list[list[int]]:
        """The token ids that follow each prompt, all at once in one batch."""
        made: dict[Any, list[int]] = {}
        for number, prompt in enumerate(prompts):
            job = self.generation.ExLlamaV2DynamicJob(
                input_ids=self.tokenizer.encode(prompt),
                max_new_tokens=tokens,
                gen_settings=self.generation.ExLlamaV2Sampler.Settings.greedy(),
                identifier=number,
            )
            self.generator.enqueue(job)
            made[number] = []
        while self.generator.num_remaining_jobs():
            for result in self.generator.iterate():
                if "token_ids" in result:
                    made[result["identifier"]] += result["token_ids"][0].tolist()
        return list(made.values())


def llama(folder: Path, ids: list[int]) -> torch.Tensor:
    """Logits `[tokens, rows]` of the Llama in `folder`, from its definition, in 64 bits."""
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(len(ids), -1, models.HEAD_DIM).transpose(0, 1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        frequencies = 10000 ** (-torch.arange(0, models.HEAD_DIM, 2).double() / models.HEAD_DIM)
        turn = torch.polar(torch.ones(1).double(), torch.arange(len(ids))[:, None] * frequencies)
        done = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((done.real, done.imag), -1)

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(models.LAYERS):
        of = f"model.layers.{layer}."
        q, k, v = (
            heads(norm(x, f"{of}input_layernorm") @ weights[f"{of}self_attn.{name}_proj.weight"].T) for name in "qkv"
        )
        shared = models.HEADS // models.KEY_VALUE_HEADS
        k, v = turned(k).repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        scores = turned(q) @ k.transpose(1, 2) / math.sqrt(models.HEAD_DIM)
        seen = torch.ones(len(ids), len(ids)).tril().bool()
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        x = x + mixed.transpose(0, 1).reshape(len(ids), -1) @ weights[f"{of}self_attn.o_proj.weight"].T
        inner = norm(x, f"{of}post_attention_layernorm")
        gate = torch.nn.functional.silu(inner @ weights[f"{of}mlp.gate_proj.weight"].T)
        x = x + (gate * (inner @ weights[f"{of}mlp.up_proj.weight"].T)) @ weights[f"{of}mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("vocab", [512, 500])
def test_the_harness_computes_the_llama(exllamav2: ModuleType, tmp_path: Path, vocab: int) -> None:
    folder = models.write_tiny_llama(tmp_path, vocab=vocab)
    model = Model(exllamav2, folder)
    ids = [number * 37 % vocab for number in range(60)]
    found, wanted = model.logits(ids), llama(folder, ids)
    assert found.shape[1] == 512
    assert float((found[:, :vocab] - wanted).abs().max()) < 0.03
    assert (found[:, vocab:] == -65504).all()  # padding cannot be sampled


def test_a_batch_writes_what_each_prompt_gets_alone(exllamav2: ModuleType, tiny: Path) -> None:
    model = Model(exllamav2, tiny)
    prompts = ("Once upon a time", "The queue holds the request", "{")
    together = model.greedy(*prompts)
    assert together == [model.greedy(prompt)[0] for prompt in prompts]
    ids = model.tokenizer.encode(prompts[0])[0].tolist()
    assert together[0][0] == int(llama(tiny, ids)[-1].argmax())


@pytest.mark.parametrize(("cache", "same"), [("Q8", 24), ("Q6", 8), ("Q4", 8)])
def test_a_quantised_cache_writes_much_the_same(exllamav2: ModuleType, tiny: Path, cache: str, same: int) -> None:
    exact = Model(exllamav2, tiny).greedy("Once upon a time there was a")[0]
    near = Model(exllamav2, tiny, f"ExLlamaV2Cache_{cache}").greedy("Once upon a time there was a")[0]
    assert near[:same] == exact[:same]


def test_an_adapter_changes_the_text(exllamav2: ModuleType, tiny: Path, tmp_path: Path) -> None:
    model = Model(exllamav2, tiny)
    plain = model.greedy("Once upon a time")
    adapter = exllamav2.ExLlamaV2Lora.from_directory(model.model, str(models.write_lora(tmp_path)))
    model.generator.set_loras([adapter])
    model.generator.reset_page_table()
    assert model.greedy("Once upon a time") != plain


@pytest.mark.slow
def test_smollm2_writes_sense(exllamav2: ModuleType) -> None:
    cache = Settings().cache_dir
    try:
        gguf = carried_model.ensure(cache)
    except carried_model.ModelUnavailable as unavailable:
        pytest.skip(str(unavailable))
    model = Model(exllamav2, models.write_smollm2(cache.expanduser() / "smollm2-135m-half", gguf))
    made = model.greedy("The capital of France is", tokens=8)[0]
    assert "Paris" in model.tokenizer.decode(torch.tensor(made))
