"""What a client of `/v1/completions` sees: chunks of text, with the prompt before it if it is to be echoed. Pure."""

from __future__ import annotations

from typing import Any

from api.relay.builder import Builder, Choice, encode, text_data
from api.relay.logprobs import Entry, as_object
from api.schemas.stream_options import StreamOptions
from shared.frames import Delta, Finish, Start
from shared.jobs import Job


class CompletionBuilder(Builder):
    """See `Builder`."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        job: Job,
        *,
        fingerprint: str,
        options: StreamOptions | None = None,
        tokens_as_ids: bool = False,
    ) -> None:
        super().__init__(job, fingerprint=fingerprint, options=options, tokens_as_ids=tokens_as_ids)
        self._prompt_texts = [prompt if isinstance(prompt, str) else "" for prompt in job.prompts]
        self._before_text = self._head + b'{"text":'
        rest = b"" if self._running else self._tail
        self._after_text = [
            b',"index":%d,"logprobs":null,"finish_reason":null,"stop_reason":null}]%b' % (index, rest)
            for index in range(len(self._choices))
        ]

    def _brings_more(self, frame: Delta) -> bool:
        return self._job.echo and not self._choices[frame.i].echoed

    def _opening(self, start: Start) -> list[bytes]:
        if start.echo is not None:
            self._prompt_texts = start.echo
        for index, choice in enumerate(self._choices):
            choice.length = self._offset(index)
        if not self._job.echo or self._scored:  # a prompt with logprobs waits for them
            return []
        return [chunk for index in range(len(self._choices)) for chunk in self._before(index)]

    def _offset(self, index: int) -> int:
        return len(self._prompt_texts[index // self._job.candidates])

    def _before(self, index: int) -> list[bytes]:
        """The chunk with the prompt, once a choice."""
        choice = self._choices[index]
        if choice.echoed or not self._job.echo:
            return []
        choice.echoed = True
        number = index // self._job.candidates
        text, scores = self._prompt_texts[number], self._prompt_scores[number]
        if not text and not scores:
            return []
        choice.keep(text=text, scores=scores)
        return [self._chunk(index, text, scores)]

    def _text(self, index: int, text: str) -> list[bytes]:
        choice = self._choices[index]
        choice.keep(text=text)
        return [self._chunk(index, text, choice.release(choice.length))]

    def _rest(self, index: int) -> list[bytes]:
        return self._before(index)

    def _chunk(self, index: int, text: str, entries: list[Entry]) -> bytes:
        if self._scored:
            chunk = b'%b%b,"index":%d,"logprobs":%b,"finish_reason":null,"stop_reason":null}]%b' % (
                self._before_text,
                text_data(text),
                index,
                text_data(as_object(entries, self._vocabulary)),
                b"" if self._running else self._tail,
            )
        else:
            chunk = self._before_text + text_data(text) + self._after_text[index]
        return chunk + self._usage_so_far() if self._running else chunk

    def _finish_object(self, finish: Finish) -> bytes:
        entries = self._choices[finish.i].release()
        return b'{"text":"","index":%d,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}' % (
            finish.i,
            text_data(as_object(entries, self._vocabulary)) if self._scored else b"null",
            encode(finish.reason),
            encode(finish.stop_reason),
        )

    def _choice_object(self, choice: Choice, number: int) -> dict[str, Any]:
        return {
            "text": "".join(choice.text),
            "index": number,
            "logprobs": as_object(choice.released, self._vocabulary) if self._scored else None,
            "finish_reason": choice.finish.reason if choice.finish else None,
            "stop_reason": choice.finish.stop_reason if choice.finish else None,
        }
