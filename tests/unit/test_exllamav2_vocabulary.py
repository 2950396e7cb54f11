"""Texts to ids and back with every kind of tokenizer.json that EXL2 models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from api.control_tokens import mark
from shared.cards import Fim, ModelCard
from shared.errors import InvalidRequest
from shared.jobs import Job
from shared.prompts import prompt_ids
from shared.tokenizer import JsonTokenizer
from tests.unit.test_exllamav2_directory import write_directory
from workers.engines.exllamav2.directory import ModelDirectory
from workers.engines.exllamav2.errors import LoadError
from workers.engines.exllamav2.vocabulary import Vocabulary
from workers.tokenizer_proof import prove

TEXTS = ("Größe und Länge; naïve 🙂", "the quick brown fox the fox", "def f(x):\n    return x\n")
ROUND = ("hello", " hello", "  two  spaces ", "Größe 🙂 漢字\n\ttab", "", "the fox<|end|>the")


def byte_level(*specials: str, template: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _finished(tokenizer, specials, template)


def sentencepiece(*specials: str, template: str | None = None) -> Tokenizer:
    """As Llama 2's: `▁` for a space, one before each text, and bytes for what is in no piece."""
    table = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefhlortuxéö"]
    merges = [("h", "e"), ("l", "l"), ("▁", "t"), ("▁t", "he"), ("▁", "he")]
    table += ["".join(pair) for pair in merges]
    vocabulary = {name: number for number, name in enumerate(table)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer, ("<unk>", "<s>", "</s>", *specials), template)


def _finished(tokenizer: Tokenizer, specials: tuple[str, ...], template: str | None) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    if template is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{template} $A", special_tokens=[(template, tokenizer.token_to_id(template))]
        )
    return tokenizer


def vocabulary(folder: Path, tokenizer: Tokenizer, files: dict[str, Any] | None = None, **config: Any) -> Vocabulary:
    rows = config.pop("vocab_size", tokenizer.get_vocab_size())
    files = {"tokenizer.json": tokenizer.to_str(), **(files or {})}
    return Vocabulary(ModelDirectory(write_directory(folder, vocab_size=rows, files=files, **config)))


class Half:
    """As much of an engine as the proof asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokenize, self.detokenize = vocabulary.tokenize, vocabulary.detokenize
        self.tokenizer_json = lambda: vocabulary.tokenizer_json
        self.card = ModelCard(
            id="m",
            engine="exllamav2",
            context=100,
            vocab_size=vocabulary.vocab_size,
            lanes=1,
            fingerprint="f",
            add_bos=vocabulary.add_bos,
            bos_id=vocabulary.bos_id,
        )


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_api_counts_as_the_engine_does(make: Any, bos: bool, tmp_path: Path) -> None:
    tokenizer = make("<s>", "<|end|>", "<｜fim▁hole｜>", template="<s>" if bos else None)
    half = Half(vocabulary(tmp_path, tokenizer, {"tokenizer_config.json": {"bos_token": "<s>"}}))
    proven = prove(half, half.card)  # type: ignore[arg-type]
    assert proven.card.tokenizer_sha is not None
    assert proven.card.add_bos == bos


@pytest.mark.parametrize("text", ROUND)
def test_a_byte_level_text_comes_back_as_it_was(text: str, tmp_path: Path) -> None:
    words = vocabulary(tmp_path, byte_level("<s>", "<|end|>"))
    for parse_special in (True, False):
        ids = words.tokenize(text, parse_special=parse_special)
        assert words.detokenize(ids) == text.encode()
        assert b"".join(words.pieces[token] for token in ids) == text.encode()


@pytest.mark.parametrize("text", ROUND)
def test_a_sentencepiece_text_comes_back_with_the_space_before_it(text: str, tmp_path: Path) -> None:
    # llama.cpp does the same; without it the pieces of an answer could not be joined to what stands before.
    words = vocabulary(tmp_path, sentencepiece("<|end|>"))
    ids = words.tokenize(text, parse_special=False)
    # The library gives a text without characters no space.
    assert words.detokenize(ids) == ((" " + text) if text else "").encode()
    assert JsonTokenizer(words.tokenizer_json, None).decode(ids).encode() == words.detokenize(ids)


def test_pieces_of_every_kind(tmp_path: Path) -> None:
    tokenizer = sentencepiece("▁<PRE>")
    tokenizer.add_tokens([AddedToken("▁▁▁", normalized=True)])  # Gemma's runs of spaces
    words = vocabulary(tmp_path / "a", tokenizer)
    names = words.names
    for name, piece in [
        ("▁", b" "), ("<0xE4>", b"\xe4"), ("▁the", b" the"), ("é", "é".encode()), ("<s>", b"<s>"), ("▁<PRE>", "▁<PRE>".encode()), ("▁▁▁", b"   "),
    ]:  # fmt: skip
        assert words.pieces[names[name]] == piece
    words = vocabulary(tmp_path / "b", byte_level("<s>"))
    for name, piece in [("Ġ", b" "), ("Ċ", b"\n"), ("Ã", b"\xc3"), ("<s>", b"<s>"), ("!", b"!")]:
        assert words.pieces[words.names[name]] == piece


def test_a_normalized_token_keeps_its_name(tmp_path: Path) -> None:
    # Older files of Llama 2 have such a BOS; the library's `id_to_token` puts a `▁` before it.
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens([AddedToken("<begin>", normalized=True)])
    words = vocabulary(tmp_path, tokenizer, {"tokenizer_config.json": {"bos_token": "<begin>"}})
    assert words.bos_id == tokenizer.token_to_id("<begin>")
    assert JsonTokenizer(words.tokenizer_json, None).name(words.bos_id) == "<begin>"


def test_bytes_that_are_no_character_are_shown_one_way_on_both_sides(tmp_path: Path) -> None:
    # The library alone shows U+FFFD for each byte of a run; the text of an answer has one for each broken character.
    words = vocabulary(tmp_path, sentencepiece())
    ids = [words.names[name] for name in ("<0xE4>", "<0xBD>", "<0xC3>", "<0xB6>", "he")]
    assert words.detokenize(ids).decode(errors="replace") == "\ufffdöhe"
    assert JsonTokenizer(words.tokenizer_json, None).decode(ids) == "\ufffdöhe"


def test_bos_goes_first_once_and_only_if_it_is_asked_for(tmp_path: Path) -> None:
    words = vocabulary(
        tmp_path, byte_level("<s>", template="<s>"), bos_token_id=None, files={"tokenizer_config.json": {}}
    )
    bos = words.bos_id
    assert bos is not None
    assert words.tokenize("a")[0] == bos
    assert words.tokenize("<s>a") == words.tokenize("a")
    assert bos not in words.tokenize("a", add_special=False)
    assert words.tokenize("<s>a", add_special=False)[0] == bos
    assert words.tokenize("<s>", add_special=False, parse_special=False) != [bos]


@pytest.mark.parametrize(
    ("template", "config", "adds"),
    [
        ("<s>", {}, True),
        (None, {}, False),
        (None, {"add_bos_token": True}, True),
        ("<s>", {"add_bos_token": False}, False),
        (None, {"tokenizer_class": "LlamaTokenizerFast"}, True),
        (None, {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": None}, False),
    ],
)
def test_who_says_whether_there_is_a_bos(
    template: str | None, config: dict[str, Any], adds: bool, tmp_path: Path
) -> None:
    files = {"tokenizer_config.json": {"bos_token": {"content": "<s>"}, **config}}
    assert vocabulary(tmp_path, byte_level("<s>", template=template), files).add_bos == adds


def test_a_model_without_a_bos_adds_none(tmp_path: Path) -> None:
    words = vocabulary(tmp_path, byte_level(), {"tokenizer_config.json": {"bos_token": None, "add_bos_token": True}})
    assert (words.bos_id, words.add_bos) == (None, False)


def test_ids_with_a_meaning(tmp_path: Path) -> None:
    tokenizer = byte_level("<s>", "</s>", "<pad>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer.add_tokens(["<think>"])
    ids = {name: tokenizer.token_to_id(name) for name in ("<s>", "</s>", "<pad>", "<|im_end|>", "<think>")}
    end = ids["<|im_end|>"]
    words = vocabulary(
        tmp_path,
        tokenizer,
        {
            "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"},
            "generation_config.json": {"eos_token_id": [end, 999_999]},
        },
    )
    assert (words.bos_id, words.eos_id, words.pad_id) == (ids["<s>"], ids["</s>"], ids["<pad>"])
    assert words.end_ids == tuple(sorted((ids["</s>"], end)))
    assert end in words.control_ids
    assert ids["<think>"] not in words.control_ids
    assert words.fim == Fim(*(tokenizer.token_to_id(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle")))


def test_a_longer_head_is_padding_and_a_shorter_one_is_the_limit(tmp_path: Path) -> None:
    tokenizer = byte_level("<s>", "<x>")
    count = tokenizer.get_vocab_size()
    assert vocabulary(tmp_path / "a", tokenizer, vocab_size=count + 30).vocab_size == count
    short = vocabulary(tmp_path / "b", tokenizer, vocab_size=count - 1)
    assert (short.vocab_size, len(short.pieces)) == (count - 1, count - 1)
    assert "<x>" not in short.names
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        short.detokenize([count - 1])
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        short.detokenize([-1])


def test_a_lone_surrogate_is_the_clients_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        vocabulary(tmp_path, byte_level()).tokenize("a\ud800")


@pytest.mark.parametrize("text", ["{", "{}", json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}})])
def test_a_file_that_is_no_tokenizer(text: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        Vocabulary(ModelDirectory(write_directory(tmp_path, files={"tokenizer.json": text})))


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_fb034_fb071_a_chat_has_the_templates_control_tokens_alone(make: Any, tmp_path: Path) -> None:
    """One BOS, the template's, whatever the tokenizer adds to a raw prompt; and what a message has of them is text, to the
    character."""
    words = vocabulary(
        tmp_path, make("<s>", "<|end|>", template="<s>"), {"tokenizer_config.json": {"bos_token": "<s>"}}
    )
    card = ModelCard(
        id="m", engine="exllamav2", context=100, vocab_size=words.vocab_size, lanes=1, fingerprint="f",
        add_bos=words.add_bos, bos_id=words.bos_id, control_ids=words.control_ids,
    ).with_special(words.pieces.__getitem__)  # fmt: skip
    assert card.add_bos and card.special[card.bos_id or 0] == "<s>"

    def ids(message: str) -> list[int]:
        marked = mark([message], card.control_texts)
        prompt, cuts = marked.cut(f"<s>{marked.value[0]}<|end|>")
        job = Job(id="j", model="m", prompts=[prompt], seed=1, created=0, kind="chat", add_special=False, cuts=cuts)
        job.check()
        return prompt_ids(
            prompt, job, bos_id=card.bos_id, encode=words.tokenize, decode=lambda i: words.detokenize(i).decode()
        ).all

    bos, end = words.names["<s>"], words.names["<|end|>"]
    for message in ("the fox", "the<|end|> fox", "<s>the", "the<s><|end|> <s", "<|end|><|end|>"):
        found = ids(message)
        assert (found[0], found[-1], found.count(bos), found.count(end)) == (bos, end, 1, 1)
        text = words.detokenize(found[1:-1]).decode()
        assert text.removeprefix(" ") == message, "but for the space that SentencePiece puts before a text"
