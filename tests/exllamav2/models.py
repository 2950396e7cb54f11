"""Model folders for tests of ExLlamaV2: tiny random Llamas in about a second, and SmolLM2-135M converted once.

A folder looks as one from Hugging Face: config, weights, a real tokenizer.json. The same arguments give the same bytes.
Needs torch; knows nothing of exllamav2 or of the harness.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HIDDEN, HEADS, KEY_VALUE_HEADS, INNER, LAYERS = 128, 4, 2, 256, 2
#: 32, since the quantised caches work on groups of 32.
HEAD_DIM = HIDDEN // HEADS
MAX_POSITIONS = 2048

BEGIN, END, PAD, TURN, TURN_END = "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: What the tokens are learned from: enough pairs for 512 tokens, several scripts.
CORPUS = (
    "Once upon a time there was a model that knew nothing. It read every word it was given and answered with noise.",
    "The queue holds the request until a worker takes it; the worker streams the tokens, and the client reads them.",
    "def answer(question: str) -> str:\n    return question.replace('why', 'because')\n",
    '{"name": "Ada", "age": 36, "tags": ["engine", "notes"], "nested": {"true": true, "none": null}}',
    "Größe, Öl und Straße; café, naïve, señor; привет мир; 你好，世界; こんにちは; emoji 🙂🚀.",
    "Numbers such as 1, 12, 123, 1234 and 3.14159 follow each other in the text, as do commas, dots and dashes.",
)
#: Another text, for a tokenizer with other tokens.
OTHER_CORPUS = tuple(text[::-1].upper() for text in CORPUS)

#: Matrices of a decoder layer -> (rows, columns).
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def write_tiny_llama(
    folder: Path,
    *,
    vocab: int = 512,
    rows: int | None = None,
    tokenizer: Literal["byte-level", "byte-fallback"] = "byte-level",
    corpus: Sequence[str] = CORPUS,
    max_positions: int = MAX_POSITIONS,
    eos: str | Sequence[str] = END,
    generation_eos: str | Sequence[str] | None = (END, TURN_END),
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos: bool = True,
    fim: bool = False,
    layers: int = LAYERS,
    seed: int = 0,
) -> Path:
    """Writes a random Llama into `folder` (made if need be) and returns it.

    `vocab`: tokens of the tokenizer; exllamav2 pads the logits to a multiple of 32, so 512 has no padding and 500 has 12.
    `rows`: of the embedding and the head, where a model has more than its tokenizer; None: as many as tokens.
    `eos`, `generation_eos`: token texts for `eos_token_id` of config.json and of generation_config.json (one or a list;
    None: no generation_config.json). `fim`: the tokenizer has the tokens of fill-in-the-middle.
    `byte-fallback`: pieces with `▁` and `<0x0A>`, as of SentencePiece; it needs a `vocab` of at least 400.
    """
    folder.mkdir(parents=True, exist_ok=True)
    specials = ["<unk>", BEGIN, END, PAD, TURN, TURN_END, *(FIM if fim else ())]
    make = _byte_level if tokenizer == "byte-level" else _byte_fallback
    made = make(vocab, specials, corpus)
    if made.get_vocab_size() != vocab:
        raise ValueError(f"the corpus gives {made.get_vocab_size()} tokens, not {vocab}")
    if add_bos:
        # as real Llamas have it: who asks this tokenizer for special tokens gets a second BOS
        made.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, made.token_to_id(BEGIN))]
        )
    made.save(str(folder / "tokenizer.json"))

    def ids(texts: str | Sequence[str]) -> int | list[int]:
        found = [made.token_to_id(text) for text in ([texts] if isinstance(texts, str) else texts)]
        return found[0] if isinstance(texts, str) else found

    _write_json(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=rows or vocab,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=max_positions,
        bos_token_id=ids(BEGIN),
        eos_token_id=ids(eos),
        pad_token_id=ids(PAD),
        hidden_act="silu",
        tie_word_embeddings=False,
        torch_dtype="float16",
    )
    if generation_eos is not None:
        _write_json(folder / "generation_config.json", bos_token_id=ids(BEGIN), eos_token_id=ids(generation_eos))
    _write_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        add_bos_token=add_bos,
        add_eos_token=False,
        bos_token=BEGIN,
        eos_token=eos if isinstance(eos, str) else eos[0],
        pad_token=PAD,
        unk_token="<unk>",
        model_max_length=max_positions,
        **({} if chat_template is None else {"chat_template": chat_template}),
    )
    _save(folder / "model.safetensors", _weights(rows or vocab, layers, seed))
    return folder


def write_draft_model(folder: Path, *, same_vocabulary: bool = True, seed: int = 1, **options: Any) -> Path:
    """A one-layer Llama to draft for `write_tiny_llama`'s, with its vocabulary or one of other tokens."""
    corpus = CORPUS if same_vocabulary else OTHER_CORPUS
    return write_tiny_llama(folder, layers=1, corpus=corpus, seed=seed, **options)


def write_lora(folder: Path, *, rank: int = 4, alpha: float = 16.0, layers: int = LAYERS, seed: int = 2) -> Path:
    """An adapter for `write_tiny_llama`'s model, in PEFT's layout, strong enough to change greedy text."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    targets = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    tensors = {}
    for layer in range(layers):
        for name in targets:
            outputs, inputs = MATRICES[name]
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = _normal(random, rank, inputs, scale=0.2)
            tensors[f"{key}.lora_B.weight"] = _normal(random, outputs, rank, scale=0.2)
    _save(folder / "adapter_model.safetensors", tensors)
    _write_json(
        folder / "adapter_config.json",
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path="tiny",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=False,
        target_modules=[name.rpartition(".")[2] for name in targets],
    )
    return folder


def write_smollm2(folder: Path, gguf_path: Path) -> Path:
    """SmolLM2-135M from its GGUF as a folder of 16-bit weights (270 MB, some ten seconds). Does nothing where it is whole.

    Two processes at once convert it once.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        from tests.conformance import gguf_to_hf

        print(f"Converting {gguf_path.name} to 16-bit weights in {folder}: some ten seconds, once", flush=True)
        making = folder.with_name(folder.name + ".part")
        shutil.rmtree(making, ignore_errors=True)
        gguf_to_hf.convert_to_half(gguf_path, making)
        making.rename(folder)
        print(f"Converted: {sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.0f} MB", flush=True)
    return folder


def _byte_level(vocab: int, specials: list[str], corpus: Sequence[str]) -> Tokenizer:
    """As of GPT-2 and Llama 3: the 256 bytes, then merges. The special tokens are the last ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


def _byte_fallback(vocab: int, specials: list[str], corpus: Sequence[str]) -> Tokenizer:
    """As of Llama 2: `<unk>`, BOS and EOS, the bytes as `<0x00>`, then pieces in which `▁` stands for a space."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    first = [*specials[:3], *(f"<0x{byte:02X}>" for byte in range(256))]
    last = specials[3:]
    # Rare letters and line ends become no pieces, so that they fall back to bytes. Chosen here: of letters that are
    # as frequent, the trainer's limit_alphabet keeps others each time.
    counts = Counter("".join(corpus))
    letters = {letter for letter in counts if counts[letter] >= 4 and letter != "\n"}
    texts = ["".join(letter if letter in letters else " " for letter in text) for text in corpus]
    trainer = trainers.BpeTrainer(vocab_size=vocab - len(first) - len(last), show_progress=False)
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    table = {text: number for number, text in enumerate([*first, *pieces])}
    merges = [(left, right) for left, right in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


def _weights(rows: int, layers: int, seed: int) -> dict[str, torch.Tensor]:
    """Scaled so that the logits have a clear first, and differ with every token before."""
    random = torch.Generator().manual_seed(seed)
    ones = torch.ones(HIDDEN, dtype=torch.half)
    tensors = {
        "model.embed_tokens.weight": _normal(random, rows, HIDDEN, scale=1.0),
        "lm_head.weight": _normal(random, rows, HIDDEN, scale=0.3),
        "model.norm.weight": ones,
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in MATRICES.items():
            tensors[f"{prefix}{name}.weight"] = _normal(random, *shape, scale=0.08)
        tensors[f"{prefix}input_layernorm.weight"] = ones.clone()
        tensors[f"{prefix}post_attention_layernorm.weight"] = ones.clone()
    return tensors


def _normal(random: torch.Generator, *shape: int, scale: float) -> torch.Tensor:
    return (torch.randn(*shape, generator=random) * scale).half()


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _write_json(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
