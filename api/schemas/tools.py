"""The tools of a chat: their declarations, and which of them the model may or must call.

Their shape is checked here; what their schemas may say is checked where those of `response_format` are.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from api.schemas.output_format import Demand
from api.schemas.strict import StrictRequest
from shared.errors import InvalidRequest
from shared.structured import of_calls
from shared.tool_calls import MAX_NAME, MAX_TOOLS, NAME, Form
from shared.tool_grammar import Calls, Function

_CHOICES = ("none", "auto", "required")
_NAME: dict[str, Any] = {"type": "string", "pattern": f"^{NAME.pattern}$"}
TOOLS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": _NAME,
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
}
TOOL_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": list(_CHOICES)},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": _NAME}},
            },
        },
    ]
}
#: The schema of a function that declares none: it takes nothing.
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


class ToolFields(StrictRequest):
    """Mixed into the request model of chats."""

    tools: Annotated[list[Any], WithJsonSchema(TOOLS_SCHEMA)] = Field(default_factory=list)
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool = True

    def read_tools(self) -> list[Function]:
        """Raises InvalidRequest."""
        if len(self.tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools must be at most {MAX_TOOLS}.", param="tools")
        read = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools)]
        if len({tool.name for tool in read}) < len(read):
            raise InvalidRequest("tools must have different names.", param="tools")
        return read

    @property
    def offered_tools(self) -> list[Any]:
        """The declarations that the template tells the model of."""
        return [] if self.tool_choice == "none" else self.tools

    def callable_tools(self) -> list[Function]:
        """Those that the model may call: with a name in tool_choice, that one. Raises InvalidRequest."""
        tools, choice = self.read_tools(), self.tool_choice
        if choice is None or (isinstance(choice, str) and choice in _CHOICES):
            if choice == "required" and not tools:
                raise InvalidRequest("tool_choice is required, and there are no tools.", param="tool_choice")
            return [] if choice == "none" else tools
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise InvalidRequest(
                f'tool_choice must be one of {", ".join(_CHOICES)}, or {{"type": "function", "function": {{"name": ...}}}}.',
                param="tool_choice",
            )
        named = [tool for tool in tools if tool.name == name]
        if not named:
            raise InvalidRequest(
                f"tool_choice names {name[:MAX_NAME]!a}, which is none of the tools.", param="tool_choice"
            )
        return named

    def schemas_demand(self, form: Form) -> Demand | None:
        """What checks the schemas of all tools; None without any. Raises InvalidRequest."""
        tools = self.read_tools()
        return Demand(of_calls(Calls(form, tools)), "tools") if tools else None

    def calls_demand(self, form: Form) -> Demand | None:
        """What the text must be, if it must call tools. Raises InvalidRequest."""
        if not self.must_call:
            return None
        return Demand(of_calls(Calls(form, self.callable_tools(), self.single_call)), "tools")

    @property
    def must_call(self) -> bool:
        """Whether the model has to call a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, dict)

    @property
    def single_call(self) -> bool:
        """Whether one call is all that may come."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, dict)


def _tool(tool: Any, place: str) -> Function:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise _wrong(f"{place} must be of type function, with the function.")
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{place}.function.name must be 1 to {MAX_NAME} letters, digits, underscores and dashes.")
    if not isinstance(function.get("description"), str | None):
        raise _wrong(f"{place}.function.description must be a string.")
    if not isinstance(parameters, dict | None):
        raise _wrong(f"{place}.function.parameters must be a JSON schema.")
    if not isinstance(strict, bool | None):
        raise _wrong(f"{place}.function.strict must be true or false.")
    if parameters and parameters.get("type", "object") != "object":
        raise _wrong(f"{place}.function.parameters must be the schema of an object.")
    schema = {"type": "object", **parameters} if parameters else _NOTHING
    return Function(name, schema, strict is True)


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tools")
