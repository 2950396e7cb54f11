"""Random and hand-made frame sequences of one request, for the tests of what is built from them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from shared.frames import Delta, End, Finish, Frame, Name, Start, Take
from shared.jobs import Job

#: An entry as the hub hands it over.
Entry = tuple[Name, list[Frame]]


def a_job(prompt: str = "p", *, prompts: int = 1, n: int = 1, echo: bool = False) -> Job:
    return Job(id="cmpl-1", model="m", prompts=[prompt] * prompts, seed=1, created=7, n=n, best_of=n, echo=echo)


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def told(*texts: str, reason: str = "stop", prompt_tokens: int = 3) -> list[Frame]:
    """One choice's frames: one token a text, and an end token."""
    return [
        Take("w"),
        Start(prompt_tokens),
        *(Delta(0, [5], text) for text in texts),
        Delta(0, [6]),
        Finish(0, reason),
        End(usage(prompt_tokens, len(texts) + 1)),
    ]


def entries(frames: list[Frame], cuts: list[int], a: int = 5) -> list[Entry]:
    """The frames cut into entries behind the given counts; `end` has an entry and an attempt of its own."""
    borders = sorted({0, len(frames) - 1, *(cut for cut in cuts if cut < len(frames))})
    cut = [(Name(a, end), frames[start:end]) for start, end in pairwise(borders)]
    return [*cut, (Name(a + 1, len(frames)), frames[-1:])]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Job, list[Frame], list[str]]:
    """(job, its frames up to `end`, the text of each choice). Deltas of the choices come in any order; some attempts
    end without their `end` frame and are taken over."""
    n, prompts = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    job = a_job(draw(st.text(max_size=5)), prompts=prompts, n=n, echo=draw(st.booleans()))
    choices = prompts * n
    texts = [""] * choices
    frames: list[Frame] = [Take("w"), Start(draw(st.integers(1, 9)), draw(st.integers(0, 3)))]
    tokens, alive = 0, list(range(choices))
    while alive:
        i = draw(st.sampled_from(alive))
        if draw(st.integers(0, 9)) == 0:
            frames.append(Take("w2"))
        ids = draw(st.lists(st.integers(0, 99), max_size=3))
        text = draw(st.text(max_size=3)) if ids else ""
        frames.append(Delta(i, ids, text))
        tokens, texts[i] = tokens + len(ids), texts[i] + text
        if draw(st.integers(0, 2)) == 0:
            frames.append(Finish(i, draw(st.sampled_from(["stop", "length"])), draw(st.sampled_from([None, "x", 7]))))
            alive.remove(i)
    start = frames[1]
    assert isinstance(start, Start)
    frames.append(
        End({**usage(start.prompt_tokens, tokens), "prompt_tokens_details": {"cached_tokens": start.cached_tokens}})
    )
    if job.echo:
        texts = [str(job.prompts[0]) + text for text in texts]
    return job, frames, texts
