"""Schemas that other people wrote, each asked of a running server: is the answer right, refused, or cut off?

`python -m tests.conformance.schema_corpus [--url URL]` asks all of them, of a stack of its own or of a server that runs, and
writes the table of docs/structured-output.md. The sources are fetched from the package index, once:

- the JSON Schema test suite (draft 2020-12), which the source package of jsonschema carries;
- the functions of the Berkeley function calling leaderboard, which the bfcl-eval wheel carries, with their types cast to
  those of JSON Schema by the package's own table.

`schemas_sample.json` beside this file is a sample of 60 for tests; `--sample` makes it anew.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance import environments
from tests.stack import REAL, Client, Stack

HERE = Path(__file__).parent
SAMPLE = HERE / "schemas_sample.json"
#: Of each source, how many schemas the sample has.
SAMPLED = 30
#: What is fetched: arguments of `pip download`.
PACKAGES = (("--no-binary", ":all:", "jsonschema==4.26.0"), ("--only-binary", ":all:", "bfcl-eval==2026.3.23"))
SUITE, FUNCTIONS = "suite", "functions"
#: Requests at once; tokens of an answer at most.
AT_ONCE, MOST_TOKENS = 12, 400
#: Characters of a schema in its prompt.
SHOWN = 1200
#: An answer that takes this long is none, s.
HANGS = 900.0
#: A small model writes what it has seen: short values of short schemas.
EXAMPLES = """Schema: {"type": "integer", "minimum": 5}
Value: 7

Schema: {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
Value: {"name": "Ann"}

Schema: {"items": {"type": "string"}}
Value: ["a", "b"]

Schema: {"maxLength": 5}
Value: "abc"

"""


@dataclass(frozen=True)
class Case:
    """A schema, where it is from, and what it is for."""

    source: str
    name: str
    schema: Any

    @property
    def prompt(self) -> str:
        if self.source == SUITE:
            return f"{EXAMPLES}Schema: {json.dumps(self.schema)[:SHOWN]}\nValue: "
        return f'Call of open_door: {{"door": "kitchen", "wide": true}}\nCall of {self.name}: '


@dataclass(frozen=True)
class Outcome:
    """`kind`: valid, refused (400), length, failed (502), or what must not be: invalid, error. `words`: the text or message."""

    case: Case
    kind: str
    words: str
    seconds: float


def fetched() -> Path:
    """The folder with both packages, unpacked."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for arguments in PACKAGES:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            environments.run([*pip, "--dest", str(folder), *arguments])
        for archive in folder.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as zipped:
                zipped.extractall(folder)

    return environments.made("schema-corpus", repr(PACKAGES).encode(), make)


def suite(folder: Path) -> Iterator[Case]:
    for file in sorted(folder.glob("jsonschema-*/json/tests/draft2020-12/*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            yield Case(SUITE, f"{file.stem}: {group['description']}", group["schema"])


def functions(folder: Path) -> Iterator[Case]:
    """Of functions with the same parameters, the first."""
    package = folder / "bfcl_eval"
    types = _types(package / "constants" / "type_mappings.py")
    seen: set[str] = set()
    files = [*(package / "data").glob("BFCL_*.json"), *(package / "data" / "multi_turn_func_doc").glob("*.json")]
    for file in sorted(files):
        for entry in _entries(file.read_text(encoding="utf-8")):
            described = [entry] if "parameters" in entry else entry.get("function") or []
            for function in described if isinstance(described, list) else [described]:
                if not isinstance(function, dict) or not isinstance(function.get("parameters"), dict):
                    continue
                schema = {**_cast(function["parameters"], types), "type": "object"}
                if (key := json.dumps(schema)) not in seen:
                    seen.add(key)
                    yield Case(FUNCTIONS, str(function["name"]), schema)


def _entries(text: str) -> list[dict[str, Any]]:
    """A file of JSON, or of JSON in lines."""
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def _types(file: Path) -> dict[str, str]:
    """The package's table of types, read without running the package."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "GORILLA_TO_OPENAPI":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    raise ValueError(f"{file} has no table of types")


def _cast(schema: Any, types: dict[str, str]) -> Any:
    """With types of JSON Schema, wherever a schema stands; one that is not known is a string, as in the package."""
    if not isinstance(schema, dict):
        return schema
    made = {}
    for keyword, value in schema.items():
        if keyword == "type" and isinstance(value, str):
            made[keyword] = types.get(value, "string")
        elif keyword == "properties" and isinstance(value, dict):
            made[keyword] = {name: _cast(part, types) for name, part in value.items()}
        else:
            made[keyword] = _cast(value, types) if keyword == "items" else value
    return made


def ask(client: Client, case: Case, model: str = REAL) -> Outcome:
    began = time.monotonic()
    asked = {"type": "json_schema", "json_schema": {"name": "it", "schema": case.schema}}
    try:
        answer = client.complete(
            case.prompt, model=model, temperature=0, max_tokens=MOST_TOKENS, response_format=asked, timeout=HANGS
        )
    except OSError as error:
        return Outcome(case, "error", repr(error), time.monotonic() - began)
    seconds = time.monotonic() - began
    if answer.status != 200:
        kind = {400: "refused", 502: "failed"}.get(answer.status, "error")
        return Outcome(case, kind, f"{answer.status} {answer.error['message']}", seconds)
    if answer.finish == "length":
        return Outcome(case, "length", answer.text, seconds)
    return Outcome(case, "valid" if is_valid(case.schema, answer.text) else "invalid", answer.text, seconds)


def is_valid(schema: Any, text: str) -> bool:
    """As the package says, which knows nothing of ours."""
    import jsonschema
    from jsonschema_specifications import REGISTRY

    try:
        return bool(jsonschema.Draft202012Validator(schema, registry=REGISTRY).is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False


def ask_all(client: Client, cases: Sequence[Case], model: str = REAL) -> Iterator[Outcome]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield from threads.map(lambda case: ask(client, case, model), cases)


def table(outcomes: Iterable[Outcome]) -> str:
    """In Markdown."""
    kinds = ("valid", "refused", "length", "failed", "invalid", "error")
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.case.source, Counter())[outcome.kind] += 1
    lines = ["| source | schemas | " + " | ".join(kinds) + " |", "|---|" + "---|" * (len(kinds) + 1)]
    for source, found in counts.items():
        total = found.total()
        lines.append(
            f"| {source} | {total} | " + " | ".join(f"{found[k]} ({found[k] / total:.1%})" for k in kinds) + " |"
        )
    return "\n".join(lines)


def sample() -> list[Case]:
    return [Case(**case) for case in json.loads(SAMPLE.read_text(encoding="utf-8"))]


def write_sample(folder: Path) -> None:
    """By a hash: neither the easy ones nor the first."""
    chosen = []
    for cases in (suite(folder), functions(folder)):
        ordered = sorted(cases, key=lambda case: hashlib.sha256(json.dumps([case.name, case.schema]).encode()).digest())
        chosen += ordered[:SAMPLED]
    text = json.dumps([vars(case) for case in chosen], ensure_ascii=False, indent=1)
    SAMPLE.write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.schema_corpus", description=__doc__)
    parser.add_argument("--port", type=int, help="of a server that runs here; else one is started")
    parser.add_argument("--model", default=REAL)
    parser.add_argument("--source", choices=(SUITE, FUNCTIONS), help="only one of them")
    parser.add_argument("--sample", action="store_true", help="only write the sample of 60")
    parser.add_argument("--report", type=Path, help="a file for every outcome that is not valid, as lines of JSON")
    args = parser.parse_args(argv)
    folder = fetched()
    if args.sample:
        write_sample(folder)
        return 0
    cases = [case for case in (*suite(folder), *functions(folder)) if args.source in (None, case.source)]
    outcomes: list[Outcome] = []

    def ask_them(client: Client) -> None:
        for outcome in ask_all(client, cases, args.model):
            outcomes.append(outcome)
            if outcome.kind != "valid" and args.report:
                line = {"kind": outcome.kind, "name": outcome.case.name, "words": outcome.words[-300:]}
                with args.report.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            if len(outcomes) % 100 == 0:
                print(f"{len(outcomes)} of {len(cases)}", file=sys.stderr, flush=True)

    if args.port:
        ask_them(Client(args.port))
    else:
        with tempfile.TemporaryDirectory() as name, Stack(Path(name), ("llamacpp",)) as stack:
            ask_them(stack)
    print(table(outcomes))
    print(f"The slowest answer took {max(outcome.seconds for outcome in outcomes):.1f} s.")
    return int(any(outcome.kind in ("invalid", "error") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
