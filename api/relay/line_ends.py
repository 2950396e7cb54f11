"""JSON on one line, for readers that cut at more than line feeds. Pure."""

from __future__ import annotations


def on_one_line(raw: bytes) -> bytes:
    """JSON without the three characters that str.splitlines() cuts at (and httpx's iter_lines, among others): U+0085,
    U+2028 and U+2029 are escaped. In JSON they can only stand in texts."""
    if raw.isascii():
        return raw
    return (
        raw.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )
