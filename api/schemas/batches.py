"""`POST /v1/batches` and the form of `POST /v1/files`. Knows nothing of files and of the store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from api.schemas.strict import StrictRequest, only_keys
from api.webhooks import targets
from shared.errors import InvalidRequest

#: How long files may be kept, s, as with OpenAI: an hour to 30 days.
LEAST_TTL, MOST_TTL = 3600, 2_592_000
#: Longest window, s.
LONGEST_WINDOW = 86_400
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smh])")
_UNITS = {"s": 1, "m": 60, "h": 3600}

EXPIRES_SCHEMA = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "additionalProperties": False,
    "properties": {
        "anchor": {"const": "created_at"},
        "seconds": {"type": "integer", "minimum": LEAST_TTL, "maximum": MOST_TTL},
    },
}
METADATA_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
}
#: The form of an upload.
UPLOAD_SCHEMA = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_TTL, "maximum": MOST_TTL},
    },
}
WINDOW_SCHEMA = {"type": "string", "pattern": f"^{_WINDOW.pattern}$"}


class BatchTimes(StrictRequest):
    """What a new batch and a replay share. Use `read` to make one."""

    completion_window: Annotated[str, WithJsonSchema(WINDOW_SCHEMA)] = "24h"
    metadata: Annotated[dict[str, Any] | None, WithJsonSchema(METADATA_SCHEMA)] = None
    output_expires_after: Annotated[dict[str, Any] | None, WithJsonSchema(EXPIRES_SCHEMA)] = None

    webhook_url: str | None = None

    def checked_webhook(self, origins: Sequence[str]) -> str:
        """The URL that is told of the end, or "". Raises InvalidRequest."""
        if self.webhook_url is not None:
            targets.check(self.webhook_url, origins)
        return self.webhook_url or ""

    @property
    def window_s(self) -> int:
        """Seconds. Raises InvalidRequest."""
        match = _WINDOW.fullmatch(self.completion_window)
        seconds = int(match[1]) * _UNITS[match[2]] if match else 0
        if not 0 < seconds <= LONGEST_WINDOW:
            raise InvalidRequest(
                "completion_window must be a time of at most 24 hours, such as 24h, 90m or 30s.",
                param="completion_window",
            )
        return seconds

    def checked_metadata(self) -> dict[str, str] | None:
        """Raises InvalidRequest."""
        if self.metadata is None:
            return None
        given = {key: value for key, value in self.metadata.items() if value is not None}
        if len(given) > MAX_METADATA:
            raise InvalidRequest(f"metadata has at most {MAX_METADATA} pairs.", param="metadata")
        for key, value in given.items():
            if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE or len(key) > MAX_METADATA_KEY:
                raise InvalidRequest(
                    f"metadata has texts of at most {MAX_METADATA_VALUE} characters under keys of at most "
                    f"{MAX_METADATA_KEY}.",
                    param="metadata",
                )
        return given

    def output_ttl_s(self, default: int) -> int:
        """Seconds for which results are kept. Raises InvalidRequest."""
        given = self.output_expires_after
        return default if given is None else read_ttl(given, "output_expires_after")


class BatchRequest(BatchTimes):
    """A new batch."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, WithJsonSchema(WINDOW_SCHEMA)]


class ReplayRequest(BatchTimes):
    """The requests of a batch that were not completed, once more."""


class UploadForm(StrictRequest):
    """The fields of an upload beside the file."""

    purpose: str
    expires_after: dict[str, Any] | None = None

    @classmethod
    def of(cls, fields: dict[str, str]) -> UploadForm:
        """From a form, in which `expires_after` is written as `expires_after[anchor]` and `expires_after[seconds]`.
        Raises InvalidRequest."""
        given: dict[str, Any] = {}
        if "purpose" in fields:
            given["purpose"] = fields["purpose"]
        expires: dict[str, Any] = {
            name.removeprefix("expires_after[").removesuffix("]"): value
            for name, value in fields.items()
            if name.startswith("expires_after[")
        }
        if expires:
            seconds = expires.get("seconds", "")
            given["expires_after"] = {
                **expires,
                "seconds": int(seconds) if seconds.isascii() and seconds.isdigit() and len(seconds) < 16 else seconds,
            }
        form = cls.read(given)
        if form.purpose != "batch":
            raise InvalidRequest("purpose must be batch: files are for batches here.", param="purpose")
        return form

    def ttl_s(self, default: int) -> int:
        """Seconds for which the file is kept. Raises InvalidRequest."""
        return default if self.expires_after is None else read_ttl(self.expires_after, "expires_after")


def read_ttl(given: dict[str, Any], field: str) -> int:
    """The seconds of an expiry policy. Raises InvalidRequest."""
    only_keys(field, given, ("anchor", "seconds"))
    seconds = given.get("seconds")
    if given.get("anchor") != "created_at":
        raise InvalidRequest(f"{field}.anchor must be created_at.", param=field)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not LEAST_TTL <= seconds <= MOST_TTL:
        raise InvalidRequest(f"{field}.seconds must be an integer from {LEAST_TTL} to {MOST_TTL}.", param=field)
    return seconds
