"""The playground in Chromium, on the real server: what a visitor does there, and what no visitor can make it do."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import DESK, PHONE, Visit
from tests.conftest import script, wait_for
from tests.stack import REAL, SCRIPTED, Chat, Stack, endless, strict_json

Open = Callable[..., Visit]

#: What would run or load something if it became markup anywhere.
XSS = "<img src=x onerror=\"window.hit='img'\"><script>window.hit='script'</script>'\"`</textarea><b>bold</b>${7*7}&lt;"


#: The texts of answers, as far as they have come.
TEXT = ".answer .said:not(.tokens)"


def choose(page: Page, **radios: str) -> None:
    """As a person does, by the words on the button of each choice."""
    for name, value in radios.items():
        page.locator(f'label:has(input[name="{name}"][value="{value}"])').click()


def settings(page: Page, model: str = SCRIPTED, **fields: object) -> None:
    expect(page.locator("#model")).to_be_enabled()
    page.locator("#model").select_option(model)
    page.locator("#settings").evaluate("element => { element.open = true; }")
    for name, value in fields.items():
        page.locator(f"#{name}").fill(str(value))


def send(page: Page, prompt: str, field: str = "#prompt") -> None:
    page.locator(field).fill(prompt)
    page.locator("#send").click()


def answered(page: Page, count: int = 1) -> list[str]:
    """The texts of the answers, once all are complete."""
    done = page.locator('.answer[aria-busy="false"]')
    expect(done).to_have_count(count)
    return [said.text_content() or "" for said in page.locator(TEXT).all()]


def figures(page: Page) -> dict[str, str]:
    """Of the last answer."""
    names, values = (page.locator(f".answer >> nth=-1 >> {part}").all_text_contents() for part in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def bodies(page: Page) -> list[dict[str, Any]]:
    """What the page sends from now on, as it is sent."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: request.post_data and sent.append(strict_json(request.post_data)))
    return sent


def test_a_prompt_is_completed_live_as_the_api_completes_it(stack: Stack, visit: Open) -> None:
    page = visit(stack).page
    fields = {"max_tokens": 48, "temperature": 0.7, "seed": 11}
    expected = stack.complete("The capital of France is", model=REAL, **fields)
    expect(page.locator("#model")).to_have_value(REAL)  # not the scripted engine, though it is listed first
    settings(page, REAL, **fields, top_p=1)
    page.evaluate(
        """() => {
            window.lengths = new Set();
            const look = () => lengths.add(document.querySelector(".answer .said")?.textContent.length);
            new MutationObserver(look).observe(document.querySelector("#answers"), {childList: true, subtree: true});
            window.words = 0;
            new MutationObserver(() => { words += 1; }).observe(document.querySelector("#status"), {childList: true});
        }"""
    )
    send(page, "The capital of France is")
    assert answered(page) == [expected.text]
    assert page.evaluate("lengths.size") > 10, "it comes piece by piece"
    assert page.evaluate("words") <= 4, "a screen reader is not told of each"
    shown = figures(page)
    assert (shown["finish"], shown["completion"]) == ("length", "48")
    assert shown["prompt"].startswith(str(expected.usage["prompt_tokens"]))
    assert float(shown["tokens/s"]) > 0 and shown["first token"].endswith(("ms", " s"))
    expect(page.locator("#status")).to_contain_text("Done: 48 tokens in")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == expected.text
    page.get_by_role("button", name="Add to the prompt").click()
    expect(page.locator("#prompt")).to_have_value("The capital of France is" + expected.text)


def test_a_chat_goes_on_with_what_was_said(stack: Stack, visit: Open) -> None:
    page = visit(stack, "/#chat").page
    fields = {"max_tokens": 24, "temperature": 0}
    settings(page, REAL, **fields)
    page.get_by_text("System message").first.click()
    page.locator("#system").fill("Answer in one word.")
    said_so_far = Chat([{"role": "system", "content": "Answer in one word."}])
    answers = []
    for question in ("What is the capital of France?", "And of Italy?"):
        send(page, question, "#message")
        said_so_far.append({"role": "user", "content": question})
        expected = stack.complete(said_so_far, model=REAL, **fields).text
        said_so_far.append({"role": "assistant", "content": expected})
        answers.append(expected)
        assert answered(page, len(answers)) == answers
        expect(page.locator("#message")).to_have_value("")
    page.get_by_role("button", name="Regenerate").click()
    assert answered(page, 2) == answers, "greedy, so the same"
    assert page.locator(".turn.user").all_text_contents() == [
        "You: What is the capital of France?",
        "You: And of Italy?",
    ]
    page.locator("#clear").click()
    expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize("mode", ["raw", "chat"])
def test_stop_cancels_the_request(stack: Stack, visit: Open, mode: str) -> None:
    page = visit(stack).page
    settings(page, max_tokens="")
    choose(page, mode=mode)
    with page.expect_response("**/completions") as response:
        send(page, endless(delay_ms=20), "#prompt" if mode == "raw" else "#message")
    expect(page.locator(TEXT).first).to_contain_text("tick tick")
    assert stack.busy() == 1
    page.locator("#stop").click()
    wait_for(stack.idle, 5)
    job = stack.job(response.value.headers["x-sluice-id"]).json
    assert job["status"] == "cancelled"
    [text] = answered(page)
    assert text.startswith("tick tick ") and len(text) >= 5 * (job["usage"]["completion_tokens"] - 5)
    shown = figures(page)
    assert (shown["finish"], shown["completion"]) == ("stopped by you", str(job["usage"]["completion_tokens"]))
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#send")).to_be_focused()


def test_stop_before_anything_came_and_a_visitor_who_leaves(stack: Stack, visit: Open) -> None:
    page = visit(stack).page
    settings(page, max_tokens="")
    send(page, script("late", start_delay_ms=60_000))
    wait_for(lambda: stack.busy() == 1)
    page.keyboard.press("Escape")
    wait_for(stack.idle, 5)
    expect(page.locator("#status")).to_contain_text("Stopped")
    send(page, endless(delay_ms=20))
    expect(page.locator(TEXT)).to_contain_text("tick")
    page.goto("about:blank")
    wait_for(stack.idle, 5)


def test_tokens_have_the_colours_and_alternatives_of_their_logprobs(stack: Stack, visit: Open) -> None:
    page = visit(stack).page
    fields = {"max_tokens": 12, "temperature": 0.7, "seed": 5, "logprobs": 4}
    expected = stack.complete("Once upon a time", model=REAL, **fields)
    logprobs = expected.choice["logprobs"]
    settings(page, REAL, **fields)
    choose(page, view="tokens")
    send(page, "Once upon a time")
    answered(page)
    shown = page.locator(".token")
    expect(shown).to_have_count(len(logprobs["tokens"]))
    assert [text.replace("↵", "") for text in shown.all_text_contents()] == logprobs["tokens"]
    expect(page.locator(TEXT)).to_be_hidden()
    least = (0.9, 0.5, 0.2, 0.05, 0.0)
    for place, value in enumerate(logprobs["token_logprobs"]):
        shade = next(i for i, share in enumerate(least, 1) if math.exp(value) >= share)
        assert f"heat-{shade}" in (shown.nth(place).get_attribute("class") or ""), place
    card = page.locator("#token-card")
    shown.nth(3).hover()
    expect(card).to_be_visible()
    top = sorted(logprobs["top_logprobs"][3].values(), reverse=True)
    shares = [float(share.removesuffix(" %")) for share in card.locator("td.number").all_text_contents()]
    assert shares == pytest.approx([100 * math.exp(value) for value in top], abs=0.06)
    assert card.locator(".chosen td").first.inner_text().replace("␣", " ") == logprobs["tokens"][3]
    page.mouse.move(0, 0)
    expect(card).to_be_hidden()
    choose(page, view="text")
    expect(page.locator(TEXT)).to_have_text(expected.text)


def test_several_choices_and_odd_tokens(stack: Stack, visit: Open) -> None:
    page = visit(stack).page
    settings(page, n=2)
    send(page, json.dumps({"choices": [{"pieces": ["first", " one"]}, {"pieces": ["second"]}]}))
    assert answered(page, 2) == ["first one", "second"]
    settings(page, n="")
    send(page, json.dumps({"pieces": ["a\n", {"hex": "f09f"}, {"hex": "8c8d"}, "🌍"]}))
    assert answered(page) == ["a\n🌍🌍"]
    choose(page, view="tokens")
    tokens = page.locator(".token")
    assert tokens.first.text_content() == "a↵\n"
    expect(tokens).to_have_count(5)
    assert "control" in (tokens.last.get_attribute("class") or ""), "the end token"


def test_markup_stays_text_everywhere(stack: Stack, visit: Open) -> None:
    """In prompts, answers, tokens and their alternatives, messages, error messages, and the names of models."""
    opened = visit(stack, refused=(400, 404))
    page = opened.page
    settings(page)
    before = page.locator("#main *").count()
    send(page, script(XSS, XSS))
    assert answered(page) == [XSS + XSS]
    choose(page, view="tokens")
    assert page.locator(".token").first.text_content() == XSS
    page.locator(".token").first.hover()
    expect(page.locator("#token-card .chosen td").first).to_have_text(XSS)
    choose(page, view="text", mode="chat")
    send(page, XSS, "#message")  # no script, so it is echoed
    assert page.locator(".turn.user").text_content() == "You: " + XSS
    expect(page.locator(".turn.assistant .said:not(.tokens)")).to_have_text(XSS)
    page.locator("#code").click()
    expect(page.locator("#code-text")).to_contain_text("<script>")
    page.keyboard.press("Escape")

    # a model of that name, as the list and the server's refusal show it
    models = {"object": "list", "data": [{"id": XSS, "object": "model", "created": 0, "owned_by": "x"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.goto(opened.address)
    expect(page.locator("#model option")).to_have_text([XSS])
    send(page, "x")
    expect(page.locator("#problem")).to_contain_text("onerror")
    assert page.evaluate("window.hit") is None
    assert page.locator("#main img, #main script, #main b, dialog script").count() == 0
    assert before > 20


def test_the_policy_holds(stack: Stack, visit: Open) -> None:
    """Were markup ever to get in, it could neither run nor call out; and the other tests would notice."""
    opened = visit(stack)
    page = opened.page
    page.evaluate(
        """() => {
            window.broken = [];
            addEventListener("securitypolicyviolation", (event) => broken.push(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.hit = 1";
            document.body.append(script);
            document.createElement("div").setAttribute("style", "color: red");
            fetch("http://127.0.0.1:9/").catch(() => {});
        }"""
    )
    page.wait_for_function("broken.length >= 3")
    assert sorted(page.evaluate("broken")) == ["connect-src", "script-src-elem", "style-src-attr"]
    assert page.evaluate("window.hit") is None
    assert len(opened.faults) >= 3
    opened.faults.clear()


def test_everything_can_be_done_by_keyboard(stack: Stack, visit: Open) -> None:
    page = visit(stack).page
    expect(page.locator("#model")).to_have_value(REAL)

    def press_until(key: str, selector: str) -> None:
        for _ in range(40):
            if page.locator(":focus").count() and page.locator(f"{selector}:focus").count():
                return
            page.keyboard.press(key)
        pytest.fail(f"{key} does not lead to {selector}")

    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    expect(page.locator(".skip")).to_be_in_viewport()
    page.keyboard.press("Enter")
    press_until("Tab", "#model")
    page.keyboard.type(SCRIPTED)
    expect(page.locator("#model")).to_have_value(SCRIPTED)
    press_until("Tab", "#prompt")
    page.keyboard.insert_text(endless(delay_ms=20))
    press_until("Tab", "#max_tokens")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.press("Delete")
    page.keyboard.press("Control+Enter")
    expect(page.locator(TEXT)).to_contain_text("tick")
    page.keyboard.press("Escape")
    answered(page)
    wait_for(stack.idle, 5)
    press_until("Shift+Tab", "[name=view]")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#legend")).to_be_visible()
    press_until("Tab", ".token")
    card = page.locator("#token-card")
    expect(card).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    expect(page.locator(".token").nth(1)).to_have_attribute("aria-describedby", "token-card")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    press_until("Shift+Tab", "#code")
    page.keyboard.press("Enter")
    expect(page.locator("#code-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#code")).to_be_focused()


def test_errors_name_the_field(stack: Stack, visit: Open) -> None:
    page = visit(stack, refused=(400,)).page
    sent = bodies(page)
    settings(page, max_tokens=999_999)
    send(page, "x")
    problem = page.locator("#problem")
    expect(problem).to_contain_text("context is 32768 tokens")
    expect(problem).to_contain_text("field: max_tokens · context_length_exceeded · status 400")
    expect(page.locator("#max_tokens")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".answer")).to_have_count(0)
    settings(page, max_tokens=5, temperature=3)
    send(page, "x")  # what the browser can see itself is not sent
    expect(page.locator("#temperature")).to_be_focused()
    assert len(sent) == 1
    settings(page, temperature=1)
    send(page, script("some ", "words", error_after=2))
    expect(problem).to_contain_text("internal_error")
    assert answered(page) == ["some words"]
    assert figures(page)["finish"] == "broken off"
    expect(page.locator("#max_tokens")).not_to_have_attribute("aria-invalid", "true")
    choose(page, mode="chat")
    send(page, script("x", error_after=0), "#message")
    expect(problem).to_contain_text("internal_error")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#message")).to_have_value(script("x", error_after=0))


def test_a_server_that_is_gone(stack: Stack, visit: Open) -> None:
    opened = visit(stack)
    settings(opened.page)
    opened.context.set_offline(True)
    send(opened.page, "x")
    expect(opened.page.locator("#problem")).to_have_text("The server cannot be reached.")
    opened.context.set_offline(False)
    send(opened.page, "x")
    assert answered(opened.page) == ["x"]
    expect(opened.page.locator("#problem")).to_be_hidden()
    assert [fault for fault in opened.faults if "ERR_INTERNET_DISCONNECTED" not in fault] == []
    opened.faults.clear()


def test_a_place_in_the_queue_is_told(narrow: Stack, visit: Open) -> None:
    page = visit(narrow).page
    settings(page, max_tokens="")
    with narrow.open(endless(delay_ms=20)) as ahead:
        ahead.goes_on()
        send(page, script("at last"))
        expect(page.locator("#status")).to_contain_text("Waiting: place 1 in the queue")
    assert answered(page) == ["at last"]


@pytest.mark.parametrize("mode", ["raw", "chat"])
def test_the_code_does_what_the_page_does(stack: Stack, visit: Open, mode: str) -> None:
    page = visit(stack).page
    text = "it's \"quoted\" $HOME `id` $(id) \\n \\\\ 'x' \u2028 é 🌍\n'''\n\"\"\" !! %s {0}"
    settings(page, max_tokens=500, **{"stop-strings": "never this\\n\nnor that"})
    choose(page, mode=mode)
    field = "#prompt" if mode == "raw" else "#message"
    page.locator(field).fill(script(text))
    page.locator("#code").click()
    code = {}
    for language in ("curl", "python"):
        choose(page, language=language)
        page.get_by_role("button", name="Copy").click()
        expect(page.locator("#code-status")).to_have_text("Copied")
        code[language] = page.evaluate("navigator.clipboard.readText()")
    for command in (["bash", "-c", code["curl"]], [sys.executable, "-c", code["python"]]):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "HOME": "/"})
        assert ran.returncode == 0, ran.stderr
        if command[0] == "bash":
            events = [strict_json(line[6:]) for line in ran.stdout.splitlines() if line.startswith("data: {")]
            pieces = [choice for event in events for choice in event["choices"]]
            assert "".join(p["text"] if mode == "raw" else p["delta"].get("content", "") for p in pieces) == text
        else:
            assert ran.stdout == text


def test_a_server_with_keys_asks_for_one_and_gets_it_from_this_tab_only(locked: Stack, visit: Open) -> None:
    opened = visit(locked, refused=(401,))
    page = opened.page
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    expect(page.locator("#key-reason")).to_contain_text("An API key is needed")
    expect(page.locator("#key")).to_be_focused()
    page.locator("#key").fill("sk-sluice-wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-reason")).to_contain_text("not known")
    page.locator("#key").fill(locked.key)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    settings(page)
    send(page, "open at last")
    assert answered(page) == ["open at last"]
    page.locator("#code").click()
    assert "$SLUICE_API_KEY" in page.locator("#code-text").inner_text()
    page.keyboard.press("Escape")
    kept = page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie, location.href]")
    assert kept == [{"sluice.key": locked.key}, {}, "", opened.address + "/"]
    assert locked.key not in page.content()

    page.get_by_role("link", name="API docs").click()
    expect(page.locator("h1")).to_have_text("Sluice: API")
    assert page.url == opened.address + "/docs"
    page.get_by_role("link", name="Playground").click()
    expect(page.locator("#model")).to_be_enabled()  # the key is still there
    page.locator("#key-button").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#key-reason")).to_contain_text("An API key is needed")
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param(DESK, "light", id="desk-light"),
        pytest.param(PHONE, "dark", id="phone-dark"),
        pytest.param(DESK, "dark", id="desk-dark", marks=pytest.mark.slow),
        pytest.param(PHONE, "light", id="phone-light", marks=pytest.mark.slow),
    ],
)
def test_no_barriers_and_nothing_too_wide(stack: Stack, visit: Open, size: tuple[int, int], scheme: str) -> None:
    opened = visit(stack, size=size, color_scheme=scheme, refused=(400,))
    page = opened.page
    settings(page)

    def check(state: str) -> None:
        assert opened.overflow() <= 0, state
        assert opened.barriers() == [], state

    check("empty")
    pieces = ["word ", "W" * 200, "\n", " more", "<|x|>", " and", " more"]
    send(page, script(*pieces, logprobs=[-0.01, -0.4, -1.2, -2.0, -5.0, -0.01, -9.0]))
    answered(page)
    choose(page, view="tokens")
    page.locator(".token").nth(3).focus()
    expect(page.locator("#token-card")).to_be_visible()
    check("tokens and their card")
    settings(page, max_tokens=999_999)
    send(page, "x")
    expect(page.locator("#problem")).to_be_visible()
    check("an error")
    settings(page, max_tokens=100)
    choose(page, mode="chat")
    send(page, "long " * 30 + "W" * 150, "#message")
    answered(page)
    check("a chat")
    page.locator("#code").click()
    check("code")
    page.keyboard.press("Escape")
    page.locator("#key-button").click()
    check("the key")
    page.goto(opened.address + "/docs")
    check("API docs")
