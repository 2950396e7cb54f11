"""`/v1/batches`: create, list, look, cancel, replay. What runs them is `api/batches/`, in a process of its own."""

from __future__ import annotations

from typing import Any

import msgspec
from flask import Blueprint, Response, request

from api.auth import caller
from api.batches.endpoints import ENDPOINTS
from api.batches.records import Fields
from api.body import read_json
from api.edge import tell_ignored, tenant, visible_tenant
from api.routes.files import listed, read_limit
from api.schemas.batches import BatchRequest, ReplayRequest
from api.services import Services, services
from shared.errors import Forbidden, InvalidRequest

blueprint = Blueprint("batches", __name__)

#: Batches in one page of the list, by default and at most, as with OpenAI.
LISTED, MOST_LISTED = 20, 100


@blueprint.post("/v1/batches")
def create() -> Response:
    """A batch of an uploaded file. Its lines are checked later: what is wrong with them is in the batch's `errors`."""
    parts = services()
    body = read_json(request.environ, parts.settings.max_body_bytes)
    tell_ignored(BatchRequest.unknown(body), strict=parts.settings.strict_fields)
    fields = BatchRequest.read(body)
    _check_endpoint(fields.endpoint)
    return _made(
        parts,
        Fields(
            tenant=tenant(),
            endpoint=fields.endpoint,
            input=fields.input_file_id,
            window=fields.completion_window,
            window_s=fields.window_s,
            metadata=fields.checked_metadata(),
            output_ttl_s=fields.output_ttl_s(parts.settings.file_ttl_s),
            webhook=fields.checked_webhook(parts.settings.webhook_targets),
        ),
    )


@blueprint.post("/v1/batches/<batch_id>/replay")
def replay(batch_id: str) -> Response:
    """A new batch of those requests of an ended one that were not completed."""
    parts = services()
    has_body = (
        request.environ.get("CONTENT_LENGTH", "0") not in ("", "0") or "HTTP_TRANSFER_ENCODING" in request.environ
    )
    body = read_json(request.environ, parts.settings.max_body_bytes) if has_body else {}
    tell_ignored(ReplayRequest.unknown(body), strict=parts.settings.strict_fields)
    fields = ReplayRequest.read(body)
    earlier = parts.batches.find(batch_id, tenant())
    if not earlier.over:
        raise InvalidRequest("This batch has not ended yet.", param="batch_id")
    _check_endpoint(earlier.endpoint)
    return _made(
        parts,
        Fields(
            tenant=earlier.tenant,
            endpoint=earlier.endpoint,
            input=earlier.input,
            window=fields.completion_window,
            window_s=fields.window_s,
            metadata=fields.checked_metadata(),
            output_ttl_s=fields.output_ttl_s(parts.settings.file_ttl_s),
            webhook=fields.checked_webhook(parts.settings.webhook_targets),
            replay_of=earlier.id,
        ),
    )


@blueprint.get("/v1/batches")
def listing() -> Response:
    """The caller's batches, newest first."""
    batches, more = services().batches.listed(
        visible_tenant(),
        after=request.args.get("after") or None,
        limit=read_limit(request.args.get("limit"), LISTED, MOST_LISTED),
    )
    return _json(listed([batch.shown() for batch in batches], more))


@blueprint.get("/v1/batches/<batch_id>")
def one(batch_id: str) -> Response:
    return _json(services().batches.find(batch_id, visible_tenant()).shown())


@blueprint.post("/v1/batches/<batch_id>/cancel")
def cancel(batch_id: str) -> Response:
    """What runs is cut off. A batch that has all its results stays as it is."""
    return _json(services().batches.cancel(batch_id, visible_tenant()).shown())


def _check_endpoint(url: str) -> None:
    """Raises InvalidRequest, or Forbidden if the caller's key may not call it."""
    endpoint = ENDPOINTS.get(url)
    if endpoint is None:
        raise InvalidRequest(f"endpoint must be {' or '.join(ENDPOINTS)}.", param="endpoint")
    key = caller().key
    if key is not None and not key.may(endpoint.scope):
        raise Forbidden(f"This key may not do that: it lacks the scope {endpoint.scope}.")


def _made(parts: Services, fields: Fields) -> Response:
    return _json(parts.batches.create(fields, parts.settings.max_tenant_batches).shown())


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
