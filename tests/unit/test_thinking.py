"""The no-thinking tail: found in a template, and put at the end of a raw prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pytest

from api.template_process import render
from api.templating import TemplateFailed
from api.thinking import PAUSE, PROBE, Shape, Shapes, tail_of
from shared.no_thinking import missing

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}"
EMPTY = "<think>\n\n</think>\n\n"
#: Minimal templates of our own, one for each family: (template, how a rendering with thinking on ends, tail).
FAMILIES = {
    "qwen3": (
        TURNS + OPEN + "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
        "<|im_start|>assistant\n",
        EMPTY,
    ),
    "on-form opens": (
        TURNS + OPEN + "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}",
        "<|im_start|>assistant\n<think>\n",
        EMPTY,
    ),
    "glm": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + OPEN + "<|assistant|>"
        "{{ '<think></think>' if enable_thinking is false else '<think>' }}{% endif %}",
        "<|assistant|><think>",
        "<think></think>",
    ),
    "glm-4.5-like": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + OPEN + "<|assistant|>"
        "{{ '\\n<think></think>' if enable_thinking is false else '' }}{% endif %}",
        "<|assistant|>",
        "\n<think></think>",
    ),
    "glm-4.5-like that writes to the user's words too": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        "{{ '/nothink' if enable_thinking is false else '' }}{% endfor %}" + OPEN + "<|assistant|>"
        "{{ '\\n<think></think>' if enable_thinking is false else '' }}{% endif %}",
        "<|assistant|>",
        "\n<think></think>",
    ),
    "deepseek-v3.1-like": (
        "{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}" + OPEN + "<｜Assistant｜>"
        "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
        "<｜Assistant｜><think>",
        "</think>",
    ),
    "switch also in the system message": (
        "<|im_start|>system\nReasoning: {{ 'on' if enable_thinking else 'off, no <think> block' }}<|im_end|>\n"
        + TURNS + OPEN + "<|im_start|>assistant\n{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}"
        "{% endif %}",
        "<|im_start|>assistant\n",
        "<think>\n\n</think>\n",
    ),
    "system message speaks of the tag": (
        "<|im_start|>system\nThink inside <think> tags.<|im_end|>\n" + TURNS + OPEN + "<|im_start|>assistant\n"
        "{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
        "<|im_start|>assistant\n",
        EMPTY,
    ),
    "brackets": (
        TURNS + OPEN + "[ASSISTANT]{{ '[THINK][/THINK]' if not enable_thinking else '[THINK]' }}{% endif %}",
        "[ASSISTANT][THINK]",
        "[THINK][/THINK]",
    ),
    "off adds nothing": (
        TURNS + OPEN + "<|im_start|>assistant\n{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}",
        "<|im_start|>assistant\n<think>\n",
        "",
    ),
    "no switch": (TURNS + OPEN + "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n", None),
    "no switch, always thinks": (TURNS + OPEN + "<|im_start|>assistant\n<think>\n{% endif %}", "assistant\n<think>\n", None),
    "a soft switch in the user's words": (
        "{% for m in messages %}<|user|>{{ m.content }}{{ ' /no_think' if not enable_thinking }}<|end|>{% endfor %}"
        "<|assistant|>",
        "<|assistant|>",
        None,
    ),
}  # fmt: skip


def chat(**switches: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": PROBE}], "add_generation_prompt": True, **switches}


def rendered(template: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
    return [render(template, dict(one)) for one in variables]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tail_of_every_family(family: str) -> None:
    """FB-061, FB-062, FB-065: off adds the closed empty block; what a template without a switch has is no tail."""
    template, on_ends, tail = FAMILIES[family]
    assert render(template, chat(enable_thinking=True, thinking=True)).endswith(on_ends)
    assert Shapes(rendered).of(template).tail == tail


@pytest.mark.parametrize("family", [name for name, (_, _, tail) in FAMILIES.items() if tail])
def test_prompt_and_tail_are_what_the_template_writes(family: str) -> None:
    """A raw prompt that is the chat up to the assistant's turn becomes the template's own no-thinking prompt."""
    template, _, tail = FAMILIES[family]
    assert tail is not None
    off = render(template, chat(enable_thinking=False, thinking=False))
    header = off.removesuffix(tail)
    assert header != off and header + missing(header, tail) == off
    assert missing(off, tail) == "" and off + missing(off, tail) == off


@pytest.mark.parametrize(
    ("prompt", "tail", "more"),
    [
        ("...assistant\n", EMPTY, EMPTY),
        ("...assistant\n<think>", EMPTY, "\n\n</think>\n\n"),
        ("...assistant\n<think>\n", EMPTY, "\n</think>\n\n"),
        ("...assistant\n<think>\n\n", EMPTY, "</think>\n\n"),
        ("...assistant\n<think>\n\n</think>", EMPTY, "\n\n"),
        ("...assistant\n<think>\n\n</think>\n\n", EMPTY, ""),
        ("...assistant\n<think", EMPTY, EMPTY),
        ("...assistant\n<", EMPTY, EMPTY),
        ("...assistant\n<think>\nfirst thoughts", EMPTY, EMPTY),
        ("hi /think", EMPTY, EMPTY),
        ("", EMPTY, EMPTY),
        ("<|assistant|>", "<think></think>", "<think></think>"),
        ("<|assistant|><think>", "<think></think>", "</think>"),
        ("<|assistant|>", "\n<think></think>", "\n<think></think>"),
        ("<|assistant|>\n", "\n<think></think>", "\n<think></think>"),
        ("<|assistant|>\n<think>", "\n<think></think>", "</think>"),
        ("<|assistant|>\n<think></think>", "\n<think></think>", ""),
        ("<｜Assistant｜>", "</think>", "</think>"),
        ("<｜Assistant｜><think>", "</think>", "</think>"),
        ("<｜Assistant｜></", "</think>", "</think>"),
        ("<｜Assistant｜></think>", "</think>", ""),
    ],
)
def test_what_a_prompt_lacks(prompt: str, tail: str, more: str) -> None:
    """FB-063: whatever the user's text says, the tail closes the prompt, once."""
    assert missing(prompt, tail) == more
    assert missing(prompt + more, tail) == "" or not tail


def test_a_tail_is_found_once() -> None:
    calls: list[str] = []

    def counted(template: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        calls.append(template)
        assert [(one["enable_thinking"], one["thinking"]) for one in variables] == [(False, False), (True, True)]
        return rendered(template, variables)

    shapes = Shapes(counted)
    for _ in range(3):
        assert shapes.of(FAMILIES["qwen3"][0]).tail == EMPTY
        assert shapes.of(FAMILIES["no switch"][0], bos_token="<s>").tail is None
        assert shapes.of(None) == shapes.of("") == Shape()
    assert len(calls) == 2


def test_a_template_that_fails_is_left_alone_for_a_while() -> None:
    now, calls = [0.0], [0]

    def fails(template: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        calls[0] += 1
        raise TemplateFailed("no")

    shapes = Shapes(fails, clock=lambda: now[0])
    for when, asked in ((0.0, 1), (1.0, 1), (PAUSE + 1, 2)):
        now[0] = when
        with pytest.raises(TemplateFailed):
            shapes.of("x")
        assert calls[0] == asked


def test_equal_renderings_have_no_tail() -> None:
    assert tail_of("a", "a") is None
    assert tail_of("x<think></think>", "x") == "<think></think>"


def test_templates_find_what_they_are_written_for() -> None:
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", {}) == "13"
    assert render("{% generation %}a{% endgeneration %}{{ m | tojson }}", {"m": {"ä": "<"}}) == 'a{"ä": "<"}'
    assert len(render("{{ strftime_now('%Y') }}", {})) == 4
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", {})
