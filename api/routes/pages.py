"""`GET /`: the playground. `GET /web/...`: the files of all pages. Open to everyone, for there is no data in them."""

from __future__ import annotations

from flask import Blueprint, Response, request

from api import pages
from api.services import services
from shared.errors import NotFound

blueprint = Blueprint("pages", __name__)


@blueprint.get("/")
def playground() -> Response:
    return pages.page("playground.html", page="playground")


@blueprint.get(pages.ADDRESS + "<name>")
def asset(name: str) -> Response:
    found = services().assets.get(request.path)
    if found is None:
        raise NotFound(f"There is no file {name[:64]!a} here.")
    return pages.answer(*found)
