"""What a client of `/v1/chat/completions` sees: the assistant's message, whole or as deltas, its reasoning and the calls
of tools apart. Pure."""

from __future__ import annotations

from typing import Any, Literal

from api.relay.builder import Builder, Choice, encode, text_data
from api.relay.logprobs import Entry, as_chat_object
from api.relay.tool_calls import CallDelta, CallParser, Found, call_id
from api.schemas.stream_options import StreamOptions
from shared.frames import Finish, Start
from shared.jobs import Job
from shared.reasoning import Splitter

#: What the reasoning is called in messages and deltas.
ReasoningField = Literal["reasoning_content", "reasoning", "both"]
_NAMES: dict[ReasoningField, tuple[str, ...]] = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


class ChatBuilder(Builder):
    """See `Builder`. The first chunk of each choice has the role and no text."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        job: Job,
        *,
        fingerprint: str,
        options: StreamOptions | None = None,
        tokens_as_ids: bool = False,
        reasoning_field: ReasoningField = "reasoning_content",
    ) -> None:
        super().__init__(job, fingerprint=fingerprint, options=options, tokens_as_ids=tokens_as_ids)
        self._names = _NAMES[reasoning_field]
        self._splitters = [Splitter(job.reasoning) for _ in self._choices]
        self._parsers = [CallParser(job.tools) for _ in self._choices] if job.tools is not None else []

    def _opening(self, start: Start) -> list[bytes]:
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._choices))]

    def _text(self, index: int, text: str) -> list[bytes]:
        parts = self._splitters[index].feed(text)
        found = self._parsers[index].feed(parts.content) if self._parsers else Found(parts.content)
        return self._say(index, parts.reasoning, found)

    def _rest(self, index: int) -> list[bytes]:
        parts = self._splitters[index].flush()
        found = self._parsers[index].flush(parts.content) if self._parsers else Found(parts.content)
        return self._say(index, parts.reasoning, found)

    def _say(self, index: int, reasoning: str, found: Found) -> list[bytes]:
        choice, delta = self._choices[index], dict[str, Any]()
        if reasoning:
            choice.keep(reasoning=reasoning)
            delta |= dict.fromkeys(self._names, reasoning)
        if found.content:
            choice.keep(text=found.content)
            delta["content"] = found.content
        if found.calls:
            delta["tool_calls"] = [self._call_delta(index, call) for call in found.calls]
        return [self._chunk(index, delta, scored=True)] if delta else []

    def _call_delta(self, index: int, call: CallDelta) -> dict[str, Any]:
        calls = self._choices[index].calls
        if call.name is None:
            self._choices[index].keep_arguments(call.index, call.arguments)
            return {"index": call.index, "function": {"arguments": call.arguments}}
        calls.append((call.name, [call.arguments]))
        return {"index": call.index, **self._call_object(index, call.index)}

    def _call_object(self, index: int, number: int) -> dict[str, Any]:
        name, arguments = self._choices[index].calls[number]
        return {
            "id": call_id(self._job.id, index, number),
            "type": "function",
            "function": {"name": name, "arguments": "".join(arguments)},
        }

    def _reason(self, index: int, finish: Finish) -> str:
        """Why a choice ended: also with calls, if they are whole."""
        calls = self._choices[index].calls
        return "tool_calls" if calls and finish.reason == "stop" and self._parsers[index].whole else finish.reason

    def _chunk(self, index: int, delta: dict[str, Any], *, scored: bool = False) -> bytes:
        scores = b"null"
        if scored and self._scored:
            choice = self._choices[index]
            scores = self._scores(choice.release(choice.length))
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null,"stop_reason":null}]%b' % (
            self._head,
            index,
            text_data(delta),
            scores,
            self._usage_so_far(),
        )

    def _scores(self, entries: list[Entry]) -> bytes:
        return text_data(as_chat_object(entries, self._vocabulary, self._job.logprobs or 0))

    def _finish_object(self, finish: Finish) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":%b,"finish_reason":%b,"stop_reason":%b}' % (
            finish.i,
            self._scores(self._choices[finish.i].release()) if self._scored else b"null",
            encode(self._reason(finish.i, finish)),
            encode(finish.stop_reason),
        )

    def _count(self) -> dict[str, Any]:
        reasoned = sum(choice.reasoned for choice in self._choices)
        return {**super()._count(), "completion_tokens_details": {"reasoning_tokens": reasoned}}

    def _choice_object(self, choice: Choice, number: int) -> dict[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [self._call_object(number, called) for called in range(len(choice.calls))]
        if self._job.reasoning is not None:
            message |= dict.fromkeys(self._names, "".join(choice.reasoning) or None)
        best = self._job.logprobs
        return {
            "index": number,
            "message": message,
            "logprobs": None if best is None else as_chat_object(choice.released, self._vocabulary, best),
            "finish_reason": self._reason(number, choice.finish) if choice.finish else None,
            "stop_reason": choice.finish.stop_reason if choice.finish else None,
        }
