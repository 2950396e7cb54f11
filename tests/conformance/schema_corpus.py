"""Schemas that other people wrote, each asked of a running server: is the answer right, refused, or cut off?

`python -m tests.conformance.schema_corpus --report FILE --json FILE` asks all of them, of a stack of its own or of a server that
runs, and writes the table of docs/structured-output.md. Their order is that of a hash, so that the first ones are a fair
sample: a run can be ended after some `--minutes`, and goes on from its report. The sources are fetched from the package
index, once:

- the JSON Schema test suite (draft 2020-12), which the source package of jsonschema carries;
- the functions of the Berkeley function calling leaderboard, which the bfcl-eval wheel carries, with their types cast to
  those of JSON Schema by the package's own table.

`schemas_sample.json` beside this file is the first 30 of each, for tests; `--sample` makes it anew.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

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
AT_ONCE, MOST_TOKENS = 8, 400
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
CALLS = """Call of open_door: {"door": "kitchen", "wide": true}
Call of add_up: {"numbers": [20, 5, 13]}
Call of invite: {"guests": ["Ann", "Bob"], "at": "19:30"}
Call of draw: {"lines": [[0, 1], [4, 2]], "style": {"color": "red", "tags": ["thin"]}}
Call of median: {"values": [3.5, 1.2]}
"""


@dataclass(frozen=True)
class Mark:
    """Of all schemas of a source, how many have a valid answer at least, and how many are cut off and fail at most. (Where masks
    enforce a schema in part, a text may turn out wrong: then the answer says so.)"""

    valid: float
    length: float
    failed: float


MARKS = {SUITE: Mark(0.7, 0.05, 0.02), FUNCTIONS: Mark(0.9, 0.05, 0.0)}
KINDS = ("valid", "refused", "length", "failed", "invalid", "error")
#: What must never be.
WRONG = ("invalid", "error")


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
        return f"{CALLS}Call of {self.name}: "

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps([self.name, self.schema]).encode()).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """`kind`: valid, refused (400), length, failed (502), or what must not be: invalid, error. `words`: the text or message.
    `hash`: its case's."""

    source: str
    name: str
    hash: str
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


def ask(client: Client, case: Case, model: str = REAL, most: int = MOST_TOKENS) -> Outcome:
    began = time.monotonic()
    kind, words = _answered(client, case, model, most)
    return Outcome(case.source, case.name, case.hash, kind, words, round(time.monotonic() - began, 2))


def _answered(client: Client, case: Case, model: str, most: int) -> tuple[str, str]:
    asked = {"type": "json_schema", "json_schema": {"name": "it", "schema": case.schema}}
    try:
        answer = client.complete(
            case.prompt, model=model, temperature=0, max_tokens=most, response_format=asked, timeout=HANGS
        )
    except OSError as error:
        return "error", repr(error)
    if answer.status != 200:
        kind = {400: "refused", 502: "failed"}.get(answer.status, "error")
        return kind, f"{answer.status} {answer.error['message']}"
    if answer.finish == "length":
        return "length", answer.text
    return "valid" if is_valid(case.schema, answer.text) else "invalid", answer.text


def is_valid(schema: Any, text: str) -> bool:
    """As the package says, which knows nothing of ours."""
    import jsonschema
    from jsonschema_specifications import REGISTRY

    try:
        return bool(jsonschema.Draft202012Validator(schema, registry=REGISTRY).is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False


def ask_all(
    client: Client, cases: Iterable[Case], model: str = REAL, most: int = MOST_TOKENS, at_once: int = AT_ONCE
) -> Iterator[Outcome]:
    """In the order in which the answers come; `cases` is read as they are asked."""
    waiting: set[Future[Outcome]] = set()
    with ThreadPoolExecutor(at_once) as threads:
        for case in cases:
            waiting.add(threads.submit(ask, client, case, model, most))
            if len(waiting) == at_once:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in as_completed(waiting))


def shares(outcomes: Iterable[Outcome]) -> dict[str, dict[str, float]]:
    """Source -> how many schemas, and what part of them has each outcome."""
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.source, Counter())[outcome.kind] += 1
    return {
        source: {"schemas": found.total(), **{kind: found[kind] / found.total() for kind in KINDS}}
        for source, found in sorted(counts.items())
    }


def missed(outcomes: Sequence[Outcome], slack: float = 0.0) -> list[str]:
    """What is not as it should be; `slack`: how far shares may be from the marks."""
    found = [f"{outcome.kind}: {outcome.name}: {outcome.words[:200]}" for outcome in outcomes if outcome.kind in WRONG]
    for source, share in shares(outcomes).items():
        mark = MARKS[source]
        if share["valid"] < mark.valid - slack:
            found.append(f"{source}: {share['valid']:.1%} valid, not {mark.valid:.0%}")
        for kind, most in (("length", mark.length), ("failed", mark.failed)):
            if share[kind] > most + slack:
                found.append(f"{source}: {share[kind]:.1%} {kind}, more than {most:.0%}")
    return found


def table(outcomes: Iterable[Outcome]) -> str:
    """In Markdown."""
    lines = ["| source | schemas | " + " | ".join(KINDS) + " |", "|---|" + "---|" * (len(KINDS) + 1)]
    for source, share in shares(outcomes).items():
        lines.append(f"| {source} | {share['schemas']} | " + " | ".join(f"{share[kind]:.1%}" for kind in KINDS) + " |")
    return "\n".join(lines)


def sample() -> list[Case]:
    return [Case(**case) for case in json.loads(SAMPLE.read_text(encoding="utf-8"))]


def in_order(folder: Path) -> list[Case]:
    """All schemas by their hash: neither the easy ones first nor the short ones."""
    return sorted((*suite(folder), *functions(folder)), key=lambda case: case.hash)


def write_sample(folder: Path) -> None:
    cases = in_order(folder)
    chosen = [case for source in MARKS for case in [case for case in cases if case.source == source][:SAMPLED]]
    text = json.dumps([vars(case) for case in chosen], ensure_ascii=False, indent=1)
    SAMPLE.write_text(text + "\n", encoding="utf-8")


def reported(file: Path | None) -> list[Outcome]:
    """What an earlier run has found."""
    if file is None or not file.exists():
        return []
    return [Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def run(client: Client, cases: Sequence[Case], args: argparse.Namespace) -> Iterator[Outcome]:
    """Asks for so long as `--minutes` says; a line of the report for each."""
    ends = time.monotonic() + args.minutes * 60
    in_time = itertools.takewhile(lambda case: time.monotonic() < ends, cases)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("schemas", total=len(cases))
        for outcome in ask_all(client, in_time, args.model, args.tokens, args.at_once):
            if args.report:
                with args.report.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome), ensure_ascii=False) + "\n")
            bar.advance(task)
            yield outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.schema_corpus", description=__doc__)
    parser.add_argument("--port", type=int, help="of a server that runs here; else one is started")
    parser.add_argument("--model", default=REAL)
    parser.add_argument("--source", choices=tuple(MARKS), help="only one of them")
    parser.add_argument("--minutes", type=float, default=120.0, help="no schema is asked later (default: 120)")
    parser.add_argument("--tokens", type=int, default=MOST_TOKENS, help="of an answer at most")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="requests at one time")
    parser.add_argument(
        "--report", type=Path, help="a file for every outcome, as lines of JSON; what it has is not asked again"
    )
    parser.add_argument("--json", type=Path, help="a file for the shares")
    parser.add_argument("--sample", action="store_true", help="only write the sample of 60")
    args = parser.parse_args(argv)
    folder = fetched()
    if args.sample:
        write_sample(folder)
        return 0
    outcomes = reported(args.report)
    known = {outcome.hash for outcome in outcomes}
    wanted = [case for case in in_order(folder) if args.source in (None, case.source)]
    left = [case for case in wanted if case.hash not in known]
    began = time.monotonic()
    if args.port:
        outcomes += run(Client(args.port), left, args)
    elif left:
        with tempfile.TemporaryDirectory() as name, Stack(Path(name), ("llamacpp",), lanes=args.at_once) as stack:
            outcomes += run(stack, left, args)
    failures = missed(outcomes)
    result = {
        "model": args.model,
        "tokens": args.tokens,
        "at_once": args.at_once,
        "of": len(wanted),
        "sources": shares(outcomes),
        "slowest_s": max((outcome.seconds for outcome in outcomes), default=0.0),
        "seconds": round(time.monotonic() - began),
        "missed": failures,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(outcomes))
    print(
        f"{len(outcomes)} of {len(wanted)} schemas; the slowest answer took {result['slowest_s']} s.",
        *failures,
        sep="\n",
    )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
