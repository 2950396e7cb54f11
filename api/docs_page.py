"""The OpenAPI document as one static HTML page: no scripts, readable without a style sheet.

Knows the document's shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from api import pages
from api.schemas.strict import written

_REF = re.compile(r"#/components/(\w+)/(\w+)")
_CODE = re.compile(r"`([^`]+)`")


class Row(NamedTuple):
    """A line of a table of fields."""

    name: str
    kind: Markup
    default: str
    words: str


def render(document: dict[str, Any], base: str) -> str:
    """The page of `document` for a server at `base`, the beginning of its addresses."""
    environment = pages.templates()
    environment.filters["words"] = _words
    components = document["components"]
    operations = [
        _operation(path, method, item, components)
        for path, methods in document["paths"].items()
        for method, item in methods.items()
    ]
    requests = {operation["request"] for operation in operations}
    return environment.get_template("docs.html").render(
        page="docs",
        openapi=document["openapi"],
        info=document["info"],
        base=base,
        operations=operations,
        schemas=[
            {"name": name, "words": schema.get("description", ""), "fields": _fields(schema)}
            for name, schema in components["schemas"].items()
            if name not in requests
        ],
        headers=[(name, header["description"]) for name, header in components["headers"].items()],
        table=_table,
    )


def _operation(path: str, method: str, item: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    request = ""
    if "requestBody" in item:
        [body] = item["requestBody"]["content"].values()
        request = _target(body["schema"]["$ref"])
    answered = []
    for status, answer in item["responses"].items():
        answer = components["responses"][_target(answer["$ref"])] if "$ref" in answer else answer
        bodies = [
            Markup("<code>{}</code> ").format(media)
            + (Markup("events") if media == "text/event-stream" else _kind(content["schema"]))
            for media, content in answer.get("content", {}).items()
        ]
        words = [answer["description"]]
        words += [
            c["schema"]["description"] for c in answer.get("content", {}).values() if "description" in c["schema"]
        ]
        answered.append({"status": status, "body": Markup("<br>").join(bodies), "words": " ".join(words)})
    return {
        "name": item["operationId"],
        "method": method,
        "path": path,
        "summary": item["summary"],
        "description": item.get("description", ""),
        "request": request,
        "parameters": [
            Row(p["name"], _kind(p["schema"]) + Markup(" in the {}").format(p["in"]), "", p["description"])
            for p in item["parameters"]
        ],
        "fields": _fields(components["schemas"][request]) if request else [],
        "answers": answered,
    }


def _fields(schema: dict[str, Any]) -> list[Row]:
    return [
        Row(
            name, _kind(field), json.dumps(field["default"]) if "default" in field else "", field.get("description", "")
        )
        for name, field in schema.get("properties", {}).items()
    ]


def _table(rows: Iterable[Row]) -> Markup:
    lines = [
        Markup("<tr><td><code>{}</code></td><td>{}</td><td>{}</td><td>{}</td></tr>").format(
            row.name, row.kind, row.default, _words(row.words)
        )
        for row in rows
    ]
    head = Markup("<table><thead><tr><th>name</th><th>type</th><th>default</th><th>meaning</th></tr></thead><tbody>")
    return head + Markup("\n").join(lines) + Markup("</tbody></table>")


def _kind(schema: dict[str, Any]) -> Markup:
    """A schema in words."""
    if "$ref" in schema:
        name = _target(schema["$ref"])
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "const" in schema:
        return escape(json.dumps(schema["const"]))
    if "enum" in schema:
        return Markup(" or ").join(escape(json.dumps(value)) for value in schema["enum"] if value is not None)
    if "anyOf" in schema:
        return Markup(" or ").join(_kind(option) for option in schema["anyOf"] if option != {"type": "null"})
    kinds = schema.get("type", "any value")
    kind = " or ".join(k for k in kinds if k != "null") if isinstance(kinds, list) else kinds
    made = escape(kind)
    if kind == "array" and "items" in schema:
        made = Markup("array of ({})").format(_kind(schema["items"]))
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        made = Markup("object of ({})").format(_kind(schema["additionalProperties"]))
    elif kind == "object" and "properties" in schema:
        made = Markup("object with {}").format(", ".join(schema["properties"]))
    return made + escape(_bounds(schema))


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" {written(low)} to {written(high)}" if abs(high) < 2**31 else ""
    if low is not None:
        return f" from {written(low)}"
    if high is not None:
        return f" up to {written(high)}"
    for key, noun in (("maxItems", "items"), ("maxLength", "characters"), ("maxProperties", "entries")):
        if key in schema:
            return f", at most {schema[key]} {noun}"
    return ""


def _target(ref: str) -> str:
    match = _REF.fullmatch(ref)
    if match is None:
        raise ValueError(f"{ref} points nowhere in this document")
    return match[2]


def _words(text: str) -> Markup:
    """Text with `code` in it."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
