"""What a model's folder is taken for, and what is said of one that exllamav2 cannot load."""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from workers.engines.exllamav2.directory import ARCHITECTURES, ModelDirectory, tensor_shapes
from workers.engines.exllamav2.errors import LoadError


def write_directory(
    folder: Path,
    *,
    tensors: Sequence[str] = ("model.embed_tokens.weight",),
    files: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A folder that looks like a model's. `files`: more files, JSON unless they are strings; None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {name: {"dtype": "F16", "shape": [7, 2], "data_offsets": [0, 28]} for name in tensors}
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(28))
    written: dict[str, Any] = {
        "config.json": {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, **config},
        "tokenizer.json": {"model": {}},
        **(files or {}),
    }
    for name, content in written.items():
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("made", "description"),
    [
        ({}, "fp16"),
        ({"quantization_config": {"quant_method": "exl2", "bits": 4.65}}, "exl2 4.65 bpw"),
        ({"tensors": ["model.layers.0.mlp.up_proj.q_weight"]}, "exl2"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"tensors": ["a.qweight", "a.qzeros", "a.scales"]}, "gptq"),
    ],
)
def test_what_a_folder_holds(made: dict[str, Any], description: str, tmp_path: Path) -> None:
    assert ModelDirectory(write_directory(tmp_path, **made)).description == description


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*does not know.*LlamaForCausalLM"),
        ({"architectures": ["A", "B"]}, "exactly one architecture"),
        ({"architectures": None}, "exactly one architecture"),
        ({"quantization_config": {"quant_method": "exl3"}}, "EXL3.*ExLlamaV3"),
        ({"tensors": ["model.layers.0.mlp.up_proj.trellis"]}, "EXL3"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "GPTQ with 8 bits.*4 bits only"),
        ({"files": {"tokenizer.json": None, "tokenizer.model": "x"}}, "SentencePiece.*tokenizer.json"),
        ({"files": {"tokenizer.json": None}}, "has no tokenizer.json"),
        ({"files": {"config.json": "{"}}, "config.json is not valid JSON"),
        ({"files": {"config.json": "[]"}}, "must hold a JSON object"),
        (
            {"files": {"model.safetensors": "version https://git-lfs.github.com/spec/v1"}},
            "damaged or not fully downloaded",
        ),
        ({"files": {"model.safetensors": ""}}, "damaged or not fully downloaded"),
    ],
)
def test_what_exllamav2_cannot_load_is_refused(made: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = write_directory(tmp_path, **made)
    with pytest.raises(LoadError, match=says):
        ModelDirectory(folder)


def test_paths_that_are_no_model_folder(tmp_path: Path) -> None:
    gguf = tmp_path / "model.bin"
    gguf.write_bytes(b"GGUF\x03\x00\x00\x00")
    folder = tmp_path / "ggufs"
    folder.mkdir()
    (folder / "a.gguf").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    weights = tmp_path / "bins"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    (weights / "pytorch_model.bin").touch()
    note = tmp_path / "note.txt"
    note.write_text("hello")
    for path, says in [
        (gguf, "--engine llamacpp"),
        (tmp_path / "absent.gguf", "--engine llamacpp"),
        (folder, "--engine llamacpp"),
        (empty, "no config.json"),
        (weights, r"no \*.safetensors file.*pytorch_model.bin"),
        (note, "is a file; name the folder"),
        (tmp_path / "absent", "There is no model at .*--model DIR"),
    ]:
        with pytest.raises(LoadError, match=says):
            ModelDirectory(path)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 2]}, (7, 2)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, {}, ()),
    ],
)
def test_end_ids_of_both_files(config: Any, generation: Any, ends: tuple[int, ...], tmp_path: Path) -> None:
    folder = write_directory(tmp_path, eos_token_id=config, files={"generation_config.json": generation})
    assert ModelDirectory(folder).end_ids == ends


def test_the_values_of_a_model_that_also_sees_are_in_its_text_config(tmp_path: Path) -> None:
    text = {"vocab_size": 99, "eos_token_id": 3, "bos_token_id": 1}
    folder = write_directory(
        tmp_path, architectures=["Gemma3ForConditionalGeneration"], vocab_size=None, text_config=text
    )
    directory = ModelDirectory(folder)
    assert (directory.vocab_size, directory.end_ids, directory.bos_id) == (99, (3,), 1)


def test_rows_of_the_embedding_where_no_file_says_how_many(tmp_path: Path) -> None:
    assert ModelDirectory(write_directory(tmp_path, vocab_size=None)).vocab_size == 7


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.jinja": "jinja", "tokenizer_config.json": {"chat_template": "config"}}, "jinja"),
        ({"chat_template.json": {"chat_template": "json"}, "tokenizer_config.json": {"chat_template": "c"}}, "json"),
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "r"}]}}, "r"),
        ({}, None),
    ],
)
def test_the_chat_template(files: dict[str, Any], template: str | None, tmp_path: Path) -> None:
    assert ModelDirectory(write_directory(tmp_path, files=files)).chat_template == template


def test_the_identity_follows_every_file_that_changes_the_answers(tmp_path: Path) -> None:
    folder = write_directory(tmp_path, files={"tokenizer_config.json": {}, "generation_config.json": {}})
    seen = {ModelDirectory(folder).identity()}
    assert ModelDirectory(folder).identity() in seen
    weights = folder / "model.safetensors"
    for change in (
        lambda: weights.write_bytes(weights.read_bytes()[:-1] + b"\x01"),
        lambda: (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}'),
        lambda: (folder / "generation_config.json").write_text('{"eos_token_id": 1}'),
        lambda: (folder / "chat_template.jinja").write_text("x"),
        lambda: (folder / "tokenizer.json").write_text('{"model": {"a": 1}}'),
    ):
        change()
        found = ModelDirectory(folder).identity()
        assert found not in seen
        seen.add(found)


def test_a_header_that_claims_to_be_endless(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(LoadError, match="damaged"):
        tensor_shapes(file)


def test_the_architectures_are_those_of_the_package() -> None:
    spec = importlib.util.find_spec("exllamav2")
    if spec is None or spec.origin is None:
        pytest.skip("exllamav2 is not installed")
    source = (Path(spec.origin).parent / "architecture.py").read_text(encoding="utf-8")
    known = re.findall(r'"(\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration))"', source)
    assert set(known) == ARCHITECTURES
