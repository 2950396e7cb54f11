"""The server, and its tests, without the jsonschema package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.run_tests import WITHOUT_JSONSCHEMA
from tests.conftest import script
from tests.integration.test_http_completions import refused
from tests.integration.test_structured import (
    BOOK,
    CUT,
    EXTRA,
    HEADING,
    MISSING,
    NO_NUMBER,
    QUOTED,
    RIGHT,
    TWICE,
    failed,
    failed_stream,
    schema_format,
)
from tests.stack import ROOT, Stack

#: Tests that look at schemas, and how many of them are skipped.
TESTS = ("constraints", "constraint", "structured", "narrowing", "inspection", "openapi")
SKIPPED = 173


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(WITHOUT_JSONSCHEMA), prepend=os.pathsep)
        with Stack(tmp_path_factory.mktemp("without")) as stack:
            yield stack


@pytest.mark.parametrize("text", [HEADING, CUT, TWICE, NO_NUMBER, "[1]"])
def test_what_is_no_json_object_is_told(without: Stack, text: str) -> None:
    failed(without.complete(script(*text), response_format=schema_format(BOOK)))
    failed_stream(without.stream(script(*text), response_format=schema_format(BOOK)))


@pytest.mark.parametrize("text", [RIGHT, MISSING, EXTRA, QUOTED])
def test_what_is_one_passes(without: Stack, text: str) -> None:
    assert without.complete(script(*text), response_format=schema_format(BOOK)).text == text
    assert without.stream(script(*text), response_format=schema_format(BOOK)).text == text


def test_a_root_that_may_be_other_is_any_value(without: Stack) -> None:
    for schema in ({"type": "integer"}, {"type": ["object", "array"]}, {}):
        assert without.complete(script("[1]"), response_format=schema_format(schema)).text == "[1]"
        failed(without.complete(script("[1"), response_format=schema_format(schema)))


def test_what_is_no_schema_is_refused_all_the_same(without: Stack) -> None:
    for schema in ({"type": "strin"}, {"properties": []}, {"pattern": "("}, {"$ref": "http://127.0.0.1:1/x"}, False):
        refused(without.complete("x", response_format=schema_format(schema)), 400)


def test_it_is_said_once(without: Stack) -> None:
    without.complete("x", response_format=schema_format(BOOK))
    assert without.log().count("no_jsonschema") == 1


def test_the_tests_run_too() -> None:
    files = [f"tests/unit/test_{name}.py" for name in TESTS]
    env = {**os.environ, "PYTHONPATH": str(WITHOUT_JSONSCHEMA)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    out = subprocess.run(command, cwd=Path(ROOT), env=env, capture_output=True, text=True, timeout=110).stdout
    assert re.search(rf"\d+ passed, {SKIPPED} skipped in", out), out[-2000:]
