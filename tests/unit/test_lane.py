"""A lane's frames: in which order they come, whatever the order of the engine's events."""

from __future__ import annotations

from shared.errors import EngineOverloaded
from shared.frames import Delta, End, Finish, Name, Prompt, Start
from shared.jobs import Job
from shared.structured import of_choices
from workers.engines.base import Failed, Finished, PromptLogprobs, Started, Token
from workers.generation.constraint import Grammar, Vocabulary
from workers.lane import Lane, PromptIds
from workers.past import Past


def test_a_prompts_logprobs_come_before_all_its_choices() -> None:
    """An engine may compute a long prompt's logprobs in pieces, with its first choice, and give the other choices
    tokens meanwhile: from its cache, or because their prefill needs no logprobs."""
    job = Job(id="j", model="m", prompts=["abcd"], seed=1, created=1, n=2, best_of=2, echo=True, logprobs=0)
    prompt = PromptIds([1, 2, 3, 4], 9, text="abcd")
    lane = Lane(job, Name(1, 1), [prompt], end_ids=(0,), pieces=lambda request, ids: [b"x"] * len(ids))
    lane.on_event(0, Started("j/0"))
    lane.on_event(1, Started("j/1"))
    lane.on_event(0, PromptLogprobs("j/0", 0, [None, (-1.0, [(2, -1.0)])]))
    assert lane.on_event(1, Token("j/1", 7, b"x", (-1.0, [(7, -1.0)]))) is False
    lane.flush()
    assert lane.on_event(1, Token("j/1", 0, b"", (-1.0, [(0, -1.0)]), end=True)) is False
    assert lane.on_event(1, Finished("j/1", "stop")) is False
    lane.flush()
    lane.on_event(0, PromptLogprobs("j/0", 2, [(-1.0, [(3, -1.0)]), (-1.0, [(4, -1.0)])]))
    lane.on_event(0, Token("j/0", 0, b"", (-1.0, [(0, -1.0)]), end=True))
    frames = [frame for entry in lane.outbox for frame in entry]
    assert [type(frame) for frame in frames] == [Start, Prompt, Prompt, Delta, Delta, Finish, Delta, Finish]
    assert lane.terminal is not None and [entry[-1] for entry in lane.outbox if isinstance(entry[-1], Finish)]


def test_a_choice_that_ended_while_it_waited_is_stopped_at_its_next_token() -> None:
    job = Job(id="j", model="m", prompts=["ab"], seed=1, created=1, n=2, best_of=2, echo=True, logprobs=0, stop=["x"])
    lane = Lane(job, Name(1, 1), [PromptIds([1, 2], 9, text="ab")], pieces=lambda request, ids: [b"x"] * len(ids))
    token = Token("j/1", 7, b"x", (-1.0, [(7, -1.0)]))
    assert lane.on_event(1, token) is False, "nobody knows yet that it is the last"
    lane.on_event(0, PromptLogprobs("j/0", 0, [None, (-1.0, [(2, -1.0)])]))
    assert lane.on_event(1, token) is True
    assert [frame.t for entry in lane.outbox for frame in entry if isinstance(frame, Delta)] == [[7]]


def test_bytes_of_an_id_come_with_the_first_frame_that_needs_them() -> None:
    """Of two choices that sample one token in one step, the second may end with it and be out first."""
    job = Job(id="j", model="m", prompts=["ab"], seed=1, created=1, n=2, best_of=2, logprobs=0, stop=["y"])
    lane = Lane(job, Name(1, 1), [PromptIds([1, 2], 9, text="ab")], pieces=lambda request, ids: [b"x"] * len(ids))
    for index, piece in ((0, b"x"), (1, b"y")):
        lane.on_event(index, Token(f"j/{index}", 7, piece, (-1.0, [(7, -1.0)])))
    lane.flush()
    deltas = [frame for entry in lane.outbox for frame in entry if isinstance(frame, Delta)]
    assert [(delta.i, delta.p) for delta in deltas] == [(1, {7: "78"}), (0, {})]


def test_a_choice_that_fails_takes_its_siblings_out_of_the_engine() -> None:
    job = Job(id="j", model="m", prompts=["x"], seed=1, created=0, n=3)
    lane = Lane(job, Name(1, 1), [PromptIds([1], 10)])
    for index in range(3):
        lane.on_event(index, Started(f"j/{index}"))
    lane.on_event(1, Failed("j/1", EngineOverloaded("no memory")))
    assert lane.over
    assert set(lane.open_requests()) == {"j/0", "j/2"}
    lane.on_event(0, Finished("j/0", "length"))
    assert set(lane.open_requests()) == {"j/2"}


def test_a_text_that_was_complete_when_its_worker_died_has_its_end() -> None:
    """The log ends behind the token that completed it: also at the limit, that is a stop."""
    pieces = [bytes((byte,)) for byte in range(256)]
    grammar = Grammar(
        of_choices(["no", "yes"]),
        Vocabulary(pieces, end_ids=(), control_ids=(), encode=lambda text: list(text.encode())),
    )
    job = Job(id="j", model="m", prompts=["x"], seed=1, created=0)
    for ids, room, reason in ((b"no", 9, "stop"), (b"no", 2, "stop"), (b"n", 1, "length")):
        past = Past.of([Start(1), Delta(0, list(ids), ids.decode())], choices=1, prompts=1)
        lane = Lane(
            job, Name(1, 3), [PromptIds([1], room)], past=past, grammar=grammar,
            pieces=lambda request, tokens: [pieces[token] for token in tokens],
        )  # fmt: skip
        assert [frame for entry in lane.outbox for frame in entry] == [Finish(0, reason)]
        assert isinstance(lane.terminal, End) and not lane.requests()
