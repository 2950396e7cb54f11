"""From the messages of a chat to the prompt of its job: the model's template, and nothing that a message could forge.

Knows templates, cards and messages; nothing of Flask and of request models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from api.control_tokens import Marked, mark
from api.schemas.messages import OWN_ROLE
from api.templating import Renderer, TemplateFailed
from api.thinking import SWITCHES, Shape, Shapes, reasoning_of
from api.tokenizers import Tokenizers, aside, template_tokens
from api.tool_messages import plain
from shared.cards import ModelCard
from shared.errors import InvalidRequest
from shared.reasoning import Reasoning
from shared.tool_calls import knows_tools


class NoChatTemplate(InvalidRequest):
    """The model has none, so nobody knows how it wants to be talked to."""

    code = "no_chat_template"


class ChatPrompt(NamedTuple):
    """`cuts`, `reasoning`: as of the job. `switched`: what the template does depends on the switch of thinking."""

    text: str
    cuts: tuple[int, ...] = ()
    reasoning: Reasoning | None = None
    switched: bool = False


class ChatPrompts:
    """Writes prompts. `shapes`: what is known of how templates end them."""

    def __init__(self, renderer: Renderer, shapes: Shapes, tokenizers: Tokenizers) -> None:
        self._renderer = renderer
        self._shapes = shapes
        self._tokenizers = tokenizers

    def write(
        self,
        card: ModelCard,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> ChatPrompt:
        """`messages` as `read_messages` gives them. `thinking`: on, off, or as the template does it.

        Raises NoChatTemplate, and TemplateFailed naming `messages`."""
        template = card.chat_template
        if not template:
            raise NoChatTemplate(
                f"{card.id} has no chat template; raw prompts go to /v1/completions.", param="messages"
            )
        if not knows_tools(template):
            messages, tools = plain(messages, tools or []), None
        size = sum(len(message["content"]) for message in messages)
        marked = aside(size, lambda: _marked(messages, tools, card))
        variables: dict[str, Any] = {
            **self._names(card),
            **marked.value,
            "add_generation_prompt": add_generation_prompt,
            **(dict.fromkeys(SWITCHES, thinking) if thinking is not None else {}),
        }
        try:
            written = self._renderer.render(template, variables)
        except TemplateFailed as failed:
            raise TemplateFailed(failed.message, param="messages") from None
        text, cuts = marked.cut(written)
        shape = self._shape(card)
        return ChatPrompt(text, cuts, reasoning_of(template, text, bare=shape.bare), shape.switches)

    def tail(self, card: ModelCard) -> str | None:
        """The no-thinking tail of a model's template. Raises TemplateFailed."""
        return self._shapes.of(card.chat_template, **self._names(card)).tail

    def _names(self, card: ModelCard) -> dict[str, str]:
        return template_tokens(card, self._tokenizers.of(card))

    def _shape(self, card: ModelCard) -> Shape:
        """A template may take this chat, and fail with the one that it is tried out with."""
        try:
            return self._shapes.of(card.chat_template, **self._names(card))
        except TemplateFailed:
            return Shape(switches=True)


def _marked(messages: Sequence[dict[str, Any]], tools: list[Any] | None, card: ModelCard) -> Marked:
    """The template's variables, with marks in the control tokens that others than the model have written."""
    own = [message for message in messages if message["role"] == OWN_ROLE]
    others = [message for message in messages if message["role"] != OWN_ROLE]
    (others, tools), chosen = mark([others, tools], card.control_texts, beside=own)
    rest = iter(others)
    every = [message if message["role"] == OWN_ROLE else next(rest) for message in messages]
    return Marked({"messages": every, **({"tools": tools} if tools else {})}, chosen)
