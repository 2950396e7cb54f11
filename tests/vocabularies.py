"""GGUF files that hold a vocabulary and no weights, and the engine's half of a tokenizer on top of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

from shared.cards import ModelCard
from workers.engines.llamacpp.binding import Library
from workers.engines.llamacpp.model import Model

SPECIALS = ("<|start|>", "<|end|>", "<|fim|>")
USER_DEFINED = ("<think>", "</think>")
CONTROL_TYPE, USER_TYPE, NORMAL_TYPE = 3, 4, 1
_TEXT = (
    "The quick brown fox jumps over the lazy dog, doesn't it? I'm sure they'll say we've seen 12345 of them in 2024.\n",
    "def square(x):\n    return x ** 2  # don't\n\n\nfor i in range(100):\n\tprint(square(i))\n",
    "Größe und Länge, naïve cafés; Привет, мир! 你好，世界！ こんにちは 안녕하세요 مرحبا नमस्ते 😀👩‍👩‍👧 \n",
    "x12y34z56#123#456#789#1234#12345-2024-12-34-67-890(1)(12)(123)(1234) don't we'll it's he's IT'S x's\n  \n\n\t\n",
    "WE'LL DON'T I'M THEY'RE   spaces    and\t\ttabs  \n \n  end...!!! ---- 1,000.50 €5 ==> {\"a\": [1, 2]}\n",
)


def write_vocabulary(
    path: Path, pre: str, *, without: Sequence[str] = (), specials: Sequence[str] = SPECIALS, add_bos: bool = False
) -> Path:
    """A byte-level BPE vocabulary trained on the spot. `without`: byte characters that are no token."""
    model = _trained()
    lost = set("".join(without))
    words = [word for word, _ in sorted(model["vocab"].items(), key=lambda item: item[1]) if not lost & set(word)]
    merges = [" ".join(pair) for pair in model["merges"] if not lost & set("".join(pair))]
    tokens = [*specials, *USER_DEFINED, *words]
    types = [CONTROL_TYPE] * len(specials) + [USER_TYPE] * len(USER_DEFINED) + [NORMAL_TYPE] * len(words)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def _trained() -> Any:
    """The model of a tokenizer.json."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        _TEXT * 3,
        trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=ByteLevel.alphabet(), show_progress=False, special_tokens=[]
        ),
    )
    return json.loads(trained.to_str())["model"]


class _VocabularyOnly:
    """llama.cpp's functions, whose default is to load no weights."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def llama_model_default_params(self) -> Any:
        params = self._lib.llama_model_default_params()
        params.vocab_only = True
        return params


class VocabularyEngine:
    """As much of an engine as the proof asks for, by llama.cpp itself."""

    def __init__(self, path: Path) -> None:
        self._library = Library(None)
        self._library.lib = _VocabularyOnly(self._library.lib)
        self.model = Model(self._library, path, lambda part: None)
        #: In place of the model's own offer.
        self.offer: Callable[[], str | None] = self.model.tokenizer_json

    @property
    def card(self) -> ModelCard:
        model = self.model
        return ModelCard(
            id="v", engine="llamacpp", context=512, vocab_size=model.vocab_size, lanes=1, fingerprint="f",
            add_bos=model.add_bos, bos_id=model.bos_id, end_ids=model.end_ids, eos_id=model.eos_id,
        )  # fmt: skip

    def tokenizer_json(self) -> str | None:
        return self.offer()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return self.model.detokenize(tokens)

    def close(self) -> None:
        self.model.close()
        self._library.close()
