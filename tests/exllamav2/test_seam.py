"""The names on which the CPU harness stands: another version of exllamav2 fails here, by name, before anything subtle."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT
from tests.exllamav2 import harness, host_extension

pytest.importorskip("torch", reason="torch is not installed (requirements-harness.txt)")

from tests.exllamav2 import kernels, placement, quantised_cache

STAND_INS = (*kernels.STAND_INS, *quantised_cache.STAND_INS)


@pytest.fixture(scope="module")
def package() -> Path:
    """Where exllamav2 is installed; it need not be imported."""
    spec = importlib.util.find_spec("exllamav2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("exllamav2 is not installed (requirements-harness.txt)")
    return Path(spec.submodule_search_locations[0])


def bound(package: Path) -> set[str]:
    """All functions of the real extension."""
    text = (package / "exllamav2_ext" / "ext_bindings.cpp").read_text(encoding="utf-8")
    return set(re.findall(r'^\s*m\.def\("(\w+)"', text, re.MULTILINE))


@pytest.mark.parametrize("function", STAND_INS, ids=lambda function: str(function.__name__))
def test_a_stand_in_takes_what_the_kernel_takes(package: Path, function: object) -> None:
    """By name and order as the header declares them: Python calls the extension by position."""
    assert callable(function)
    headers = "\n".join(x.read_text(encoding="utf-8") for x in (package / "exllamav2_ext").glob("**/*.[hc]*"))
    name = function.__name__
    declared = re.search(
        rf"^void {name}\s*\(([^)]*)\);|^int {name}\s*\(([^)]*)\);|^void {name}\s*\(([^)]*)\)\s*{{", headers, re.M
    )
    assert declared is not None, f"{name} is declared nowhere"
    parameters = next(group for group in declared.groups() if group is not None)
    names = [re.sub(r".*[\s*&]", "", parameter.strip()) for parameter in parameters.split(",")]
    assert list(inspect.signature(function).parameters) == names


@pytest.mark.parametrize("place", placement.REPLACED)
def test_what_is_replaced_is_there_with_the_parameters_known(package: Path, place: str) -> None:
    module, _, attribute = place.partition(":")
    path = package / (module.partition(".")[2].replace(".", "/") + ".py")
    tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    parameters = placement.REPLACED[place]
    owner, _, name = attribute.rpartition(".")
    if owner:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner)
    elif module != "exllamav2.compat":
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "exllamav2.compat"
            for alias in node.names
        }
        assert name in imported
        return
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    assert tuple(argument.arg for argument in function.args.args) == parameters


def test_the_context_is_made_as_the_package_makes_it(package: Path) -> None:
    """placement fills an ExLlamaV2DeviceContext without its __init__, so it must know every field that one sets."""
    tree = ast.parse((package / "device.py").read_text(encoding="utf-8"))
    made = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    fields = {
        node.attr
        for node in ast.walk(made)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    known = {"model", "device_idx", "ready", "scratch", "scratch_bytes", "scratch_idx", "archparams", "stream"}
    assert fields == known


def test_the_harness_knows_every_function_that_it_names(package: Path) -> None:
    assert {*host_extension.FUNCTIONS, *(x.__name__ for x in STAND_INS)} <= bound(package)


def test_the_docs_say_of_every_function_of_the_extension_what_runs_without_a_gpu(package: Path) -> None:
    text = (ROOT / "docs" / "exllamav2.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (real|stand-in|never run) \|", text, re.MULTILINE)
    said = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    known = dict.fromkeys(bound(package), "never run")
    known |= dict.fromkeys(host_extension.FUNCTIONS, "real")
    known |= {function.__name__: "stand-in" for function in STAND_INS}
    assert said == known


def test_a_kernel_without_stand_in_is_loud(exllamav2: ModuleType) -> None:
    extension = sys.modules["exllamav2_ext"]
    with pytest.raises(NotImplementedError, match="gemm_half_q_half needs CUDA"):
        extension.gemm_half_q_half()


def test_installing_twice_is_installing_once(exllamav2: ModuleType) -> None:
    assert harness.install() is sys.modules["exllamav2_ext"] is exllamav2.ext.exllamav2_ext


def test_installing_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "exllamav2_ext", ModuleType("exllamav2_ext"))
    with pytest.raises(RuntimeError, match="already"):
        harness.install()
