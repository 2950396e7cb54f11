"""Uploads: whatever way a form is cut into pieces, what is in it is the same; what is no form is refused in plain
words."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.multipart import MAX_FIELD, MAX_PARTS, boundary, read_form
from api.routes.files import shown_name
from api.schemas.batches import UploadForm
from shared.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

DIVIDING = b"XyZ"


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    said = f'Content-Disposition: form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
    return b"--XyZ\r\n" + said.encode() + b"\r\n\r\n" + value + b"\r\n"


def read(raw: bytes, cuts: list[int] | None = None) -> tuple[dict[str, str], str | None, bytes]:
    written: list[bytes] = []
    ends = [0, *sorted(cut % (len(raw) + 1) for cut in cuts or []), len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(ends)]
    fields, filename = read_form(iter(pieces), DIVIDING, "file", written.append)
    return fields, filename, b"".join(written)


@given(
    st.binary(max_size=300) | st.sampled_from([b"\r\n", b"--XyZ", b"a\r\n--XyZ\r\nb"[:9], b"\r\n--Xy", b"\n" * 50]),
    st.lists(st.integers(0, 2000), max_size=12),
    st.booleans(),
)
@example(b"\0" * 50, [196], False)  # behind a boundary, before the end of its line
@example(b"\0\0", [148, 1965], False)  # the same, and within the boundary
def test_however_it_arrives(content: bytes, cuts: list[int], last: bool) -> None:
    if b"\r\n--XyZ" in b"\r\n" + content:  # the sender would have chosen another boundary
        return
    parts = [part("purpose", b"batch"), part("file", content, "a.jsonl")]
    raw = b"".join(parts if last else parts[::-1]) + b"--XyZ--\r\n"
    assert read(raw, cuts) == ({"purpose": "batch"}, "a.jsonl", content)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no form at all",
        b"--XyZ\r\nContent-Disposition: form-data\r\n\r\nx\r\n--XyZ--\r\n",
        b"--XyZ\r\nContent-Type: text/plain\r\n\r\nx\r\n--XyZ--\r\n",
        part("purpose", b"batch"),
        part("file", b"cut off", "a")[:-4],
        part("purpose", b"a") + part("purpose", b"b") + b"--XyZ--\r\n",
        part("file", b"a", "a") + part("file", b"b", "b") + b"--XyZ--\r\n",
        part("other", b"a", "a") + b"--XyZ--\r\n",
        part("purpose", b"\xff") + b"--XyZ--\r\n",
        part("purpose", b"x" * (MAX_FIELD + 1)) + b"--XyZ--\r\n",
        part("x", b"") * (MAX_PARTS + 1) + b"--XyZ--\r\n",
        b"--XyZ\r\nContent-Disposition: form-data; name=\xff\r\n\r\nx\r\n--XyZ--\r\n",
    ],
)
def test_what_is_no_form(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(raw)


def test_a_head_that_never_ends() -> None:
    pieces = [b"--XyZ\r\nContent-Disposition: form-data; name=", *[b"x" * 1000] * 100]
    with pytest.raises(BodyTooLarge):
        read_form(iter(pieces), DIVIDING, "file", lambda data: None)


@pytest.mark.parametrize(
    "said",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=x"],
)
def test_another_kind_of_body(said: str) -> None:
    with pytest.raises(UnsupportedMediaType):
        boundary(said)
    assert boundary('Multipart/Form-Data; boundary="a b"') == b"a b"


def test_the_fields_of_an_upload() -> None:
    form = UploadForm.of({"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"})
    assert form.ttl_s(1) == 7200
    assert UploadForm.of({"purpose": "batch"}).ttl_s(5) == 5
    for fields in (
        {},
        {"purpose": "fine-tune"},
        {"purpose": "batch", "expires_after[seconds]": "7200"},
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7e3"},
        {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "7200"},
        {"purpose": "batch", "expires_after[x]": "1", "expires_after[anchor]": "created_at"},
    ):
        with pytest.raises(InvalidRequest):
            UploadForm.of(fields).ttl_s(1)


@given(st.text())
def test_a_name_is_shown_without_folders_and_control_characters(name: str) -> None:
    shown = shown_name(name)
    assert 0 < len(shown) <= 255
    assert not any(character in shown for character in "/\\\n\r\0\u2028")
    assert shown not in (".", "..")
