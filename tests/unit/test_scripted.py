"""The scripted engine: a prompt says what comes out, and exactly that comes out, when it should."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InternalError, InvalidRequest
from shared.sampling import SamplingParams
from workers.engines.base import EngineDied, EngineRequest, Event, Failed, Finished, PromptLogprobs, Started, Token
from workers.engines.script import END_ID, VOCAB_SIZE, highest_preferred
from workers.engines.scripted import ScriptedEngine
from workers.generation.choice import ChoiceState
from workers.generation.stops import StopStrings


class FakeTime:
    """A clock that only sleeping moves, and every sleep it saw (s)."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def request(
    engine: ScriptedEngine, script: str | dict[str, Any], name: str = "r", max_new: int = 100, **fields: Any
) -> EngineRequest:
    prompt = engine.tokenize(script if isinstance(script, str) else json.dumps(script))
    return EngineRequest(name, prompt, max_new, **{"seed": 1, **fields})


def run(script: str | dict[str, Any], engine: ScriptedEngine | None = None, **fields: Any) -> list[Event]:
    """The events of one request."""
    engine = engine or ScriptedEngine()
    engine.add(request(engine, script, **fields))
    events: list[Event] = []
    deadline = time.monotonic() + 20
    while not events or not isinstance(events[-1], Finished | Failed):
        assert time.monotonic() < deadline
        events += engine.step()
    return events


def pieces(events: Sequence[Event]) -> list[bytes]:
    return [event.piece for event in events if isinstance(event, Token) and not event.end]


def ids(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, Token)]


def complete(script: str | dict[str, Any], stop: Sequence[str] = (), max_new: int = 100) -> tuple[str, str, int]:
    """(text, finish reason, completion tokens), as a client would see them."""
    choice = ChoiceState(stops=StopStrings(stop), max_new=max_new, end_ids=(END_ID,))
    text = ""
    for event in run(script, max_new=max_new):
        if isinstance(event, Token):
            text += choice.feed(event.token, event.piece).text
        elif isinstance(event, Finished):
            text += choice.finish(event.reason).text
    assert choice.finished is not None
    return text, choice.finished.reason, choice.ids


# What a script says


def test_ten_pieces_are_eleven_tokens_and_a_stop() -> None:
    script = {"pieces": [str(n) for n in range(10)]}
    assert complete(script) == ("0123456789", "stop", 11)
    assert complete(script, max_new=11) == ("0123456789", "stop", 11)
    assert complete(script, max_new=10) == ("0123456789", "length", 10)


def test_a_piece_is_a_token_with_its_own_id() -> None:
    events = run({"pieces": ["a", {"hex": "f09f"}, "long piece"], "hex": ["8c 8d", ""], "repeat": 2})
    assert pieces(events) == [b"a", b"\xf0\x9f", b"long piece", b"\x8c\x8d", b""] * 2
    assert ids(events) == [512, 513, 514, 515, 516] * 2 + [257]
    assert events[-2:] == [Token("r", 257, b"<|257|>", None, True), Finished("r", "stop")]


@pytest.mark.parametrize("ending", [{"finish": "length"}, {"eos": False}])
def test_a_script_may_end_as_if_the_context_were_full(ending: dict[str, Any]) -> None:
    assert complete({"pieces": ["a", "b"], **ending}) == ("ab", "length", 2)
    assert run({"pieces": [], **ending}) == [Started("r"), Finished("r", "length")]


def test_no_pieces_are_an_end_token_alone() -> None:
    assert complete({"pieces": []}) == ("", "stop", 1)
    assert complete({"pieces": [], "repeat": 0}) == ("", "stop", 1)


@pytest.mark.parametrize(
    "prompt",
    [
        "one",
        "  two words\n",
        "\n\n leading",
        "na\u00efve \U0001f30d",
        "nul\0 nul",
        " \n",
        "[1, 2]",
        "12",
        '"pieces"',
        "null",
        '{"pieces": ["a"',
        '{"title": "no script"}',
        "{}",
        "[" * 20_000,
        '{"pieces": ' * 2000,
        '{"a": ' + "9" * 5000 + "}",
        "special <|300|> token",
    ],
    ids=lambda prompt: prompt[:12],
)
def test_any_other_prompt_is_echoed(prompt: str) -> None:
    events = run(prompt, max_new=5000)  # each word, and the end token
    assert b"".join(pieces(events)).decode() == prompt
    assert ids(events)[-1] == END_ID


def test_echo_is_word_by_word() -> None:
    assert pieces(run(" Hello  big\nworld ")) == [b" Hello", b"  big", b"\nworld", b" "]


def test_a_token_prompt_is_decoded_and_read() -> None:
    engine = ScriptedEngine()
    engine.add(EngineRequest("r", [0xFF, ord("a"), ord(" "), 300, 4711], 10, seed=1))
    assert pieces(engine.step() + engine.step()) == [b"\xffa", b" <|300|><4711>"]


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ('{"pieces": "abc"}', "pieces"),
        ('{"pieces": [1]}', "pieces[0]"),
        ('{"pieces": null}', "pieces"),
        ('{"pieces": [{"hex": "f"}]}', "hex"),
        ('{"pieces": [{"text": "a"}]}', "text"),
        ('{"hex": ["zz"]}', "hex"),
        ('{"pieces": ["a"], "repeat": -1}', "repeat"),
        ('{"pieces": ["a"], "repeat": 1.5}', "repeat"),
        ('{"pieces": ["a"], "repeat": true}', "repeat"),
        ('{"pieces": ["a"], "delay_ms": "5"}', "delay_ms"),
        ('{"pieces": ["a"], "delay_ms": -5}', "delay_ms"),
        ('{"pieces": ["a"], "error_after": "x"}', "error_after"),
        ('{"pieces": ["a"], "logprobs": [0.5]}', "logprobs"),
        ('{"pieces": ["a"], "finish": "eos"}', "finish"),
        ('{"pieces": ["a"], "delay": 5}', "delay"),
        ('{"choices": {}}', "choices"),
        ('{"choices": [1]}', "choices"),
        ('{"choices": [{"pieces": 1}]}', "pieces"),
        ('{"prefer_ids": [65600]}', "prefer_ids"),
        ('{"prefer": ["a"], "pieces": ["a"]}', "prefer"),
    ],
)
def test_a_malformed_script_fails_naming_the_prompt(script: str, what: str) -> None:
    engine = ScriptedEngine()
    engine.add(request(engine, "still here", "other"))
    events = run(script, engine)
    failed = [event for event in events if event.id == "r"]
    assert len(failed) == 1
    assert isinstance(failed[0], Failed)
    assert isinstance(failed[0].error, InvalidRequest)
    assert failed[0].error.param == "prompt"
    assert what in failed[0].error.message
    assert b"".join(pieces([*events, *engine.step(), *engine.step(), *engine.step()])) == b"still here"


def test_each_choice_has_its_own_script() -> None:
    script = {
        "pieces": ["rest"],
        "eos": False,
        "choices": [{"pieces": ["zero"]}, {"hex": ["31"], "eos": True}, {"eos": True}, {"prefer": ["p"]}],
    }
    assert pieces(run(script)) == [b"zero"]
    one = run(script, choice=1)
    assert (pieces(one), ids(one)[-1]) == ([b"1"], END_ID)
    assert ids(run(script, choice=2)) == [512, END_ID]
    assert pieces(run(script, choice=3, max_new=2)) == [b"p", b"p"]
    assert ids(run(script, choice=4)) == [512]


def test_pieces_ignore_what_would_bend_a_model() -> None:
    params = SamplingParams(min_tokens=50, ignore_eos=True, logit_bias={512: -100.0, END_ID: -100.0})
    assert ids(run({"pieces": ["a", "b"]}, params=params)) == [512, 513, END_ID]


def test_a_stop_token_id_among_the_pieces_ends_them() -> None:
    events = run({"pieces": ["a", "b", "c"]}, params=SamplingParams(stop_token_ids=(513,)))
    assert events[-2:] == [Token("r", 513, b"b", None, True), Finished("r", "stop", 513)]
    events = run({"pieces": ["a"]}, params=SamplingParams(stop_token_ids=(END_ID,)))
    assert events[-1] == Finished("r", "stop", None)


# Logprobs


def test_logprobs_are_those_of_the_script_by_position() -> None:
    events = run({"pieces": ["a", "b"], "repeat": 2, "logprobs": [-0.1, -2, -10.5]}, logprobs=3)
    assert [event.logprob for event in events if isinstance(event, Token)] == [
        (-0.1, [(512, -0.1), (0, -10.0), (1, -11.0)]),
        (-2.0, [(513, -2.0), (0, -10.0), (1, -11.0)]),
        (-10.5, [(0, -10.0), (512, -10.5), (1, -11.0)]),
        (-0.5, [(513, -0.5), (0, -10.0), (1, -11.0)]),
        (-0.5, [(257, -0.5), (0, -10.0), (1, -11.0)]),
    ]


def test_prompt_logprobs() -> None:
    events = run("a\1b", prompt_logprobs=2, max_new=0)
    expected = [None, (-0.5, [(1, -0.5), (0, -10.0)]), (-0.5, [(98, -0.5), (0, -10.0)])]
    assert events == [Started("r"), PromptLogprobs("r", 0, expected), Finished("r", "length")]


# Time


def timed(engine: ScriptedEngine, fake: FakeTime, names: Sequence[str]) -> dict[str, list[float]]:
    """Milliseconds since the first step at which each request's tokens came."""
    began, times = fake.now, {name: list[float]() for name in names}
    open_names = set(names)
    while open_names:
        for event in engine.step():
            if isinstance(event, Token):
                times[event.id].append(round((fake.now - began) * 1000, 3))
            elif isinstance(event, Finished | Failed):
                open_names.discard(event.id)
    return times


def test_delays_come_before_each_piece() -> None:
    fake = FakeTime()
    engine = ScriptedEngine(clock=fake.clock, sleep=fake.sleep)
    engine.add(request(engine, {"pieces": ["a", "b", "c"], "delay_ms": 50, "start_delay_ms": 100}))
    assert timed(engine, fake, ["r"]) == {"r": [150, 200, 250, 250]}
    assert max(fake.sleeps) <= 0.02


def test_lanes_keep_their_own_time() -> None:
    fake = FakeTime()
    engine = ScriptedEngine(clock=fake.clock, sleep=fake.sleep)
    engine.add(request(engine, {"pieces": ["a"] * 3, "delay_ms": 30, "eos": False}, "slow"))
    engine.add(request(engine, {"pieces": ["a"] * 4, "delay_ms": 12.5, "eos": False}, "quick"))
    engine.add(request(engine, {"pieces": ["a"] * 3, "eos": False}, "at once"))
    assert timed(engine, fake, ["slow", "quick", "at once"]) == {
        "slow": [30, 60, 90],
        "quick": [12.5, 25, 37.5, 50],
        "at once": [0, 0, 0],
    }


def test_time_slept_through_is_not_caught_up_with() -> None:
    fake = FakeTime()
    engine = ScriptedEngine(clock=fake.clock, sleep=fake.sleep)
    engine.add(request(engine, {"pieces": ["a"] * 4, "delay_ms": 10, "eos": False}))
    assert engine.step() == [Started("r")]
    fake.now += 1.0
    assert timed(engine, fake, ["r"])["r"] == [0, 0, 10, 20]


def test_a_resume_keeps_the_delay_but_not_the_start_delay() -> None:
    fake = FakeTime()
    engine = ScriptedEngine(clock=fake.clock, sleep=fake.sleep)
    script = {"pieces": ["a", "b", "c"], "delay_ms": 50, "start_delay_ms": 1000}
    engine.add(request(engine, script, generated=[512]))
    assert timed(engine, fake, ["r"]) == {"r": [50, 100, 100]}


# Faults


@pytest.mark.parametrize("after", [0, 2, 3])
def test_error_after_fails_this_request_alone(after: int) -> None:
    engine = ScriptedEngine()
    engine.add(request(engine, {"pieces": ["x"] * 20}, "other"))
    events = run({"pieces": ["a", "b", "c"], "error_after": after}, engine)
    own = [event for event in events if event.id == "r"]
    assert pieces(own) == [b"a", b"b", b"c"][:after]
    assert isinstance(own[-1], Failed)
    assert isinstance(own[-1].error, InternalError)
    assert own[-1].error.status == 500
    assert engine.stats().running == 1
    engine.cancel("other")


def test_a_limit_before_the_fault_is_a_finish() -> None:
    assert run({"pieces": ["a", "b", "c"], "error_after": 2}, max_new=2)[-1] == Finished("r", "length")
    assert run({"pieces": ["a"], "error_after": 9})[-1] == Finished("r", "stop")


def test_fatal_after_ends_the_process_each_time_it_is_not_got_past() -> None:
    """The poison case: two tokens are out, and the attempt that goes on behind them dies at once."""
    fake, deaths = FakeTime(), list[float]()
    script = {"pieces": ["a", "b", "c"], "fatal_after": 2}
    engine = ScriptedEngine(clock=fake.clock, sleep=fake.sleep, die=lambda: deaths.append(fake.now))
    engine.add(request(engine, script))
    out: list[Event] = []
    with pytest.raises(EngineDied):
        for _ in range(100):
            out += engine.step()
    assert pieces(out) == [b"a", b"b"]
    assert deaths == [pytest.approx(100.1)], "what was sampled has time to be written"
    again = ScriptedEngine(clock=fake.clock, sleep=fake.sleep, die=lambda: deaths.append(fake.now))
    again.add(request(again, script, generated=[512, 513]))
    with pytest.raises(EngineDied):
        again.step()
    assert deaths[1] == deaths[0]


@pytest.mark.parametrize("fault", ["error_after", "fatal_after", "hang_after"])
def test_a_resume_beyond_the_fault_goes_on(fault: str) -> None:
    engine = ScriptedEngine(die=lambda: pytest.fail("died"))
    assert pieces(run({"pieces": ["a", "b", "c", "d"], fault: 2}, engine, generated=[512, 513, 514])) == [b"d"]


def test_fatal_after_is_a_real_death() -> None:
    code = (
        "from workers.engines.scripted import ScriptedEngine as E\nfrom workers.engines.base import EngineRequest as R\n"
        'e = E()\ne.add(R(\'r\', e.tokenize(\'{"pieces": ["a"], "fatal_after": 0}\'), 5, seed=1))\ne.step()'
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL


def test_hang_after_ends_no_step_until_the_engine_is_closed() -> None:
    engine = ScriptedEngine()
    engine.add(request(engine, {"pieces": ["a", "b", "c"], "hang_after": 2}))
    events: list[Event] = []
    out = threading.Event()

    def own() -> None:
        while len(pieces(events)) < 2:
            events.extend(engine.step())
        out.set()
        events.extend(engine.step())

    owner = threading.Thread(target=own, daemon=True)
    owner.start()
    assert out.wait(20)
    owner.join(0.2)
    assert owner.is_alive(), "the step came back"
    engine.close()
    owner.join(20)
    assert not owner.is_alive()
    assert pieces(events) == [b"a", b"b"]


# Preferred ids


def test_prefer_gives_the_same_token_without_end() -> None:
    assert pieces(run({"prefer": ["\n", " "]}, max_new=5)) == [b"\n"] * 5


def test_prefer_obeys_bias_and_bans() -> None:
    assert pieces(run({"prefer": ["\n", " "]}, max_new=2, params=SamplingParams(logit_bias={10: -100.0}))) == [b" "] * 2
    assert ids(run({"prefer": ["\n"]}, max_new=2, params=SamplingParams(logit_bias={10: -100.0}))) == [0, 0]
    events = run({"prefer_ids": [END_ID, 97]}, params=SamplingParams(min_tokens=3))
    assert ids(events) == [97, 97, 97, END_ID]
    assert events[-1] == Finished("r", "stop")
    events = run({"prefer_ids": [END_ID, 97]}, max_new=4, params=SamplingParams(ignore_eos=True))
    assert ids(events) == [97] * 4
    assert ids(run({"prefer_ids": [300, 97]}, params=SamplingParams(stop_token_ids=(300,), min_tokens=1))) == [97, 300]


def mask_of(*allowed: int) -> npt.NDArray[np.uint32]:
    bits = np.zeros(VOCAB_SIZE, np.bool_)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def test_prefer_obeys_a_mask() -> None:
    def best(allowed: bytes, *more: int, **params: Any) -> int:
        return highest_preferred([10, 32], SamplingParams(**params), 0, mask_of(*allowed, *more))[0]

    assert best(b' "}') == 32
    assert best(b'"}') == ord('"')
    with pytest.raises(InvalidRequest):
        best(b"")
    assert best(b"", END_ID, ignore_eos=True, min_tokens=5) == END_ID, "a text that is complete has to end"


def test_fb059_ids_beyond_the_vocabulary_are_never_sampled() -> None:
    assert pieces(run({"prefer_ids": [65_599, 65_536, 97]}, max_new=3)) == [b"a"] * 3
    assert ids(run({"prefer_ids": [65_599]}, max_new=2)) == [0, 0]
    assert highest_preferred([65_599, 97], SamplingParams(), 0, mask_of(*range(VOCAB_SIZE)))[0] == 97


# Tokens


def test_ids_and_what_they_print_as() -> None:
    engine = ScriptedEngine()
    assert engine.tokenize("é<|257|><|512|><|25|>") == [0xC3, 0xA9, 257, *b"<|512|><|25|>"]
    assert engine.tokenize("<|257|>", parse_special=False) == list(b"<|257|>")
    assert engine.detokenize([0, 255, 256, 511, 512, 65_535]) == b"\0\xff<|256|><|511|><512><65535>"
    with pytest.raises(InvalidRequest):
        engine.tokenize("\ud800")


def test_a_replay_finds_the_pieces_of_its_own_script() -> None:
    engine = ScriptedEngine()
    own = request(engine, {"pieces": ["a", {"hex": "f09f"}]})
    assert engine.pieces(own, [512, 513, 514, 257, 65]) == [b"a", b"\xf0\x9f", b"<514>", b"<|257|>", b"A"]
    assert engine.detokenize([512]) == b"<512>"


def test_the_card_says_what_it_can() -> None:
    engine = ScriptedEngine(lanes=7)
    progress: list[float] = []
    card = engine.load(lambda part, what: progress.append(part))
    assert (card.id, card.lanes, card.context, card.vocab_size) == ("scripted", 7, 32_768, 65_536)
    assert (card.constraints, card.end_ids, card.add_bos) == (False, (257,), False)
    assert progress == [1.0]


def test_in_chat_the_last_user_message_is_the_script() -> None:
    template = ImmutableSandboxedEnvironment().from_string(ScriptedEngine().card.chat_template or "")
    script = ' {"pieces": ["<a>"]}\n'
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": script},
        {"role": "assistant", "content": "no"},
    ]
    assert template.render(messages=messages, add_generation_prompt=True) == script


def test_an_id_that_is_running_cannot_come_again() -> None:
    engine = ScriptedEngine()
    engine.add(request(engine, "a"))
    with pytest.raises(InvalidRequest, match="already"):
        engine.add(request(engine, "a"))


def test_a_full_load_runs_at_tens_of_thousands_of_tokens_a_second() -> None:
    """The load generator must not be what is measured. About 400,000 a second on an idle core."""
    engine = ScriptedEngine(lanes=64)
    for n in range(64):
        engine.add(request(engine, {"pieces": ["Hello", " world"], "repeat": 0}, f"r{n}", max_new=500))
    began, count = time.monotonic(), 0
    while engine.stats().running + engine.stats().waiting:
        count += sum(isinstance(event, Token) for event in engine.step())
    assert count == 32_000
    assert count / (time.monotonic() - began) > 20_000


# Field cases, as a client would see them


def test_fb001_stop_strings() -> None:
    assert complete({"pieces": ["ABC", " DEF", "G", "HI", "J", "K"]}, ["DEFGHIJ"], 20) == ("ABC ", "stop", 5)
    assert complete({"pieces": ["ABC", " DEF", "G", "HI", "Z"]}, ["DEFGHIJ"], 20) == ("ABC DEFGHIZ", "stop", 6)


def test_fb003_characters_over_several_tokens() -> None:
    assert complete({"hex": ["f09f", "8c8d", "e4bd", "a0"]}) == ("🌍你", "stop", 5)


def test_fb024_finish_reasons() -> None:
    assert complete({"pieces": ["a"], "repeat": 0}, max_new=5) == ("aaaaa", "length", 5)
    assert complete({"pieces": ["a"] * 4}, max_new=5) == ("aaaa", "stop", 5)
    assert complete({"pieces": ["a", "b", "c", "STO", "P"]}, ["STOP"], 5) == ("abc", "stop", 5)
    assert complete({"pieces": ["a", "b", "c", "d", "STO"]}, ["STOP"], 5) == ("abcdSTO", "length", 5)


def test_fb032_a_held_tail_comes_out_with_the_end_token() -> None:
    assert complete({"pieces": ["almost", " </sto"]}, ["</stop>"]) == ("almost </sto", "stop", 3)


def test_fb033_the_cut_into_tokens_changes_nothing() -> None:
    assert complete({"pieces": ["Hel", "lo wor", "ld. Next"]}, ["world."])[0] == "Hello "
    for cuts in itertools.product((False, True), repeat=4):
        cut = [""]
        for char, new in zip("xabcy", (*cuts, False), strict=True):
            cut[-1] += char
            cut += [""] if new else []
        assert complete({"pieces": cut}, ["b", "abc"])[:2] == ("xa", "stop")


@pytest.mark.parametrize("first", [" Paris", "\n\n"])
def test_fb035_leading_whitespace_stays(first: str) -> None:
    assert complete({"pieces": [first, "x"]})[0] == first + "x"


@pytest.mark.parametrize("cut", range(9))
def test_a_worker_that_takes_over_goes_on_at_the_next_token(cut: int) -> None:
    """What the first worker sent and what the second one sends is the text of an undisturbed run."""
    script = {"hex": ["61", "f09f", "8c8d", "53", "54", "7a", "53544f", "50", "6d6f7265"]}
    whole = complete(script, ["STOP"])
    first = run(script)
    logged = ids(first)[:cut]
    engine = ScriptedEngine()
    resumed = request(engine, script, generated=logged)
    choice = ChoiceState(stops=StopStrings(["STOP"]), max_new=100, end_ids=(END_ID,))
    text = choice.replay(zip(logged, engine.pieces(resumed, logged), strict=True)).text
    for event in run(script, engine, generated=logged) if choice.finished is None else []:
        if isinstance(event, Token):
            text += choice.feed(event.token, event.piece).text
    assert (text, choice.finished and choice.finished.reason, choice.ids) == whole
