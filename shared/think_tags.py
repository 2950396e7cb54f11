"""The tags between which models write their reasoning, as the families in use spell them.

They are text, not control: they stay in what is shown, whatever a vocabulary flags them as. Pure.
"""

from __future__ import annotations

import re

_WORDS = "think|thinking|thought|thoughts|reason|reasoning"
#: <think>, <thinking>, <seed:think>, [THINK], ◁think▷ and the like.
OPENING = re.compile(rf"<(?:\w+:)?(?:{_WORDS})>|\[THINK\]|◁think▷|<\|(?:think|begin_of_thought)\|>")
CLOSING = re.compile(rf"</(?:\w+:)?(?:{_WORDS})>|\[/THINK\]|◁/think▷|<\|/think\|>|<\|end_of_thought\|>")


def is_tag(text: str) -> bool:
    return OPENING.fullmatch(text) is not None or CLOSING.fullmatch(text) is not None


def closing(opening: str) -> str:
    """The tag that ends what this one begins."""
    if opening == "<|begin_of_thought|>":
        return "<|end_of_thought|>"
    mark = "<|" if opening.startswith("<|") else opening[0]
    return f"{mark}/{opening[len(mark) :]}"


def opening(closing: str) -> str:
    """The tag that begins what this one ends."""
    return closing.replace("end_of", "begin_of") if "end_of" in closing else closing.replace("/", "", 1)


def opening_in(text: str) -> str | None:
    """The opening tag of the family that a text speaks of, a chat template above all; None if it speaks of none."""
    found = OPENING.search(text)
    if found is not None:
        return found[0]
    ending = CLOSING.search(text)
    return None if ending is None else opening(ending[0])
