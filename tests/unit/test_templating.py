"""Chat templates in their process: limits, refusals, and what they cost others. FB-068, FB-069."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.templating import Renderer, TemplateFailed
from tests.conftest import ROOT, wait_for

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
SILENT_LOOP = LOOP.replace("x", "")
LARGE = '{{ "x" * 10**9 }}'


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(limit=1.0)
    yield renderer
    renderer.close()


def test_it_renders_again_and_again(renderer: Renderer) -> None:
    assert renderer.render("{{ a }}🌍", {"a": "ä"}) == "ä🌍"
    assert renderer.render_all("{{ a }}", [{"a": n} for n in range(3)]) == ["0", "1", "2"]
    assert len(renderer.render("{{ a * 1000000 }}", {"a": "x"})) == 1_000_000


@pytest.mark.parametrize("template", [LOOP, SILENT_LOOP, LARGE, "{{ (2**100000000) | string | length }}"])
def test_what_goes_beyond_its_limits_fails_in_time(renderer: Renderer, template: str) -> None:
    """FB-069, with the template on the card."""
    began = time.monotonic()
    with pytest.raises(TemplateFailed):
        renderer.render(template, {})
    assert time.monotonic() - began < 10
    assert renderer.render("still {{ x }}", {"x": 1}) == "still 1"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch %s').read() }}",
        "{{ lipsum.__globals__['os'].system('touch %s') }}",
        "{{ (messages|attr('__class__')).__base__.__subclasses__()[1]('touch %s') }}",
        "{{ messages.append('forged') }}",
    ],
)
def test_the_sandbox_holds(renderer: Renderer, template: str, tmp_path: Path) -> None:
    """FB-068 (CVE-2024-34359)"""
    canary = tmp_path / "canary"
    with pytest.raises(TemplateFailed):
        renderer.render(template.replace("%s", str(canary)), {"messages": []})
    assert not canary.exists()


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", r"{{ '\ud800' }}"])
def test_the_message_says_what_is_wrong(renderer: Renderer, template: str) -> None:
    with pytest.raises(TemplateFailed) as caught:
        renderer.render(template, {})
    assert (caught.value.status, caught.value.code) == (400, "template_error")
    assert "Traceback" not in caught.value.message and "site-packages" not in caught.value.message


def test_a_child_that_died_is_replaced(renderer: Renderer) -> None:
    renderer.render("x", {})
    child = renderer._children._idle.get()
    assert child is not None
    child._process.kill()
    child._process.wait()
    renderer._children._idle.put(child)
    assert renderer.render("{{ 1 }}", {}) == "1"


def test_a_loop_holds_up_no_other_rendering(renderer: Renderer) -> None:
    renderer.render("warm", {})

    def loop() -> None:
        with pytest.raises(TemplateFailed):
            renderer.render(SILENT_LOOP, {})

    looping = threading.Thread(target=loop)
    looping.start()
    assert [renderer.render("{{ n }}", {"n": n}) for n in range(5)] == list("01234")
    looping.join()


def test_greenlets_run_on_while_a_template_loops() -> None:
    """FB-069: the latency of others is unchanged, in a process as the server's."""
    code = f"""
from gevent import monkey; monkey.patch_all()
import gevent, time
from api.templating import Renderer, TemplateFailed
renderer, gaps, stop = Renderer(limit=1.0), [], []
renderer.render("warm", {{}})
def tick():
    last = time.monotonic()
    while not stop:
        gevent.sleep(0.01)
        gaps.append(time.monotonic() - last - 0.01)
        last += gaps[-1] + 0.01
ticking = gevent.spawn(tick)
try:
    renderer.render({SILENT_LOOP!r}, {{}})
except TemplateFailed:
    stop.append(1)
ticking.join()
renderer.close()
print(len(gaps), sorted(gaps)[len(gaps) // 2])
"""
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    ticks, median = out.stdout.split()[-2:]
    assert int(ticks) > 20 and float(median) < 0.05


def test_no_child_outlives_its_process() -> None:
    """Not even one that loops when the process is killed: its own alarm ends it."""
    code = f"""
import threading
from api.templating import Renderer
renderer = Renderer(limit=1.0)
renderer.render("warm", {{}})
child = renderer._children._idle.queue[-1]
threading.Thread(target=renderer.render, args=({SILENT_LOOP!r}, {{}}), daemon=True).start()
print(child._process.pid, flush=True)
threading.Event().wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()

    def gone() -> bool:
        try:
            return "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][:3]
        except FileNotFoundError:
            return True

    wait_for(gone, 10)
