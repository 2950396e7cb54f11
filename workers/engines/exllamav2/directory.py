"""A model's folder as it lies on the disk: what kind of model it is, and what its small files say.

It looks into headers and JSON only. Knows nothing of the package, of tokens and of GPUs.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from workers.engines.exllamav2.errors import LoadError

Kind = Literal["exl2", "gptq", "fp16"]

#: Architectures of exllamav2 0.3.2 (exllamav2/architecture.py). It loads any other as if it were Llama, which ends
#: in an error about tensors or in nonsense.
ARCHITECTURES = frozenset(
    (
        *("Cohere2ForCausalLM", "CohereForCausalLM", "DbrxForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM"),
        *("Gemma2ForCausalLM", "Gemma3ForConditionalGeneration", "GemmaForCausalLM", "GemmoeForCausalLM"),
        *("Glm4ForCausalLM", "GraniteForCausalLM", "IndexForCausalLM", "InternLM2ForCausalLM", "LlamaForCausalLM"),
        *("LlavaForConditionalGeneration", "MiniCPMForCausalLM", "Mistral3ForConditionalGeneration"),
        *("MistralForCausalLM", "MixtralForCausalLM", "OrionForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM"),
        *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM"),
        *("Qwen3MoeForCausalLM", "Starcoder2ForCausalLM", "YiForCausalLM"),
    )
)
#: Bytes of a file's head, and of each sample of the rest, that tell one file from another.
_HEAD, _SAMPLE, _SAMPLES = 1 << 20, 1 << 16, 16
#: A safetensors header longer than this is no header.
_MOST_HEADER = 1 << 28
#: How the embedding is called.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
#: Small files that change what the model says.
_SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)


class ModelDirectory:
    """`path`: the folder, checked. `kind`: how the weights are stored; `bits` per weight where the folder says.

    `end_ids`: ids that end a text, as the configuration files name them, in their order. Raises LoadError for a
    folder that exllamav2 0.3.2 cannot load.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_path(path)
        self.config = _object(path / "config.json")
        self.tokenizer_config = _object(path / "tokenizer_config.json", optional=True)
        self._generation_config = _object(path / "generation_config.json", optional=True)
        self.weights = sorted(path.glob("*.safetensors"))
        if not self.weights:
            others = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
            instead = f" It holds {', '.join(others[:3])}, which this engine does not read." if others else ""
            raise LoadError(f"{path} holds no *.safetensors file.{instead}")
        self.kind, self.bits = self._kind()
        self.architecture = self._architecture()
        self.tokenizer_path = path / "tokenizer.json"
        if not self.tokenizer_path.is_file():
            if (path / "tokenizer.model").is_file():
                raise LoadError(
                    f"{path} has a SentencePiece tokenizer.model only, and exllamav2 0.3.2 reads tokenizer.json: load the "
                    "tokenizer once with transformers' AutoTokenizer and save it into the folder."
                )
            raise LoadError(f"{path} has no tokenizer.json.")

    @property
    def description(self) -> str:
        """`exl2 4.0 bpw`, `gptq`, `fp16`."""
        return f"{self.kind} {self.bits} bpw" if self.kind == "exl2" and self.bits is not None else self.kind

    @property
    def vocab_size(self) -> int | None:
        """Rows of the output layer: what config.json says, else those of the embedding; None if neither tells."""
        said = _whole(self._text_config("vocab_size"))
        found = (shape[0] for name, shape in self.tensors().items() if name.endswith(_EMBEDDINGS) and shape)
        return said if said is not None else next(found, None)

    @property
    def end_ids(self) -> tuple[int, ...]:
        named = (self._generation_config.get("eos_token_id"), self._text_config("eos_token_id"))
        return tuple(dict.fromkeys(token for value in named for token in _ids(value)))

    @property
    def bos_id(self) -> int | None:
        return _whole(self._text_config("bos_token_id"))

    @property
    def pad_id(self) -> int | None:
        return _whole(self._text_config("pad_token_id"))

    @property
    def chat_template(self) -> str | None:
        """The template for chats, if there is one; of several named ones the `default`."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return _text(file)
        for place in (_object(self.path / "chat_template.json", optional=True), self.tokenizer_config):
            if (found := _template(place.get("chat_template"))) is not None:
                return found
        return None

    def identity(self) -> str:
        """A digest that tells this model from others without reading it whole: of each weights file its size, head and
        samples of the rest; configuration and tokenizer whole."""
        return _identity([self.path / name for name in _SMALL_FILES], self.weights)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, from the headers. Raises LoadError for a file that is damaged."""
        return {name: shape for file in self.weights for name, shape in tensor_shapes(file).items()}

    def _text_config(self, key: str) -> Any:
        """A value of config.json; models that also see keep those of their text part in `text_config`."""
        text = self.config.get("text_config")
        value = self.config.get(key)
        return text.get(key) if value is None and isinstance(text, dict) else value

    def _architecture(self) -> str:
        named = self.config.get("architectures")
        if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
            raise LoadError(f"{self.path}/config.json must name exactly one architecture, not {named!r}.")
        if named[0] not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise LoadError(f"{self.path} is a {named[0]}, which exllamav2 0.3.2 does not know. It knows: {known}.")
        return named[0]

    def _kind(self) -> tuple[Kind, float | None]:
        quantization = self.config.get("quantization_config")
        quantization = quantization if isinstance(quantization, dict) else {}
        method = quantization.get("quant_method")
        bits = quantization.get("bits")
        bits = float(bits) if isinstance(bits, int | float) else None
        ends = {name.rpartition(".")[2] for name in self.tensors()}
        if method == "exl3" or "trellis" in ends:
            raise LoadError(
                f"{self.path} holds an EXL3 model, which needs ExLlamaV3; this engine runs EXL2, GPTQ and FP16."
            )
        if method == "awq":
            raise LoadError(f"{self.path} holds an AWQ model; this engine runs EXL2, GPTQ and FP16 models.")
        if method == "exl2" or "q_weight" in ends:
            return "exl2", bits
        if method == "gptq" or (method is None and {"qweight", "qzeros"} <= ends):
            if bits not in (None, 4.0):
                raise LoadError(f"{self.path} is GPTQ with {bits:g} bits; exllamav2 0.3.2 reads GPTQ with 4 bits only.")
            return "gptq", bits
        if method is not None:
            raise LoadError(f"{self.path} is quantised with {method}; this engine runs EXL2, GPTQ and FP16 models.")
        return "fp16", None


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors in a safetensors file, from its header. Raises LoadError."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length) if length <= _MOST_HEADER else b"")
            return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(f"{file} is damaged or not fully downloaded: it has no safetensors header.") from None


def adapter_identity(path: Path) -> str:
    """Likewise of a LoRA adapter's folder: the same wherever it lies, another one when it was trained further."""
    return _identity([path / "adapter_config.json"], sorted(path.glob("adapter_model.*")))


def _identity(small: Iterable[Path], large: Iterable[Path]) -> str:
    """Of small files, those that are there, everything; of large ones size, head and samples."""
    digest = hashlib.sha256()
    for file in small:
        if file.is_file():
            digest.update(f"{file.name}|{file.stat().st_size}|".encode())
            digest.update(file.read_bytes())
    for file in large:
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}|".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_HEAD))
            for number in range(_SAMPLES):
                opened.seek(max(0, size - _SAMPLE) * (number + 1) // _SAMPLES)
                digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


def _check_path(path: Path) -> None:
    if path.suffix.lower() == ".gguf" or (path.is_file() and path.open("rb").read(4) == b"GGUF"):
        raise LoadError(f"{path} is a GGUF model: run it with --engine llamacpp.")
    if path.is_file():
        raise LoadError(f"{path} is a file; name the folder that holds config.json and the *.safetensors files.")
    if not path.is_dir():
        raise LoadError(f"There is no model at {path}: name one with --model DIR.")
    if not (path / "config.json").is_file():
        if any(path.glob("*.gguf")):
            raise LoadError(f"{path} holds a GGUF model: run it with --engine llamacpp.")
        raise LoadError(f"{path} has no config.json: --model names a folder as downloaded from Hugging Face.")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise LoadError(f"{file} is not UTF-8.") from None


def _object(file: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in `file`; {} for an optional one that is not there. Raises LoadError."""
    if optional and not file.is_file():
        return {}
    try:
        found = json.loads(_text(file))
    except ValueError as error:
        raise LoadError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise LoadError(f"{file} must hold a JSON object.")
    return found


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ids(value: Any) -> list[int]:
    """Ids of a field that holds one or a list."""
    return [token for token in (value if isinstance(value, list) else [value]) if _whole(token) is not None]


def _template(value: Any) -> str | None:
    """A template, or the `default` (else the first) of several: `[{"name": ..., "template": ...}]`."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default", next(iter(named.values()), None))
    return value if isinstance(value, str) else None
