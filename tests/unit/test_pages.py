"""The pages and their files as they are served; what they do in a browser is in `tests/browser`."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from api.pages import ADDRESS, WEB, assets

TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


class _Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_may_load_its_own_files_and_nothing_else(client: FlaskClient, path: str) -> None:
    page = client.get(path)
    assert (page.status_code, page.content_type) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["Referrer-Policy"] == "no-referrer"
    for tag, attributes in _Tags(page.text).found:
        assert tag != "style" and not {name for name in attributes if name.startswith("on") or name == "style"}
        if tag == "script":
            assert attributes["src"]
        for name in ("src", "href"):
            address = attributes.get(name)
            if address and address.startswith(ADDRESS):
                assert client.get(address).status_code == 200, address
            else:
                assert address is None or address in ("/", "/monitor", "/docs", "/openapi.json") or address[0] == "#"


def test_every_file_is_served_as_what_it_is(client: FlaskClient) -> None:
    found = assets()
    assert {"/web/base.css", "/web/playground.js", "/web/icon.svg"} <= found.keys()
    for path, (body, _) in found.items():
        answer = client.get(path)
        assert answer.data == body == (WEB / path.removeprefix(ADDRESS)).read_bytes()
        assert answer.content_type == TYPES[path.rpartition(".")[2]]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-cache"
        assert client.head(path).headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize("path", ["/", "/docs", "/web/base.css"])
def test_a_copy_that_is_still_right_is_not_sent_again(client: FlaskClient, path: str) -> None:
    etag = client.get(path).headers["ETag"]
    again = client.get(path, headers={"If-None-Match": etag})
    assert (again.status_code, again.data) == (304, b"")
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/web/base.html", "/web/nothing.js", "/web/%2e%2e/pages.py", "/web/base.css%00"])
def test_nothing_else_is_served(client: FlaskClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_scripts_write_text_only() -> None:
    """What comes from a prompt or a model never becomes markup."""
    for path in Path(WEB).glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
