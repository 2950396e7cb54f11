"""The no-thinking tail at the end of a raw prompt: what has to be appended so that the model does not think.

What the tail of a template is, `api/thinking.py` finds out; here is only how it meets a prompt, which both sides
need: the API for its counts, the worker for what it runs. Pure.
"""

from __future__ import annotations

from shared.think_tags import OPENING


def missing(prompt: str, tail: str) -> str:
    """What of `tail` to append to `prompt`.

    Nothing, if the prompt ends with all of it. Else the tail without its longest beginning that the prompt already
    ends with, if that beginning holds the whole opening tag: a prompt that has opened the block gets it closed.
    """
    if prompt.endswith(tail):
        return ""
    opening = OPENING.search(tail)
    if opening is not None:
        for length in range(len(tail) - 1, opening.end() - 1, -1):
            if prompt.endswith(tail[:length]):
                return tail[length:]
    return tail
