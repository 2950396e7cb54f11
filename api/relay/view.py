"""How a client sees a request: what a builder needs besides the job. Kept with the job, so that whoever comes back to
it, on any API process, gets the same chunks. Knows nothing of the store."""

from __future__ import annotations

from typing import Self

import msgspec

from api.relay.builder import Builder
from api.relay.chat_builder import ChatBuilder, ReasoningField
from api.relay.completion_builder import CompletionBuilder
from api.schemas.stream_options import StreamOptions
from shared.jobs import Job


class View(msgspec.Struct, frozen=True, omit_defaults=True):
    """`fingerprint`: the model's, when the request was accepted. `reasoning_field`: of a chat. The rest as in StreamOptions
    and Call."""

    fingerprint: str
    include_usage: bool | None = None
    continuous_usage: bool = False
    tokens_as_ids: bool = False
    reasoning_field: ReasoningField = "reasoning_content"

    @classmethod
    def of(
        cls,
        fingerprint: str,
        options: StreamOptions,
        *,
        tokens_as_ids: bool,
        reasoning_field: ReasoningField = "reasoning_content",
    ) -> Self:
        return cls(fingerprint, options.include_usage, options.continuous_usage, tokens_as_ids, reasoning_field)

    @classmethod
    def read(cls, raw: bytes, fingerprint: str) -> Self:
        """The view as stored; the plainest one of a job that came by another way than the API."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except msgspec.MsgspecError:
            return cls(fingerprint)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def builder(self, job: Job) -> Builder:
        """A new builder of the request."""
        options = StreamOptions(self.include_usage, self.continuous_usage)
        if job.kind == "chat":
            return ChatBuilder(
                job,
                fingerprint=self.fingerprint,
                options=options,
                tokens_as_ids=self.tokens_as_ids,
                reasoning_field=self.reasoning_field,
            )
        return CompletionBuilder(job, fingerprint=self.fingerprint, options=options, tokens_as_ids=self.tokens_as_ids)
