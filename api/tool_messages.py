"""Tools and their calls as plain messages, for models whose chat template knows neither.

What they are told, and how calls and results are written, is Hermes' form (as in Qwen's templates). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from shared.tool_calls import CLOSING, OPENING

_TELLS = """You may call functions to help the user. You are given their signatures inside <tools></tools>:
<tools>
{tools}
</tools>
To call a function, answer with an object of its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


def plain(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, and calls and results as text of assistant and user."""
    made: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            if index and messages[index - 1]["role"] == "tool":
                made[-1]["content"] += "\n" + answer
            else:
                made.append({"role": "user", "content": answer})
        elif "tool_calls" in message:
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            said = [message["content"]] if message["content"] else []
            made.append({**rest, "content": "\n".join([*said, *map(_written, message["tool_calls"])])})
        else:
            made.append(message)
    return _told(made, tools) if tools else made


def _told(messages: list[dict[str, Any]], tools: Iterable[Any]) -> list[dict[str, Any]]:
    text = _TELLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _written(call: dict[str, Any]) -> str:
    function = call["function"]
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{OPENING["hermes"]}\n{{"name": {name}, "arguments": {written}}}\n{CLOSING["hermes"]}'
