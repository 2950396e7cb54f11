"""The server's own web pages: how they are rendered and guarded, and the files that they load (`api/web/`).

Pages hold no data: their scripts fetch it with the key that the visitor gave. Knows nothing of what is on them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from flask import Response, request
from jinja2 import Environment, FileSystemLoader, StrictUndefined

WEB = Path(__file__).parent / "web"
#: Where the files are served; pages name them by it.
ADDRESS = "/web/"
#: What a browser may do on our pages: load our own files and call our own API, nothing written into the page itself.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: Kinds of files that are served. Everything else in the folder is a template.
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
#: Of pages and their files alike. A browser asks each time whether its copy is still right, by the ETag.
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Asset(NamedTuple):
    """A file as it is served."""

    body: bytes
    content_type: str


def assets() -> dict[str, Asset]:
    """Path, as in a request, to file: all that pages load."""
    found = sorted(path for path in WEB.iterdir() if path.suffix in TYPES)
    return {ADDRESS + path.name: Asset(path.read_bytes(), TYPES[path.suffix]) for path in found}


def templates() -> Environment:
    """For the pages in `WEB`; they extend `base.html`, which takes `page` (the name of its own link), "" for none."""
    return Environment(
        loader=FileSystemLoader(WEB), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def page(template: str, **values: Any) -> Response:
    """A page made of one of the templates, as the answer to the current request."""
    return answer(templates().get_template(template).render(**values).encode(), "text/html; charset=utf-8")


def answer(body: bytes, content_type: str) -> Response:
    """To the current request, which may have a copy already (304)."""
    tag = hashlib.sha256(body).hexdigest()[:32]
    response = Response(body, content_type=content_type, headers=HEADERS)
    if request.if_none_match.contains_weak(tag):
        response = Response(status=304, headers=HEADERS)
    response.set_etag(tag)
    return response
