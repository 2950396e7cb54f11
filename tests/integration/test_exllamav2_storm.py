"""The ExLlamaV2 engine in disorder: requests that come, leave and fail at random, in pools of a few pages.

Checked after every step: the package's page table; at each end: the events, and the numbers against a reference that
shares no code with the engine. What is random follows from the seed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shared.sampling import SamplingParams
from tests.exllamav2 import harness
from workers.engines.base import EngineRequest, Event, Failed, Finished, PromptLogprobs, Started, Token

PAGE = 256
#: Rounding in 16 bits, of a logprob.
ROUNDING = 0.06


class Storm:
    """An engine in a pool of `pages`; `faults`: part of the passes that raise."""

    def __init__(self, folder: Path, seed: int, pages: int, lanes: int, faults: float, **options: Any) -> None:
        from tests.exllamav2.reference import Reference
        from workers.engines.exllamav2.engine import ExLlamaV2Engine
        from workers.engines.exllamav2.options import ExLlamaV2Options

        self.random = random.Random(seed)
        self.lanes, self.faults = lanes, faults
        self.engine: Any = ExLlamaV2Engine(
            ExLlamaV2Options(folder, "m", folder.parent, lanes=lanes, cache_tokens=pages * PAGE, chunk=PAGE, **options)
        )
        self.card = self.engine.load(lambda part, word: None)
        self.reference = Reference(folder)
        self.vocab = min(self.card.end_ids)  # no text with end tokens inside
        self.texts = [[self.random.randrange(self.vocab) for _ in range(700)]]
        self.open: dict[str, tuple[EngineRequest, list[Event]]] = {}
        self.number = self.raised = self.finished = self.failed = 0
        model = self.engine._loaded.model
        forward = model.forward_chunk

        def faulty(*arguments: Any, **named: Any) -> Any:
            if self.random.random() < self.faults:
                self.raised += 1
                raise ValueError("no such thing")
            return forward(*arguments, **named)

        model.forward_chunk = faulty

    def add(self) -> None:
        """A prompt of what others said, from a page's edge or the beginning on, and something new behind."""
        pick = self.random
        text = pick.choice(self.texts)
        text = text[pick.choice((0, 0, PAGE, 2 * PAGE)) :] or text
        length = pick.choice((1, 2, 30, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, pick.randint(1, 600)))
        kept = text[: pick.choice((length, length, length - 1, length // 2))]
        prompt = kept + [pick.randrange(self.vocab) for _ in range(length - len(kept))]
        room = self.card.context - len(prompt)
        prompt, room = (prompt, room) if room > 0 else (prompt[:20], self.card.context - 20)
        self.number += 1
        request = EngineRequest(
            f"r{self.number}",
            prompt,
            min(room, pick.choice((1, 2, 5, pick.randint(1, 40)))),
            pick.randrange(1 << 30),
            SamplingParams(temperature=pick.choice((0.0, 1.0)), ignore_eos=True),
            logprobs=0,
            prompt_logprobs=pick.choice((None, None, 0)),
        )
        self.engine.add(request)
        self.open[request.id] = (request, [])

    def cancel(self) -> None:
        name = self.random.choice(sorted(self.open))
        self.engine.cancel(name)
        del self.open[name]

    def step(self) -> None:
        for event in self.engine.step():
            request, events = self.open[event.id]  # nothing of who is over
            events.append(event)
            if isinstance(event, Finished | Failed):
                del self.open[event.id]
                self.check(request, events)
        self.check_pages()

    def check(self, request: EngineRequest, events: list[Event]) -> None:
        starts = [event for event in events if isinstance(event, Started)]
        assert len(starts) <= 1
        if isinstance(events[-1], Failed):
            assert self.raised
            self.failed += 1
            return
        self.finished += 1
        assert events[0] is starts[0] and 0 <= starts[0].cached < len(request.prompt)
        sampled = [event for event in events if isinstance(event, Token)]
        assert len(sampled) == request.max_new
        scores = [entry for event in events if isinstance(event, PromptLogprobs) for entry in event.logprobs]
        whole = [*request.prompt, *(event.token for event in sampled)]
        self.texts = [*self.texts[-5:], whole]
        exact = self.reference.logits(whole)[:, : self.card.vocab_size].log_softmax(-1)
        said = [event.logprob for event in sampled]
        if request.prompt_logprobs is not None:
            assert len(scores) == len(request.prompt) and scores[0] is None and starts[0].cached == 0
            said = [*scores[1:], *said]
        first = len(whole) - len(said)
        for place, found in enumerate(said, start=first):
            assert found is not None
            assert found[0] == pytest.approx(float(exact[place - 1, whole[place]]), abs=ROUNDING), (request, place)

    def check_pages(self) -> None:
        """As the package's own `validate_cache` would have it, which is switched off there."""
        generator, stats = self.engine._batch._generator, self.engine.stats()
        assert stats.running + stats.waiting == len(self.open)
        assert not generator.pending_jobs and len(generator.active_jobs) == stats.running <= self.lanes
        held = [page for job in generator.active_jobs for page in job.sequences[0].allocated_pages]
        seen = set()
        for pages, in_use in ((generator.referenced_pages, True), (generator.unreferenced_pages, False)):
            for name, page in pages.items():
                assert page.phash == name and (page.ref_count > 0) == in_use
                assert page.ref_count == held.count(page)
                seen.add(page.page_index)
        assert len(seen) == generator.max_pages == len(generator.referenced_pages) + len(generator.unreferenced_pages)

    def rage(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.open) < 2 * self.lanes and self.random.random() < 0.4:
                self.add()
            if self.open and self.random.random() < 0.07:
                self.cancel()
            self.step()
        self.faults = 0.0
        for _ in range(5000):
            if not self.open:
                break
            self.step()
        assert not self.open and self.engine.stats().cells_used == 0
        assert self.finished > steps / 10, "it did something"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    harness.install_or_skip()
    from tests.exllamav2.models import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("drafts", "pages", "lanes", "faults"),
    [("none", 3, 8, 0.0), ("none", 6, 4, 0.03), ("n-grams", 3, 8, 0.03), ("a good model", 6, 4, 0.03)],
)
def test_nothing_is_lost_or_mixed_up_in_a_storm(
    folder: Path, tmp_path: Path, drafts: str, pages: int, lanes: int, faults: float
) -> None:
    options: dict[str, Any] = {"draft_tokens": 7, "ngram_draft": drafts == "n-grams"}
    if drafts == "a good model":
        from tests.exllamav2.models import write_tiny_llama

        options["draft_model"] = write_tiny_llama(tmp_path / "draft")
    storm = Storm(folder, 1, pages, lanes, faults, **options)
    storm.rage(60)
    assert (storm.raised > 0) == (faults > 0)
    storm.engine.close()
