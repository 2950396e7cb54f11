"""What a text must be that calls tools: the form of the model's calls around arguments that follow the tools' schemas.

Made of the grammars of the schemas (`shared/grammars.py`), for llguidance, which is not loaded here. Reading such a text:
`api/relay/tool_calls.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from shared.tool_calls import CLOSING, NAME, OPENING, Form

#: Calls of one text. A model that likes to call would not end, and there is no sense in so many.
MAX_CALLS = 16


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool. `parameters`: the JSON schema of its arguments. `strict`: masks must enforce all of it."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


class Calls(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call or more (`single`: exactly one) of these functions, and nothing else."""

    form: Form
    functions: list[Function]
    single: bool = False

    @property
    def is_sound(self) -> bool:
        return bool(self.functions) and all(NAME.fullmatch(function.name) for function in self.functions)


def grammar_of(calls: Calls, arguments: Sequence[str]) -> str:
    """A grammar for LLMatcher. `arguments`: those of the functions' schemas, in their order."""
    ways = [
        " ".join([*_before(calls.form, function.name), f"@arguments_{number}", *_behind(calls.form)])
        for number, function in enumerate(calls.functions)
    ]
    # Llama's own templates take back one call only.
    more = "" if calls.single or calls.form == "llama" else f' ("\\n" call){{0,{MAX_CALLS - 1}}}'
    text = f"start: call{more}\ncall: {' | '.join(ways)}\n"
    parts = [
        {**json.loads(grammar)["grammars"][0], "name": f"arguments_{number}"}
        for number, grammar in enumerate(arguments)
    ]
    return json.dumps({"grammars": [{"name": "calls", "lark_grammar": text}, *parts]}, ensure_ascii=False)


def _before(form: Form, name: str) -> list[str]:
    if form == "llama":
        return [json.dumps(f'{{"name": "{name}", "parameters": ')]
    return [json.dumps(f'{OPENING[form]}\n{{"name": "{name}", "arguments": ')]


def _behind(form: Form) -> list[str]:
    return [json.dumps("}" if form == "llama" else f"}}\n{CLOSING[form]}")]
