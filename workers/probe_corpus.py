"""Texts on which two tokenizers that are not the same tend to differ.

Fixed: the same texts at every start. Knows no tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise

#: Where random characters come from: scripts, symbols, marks, spaces, private use, unassigned, beyond the BMP.
_BLOCKS = (
    (0x00, 0x7F), (0x80, 0x24F), (0x250, 0x36F), (0x370, 0x52F), (0x530, 0x6FF), (0x900, 0xDFF), (0xE00, 0x109F),
    (0x10A0, 0x139F), (0x1680, 0x18AF), (0x1E00, 0x206F), (0x2070, 0x2BFF), (0x2E80, 0x30FF), (0x3400, 0x9FFF),
    (0xA000, 0xABFF), (0xAC00, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0x20000, 0x3FFFF), (0x40000, 0x10FFFF),
)  # fmt: skip

_TEXTS = (
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", " \n", "\n ", " \n\n  x", "a", " a", "a ", "  a  ", "x\n\n\ny",
    "\x00", "a\x00b", "\x00\x00", "\x01\x02\x1b[0m\x7f", "\x85\xa0\u2028\u2029\u3000", "\ufeffbom", "\ufffe\uffff\ufffd",
    "The quick brown fox jumps over the lazy dog.", "THE QUICK", "camelCase snake_case kebab-case", "Hello, world!",
    "don't I'm we'll they've you're he's I'd", "DON'T I'M WE'LL THEY'VE YOU'RE HE'S I'D", "'s'S'ſ 'ReD 'lL", "’s ’t", "'sword 'tis 'dare 'market 'really 'very 'llama",
    "'SWORD 'Tis 'Dare 'MARKET 'REally 'Very 'LLAMA",
    "1", "12", "123", "1234", "12345", "1234567890123", " 1", " 12 345", "3.14159", "1,000,000.00", "0x1F", "v1.2.3-rc4",
    "²³¼ⅷ", "٠١٢٣٤٥", "१२३४", "一二三", "①②③", "x1y22z333", "2024-06-01T12:34:56Z", "€5 £6 $7.00 50%",
    "def f(x):\n    return x ** 2  # square\n", "if (a&&b){\n\tc++;\n\t\td--;\n}\n", "<html><body class=\"x\">&nbsp;</body>",
    "SELECT * FROM t WHERE a='b';", "\\begin{x}\\alpha_{1}^{2}\\end{x}", "{\"a\": [1, 2, {\"b\": null}]}", "#!/bin/sh\n",
    "https://example.org/a/b?c=d&e=f#g", "user@example.org", "C:\\Users\\x", "--flag=value -x", "a/b//c", "....", "!!!???",
    "...and---so__on~~", "«quoted» „auch“ “this”", "(((nested)))", "=====\n-----\n", "a.\nb!\r\nc?\n\n", " .", " .\n", "\n.",
    "Größe straße ÄÖÜ", "naïve café", "cafe\u0301 e\u0301\u0302", "\u0301", " \u0301x", "İıſK", "Ĳĳǅ", "ﬁﬂ",
    "Привет, мир!", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "안녕하세요 세계", "你好，世界！",
    "こんにちは世界。カタカナ", "Xin chào thế giới", "გამარჯობა", "Բարեւ", "አማርኛ", "ᐃᓄᒃᑎᑐᑦ", "𐍈𐌰𐌽", "𝒜𝓃𝒹 𝟙𝟚𝟛", "𠀀𠀁𪚥",
    "😀", "😀😀", " 😀 ", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "👍🏽", "1️⃣", "❤️", "a\u200bb\u200d\u2060c", "\u202eabc\u202c", "🫠🪿",
    "\U000e0041\U000e0042", "\U0010fffd", "\ue000\uf8ff", "\U00050000x", "\u0378\u0379", "zzzzzzzzzzzzzzzzzzzzzzzzzzzz",
    "a" * 300, " " * 37, "\n" * 19, "\t" * 9, " \t \t ", "ab " * 40, "the" * 30, "0" * 50, "-" * 77, "é" * 60, "漢" * 60,
    "Ġ Ċ ĉ ▁ ▁▁", "<0x0A>", "<s>hi</s>", "[INST] hi [/INST]", "<|", "|>", "<||>", "<|1|>", "<|257|>x", "<think>\n\n</think>",
    "  leading and trailing  ", "\n  indented\n", "tab\tseparated\tvalues", "mixed \u00a0 spaces\u2003here", "word\u00a0",
)  # fmt: skip


def texts(specials: Sequence[str]) -> list[str]:
    """The corpus for a vocabulary with these special tokens: each of them written in text, and where two of them
    overlap, the text in which they do."""
    chosen = random.Random(20_240_601)
    found = [*_TEXTS, *(_random_text(chosen, length) for length in (*range(1, 40), *[60] * 40, *[200] * 8))]
    found += [" ".join(pair) for pair in pairwise(_TEXTS[20:90])]
    for special in specials[:512]:
        found.append(f"a {special}b")
    for special in specials[:48]:
        found += [special, f" {special} ", f"{special}\n", f"{special}{special}", f"{special[:-1]}", f"{special[1:]}"]
        found.append(f"x{special[:-1]} {special}\n\n{special.upper()}{special.lower()}")
    found.append("".join(specials[:64]))
    found += [f"{first}{second}" for first, second in pairwise(specials[:64])]
    found += islice(_overlaps(specials[:2048]), 256)
    return found


def ids(vocab_size: int) -> list[list[int]]:
    """Sequences of any ids, for the way back to text: most are no valid UTF-8."""
    chosen = random.Random(7)
    return [[chosen.randrange(vocab_size) for _ in range(length)] for length in (1, 2, 3, 5, 8, 13, 50, 400) * 6]


def _random_text(chosen: random.Random, length: int) -> str:
    """Runs of characters of one block each, as real text has them, with spaces between some."""
    made = ""
    while len(made) < length:
        low, high = chosen.choice(_BLOCKS)
        run = "".join(chr(chosen.randint(low, high)) for _ in range(chosen.randint(1, 6)))
        made += run + chosen.choice(("", "", " ", "\n", "  "))
    return made[:length]


def _overlaps(specials: Iterable[str]) -> Iterator[str]:
    """For every two tokens of which one's end is the other's beginning: both, overlapping."""
    every = list(specials)
    beginning: dict[str, list[str]] = {}
    for special in every:
        for length in range(1, len(special)):
            beginning.setdefault(special[:length], []).append(special)
    for special in every:
        for start in range(1, len(special)):
            for other in beginning.get(special[start:], ())[:4]:
                yield special[:start] + other
