"""tokenizer.json made of a GGUF's vocabulary, and the proof that decides whether anybody may count with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.settings import Settings
from shared.tokenizer import JsonTokenizer
from tests.vocabularies import SPECIALS, VocabularyEngine, write_vocabulary
from workers import probe_corpus
from workers.engines.llamacpp.carried import find_carried_model
from workers.engines.llamacpp.gguf_head import read_head
from workers.engines.llamacpp.tokenizer_json import RULES
from workers.engines.scripted import ScriptedEngine
from workers.tokenizer_proof import prove

Open = Callable[[Path], VocabularyEngine]


@pytest.fixture
def opened() -> Iterator[Open]:
    engines: list[VocabularyEngine] = []

    def make(path: Path) -> VocabularyEngine:
        engines.append(VocabularyEngine(path))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def carried() -> Path:
    path = find_carried_model(Settings().cache_dir)
    if path is None:
        pytest.skip("the carried model is not in the cache")
    return path


def test_the_carried_model_has_a_proven_tokenizer(opened: Open) -> None:
    engine = opened(carried())
    proven = prove(engine, engine.card)  # type: ignore[arg-type]
    assert proven.tokenizer is not None and proven.card.tokenizer_sha is not None
    tokenizer = JsonTokenizer(proven.tokenizer, None)
    text = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
    assert tokenizer.encode(text) == engine.tokenize(text)
    assert tokenizer.encode(text)[0] == 1
    assert tokenizer.encode(text, parse_special=False) == engine.tokenize(text, parse_special=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.name(2) == "<|im_end|>"


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_every_kind_that_is_built_is_exact(pre: str, add_bos: bool, tmp_path: Path, opened: Open) -> None:
    """FB-034: with a BOS too, which comes once and never twice."""
    engine = opened(write_vocabulary(tmp_path / "v.gguf", pre, add_bos=add_bos))
    proven = prove(engine, engine.card)  # type: ignore[arg-type]
    assert proven.tokenizer is not None
    tokenizer = JsonTokenizer(proven.tokenizer, 0 if add_bos else None)
    first = [0] if add_bos else []
    assert tokenizer.encode("hi")[: len(first)] == first
    assert tokenizer.encode("<|start|>hi").count(0) == 1
    assert tokenizer.encode("hi", add_special=False).count(0) == 0


@pytest.mark.parametrize("pre", sorted(RULES))
def test_llama_cpp_knows_every_kind_by_that_name(pre: str, tmp_path: Path, opened: Open) -> None:
    engine = opened(write_vocabulary(tmp_path / "v.gguf", pre))
    assert prove(engine, engine.card).tokenizer is not None  # type: ignore[arg-type]


def test_bytes_that_are_no_token_vanish_alike(tmp_path: Path, opened: Open) -> None:
    engine = opened(write_vocabulary(tmp_path / "v.gguf", "smollm", without="ñóôĢ"))
    assert prove(engine, engine.card).tokenizer is not None  # type: ignore[arg-type]


def test_other_kinds_have_none(tmp_path: Path, opened: Open) -> None:
    engine = opened(write_vocabulary(tmp_path / "v.gguf", "tekken"))
    assert engine.tokenizer_json() is None
    proven = prove(engine, engine.card)  # type: ignore[arg-type]
    assert (proven.tokenizer, proven.card) == (None, engine.card)


def test_one_difference_and_there_is_none(tmp_path: Path, opened: Open) -> None:
    """Each of these tokenises plain English alike; the corpus tells them apart, and one line says so."""
    engine = opened(write_vocabulary(tmp_path / "v.gguf", "llama-bpe"))
    honest = engine.tokenizer_json()
    assert honest is not None
    wrong = [
        opened(write_vocabulary(tmp_path / "w.gguf", "qwen2")).tokenizer_json(),
        honest.replace('"content":"</think>","single_word":false', '"content":"</think>","single_word":true'),
        honest.replace('"special":true', '"special":false'),
        honest.replace(r"|\\s+(?!\\S)", ""),
        "{}",
    ]
    for offer in wrong:
        assert offer != honest
        engine.offer = lambda offer=offer: offer  # type: ignore[misc]
        with capture_logs() as logs:
            proven = prove(engine, engine.card)  # type: ignore[arg-type]
        assert (proven.tokenizer, proven.card.tokenizer_sha) == (None, None)
        assert [line["event"] for line in logs if line.get("model") == engine.card.id] == ["no_tokenizer"]


def test_special_tokens_that_overlap_are_noticed(tmp_path: Path, opened: Open) -> None:
    """llama.cpp looks for the longest first, tokenizer.json for the leftmost: no corpus of plain texts would tell."""
    engine = opened(write_vocabulary(tmp_path / "v.gguf", "qwen2", specials=(*SPECIALS, "<a><b>", "<b><c><d>")))
    assert engine.tokenizer_json() is not None
    assert prove(engine, engine.card).tokenizer is None  # type: ignore[arg-type]


def test_the_scripted_engine_has_one() -> None:
    engine = ScriptedEngine()
    proven = prove(engine, engine.card)
    assert proven.tokenizer is not None
    tokenizer = JsonTokenizer(proven.tokenizer, None)
    assert tokenizer.encode("é<|300|>") == [0xC3, 0xA9, 300] == engine.tokenize("é<|300|>")
    assert tokenizer.encode("<|300|>", parse_special=False) == list(b"<|300|>")
    assert tokenizer.decode([300, 512, 65_535, 65]) == "<|300|><512><65535>A"


def test_the_corpus_is_the_same_each_time_and_of_some_size() -> None:
    began = time.process_time()
    texts = probe_corpus.texts(SPECIALS)
    assert texts == probe_corpus.texts(SPECIALS) and 300 < len(set(texts)) < 3000
    assert time.process_time() - began < 1
    assert all(any(special in text for text in texts) for special in SPECIALS)


def test_a_head_is_read_without_the_rest(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", "qwen2", add_bos=True)
    head = read_head(path, ("tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.add_bos_token", "absent"))
    assert (head["tokenizer.ggml.pre"], head["tokenizer.ggml.add_bos_token"]) == ("qwen2", True)
    assert head["tokenizer.ggml.tokens"][0] == SPECIALS[0] and "absent" not in head
    whole = path.read_bytes()
    for size in (3, 30, 200, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises((ValueError, OSError)):
            read_head(path, ("tokenizer.ggml.merges", "absent"))
