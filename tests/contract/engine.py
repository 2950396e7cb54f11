"""What every engine must do, whatever its model: the suite of the interface in `workers/engines/base.py`.

A `test_*.py` beside this file has a subclass of `EngineContract` and a module-wide fixture `engine_under_test`. Knows
nothing of any engine beyond the interface and the few hints of `EngineUnderTest`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest

from shared.cards import ModelCard
from shared.errors import ContextLengthExceeded, InvalidRequest, LogLost, StructuredOutputFailed
from shared.sampling import SamplingParams
from shared.structured import Constraint, of_choices, of_schema
from workers.engines.base import (
    Engine,
    EngineRequest,
    Event,
    Failed,
    Finished,
    Logprob,
    PromptLogprobs,
    Started,
    Token,
)
from workers.generation.constraint import Grammars
from workers.grammars import grammars_of

#: The longest a request of this suite may take, s: a hanging engine fails instead of blocking the run.
DEADLINE_S = 60.0
GREEDY = SamplingParams(temperature=0.0)
_VALUE = {"type": "integer", "minimum": 0, "maximum": 99}
#: Its texts are short.
TREE = of_schema(
    {
        "type": "object",
        "properties": {
            "v": _VALUE,
            "kids": {"type": "array", "items": {"type": "object", "properties": {"v": _VALUE}, "required": ["v"],
                     "additionalProperties": False}, "maxItems": 1},
        },
        "required": ["v", "kids"],
        "additionalProperties": False,
    }
)  # fmt: skip


@dataclass
class EngineUnderTest:
    """An engine and what the suite must know of its model.

    `make`: builds and loads one; the first serves all tests. `prompt`: runs at least 64 tokens before any end.
    `ending_prompt`: ends by itself within 64 tokens, given a logit bias of 100 on the first end id.
    `obedient_prompt`: its tokens obey bias, min_tokens and ignore_eos. `special`: a special token as written in
    text; None = the model has none. `failing_prompt`: taken in, then Failed; None = there is no such prompt.
    `repeats`: the same request gives the same tokens whatever runs beside it. `penalises`: its tokens obey penalties.
    `make_small`: builds and loads one whose memory for tokens is small; None = it needs none.
    """

    make: Callable[[], tuple[Engine, ModelCard]]
    prompt: str
    ending_prompt: str
    obedient_prompt: str
    special: str | None = None
    failing_prompt: str | None = None
    repeats: bool = True
    penalises: bool = True
    make_small: Callable[[], tuple[Engine, ModelCard]] | None = None
    engine: Engine = field(init=False)
    card: ModelCard = field(init=False)

    @cached_property
    def grammars(self) -> Grammars:
        return grammars_of(self.engine, self.card)

    @cached_property
    def blanks(self) -> list[int]:
        """Ids of white space."""
        pieces = ((token, self.engine.detokenize((token,))) for token in range(self.card.vocab_size))
        return [token for token, piece in pieces if piece and not piece.strip(b" \n")]

    def held_to(self, name: str, constraint: Constraint, **fields: object) -> EngineRequest:
        """A request whose tokens obey masks, with this one."""
        grammar = self.grammars.of(constraint)
        return self.request(name, text=self.obedient_prompt, grammar=grammar, **{"max_new": 400, **fields})  # type: ignore[arg-type]

    def request(self, name: str, *, text: str | None = None, max_new: int = 8, **fields: object) -> EngineRequest:
        """A greedy request, unless `fields` say otherwise."""
        prompt = self.engine.tokenize(self.prompt if text is None else text)
        return EngineRequest(name, prompt, max_new, **{"seed": 1, "params": GREEDY, **fields})  # type: ignore[arg-type]

    def run(self, *requests: EngineRequest) -> dict[str, list[Event]]:
        """Adds the requests and steps to the end of all; the events of each, in a checked order."""
        for request in requests:
            self.engine.add(request)
        events: dict[str, list[Event]] = {request.id: [] for request in requests}
        self.step_until(lambda: all(over(of) for of in events.values()), events)
        for of in events.values():
            check_order(of)
        return events

    def step_until(self, done: Callable[[], bool], events: dict[str, list[Event]]) -> None:
        """Steps until `done`, sorting the events by request; no event may be of any other one."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, f"no end after {DEADLINE_S:g} s: {events}"
            for event in self.engine.step():
                events[event.id].append(event)


@contextmanager
def loaded(under_test: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """Loads the engine for the tests of a module, and closes it."""
    under_test.engine, under_test.card = under_test.make()
    yield under_test
    under_test.engine.close()


def over(events: list[Event]) -> bool:
    return bool(events) and isinstance(events[-1], Finished | Failed)


def check_order(events: list[Event]) -> None:
    """Started, the prompt's logprobs without holes, the tokens, one last event; or Failed and no lane at all."""
    kinds = [type(event) for event in events]
    if kinds == [Failed]:
        return
    assert kinds[0] is Started
    assert kinds[-1] in (Finished, Failed)
    between = kinds[1:-1]
    prompt = between.count(PromptLogprobs)
    assert between == [PromptLogprobs] * prompt + [Token] * (len(between) - prompt)


def tokens(events: list[Event]) -> list[Token]:
    return [event for event in events if isinstance(event, Token)]


def text(events: list[Event]) -> bytes:
    return b"".join(token.piece for token in tokens(events) if not token.end)


def ids(events: list[Event]) -> list[int]:
    return [event.token for event in tokens(events)]


def finished(events: list[Event]) -> tuple[str, int | None]:
    last = events[-1]
    assert isinstance(last, Finished), last
    return last.reason, last.stop_token


def check_logprob(entry: Logprob, token: int, best: int, vocab_size: int) -> None:
    """The `best` most likely ids and the token itself, best first; its own number is the one that stands there."""
    own, top = entry
    assert math.isfinite(own)
    assert own <= 0
    assert dict(top)[token] == own
    assert len(dict(top)) == len(top) in (best, best + 1)
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    if len(top) == best + 1:
        assert top[-1][0] == token
    for other, value in top:
        assert 0 <= other < vocab_size
        assert math.isfinite(value)
        assert value <= 0


class EngineContract:
    """The tests. Each leaves the engine without requests."""

    @pytest.fixture(autouse=True)
    def _leaves_nothing_behind(self, engine_under_test: EngineUnderTest) -> Iterator[None]:
        yield
        engine = engine_under_test.engine
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)

    # Text and ids

    def test_card_is_complete(self, engine_under_test: EngineUnderTest) -> None:
        card = engine_under_test.card
        assert card.id
        assert card.engine
        assert card.fingerprint
        assert card.context > 0
        assert card.lanes > 0
        assert card.end_ids
        assert all(0 <= token < card.vocab_size for token in (*card.end_ids, *card.control_ids))
        if (special := engine_under_test.special) is not None:
            assert engine_under_test.engine.tokenize(special, add_special=False)[0] in card.control_ids

    @pytest.mark.parametrize(
        "text",
        ["Hello world", " Paris", "\n\n  two\n", "naïve 你好", "🌍👩\u200d🚀", "a\0b", "\ufffd", "x" * 300, "\t\r\n "],
        ids=["plain", "leading-space", "newlines", "scripts", "emoji", "nul", "replacement", "long", "blank"],
    )
    def test_text_to_ids_and_back(self, engine_under_test: EngineUnderTest, text: str) -> None:
        engine, card = engine_under_test.engine, engine_under_test.card
        found = engine.tokenize(text, add_special=False)
        assert all(0 <= token < card.vocab_size for token in found)
        assert engine.detokenize(found) == text.encode()

    def test_no_text_is_no_ids(self, engine_under_test: EngineUnderTest) -> None:
        assert engine_under_test.engine.tokenize("", add_special=False) == []
        assert engine_under_test.engine.detokenize([]) == b""

    def test_bos_comes_once_if_the_model_has_one(self, engine_under_test: EngineUnderTest) -> None:
        engine, card = engine_under_test.engine, engine_under_test.card
        plain = engine.tokenize("Hello", add_special=False)
        first = [card.bos_id] if card.add_bos else []
        assert engine.tokenize("Hello") == first + plain
        if card.add_bos and card.bos_id is not None:
            written = engine.detokenize([card.bos_id]).decode() + "Hello"
            assert engine.tokenize(written) == first + plain

    def test_special_tokens_are_parsed_only_when_asked(self, engine_under_test: EngineUnderTest) -> None:
        engine, special = engine_under_test.engine, engine_under_test.special
        if special is None:
            pytest.skip("the model has no special token that can be written")
        parsed = engine.tokenize(f"a{special}b", add_special=False)
        spelled = engine.tokenize(f"a{special}b", add_special=False, parse_special=False)
        assert len(engine.tokenize(special, add_special=False)) == 1
        assert set(engine.tokenize(special, add_special=False)) <= set(parsed)
        assert not set(engine.tokenize(special, add_special=False)) & set(spelled)
        assert engine.detokenize(parsed) == engine.detokenize(spelled) == f"a{special}b".encode()

    def test_ids_outside_the_vocabulary_have_no_text(self, engine_under_test: EngineUnderTest) -> None:
        for token in (-1, engine_under_test.card.vocab_size, 2**31):
            with pytest.raises(InvalidRequest):
                engine_under_test.engine.detokenize([token])

    # A request's life

    def test_events_come_in_order_with_one_last(self, engine_under_test: EngineUnderTest) -> None:
        events = engine_under_test.run(engine_under_test.request("r"))["r"]
        assert [type(event) for event in events] == [Started, *[Token] * 8, Finished]
        assert engine_under_test.engine.step() == []

    @pytest.mark.parametrize("max_new", [1, 2, 7, 40])
    def test_max_new_is_exact(self, engine_under_test: EngineUnderTest, max_new: int) -> None:
        events = engine_under_test.run(engine_under_test.request("r", max_new=max_new))["r"]
        assert len(tokens(events)) == max_new
        assert finished(events) == ("length", None)

    def test_tokens_are_ids_with_their_own_bytes(self, engine_under_test: EngineUnderTest) -> None:
        request = engine_under_test.request("r", max_new=16)
        found = tokens(engine_under_test.run(request)["r"])
        assert all(0 <= token.token < engine_under_test.card.vocab_size for token in found)
        assert not any(token.end for token in found)
        pieces = engine_under_test.engine.pieces(request, [token.token for token in found])
        assert pieces == [token.piece for token in found]

    def test_an_end_token_ends_and_counts(self, engine_under_test: EngineUnderTest) -> None:
        end_ids = engine_under_test.card.end_ids
        params = SamplingParams(temperature=0.0, logit_bias={end_ids[0]: 100.0})
        request = engine_under_test.request("r", text=engine_under_test.ending_prompt, max_new=64, params=params)
        events = engine_under_test.run(request)["r"]
        assert finished(events) == ("stop", None)
        assert tokens(events)[-1].token in end_ids
        assert [token.end for token in tokens(events)] == [False] * (len(tokens(events)) - 1) + [True]

    def test_an_end_token_as_the_last_allowed_is_a_stop(self, engine_under_test: EngineUnderTest) -> None:
        """FB-024: the limit and the end in one token."""
        params = SamplingParams(temperature=0.0, logit_bias={engine_under_test.card.end_ids[0]: 100.0})
        text = engine_under_test.ending_prompt
        count = len(
            tokens(engine_under_test.run(engine_under_test.request("a", text=text, max_new=64, params=params))["a"])
        )
        events = engine_under_test.run(engine_under_test.request("b", text=text, max_new=count, params=params))["b"]
        assert len(tokens(events)) == count
        assert finished(events) == ("stop", None)

    def test_a_stop_token_id_ends_and_is_named(self, engine_under_test: EngineUnderTest) -> None:
        found = ids(engine_under_test.run(engine_under_test.request("a", max_new=12))["a"])
        stop = next((token for i, token in enumerate(found) if i and token not in found[:i]), found[0])
        params = SamplingParams(temperature=0.0, stop_token_ids=(stop,))
        events = engine_under_test.run(engine_under_test.request("b", max_new=12, params=params))["b"]
        assert finished(events) == ("stop", stop)
        assert ids(events)[-1] == stop
        assert [token.end for token in tokens(events)] == [False] * (len(tokens(events)) - 1) + [True]

    def test_no_new_token_is_asked_for(self, engine_under_test: EngineUnderTest) -> None:
        events = engine_under_test.run(engine_under_test.request("r", max_new=0))["r"]
        assert tokens(events) == []
        assert finished(events) == ("length", None)

    def test_a_lone_id_is_a_prompt(self, engine_under_test: EngineUnderTest) -> None:
        prompt = engine_under_test.engine.tokenize("a", add_special=False)[:1]
        events = engine_under_test.run(EngineRequest("r", prompt, 1, seed=1, params=GREEDY))["r"]
        assert len(tokens(events)) == 1

    def test_the_context_may_be_filled_to_the_last_token(self, engine_under_test: EngineUnderTest) -> None:
        request = engine_under_test.request("r")
        room = engine_under_test.card.context - len(request.prompt)
        engine_under_test.engine.add(engine_under_test.request("full", max_new=room))
        engine_under_test.engine.cancel("full")
        with pytest.raises(ContextLengthExceeded):
            engine_under_test.engine.add(engine_under_test.request("over", max_new=room + 1))

    # Sampling fields

    def test_min_tokens_holds_the_end_back(self, engine_under_test: EngineUnderTest) -> None:
        end = engine_under_test.card.end_ids[0]
        params = SamplingParams(temperature=0.0, logit_bias={end: 100.0}, min_tokens=5)
        request = engine_under_test.request("r", text=engine_under_test.obedient_prompt, max_new=16, params=params)
        events = engine_under_test.run(request)["r"]
        assert len(tokens(events)) == 6
        assert ids(events)[-1] == end
        assert finished(events) == ("stop", None)

    def test_ignore_eos_runs_to_the_limit(self, engine_under_test: EngineUnderTest) -> None:
        bias = dict.fromkeys(engine_under_test.card.end_ids, 100.0)
        params = SamplingParams(temperature=0.0, logit_bias=bias, ignore_eos=True)
        request = engine_under_test.request("r", text=engine_under_test.obedient_prompt, params=params)
        events = engine_under_test.run(request)["r"]
        assert len(tokens(events)) == 8
        assert finished(events) == ("length", None)

    def test_bias_bans_and_forces(self, engine_under_test: EngineUnderTest) -> None:
        text = engine_under_test.obedient_prompt
        first = ids(engine_under_test.run(engine_under_test.request("a", text=text, max_new=1))["a"])[0]
        banned = SamplingParams(temperature=0.0, logit_bias={first: -100.0})
        other = ids(engine_under_test.run(engine_under_test.request("b", text=text, max_new=1, params=banned))["b"])[0]
        assert other != first
        wanted = engine_under_test.engine.tokenize("z", add_special=False)[-1]
        forced = SamplingParams(temperature=0.0, logit_bias={wanted: 100.0})
        events = engine_under_test.run(engine_under_test.request("c", text=text, max_new=3, params=forced))["c"]
        assert ids(events) == [wanted] * 3

    def test_additive_penalties_do_not_count_the_prompt(self, engine_under_test: EngineUnderTest) -> None:
        """A bias of 100 keeps a token ahead of all others, unless the 60 in the prompt cost it 2 each."""
        if not engine_under_test.penalises:
            pytest.skip("this engine's tokens obey no penalty")
        wanted = engine_under_test.engine.tokenize("z", add_special=False)[-1]
        params = SamplingParams(
            temperature=0.0, logit_bias={wanted: 100.0}, frequency_penalty=2.0, presence_penalty=2.0
        )
        events = engine_under_test.run(EngineRequest("r", [wanted] * 60, 8, seed=1, params=params))["r"]
        assert ids(events) == [wanted] * 8

    def test_additive_penalties_count_what_was_generated(self, engine_under_test: EngineUnderTest) -> None:
        if not engine_under_test.penalises:
            pytest.skip("this engine's tokens obey no penalty")
        wanted = engine_under_test.engine.tokenize("z", add_special=False)[-1]
        bias, penalty = {wanted: 40.0}, 2.0
        params = SamplingParams(temperature=0.0, logit_bias=bias, frequency_penalty=penalty)
        request = engine_under_test.request("r", text=engine_under_test.obedient_prompt, max_new=48, params=params)
        found = ids(engine_under_test.run(request)["r"])
        assert found[0] == wanted
        assert found.count(wanted) < len(found), "its lead of 40 is used up after some 20 of them"

    # Logprobs

    def test_no_logprobs_unless_asked(self, engine_under_test: EngineUnderTest) -> None:
        events = engine_under_test.run(engine_under_test.request("r"))["r"]
        assert all(token.logprob is None for token in tokens(events))
        assert not any(isinstance(event, PromptLogprobs) for event in events)

    @pytest.mark.parametrize("best", [0, 1, 5, 20])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_every_token_has_its_logprobs(
        self, engine_under_test: EngineUnderTest, best: int, temperature: float
    ) -> None:
        params = SamplingParams(temperature=temperature)
        events = engine_under_test.run(engine_under_test.request("r", logprobs=best, params=params))["r"]
        for token in tokens(events):
            assert token.logprob is not None
            check_logprob(token.logprob, token.token, best, engine_under_test.card.vocab_size)
            if best and temperature == 0.0:
                assert token.logprob[1][0][0] == token.token, "greedy takes the best"

    def test_an_end_token_has_logprobs(self, engine_under_test: EngineUnderTest) -> None:
        params = SamplingParams(temperature=0.0, logit_bias={engine_under_test.card.end_ids[0]: 100.0})
        text = engine_under_test.ending_prompt
        request = engine_under_test.request("r", text=text, max_new=64, params=params, logprobs=2)
        last = tokens(engine_under_test.run(request)["r"])[-1]
        assert last.end
        assert last.logprob is not None
        check_logprob(last.logprob, last.token, 2, engine_under_test.card.vocab_size)

    @pytest.mark.parametrize("max_new", [0, 3])
    @pytest.mark.parametrize("best", [0, 3])
    def test_prompt_logprobs_cover_the_prompt(
        self, engine_under_test: EngineUnderTest, best: int, max_new: int
    ) -> None:
        """FB-008, FB-009: also when nothing is generated; the first token has none."""
        request = engine_under_test.request("r", max_new=max_new, prompt_logprobs=best)
        events = engine_under_test.run(request)["r"]
        entries: list[Logprob | None] = []
        for event in events:
            if isinstance(event, PromptLogprobs):
                assert event.start == len(entries)
                entries += event.logprobs
        assert len(entries) == len(request.prompt)
        assert entries[0] is None
        for token, entry in zip(request.prompt[1:], entries[1:], strict=True):
            assert entry is not None
            check_logprob(entry, token, best, engine_under_test.card.vocab_size)
        assert len(tokens(events)) == max_new

    # Side by side

    def test_two_run_side_by_side(self, engine_under_test: EngineUnderTest) -> None:
        engine = engine_under_test.engine
        for name in ("a", "b"):
            engine.add(engine_under_test.request(name, max_new=24))
        events: dict[str, list[Event]] = {"a": [], "b": []}
        engine_under_test.step_until(lambda: all(tokens(of) for of in events.values()), events)
        assert not any(over(of) for of in events.values()), "one was over before the other had begun"
        assert engine.stats().running == 2
        engine_under_test.step_until(lambda: all(over(of) for of in events.values()), events)
        assert [len(tokens(of)) for of in events.values()] == [24, 24]

    def test_one_joins_while_another_runs(self, engine_under_test: EngineUnderTest) -> None:
        engine = engine_under_test.engine
        engine.add(engine_under_test.request("a", max_new=40))
        events: dict[str, list[Event]] = {"a": [], "b": []}
        engine_under_test.step_until(lambda: len(tokens(events["a"])) >= 3, events)
        engine.add(engine_under_test.request("b", max_new=4))
        engine_under_test.step_until(lambda: over(events["b"]), events)
        assert not over(events["a"])
        engine_under_test.step_until(lambda: over(events["a"]), events)
        assert [len(tokens(of)) for of in events.values()] == [40, 4]
        for of in events.values():
            check_order(of)

    def test_a_step_gives_a_request_one_token_at_most(self, engine_under_test: EngineUnderTest) -> None:
        engine = engine_under_test.engine
        engine.add(engine_under_test.request("a", max_new=12))
        engine.add(engine_under_test.request("b", max_new=12))
        deadline = time.monotonic() + DEADLINE_S
        open_requests = {"a", "b"}
        while open_requests and time.monotonic() < deadline:
            step = engine.step()
            for name in ("a", "b"):
                assert len([event for event in step if isinstance(event, Token) and event.id == name]) <= 1
            open_requests -= {event.id for event in step if isinstance(event, Finished | Failed)}
        assert not open_requests

    def test_neighbours_change_nothing(self, engine_under_test: EngineUnderTest) -> None:
        if not engine_under_test.repeats:
            pytest.skip("this engine's numbers depend on what runs beside")
        params = SamplingParams(temperature=1.0)
        alone = ids(engine_under_test.run(engine_under_test.request("x", max_new=12, params=params, seed=7))["x"])
        requests = [engine_under_test.request(str(n), max_new=12, params=params, seed=n) for n in (6, 7)]
        assert ids(engine_under_test.run(*requests)["7"]) == alone

    def test_a_hundred_over_eight_lanes(self, engine_under_test: EngineUnderTest) -> None:
        assert engine_under_test.card.lanes == 8
        requests = [engine_under_test.request(f"r{n}", max_new=1 + n % 3, seed=n) for n in range(100)]
        events = engine_under_test.run(*requests)
        assert [len(tokens(of)) for of in events.values()] == [request.max_new for request in requests]

    def test_more_than_there_are_lanes_all_finish(self, engine_under_test: EngineUnderTest) -> None:
        lanes = engine_under_test.card.lanes
        requests = [engine_under_test.request(f"r{n}", max_new=3) for n in range(2 * lanes + 1)]
        for request in requests:
            engine_under_test.engine.add(request)
        assert engine_under_test.engine.stats().waiting + engine_under_test.engine.stats().running == len(requests)
        events: dict[str, list[Event]] = {request.id: [] for request in requests}

        def all_over() -> bool:
            assert engine_under_test.engine.stats().running <= lanes
            return all(over(of) for of in events.values())

        engine_under_test.step_until(all_over, events)
        assert {len(tokens(of)) for of in events.values()} == {3}

    # Going on behind what an earlier attempt sampled

    @pytest.mark.parametrize("cut", [1, 5, 11])
    def test_a_resume_goes_on_behind_what_was_generated(self, engine_under_test: EngineUnderTest, cut: int) -> None:
        whole = ids(engine_under_test.run(engine_under_test.request("a", max_new=12))["a"])
        events = engine_under_test.run(engine_under_test.request("b", max_new=12, generated=whole[:cut]))["b"]
        assert len(tokens(events)) == 12 - cut
        assert finished(events) == ("length", None)
        if engine_under_test.repeats:
            assert ids(events) == whole[cut:]

    def test_a_resume_of_what_was_all_generated_only_finishes(self, engine_under_test: EngineUnderTest) -> None:
        whole = ids(engine_under_test.run(engine_under_test.request("a", max_new=4))["a"])
        events = engine_under_test.run(engine_under_test.request("b", max_new=4, generated=whole))["b"]
        assert tokens(events) == []
        assert finished(events) == ("length", None)

    def test_a_resume_counts_min_tokens_from_the_first(self, engine_under_test: EngineUnderTest) -> None:
        end = engine_under_test.card.end_ids[0]
        params = SamplingParams(temperature=0.0, logit_bias={end: 100.0}, min_tokens=5)
        text = engine_under_test.obedient_prompt
        whole = ids(engine_under_test.run(engine_under_test.request("a", text=text, max_new=16, params=params))["a"])
        request = engine_under_test.request("b", text=text, max_new=16, params=params, generated=whole[:3])
        assert len(tokens(engine_under_test.run(request)["b"])) == 3

    # Beginning like others

    def test_a_prompt_may_be_reused_but_for_its_last_token(self, engine_under_test: EngineUnderTest) -> None:
        for _ in range(2):
            request = engine_under_test.request("r", text=engine_under_test.prompt * 2, max_new=2)
            first = engine_under_test.run(request)["r"][0]
            assert isinstance(first, Started) and 0 <= first.cached < len(request.prompt)
            scored = engine_under_test.request("s", text=engine_under_test.prompt * 2, max_new=2, prompt_logprobs=0)
            first = engine_under_test.run(scored)["s"][0]
            assert first == Started("s", 0), "each of its tokens is to be scored"

    # Held to a constraint

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_schema_is_obeyed(self, engine_under_test: EngineUnderTest, temperature: float) -> None:
        params = SamplingParams(temperature=temperature)
        events = engine_under_test.run(engine_under_test.held_to("r", TREE, params=params))["r"]
        value = json.loads(text(events))
        assert value["v"] in range(100) and all(kid["v"] in range(100) for kid in value["kids"])
        assert finished(events) == ("stop", None)
        assert [token.complete for token in tokens(events)] == [False] * (len(tokens(events)) - 1) + [True]
        assert not any(token.end for token in tokens(events)), "it is complete without an end token"

    def test_a_text_that_may_go_on_ends_with_an_end_token(self, engine_under_test: EngineUnderTest) -> None:
        end = engine_under_test.card.end_ids[0]
        params = SamplingParams(temperature=0.0, logit_bias={end: 100.0})
        constraint = Constraint("regex", "[a-z]{2,}")
        events = engine_under_test.run(engine_under_test.held_to("r", constraint, params=params))["r"]
        assert finished(events) == ("stop", None) and tokens(events)[-1].end and not tokens(events)[-1].complete
        assert re.fullmatch(b"[a-z]{2,}", text(events)), "not before it may"

    def test_a_text_that_is_complete_at_the_limit_is_a_stop(self, engine_under_test: EngineUnderTest) -> None:
        constraint = of_choices(["xylophone"])
        count = len(tokens(engine_under_test.run(engine_under_test.held_to("a", constraint))["a"]))
        events = engine_under_test.run(engine_under_test.held_to("b", constraint, max_new=count))["b"]
        assert text(events) == b"xylophone" and finished(events) == ("stop", None) and tokens(events)[-1].complete
        events = engine_under_test.run(engine_under_test.held_to("c", constraint, max_new=count - 1))["c"]
        assert finished(events) == ("length", None) and not tokens(events)[-1].complete

    def test_logprobs_are_from_before_the_mask(self, engine_under_test: EngineUnderTest) -> None:
        events = engine_under_test.run(engine_under_test.held_to("r", of_choices(["qqq"]), logprobs=2))["r"]
        first = tokens(events)[0]
        assert first.logprob is not None and first.logprob[0] < -1.0, "nothing of it was likely"
        check_logprob(first.logprob, first.token, 2, engine_under_test.card.vocab_size)

    @pytest.mark.parametrize("cut", [1, 3, 100])
    def test_a_resume_goes_on_in_its_grammar(self, engine_under_test: EngineUnderTest, cut: int) -> None:
        whole = tokens(engine_under_test.run(engine_under_test.held_to("a", TREE))["a"])
        before = whole[:cut]
        generated = [token.token for token in before]
        events = engine_under_test.run(engine_under_test.held_to("b", TREE, generated=generated))["b"]
        json.loads(b"".join(token.piece for token in before) + text(events))
        assert finished(events) == ("stop", None)
        assert len(before) < len(whole) or not tokens(events), "it was complete already"

    def test_what_does_not_follow_the_grammar_cannot_go_on(self, engine_under_test: EngineUnderTest) -> None:
        wrong = engine_under_test.engine.tokenize("zz", add_special=False)
        with pytest.raises(LogLost):
            engine_under_test.engine.add(engine_under_test.held_to("r", TREE, generated=wrong))

    def test_each_has_a_grammar_of_its_own(self, engine_under_test: EngineUnderTest) -> None:
        """FB-057: one that finishes stops nobody else, and who is free stays free."""
        texts = {"a": of_choices(["x"]), "b": Constraint("regex", "[0-9]{5}"), "c": Constraint("regex", "[A-F ]{24}")}
        held = [engine_under_test.held_to(name, constraint) for name, constraint in texts.items()]
        events = engine_under_test.run(*held, engine_under_test.request("free", max_new=24))
        assert text(events["a"]) == b"x"
        assert re.fullmatch(b"[0-9]{5}", text(events["b"])) and re.fullmatch(b"[A-F ]{24}", text(events["c"]))
        assert len(tokens(events["free"])) == 24 and finished(events["free"]) == ("length", None)

    def test_one_that_cannot_go_on_fails_alone(self, engine_under_test: EngineUnderTest) -> None:
        """A schema that asks for itself again has no end; the depth of a text has one."""
        endless = of_schema({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]})
        bias = dict.fromkeys(engine_under_test.blanks, -99.0)
        params = SamplingParams(temperature=0.0, logit_bias=bias)
        events = engine_under_test.run(
            engine_under_test.held_to("r", endless, params=params, max_new=500),
            engine_under_test.request("free", max_new=24),
        )
        assert isinstance(last := events["r"][-1], Failed) and isinstance(last.error, StructuredOutputFailed)
        assert finished(events["free"]) == ("length", None)

    # Memory for tokens

    def test_who_outgrows_the_memory_goes_on_later(self, engine_under_test: EngineUnderTest) -> None:
        """Two that fit at first and do not in the end: one is set aside, both finish, and nobody starts twice."""
        if engine_under_test.make_small is None:
            pytest.skip("this engine needs no memory for tokens")
        engine, _card = engine_under_test.make_small()
        try:
            cells = engine.stats().cells
            filler = engine.tokenize(engine_under_test.prompt * 40, add_special=False)
            events: dict[str, list[Event]] = {}
            for name in ("old", "young"):
                prompt = [*engine.tokenize(name), *filler][: cells * 2 // 5]
                params = SamplingParams(temperature=0.0, ignore_eos=True)
                engine.add(EngineRequest(name, prompt, cells // 4, seed=1, params=params))
                events[name] = []
            side_by_side = set_aside = False
            deadline = time.monotonic() + DEADLINE_S
            while not all(over(of) for of in events.values()):
                assert time.monotonic() < deadline
                for event in engine.step():
                    events[event.id].append(event)
                side_by_side |= all(tokens(of) for of in events.values()) and engine.stats().running == 2
                set_aside |= side_by_side and engine.stats().waiting == 1
                assert engine.stats().cells_used <= cells
            assert side_by_side and set_aside
            for of in events.values():
                check_order(of)
                assert len(tokens(of)) == cells // 4
                assert [type(event) for event in of].count(Started) == 1
        finally:
            engine.close()

    def test_a_long_limit_keeps_nobody_out(self, engine_under_test: EngineUnderTest) -> None:
        """Memory is taken for what was generated, not for what may be: two with the whole context run side by side."""
        engine, card = engine_under_test.engine, engine_under_test.card
        events: dict[str, list[Event]] = {"a": [], "b": []}
        for name in events:
            request = engine_under_test.request(name)
            engine.add(replace(request, max_new=card.context - len(request.prompt)))
        engine_under_test.step_until(lambda: all(len(tokens(of)) >= 3 for of in events.values()), events)
        assert engine.stats().running == 2
        for name in events:
            engine.cancel(name)

    # Cancelling

    def test_cancel_in_the_middle_of_a_prefill(self, engine_under_test: EngineUnderTest) -> None:
        engine = engine_under_test.engine
        long = engine_under_test.prompt + "\n " * 700
        engine.add(engine_under_test.request("stays", max_new=6))
        events: dict[str, list[Event]] = {"stays": []}
        engine_under_test.step_until(lambda: len(tokens(events["stays"])) >= 1, events)
        engine.add(engine_under_test.request("gone", text=long, max_new=60))
        for event in engine.step():
            if event.id == "stays":
                events["stays"].append(event)
        engine.cancel("gone")
        assert engine.stats().running <= 1
        engine_under_test.step_until(lambda: over(events["stays"]), events)
        assert len(tokens(events["stays"])) == 6
        assert len(tokens(engine_under_test.run(engine_under_test.request("gone", text=long, max_new=2))["gone"])) == 2

    def test_cancel_frees_the_lane_and_nothing_follows(self, engine_under_test: EngineUnderTest) -> None:
        engine = engine_under_test.engine
        engine.add(engine_under_test.request("gone", max_new=60))
        engine.add(engine_under_test.request("stays", max_new=12))
        events: dict[str, list[Event]] = {"gone": [], "stays": []}
        engine_under_test.step_until(lambda: len(tokens(events["gone"])) >= 2, events)
        engine.cancel("gone")
        del events["gone"]  # any further event of it is now a KeyError
        for event in engine.step():
            events[event.id].append(event)
        assert engine.stats().running == 1, "the lane is not free"
        engine_under_test.step_until(lambda: over(events["stays"]), events)
        assert len(tokens(events["stays"])) == 12
        assert engine.stats().running == 0

    def test_cancel_before_a_lane_was_free(self, engine_under_test: EngineUnderTest) -> None:
        engine, lanes = engine_under_test.engine, engine_under_test.card.lanes
        names = [f"r{n}" for n in range(lanes + 2)]
        for name in names:
            engine.add(engine_under_test.request(name, max_new=3))
        events: dict[str, list[Event]] = {name: [] for name in names}
        del events[names[-1]]
        engine.cancel(names[-1])
        engine_under_test.step_until(lambda: all(over(of) for of in events.values()), events)

    def test_cancel_of_the_unknown_is_nothing(self, engine_under_test: EngineUnderTest) -> None:
        engine_under_test.engine.cancel("nobody")
        engine_under_test.run(engine_under_test.request("r"))
        engine_under_test.engine.cancel("r")

    def test_an_id_may_come_again_after_its_end(self, engine_under_test: EngineUnderTest) -> None:
        engine = engine_under_test.engine
        engine_under_test.run(engine_under_test.request("r", max_new=2))
        engine.add(engine_under_test.request("r", max_new=60))
        engine.step()
        engine.cancel("r")
        assert len(tokens(engine_under_test.run(engine_under_test.request("r", max_new=2))["r"])) == 2

    # What cannot run

    @pytest.mark.parametrize("wrong", ["empty", "above", "negative", "context", "generated", "bias", "stop"])
    def test_a_wrong_request_is_refused_and_the_others_go_on(
        self, engine_under_test: EngineUnderTest, wrong: str
    ) -> None:
        engine, card = engine_under_test.engine, engine_under_test.card
        good = engine.tokenize("Hello")
        requests = {
            "empty": EngineRequest("bad", [], 4, seed=1),
            "above": EngineRequest("bad", [*good, card.vocab_size], 4, seed=1),
            "negative": EngineRequest("bad", [-1, *good], 4, seed=1),
            "context": EngineRequest("bad", good, card.context, seed=1),
            "generated": EngineRequest("bad", good, 4, seed=1, generated=[card.vocab_size]),
            "bias": EngineRequest("bad", good, 4, seed=1, params=SamplingParams(logit_bias={card.vocab_size: 1.0})),
            "stop": EngineRequest("bad", good, 4, seed=1, params=SamplingParams(stop_token_ids=(card.vocab_size,))),
        }
        engine.add(engine_under_test.request("other", max_new=12))
        events: dict[str, list[Event]] = {"other": []}
        engine_under_test.step_until(lambda: len(tokens(events["other"])) >= 2, events)
        with pytest.raises(InvalidRequest):
            engine.add(requests[wrong])
        engine_under_test.step_until(lambda: over(events["other"]), events)
        assert len(tokens(events["other"])) == 12

    def test_one_that_fails_leaves_the_others(self, engine_under_test: EngineUnderTest) -> None:
        if engine_under_test.failing_prompt is None:
            pytest.skip("no prompt makes this engine fail")
        bad = engine_under_test.request("bad", text=engine_under_test.failing_prompt)
        events = engine_under_test.run(engine_under_test.request("a"), bad, engine_under_test.request("b"))
        assert isinstance(events["bad"][-1], Failed)
        assert [len(tokens(events[name])) for name in ("a", "b")] == [8, 8]

    # Rest

    def test_an_idle_step_comes_back_at_once(self, engine_under_test: EngineUnderTest) -> None:
        began = time.monotonic()
        assert [engine_under_test.engine.step() for _ in range(100)] == [[]] * 100
        assert time.monotonic() - began < 1.0

    def test_close_with_requests_running(self, engine_under_test: EngineUnderTest) -> None:
        engine, card = engine_under_test.make()
        assert card.fingerprint == engine_under_test.card.fingerprint
        engine.add(EngineRequest("r", engine.tokenize(engine_under_test.prompt), 60, seed=1))
        engine.step()
        engine.close()
