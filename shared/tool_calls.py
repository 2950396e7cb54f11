"""How a model writes the calls of tools into its text, and which of them a request knows.

Told from the model's chat template when a request is accepted, and kept with the job, so that whoever reads the text of the
request, on any API process, finds the same calls. Reading them: `api/relay/tool_calls.py`. Knows nothing of HTTP.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from shared.errors import InvalidRequest

#: Tools of a request, and characters of a name (as OpenAI's API has them).
MAX_TOOLS = 128
MAX_NAME = 64
NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}")

#: hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls (Hermes, Qwen; SmolLM2 puts
#: an array of them between one pair of tags). llama: `{"name": ..., "parameters": {...}}` as the whole text, or behind
#: `<|python_tag|>` (Llama 3).
Form = Literal["hermes", "llama"]
#: What a call begins and ends with. They are text, not control, and stay in the text even if a vocabulary flags them.
OPENING: dict[Form, str] = {"hermes": "<tool_call>", "llama": "<|python_tag|>"}
CLOSING: dict[Form, str] = {"hermes": "</tool_call>", "llama": ""}
TAGS = frozenset({*OPENING.values(), *CLOSING.values()} - {""})

_KNOWS_TOOLS = re.compile(r"\btools\b")
#: The example that Llama's templates give the model.
_LLAMA = re.compile(r'\{\s*\\?"name\\?":[^{}]{0,80}\\?"parameters\\?":')


class Tools(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tools of a request. `names`: only these are calls; `single`: there is one call at most."""

    form: Form
    names: tuple[str, ...]
    single: bool = False

    def check(self) -> None:
        """Raises InvalidRequest for what the API lets nobody send."""
        if not 0 < len(self.names) <= MAX_TOOLS or not all(map(NAME.fullmatch, self.names)):
            raise InvalidRequest(f"The job's tools must be 1 to {MAX_TOOLS}, with names.", param="tools")


def knows_tools(template: str) -> bool:
    """Whether a chat template tells the model of tools. One that does not gets them in messages
    (`api/tool_messages.py`)."""
    return _KNOWS_TOOLS.search(template) is not None


def form_of(template: str) -> Form:
    """The form in which a model with this chat template writes calls: Llama's where the template speaks of it, else that of
    Hermes, in which models are asked for calls whose template knows no tools.

    Where the template teaches another form, calls in that are text here; forced ones are written in the form of Hermes."""
    if OPENING["hermes"] not in template and (OPENING["llama"] in template or _LLAMA.search(template)):
        return "llama"
    return "hermes"
