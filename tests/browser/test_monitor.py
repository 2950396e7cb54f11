"""The monitor in Chromium, on the real server: it shows a running request live, cancels it, and runs nothing it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import DESK, PHONE, Visit
from tests.conftest import script
from tests.stack import Stack, endless, run_keys

Open = Callable[..., Visit]

XSS = "<img src=x onerror=\"window.hit='img'\"><script>window.hit='script'</script><b>bold</b>"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("watched"), options=["--api-workers", "2"], request_monitor=True) as watched:
        yield watched


def test_a_running_request_is_shown_and_cancelled_by_keyboard(watched: Stack, visit: Open) -> None:
    page = visit(watched, "/monitor").page
    expect(page.locator("#live")).to_have_text("live")
    with watched.open(endless(delay_ms=30)) as stream:
        row = page.locator(f'#running tr[data-key="{stream.id}"]')
        expect(row).to_contain_text("scripted")
        expect(page.locator("#running-count")).to_have_text("1")
        button = row.get_by_role("button")
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_text("Really?")
        page.keyboard.press("Enter")
        stream.read()
        assert stream.error and stream.error["code"] == "cancelled"
        expect(row).to_have_count(0)
    expect(page.locator("#totals")).to_contain_text("Requests: cancelled")


def test_what_people_and_models_wrote_stays_text(watched: Stack, visit: Open) -> None:
    watched.complete(script(XSS))
    watched.complete(XSS)
    page = visit(watched, "/monitor").page
    expect(page.locator("#recent")).to_contain_text(XSS)
    for summary in page.locator("#recent summary").all():
        summary.click()
    expect(page.locator("#recent pre").filter(has_text=XSS).first).to_be_visible()
    assert page.locator("#recent :is(img, script, b)").count() == 0
    assert page.evaluate("window.hit") is None


@pytest.mark.parametrize("size", [DESK, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(watched: Stack, visit: Open, size: tuple[int, int], scheme: str) -> None:
    with watched.open(endless(delay_ms=30)) as stream:
        opened = visit(watched, "/monitor", size=size, color_scheme=scheme)
        expect(opened.page.locator(f'#running tr[data-key="{stream.id}"]')).to_be_visible()
        assert opened.overflow() <= 0
        assert opened.barriers() == []


def test_it_asks_for_a_key_and_shows_no_texts_without_admin(locked: Stack, visit: Open) -> None:
    key = run_keys(locked.env, "add", "--scope", "monitor")["key"]
    page = visit(locked, "/monitor", refused=(401,)).page
    page.locator("#key").fill(key)
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#live")).to_have_text("live")
    expect(page.locator("#recent-hint")).to_contain_text("not shown")
