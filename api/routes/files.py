"""`/v1/files`: upload, list, look, read, delete. Files are the input and the results of batches."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import chain
from typing import Any
from urllib.parse import quote

import msgspec
from flask import Blueprint, Response, request
from werkzeug.http import dump_options_header

from api.body import body_pieces
from api.edge import tell_ignored, tenant, visible_tenant
from api.file_records import File, new_id
from api.multipart import boundary, read_form
from api.schemas.batches import UploadForm
from api.services import services
from shared.errors import BodyTooLarge, InvalidRequest

blueprint = Blueprint("files", __name__)

#: Files in one page of the list, at most and by default, as with OpenAI.
MOST_LISTED = 10_000
#: What an upload may have besides the file, bytes.
AROUND = 64 * 1024
#: Longest name that is kept, characters.
MAX_NAME = 255

_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@blueprint.post("/v1/files")
def upload() -> Response:
    """The file goes to the file store as it arrives."""
    parts = services()
    settings = parts.settings
    dividing = boundary(request.environ.get("CONTENT_TYPE", ""))
    pieces = body_pieces(request.environ, settings.max_file_bytes + AROUND)
    file_id = new_id()
    path = f"files/{file_id}"
    with parts.files.create(path) as new:

        def write(data: bytes) -> None:
            if new.size + len(data) > settings.max_file_bytes:
                raise BodyTooLarge(f"The file is larger than the limit of {settings.max_file_bytes} bytes.")
            new.write(data)

        fields, filename = read_form(pieces, dividing, "file", write)
        form = UploadForm.of(fields)
        ttl_s = form.ttl_s(settings.file_ttl_s)
        if filename is None:
            raise InvalidRequest("file is required.", param="file")
    known = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
    tell_ignored([name for name in fields if name not in known])
    try:
        file = parts.file_records.add(
            file_id, tenant(), size=new.size, filename=shown_name(filename), path=path, ttl_s=ttl_s
        )
    except BaseException:
        parts.files.remove([path])
        raise
    return _json(file.shown())


@blueprint.get("/v1/files")
def listing() -> Response:
    """The caller's files, newest first."""
    order = request.args.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    files, more = services().file_records.listed(
        visible_tenant(),
        after=request.args.get("after") or None,
        limit=read_limit(request.args.get("limit"), MOST_LISTED, MOST_LISTED),
        ascending=order == "asc",
        purpose=request.args.get("purpose") or None,
    )
    return _json(listed([file.shown() for file in files], more))


@blueprint.get("/v1/files/<file_id>")
def one(file_id: str) -> Response:
    return _json(_find(file_id).shown())


@blueprint.delete("/v1/files/<file_id>")
def delete(file_id: str) -> Response:
    services().file_records.delete(file_id, visible_tenant())
    return _json({"id": file_id, "object": "file", "deleted": True})


@blueprint.get("/v1/files/<file_id>/content")
def content(file_id: str) -> Response:
    """The bytes, never as something that a browser would show. Of a running batch's results: what there is of them."""
    file = _find(file_id)
    headers = {
        "Content-Length": str(file.bytes),
        "Content-Disposition": dump_options_header("attachment", _names(file.filename)),
        "X-Content-Type-Options": "nosniff",
    }
    body: Iterable[bytes] = ()
    if request.method != "HEAD":
        blocks = services().file_records.content(file)
        body = chain([next(blocks, b"")], blocks)  # what fails before the first byte is an answer with a status
    return Response(body, content_type="application/octet-stream", headers=headers)


def _find(file_id: str) -> File:
    return services().file_records.find(file_id, visible_tenant())


def _names(name: str) -> dict[str, str | None]:
    """For Content-Disposition: in ASCII for all, and as it is (RFC 8187)."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode() or "file"
    return {"filename": plain} if plain == name else {"filename": plain, "filename*": f"UTF-8''{quote(name, safe='')}"}


def shown_name(name: str) -> str:
    """A client's name for a file, to be shown again: without folders and without what is no text."""
    return _NOT_SHOWN.sub("", re.split(r"[/\\]", name)[-1])[:MAX_NAME].strip(". ") or "file"


def read_limit(text: str | None, default: int, most: int) -> int:
    """`limit` of a list. Raises InvalidRequest."""
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidRequest(f"limit must be a number from 1 to {most}.", param="limit")
    return int(text)


def listed(items: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of a list."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
