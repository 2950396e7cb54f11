"""Chromium for the tests of the pages, and visits that end in a failure if the page did what no page should."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.conftest import wait_for
from tests.stack import SCRIPTED, Client, Stack, run_keys

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESK, PHONE = (1280, 850), (375, 700)
#: How long a page may take to show what a test waits for, ms.
PATIENCE_MS = 30_000
#: A browser's own line in the console for an answer that is an error.
_REFUSED = re.compile(r"Failed to load resource: the server responded with a status of (\d+)")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for a file of tests: while it is there, this thread has an event loop that other tests cannot have."""
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip(f"needs Chromium (apt-get install chromium); none of {', '.join(CHROMIUMS)} is here")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Visit:
    """A page of `stack` in a browser profile of its own. `close` fails the test for an error or warning in the console,
    a break of the policy, and a request to elsewhere. `refused`: the error statuses that the test provokes."""

    def __init__(
        self, browser: Browser, stack: Stack, path: str, size: tuple[int, int], refused: tuple[int, ...], **options: Any
    ) -> None:
        self.address = f"http://127.0.0.1:{stack.port}"
        self.faults: list[str] = []
        self._refused = refused
        self.context: BrowserContext = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            permissions=["clipboard-read", "clipboard-write"],
            **options,
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        self.page.on("request", self._see)
        self.page.goto(self.address + path)

    def _hear(self, message: ConsoleMessage) -> None:
        match = _REFUSED.match(message.text)
        if message.type in ("error", "warning") and not (match and int(match[1]) in self._refused):
            self.faults.append(f"console: {message.text}")

    def _see(self, request: Request) -> None:
        if not request.url.startswith((self.address + "/", "data:")):
            self.faults.append(f"request to {request.url}")

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def barriers(self) -> list[str]:
        """What axe finds on the page as it is."""
        found = Axe().run(self.page).response["violations"]
        return [f"{v['id']}: {v['help']}: {[n['target'] for n in v['nodes']]}" for v in found]

    def close(self) -> None:
        self.context.close()
        assert self.faults == []


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Callable[..., Visit]]:
    """`visit(stack, path, size=, refused=, **options)`: opens a page; further options are those of a browser context."""
    visits: list[Visit] = []

    def open_page(
        stack: Stack, path: str = "/", *, size: tuple[int, int] = DESK, refused: tuple[int, ...] = (), **options: Any
    ) -> Visit:
        visits.append(Visit(chromium, stack, path, size, refused, **options))
        return visits[-1]

    yield open_page
    for opened in visits:
        opened.close()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server that asks for keys; `key` is one that may everything."""
    folder: Path = tmp_path_factory.mktemp("locked")
    with Stack(folder, (SCRIPTED,)) as locked:
        locked.key = run_keys(locked.env, "add", "--scope", "admin")["key"]
        wait_for(lambda: Client(locked.port).call("GET", "/v1/models").status == 401)
        yield locked
