"""`GET /openapi.json` and `GET /docs`: what this server can be asked, for programs and for people."""

from __future__ import annotations

import msgspec
from flask import Blueprint, Response, request

from api import docs_page, openapi, pages
from api.services import services

blueprint = Blueprint("reference", __name__)


@blueprint.get("/openapi.json")
def document() -> Response:
    made = openapi.document(services().settings)
    return Response(msgspec.json.encode(made), content_type="application/json")


@blueprint.get("/docs")
def docs() -> Response:
    page = docs_page.render(openapi.document(services().settings), request.url_root.rstrip("/"))
    return pages.answer(page.encode(), "text/html; charset=utf-8")
