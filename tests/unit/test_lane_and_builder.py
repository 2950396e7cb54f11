"""From the engine's events to what a client reads, with nothing between: a lane's frames into the builder.

Random tokens over random texts, several prompts and choices, in any order of events and with frames cut into entries
at random: what comes out is what the contract says (tests/references.py), streamed as a whole.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from api.relay.completion_builder import CompletionBuilder
from api.schemas.stream_options import StreamOptions
from shared.frames import Frame, Name, Take, decode_entry, encode_entry
from shared.jobs import Job
from tests import references
from tests.scores import LISTS, aligned, joined
from workers.engines.base import EngineRequest, Finished, PromptLogprobs, Started, Token
from workers.lane import Lane, PromptIds

END = 0
END_TEXT = b"</end>"
ALPHABET = "ab STOé你🌍👩\u200d\ufffd\u2028\0"
BROKEN = [b"\xf0\x9f", b"\xe4\xbd", b"\xc3", b"\x8c", b"\xed\xa0\x80", b"\xff"]


class Choice(NamedTuple):
    """What an engine samples for one choice: ids of pieces, each with its logprob; then the end token."""

    ids: list[int]
    values: list[float]


class Request(NamedTuple):
    job: Job
    #: Bytes of each id; id 0 is the end token's.
    vocabulary: list[bytes]
    prompts: list[PromptIds]
    choices: list[Choice]
    limit: int | None

    def pieces(self, request: EngineRequest, ids: Any) -> list[bytes]:
        return [self.vocabulary[token] for token in ids]

    def bytes_of(self, ids: list[int]) -> list[bytes]:
        return [self.vocabulary[token] for token in ids]


@st.composite
def cut_up(draw: st.DrawFn, *, broken: bool) -> list[bytes]:
    """A text in pieces that are no empty ones; with `broken`, bytes that are no text lie in it."""
    parts = [part.encode() for part in draw(st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=6))]
    if broken:
        parts += draw(st.lists(st.sampled_from(BROKEN), max_size=2))
        parts = draw(st.permutations(parts))
    data = b"".join(parts)
    borders = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=12))})
    return [data[begin:end] for begin, end in pairwise(borders)]


@st.composite
def requests(draw: st.DrawFn, *, scoring: bool = False) -> Request:
    vocabulary = [END_TEXT]
    ids: dict[bytes, int] = {}

    def tokens(pieces: list[bytes]) -> list[int]:
        for piece in pieces:
            if piece not in ids:
                ids[piece] = len(vocabulary)
                vocabulary.append(piece)
        return [ids[piece] for piece in pieces]

    prompts = []
    sent: list[str | list[int]] = []
    as_text = draw(st.booleans())
    for _ in range(draw(st.integers(1, 2))):
        numbers = tokens(draw(cut_up(broken=not as_text))) or tokens([b"p"])
        text = b"".join(vocabulary[token] for token in numbers).decode(errors="replace")
        added = [END] if draw(st.booleans()) else []
        hidden = [END] if draw(st.booleans()) else []
        room = 0 if scoring else 1000
        prompts.append(PromptIds([*added, *numbers, *hidden], room, len(added), text, as_text, len(hidden)))
        sent.append(text if as_text else numbers)
    n = draw(st.integers(1, 3))
    limit = 0 if scoring else draw(st.sampled_from([None, 1, 3, 6]))
    if limit:
        prompts = [PromptIds(p.ids, limit, p.added, p.text, p.sent_as_text, p.hidden) for p in prompts]
    choices = []
    for _ in range(len(prompts) * n):
        sampled = tokens(draw(cut_up(broken=True)))
        values = draw(st.lists(st.integers(-90, 0), min_size=len(sampled) + 1, max_size=len(sampled) + 1))
        choices.append(Choice(sampled, [value / 4 for value in values]))
    text = b"".join(vocabulary[token] for token in choices[0].ids).decode(errors="replace")
    stops = draw(st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=2))
    if text and draw(st.booleans()):
        begin = draw(st.integers(0, len(text) - 1))
        stops.append(text[begin : begin + draw(st.integers(1, 5))])
    job = Job(
        id="cmpl-1", model="m", prompts=sent, seed=1, created=7, n=n, best_of=n, max_tokens=limit, stop=stops,
        echo=scoring or draw(st.booleans()), logprobs=draw(st.integers(0, 2) if scoring else st.sampled_from([None, 0, 2])),
    )  # fmt: skip
    return Request(job, vocabulary, prompts, choices, limit)


def ranked(token: int, value: float, best: int) -> tuple[float, list[tuple[int, float]]]:
    """Its own number stands in the list; the end token at -100 fills it up."""
    return value, [(token, value), (END, -100.0)][: max(1, best)]


def top(request: Request, token: int, value: float) -> dict[str, float]:
    entries = ranked(token, value, request.job.logprobs or 0)[1]
    found: dict[str, float] = {}
    for number, logprob in entries:
        found.setdefault(references.name(request.vocabulary[number]), logprob)
    return found


def events_of(request: Request, index: int, chunk: int) -> list[Any]:
    """The events of one choice in their order."""
    job, name = request.job, f"cmpl-1/{index}"
    events: list[Any] = [Started(name)]
    ids = request.prompts[index // job.n].ids
    if job.echo and job.logprobs is not None and index % job.n == 0:
        scores = [None, *(ranked(token, -1.0, job.logprobs) for token in ids[1:])]
        events += [PromptLogprobs(name, at, scores[at : at + chunk]) for at in range(0, len(ids), chunk)]
    if request.limit == 0:
        return [*events, Finished(name, "length")]
    choice = request.choices[index]
    for position, token in enumerate([*choice.ids, END][: request.limit]):
        entry = None if job.logprobs is None else ranked(token, choice.values[position], job.logprobs)
        events.append(Token(name, token, request.vocabulary[token], entry, token == END))
    return [*events, Finished(name, "stop")]


def frames_of(draw: st.DrawFn, request: Request) -> list[tuple[Frame, ...]]:
    """The lane's entries: the choices' events in any order, steps of any size."""
    lane = Lane(request.job, Name(3, 1), request.prompts, end_ids=(END,), pieces=request.pieces)
    left = {index: events_of(request, index, draw(st.integers(1, 9))) for index in range(request.job.choices)}
    while left:
        index = draw(st.sampled_from(sorted(left)))
        for _ in range(draw(st.integers(1, 8))):
            if index in left and (lane.on_event(index, left[index].pop(0)) or not left[index]):
                del left[index]
        if draw(st.booleans()):
            lane.flush()
    lane.flush()
    assert lane.terminal is not None
    return [*lane.outbox, (lane.terminal,)]


def read_back(draw: st.DrawFn, request: Request, said: list[tuple[Frame, ...]]) -> tuple[dict[str, Any], list[Any]]:
    """(the response, the stream's chunks) of frames that went through the log, several of the lane's entries in one."""
    builder = CompletionBuilder(request.job, fingerprint="fp", options=StreamOptions(None))
    entries: list[list[Frame]] = [[Take("w")]]
    for frames in said[:-1]:
        if draw(st.booleans()):
            entries.append([])
        entries[-1] += frames
    seq, chunks = 0, []
    for frames in [entry for entry in entries if entry]:
        seq += len(frames)
        chunks += builder.feed(Name(3, seq), decode_entry(encode_entry(frames)))
    chunks += builder.feed(Name(4, seq + 1), decode_entry(encode_entry(list(said[-1]))))
    return builder.response(), [json.loads(chunk.data) for chunk in chunks]


def check(request: Request, response: dict[str, Any], chunks: list[Any]) -> None:
    job, sampled = request.job, 0
    pieces = [piece for chunk in chunks for piece in chunk["choices"]]
    for index, choice in enumerate(response["choices"]):
        prompt = request.prompts[index // job.n]
        own = request.bytes_of(request.choices[index].ids)
        want = references.Expected("", "length", None, 0)
        if request.limit != 0:
            want = references.completion(own, job.stop, request.limit)
        sampled += want.completion_tokens
        mine = [piece for piece in pieces if piece["index"] == index]
        text = (prompt.text if job.echo else "") + want.text
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, *want[1:3])
        assert "".join(piece["text"] for piece in mine) == text
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == [want.finish]
        if job.logprobs is None:
            assert choice["logprobs"] is None and all(piece["logprobs"] is None for piece in mine)
            continue
        lists = wanted(request, index, want)
        assert choice["logprobs"] == lists == joined(mine, index)
        whole = prompt.text + want.text
        shown = len(prompt.ids) - prompt.added - prompt.hidden if job.echo else 0
        aligned(lists, whole, entries=len(lists["tokens"]), best=job.logprobs, scored_prompt=shown)
        if want.stop_reason is None:
            assert len(lists["tokens"]) == shown + want.completion_tokens
    usage = response["usage"]
    assert usage["completion_tokens"] == sampled
    assert usage["prompt_tokens"] == sum(len(prompt.ids) for prompt in request.prompts)
    assert chunks[-1]["usage"] == usage


def wanted(request: Request, index: int, want: references.Expected) -> dict[str, list[Any]]:
    job, prompt, choice = request.job, request.prompts[index // request.job.n], request.choices[index]
    sampled = [*choice.ids, END]
    names, places = references.kept(request.bytes_of(choice.ids), references.name(END_TEXT), want)
    lists: dict[str, list[Any]] = {
        "tokens": names,
        "token_logprobs": choice.values[: len(names)],
        "top_logprobs": [
            top(request, token, value) for token, value in list(zip(sampled, choice.values, strict=True))[: len(names)]
        ],
        "text_offset": [len(prompt.text) + place for place in places],
    }
    if not job.echo:
        return lists
    ids = prompt.ids[prompt.added : len(prompt.ids) - prompt.hidden]
    shown = request.bytes_of(ids)
    before: dict[str, list[Any]] = {
        "tokens": [references.name(piece) for piece in shown],
        "token_logprobs": [None] + [-1.0] * (len(ids) - 1),
        "top_logprobs": [None, *(top(request, token, -1.0) for token in ids[1:])],
        "text_offset": references.offsets(shown, b"".join(shown)),
    }
    return {name: before[name] + lists[name] for name in LISTS}


#: No shrinking: an example is a whole request, and that would take minutes.
@settings(max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(st.data(), requests())
def test_whatever_the_tokens_and_the_frames(data: st.DataObject, request: Request) -> None:
    said = frames_of(data.draw, request)
    check(request, *read_back(data.draw, request, said))


@settings(max_examples=60)
@given(st.data(), requests(scoring=True))
def test_scoring_alone(data: st.DataObject, request: Request) -> None:
    said = frames_of(data.draw, request)
    check(request, *read_back(data.draw, request, said))
