"""One run that says whether the ExLlamaV2 engine works on this machine, and how fast: `deploy/gpu_check.sh`.

Steps, each in a process of its own and under its own time limit; a failed one does not stop the rest. What they found
is in one JSON file, written anew after each step. No network: packages that the machine lacks are carried in as wheels
(`--fetch 3.12` gets them where there is a network). Exit status 0: all passed; 1: something failed; 2: nothing failed,
but something was skipped.

The parent uses the standard library only, since nothing may be installed yet.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "deploy" / "wheels"
#: Module -> package, of what the steps import; versions are those of the requirements files. torch is not among them:
#: it is 3 GB with its libraries, and machines with a GPU have one.
PACKAGES = {
    "exllamav2": "exllamav2",
    "ninja": "ninja",
    "setuptools": "setuptools",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "regex": "regex",
    "PIL": "pillow",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface-hub",
    "msgspec": "msgspec",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "structlog": "structlog",
    "rich": "rich",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
#: Seconds of a step; all together have `--limit`.
LIMITS = {
    "install": 90,
    "build": 420,
    "models": 60,
    "convert": 150,
    "compare": 60,
    "tests": 240,
    "bench": 120,
    "attention": 90,
}
#: Lines of a failed step that are kept.
LAST_LINES = 15
#: Seconds between two signs of life.
SIGN_OF_LIFE_S = 15
#: The quantised tiny model: its agreement with what it was made from. Random weights of 6 bits lose about a percent each.
LEAST_AGREEMENT, MOST_DIVERGENCE = 0.8, 0.1

Result = Literal["passed", "failed", "skipped"]


@dataclass
class Step:
    """`why`: one sentence, of a step that did not pass. `found`: what it measured."""

    name: str
    result: Result
    seconds: float
    why: str = ""
    last_lines: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)


class Failure(Exception):
    """A step cannot be done; the message is one sentence."""


# -- the parent


class Check:
    """A run: its steps so far, and where it writes them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began = time.monotonic()
        self._work: Path = args.work
        self._site = self._work / "site"
        self._steps: list[Step] = []
        self._machine: dict[str, Any] = {}
        self._environment = dict(os.environ)

    def run(self) -> int:
        args, work = self._args, self._work
        work.mkdir(parents=True, exist_ok=True)
        self._machine = machine()
        print(f"Machine: {self._machine['gpus'] or 'no NVIDIA GPU'}, Python {self._machine['python']}", flush=True)
        harness = ["--cpu-harness"] if args.cpu_harness else []
        if not args.cpu_harness:  # which keeps what it compiled in the usual place
            self._environment["SLUICE_CACHE_DIR"] = str(work / "cache")
        self._install()
        built = self._child("build", harness, without_gpu="in place of the extension, the CPU harness")
        written = self._child("models", harness, needs=built)
        converted = self._child("convert", harness, needs=written, gpu_only=True)
        self._child("compare", harness, needs=converted, gpu_only=True)
        self._tests(converted, needs=built)
        self._bench("bench", ["--model", str(work / "tiny")], needs=written)
        self._bench("bench-greedy", ["--model", str(work / "tiny"), "--greedy"], needs=written)
        self._bench("bench-exl2", ["--model", str(work / "tiny-exl2")], needs=converted, gpu_only=True)
        if args.model is not None:
            self._bench("bench-model", ["--model", str(args.model), "--lanes", "1", "8", "32"], needs=built)
        self._attention(needs=built or bool(self._machine["gpus"]))
        counts = {
            result: [s.name for s in self._steps if s.result == result] for result in ("passed", "failed", "skipped")
        }
        print(
            "; ".join(
                f"{len(names)} {result}" + (f" ({', '.join(names)})" if result != "passed" and names else "")
                for result, names in counts.items()
            )
            + f"; {time.monotonic() - self._began:.0f} s; {args.json}",
            flush=True,
        )
        return 1 if counts["failed"] else 2 if counts["skipped"] else 0

    def _install(self) -> None:
        """The carried wheels into a folder of their own, before all others on the path: nothing of the machine changes."""
        wheels = sorted(map(str, self._args.wheels.glob("*.whl"))) if self._args.wheels.is_dir() else []
        if wheels:
            shutil.rmtree(self._site, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-index", "--no-deps"]
            self._command("install", LIMITS["install"], [*pip, "--target", str(self._site), *wheels])
            paths = [str(self._site), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._environment["PYTHONPATH"] = os.pathsep.join(paths)
            self._environment["PATH"] = os.pathsep.join([str(self._site / "bin"), os.environ.get("PATH", "")])
        else:
            print(f"install: no wheels in {self._args.wheels}, what is installed is taken", flush=True)
            self._add(Step("install", "passed", 0.0))
        step = self._steps[-1]
        look = f"import importlib.util as u; print(*[m for m in {['torch', *PACKAGES]!r} if u.find_spec(m) is None])"
        done = subprocess.run([sys.executable, "-c", look], env=self._environment, capture_output=True, text=True)
        lacking = done.stdout.split()
        step.found |= {"wheels": len(wheels), "lacking": lacking}
        if lacking and step.result == "passed":
            step.result = "failed"
            names = ", ".join(PACKAGES.get(module, module) for module in lacking)
            step.why = f"Not installed and not among the wheels in {self._args.wheels}: {names}."
        self._write()
        if step.why:
            print(f"  {step.why}", flush=True)

    def _child(
        self, name: str, options: Sequence[str], *, needs: bool = True, gpu_only: bool = False, without_gpu: str = ""
    ) -> bool:
        """Runs the function `name` of this module in a process of its own."""
        if not self._may(name, needs, gpu_only):
            return False
        limit = self._left(LIMITS[name])
        command = [sys.executable, "-m", "scripts.gpu_check", "--step", name, "--limit", f"{limit:.0f}", *options]
        return self._command(name, limit, [*command, "--work", str(self._work)], json_option="--json", note=without_gpu)

    def _tests(self, converted: bool, *, needs: bool) -> None:
        if not self._may("tests", needs, False):
            return
        if converted:
            self._environment["EXL2_TEST_MODEL"] = str(self._work / "tiny-exl2")
        if self._args.cpu_harness:
            self._environment["EXLLAMAV2_TESTS_ON_HARNESS"] = "1"
        # Without tests/conftest.py, which wants the whole server.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "tests/gpu",
            "tests/unit/test_paged_attention.py",
            "-m",
            "gpu",
            "-q",
            "--confcutdir",
            "tests/gpu",
        ]
        self._command("tests", LIMITS["tests"], [*command, "-p", "no:cacheprovider"])
        step = self._steps[-1]
        lines = (self._work / "tests.log").read_text(encoding="utf-8", errors="replace").splitlines()
        summary = lines[-1] if lines else ""
        step.found = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
        step.found["failed_tests"] = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        if step.result == "passed" and not step.found.get("passed"):
            step.result, step.why = "skipped", next((line for line in lines if line.startswith("SKIPPED")), summary)
        self._write()
        print(f"  {summary}", flush=True)

    def _bench(self, name: str, options: Sequence[str], *, needs: bool, gpu_only: bool = False) -> None:
        if not self._may(name, needs, gpu_only):
            return
        command = [sys.executable, "-m", "scripts.benchmarks.exllamav2", "--rounds", "5", *options]
        if self._args.cpu_harness:
            command += ["--cpu-harness", "--tokens", "32"]
            if "--lanes" not in command:
                command += ["--lanes", "1", "8"]
        self._command(name, LIMITS["bench"], command, json_option="--json")
        for line in self._steps[-1].found.get("lines", ()):
            print(
                f"  {line['lanes']:>2} lanes, {line['kind']:<9} {line['median']:9.1f} tokens/s, {line['ratio']:.3f} of the "
                f"generator's ({line['ratio_lowest']:.3f} - {line['ratio_highest']:.3f})",
                flush=True,
            )

    def _attention(self, *, needs: bool) -> None:
        """Needs a GPU and torch, not the extension. On a CPU it takes more than a minute and says nothing of a GPU."""
        if self._may("attention", needs, True):
            command = [sys.executable, "-m", "scripts.benchmarks.attention", "--rounds", "5"]
            self._command("attention", LIMITS["attention"], command, json_option="--json")

    def _may(self, name: str, needs: bool, gpu_only: bool) -> bool:
        if gpu_only and self._args.cpu_harness:
            self._add(Step(name, "skipped", 0.0, "Only a GPU can do it."))
        elif not needs:
            self._add(Step(name, "skipped", 0.0, "A step that it builds on did not pass."))
        else:
            return True
        return False

    def _left(self, limit: float) -> float:
        total: float = self._args.limit
        return max(1.0, min(limit, total - (time.monotonic() - self._began)))

    def _command(self, name: str, limit: float, command: list[str], *, json_option: str = "", note: str = "") -> bool:
        """Runs `command` for `limit` seconds at most, and less if the whole run has less. With `json_option` it writes
        what it found to the file behind that option."""
        limit = self._left(limit)
        print(f"{name} (at most {limit:.0f} s)" + (f": {note}" if note and self._args.cpu_harness else ""), flush=True)
        output, report = self._work / f"{name}.log", self._work / f"{name}.json"
        report.unlink(missing_ok=True)
        if json_option:
            command = [*command, json_option, str(report)]
        began = time.monotonic()
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # compilers that it starts must end with it
            )
            status = self._wait(process, began + limit, output)
        seconds = round(time.monotonic() - began, 1)
        found = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
        lines = last_lines(output)
        if status == 0:
            self._add(Step(name, "passed", seconds, found=found))
        else:
            said = found.pop("why", None) or (lines[-1] if lines else "It said nothing.")
            why = f"It took longer than {limit:.0f} s." if status is None else said
            self._add(Step(name, "failed", seconds, why, lines, found))
        return status == 0

    def _wait(self, process: subprocess.Popen[bytes], deadline: float, output: Path) -> int | None:
        """The exit status; None at the deadline. Tells from time to time how far it is."""
        began = told = time.monotonic()
        try:
            while (now := time.monotonic()) < deadline:
                try:
                    return process.wait(min(1.0, deadline - now))
                except subprocess.TimeoutExpired:
                    if now - told >= SIGN_OF_LIFE_S:
                        told = now
                        said = last_lines(output)
                        print(f"  {now - began:.0f} s: {said[-1][:110] if said else '...'}", flush=True)
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _add(self, step: Step) -> None:
        self._steps.append(step)
        if step.result == "skipped":
            print(step.name, flush=True)
        print(f"  {step.result} in {step.seconds:.1f} s" + (f": {step.why[:300]}" if step.why else ""), flush=True)
        self._write()

    def _write(self) -> None:
        report = {
            "passed": all(step.result == "passed" for step in self._steps),
            "cpu_harness": self._args.cpu_harness,
            "seconds": round(time.monotonic() - self._began, 1),
            "machine": self._machine,
            "steps": [asdict(step) for step in self._steps],
        }
        self._args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def last_lines(output: Path) -> list[str]:
    # Progress of some tools ends in carriage returns.
    text = output.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    return list(deque((line.rstrip() for line in text.splitlines() if line.strip()), LAST_LINES))


def machine() -> dict[str, Any]:
    """What is there; an empty string where a tool is missing."""
    asked = "name,driver_version,memory.total,compute_cap"
    return {
        "gpus": said(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]),
        "nvcc": said(["nvcc", "--version"]).rpartition("\n")[2],
        "compiler": said([os.environ.get("CXX", "c++"), "--version"]).partition("\n")[0],
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "packages": {
            name: version
            for name in ("torch", *sorted(set(PACKAGES.values())))
            if (version := installed(name)) is not None
        },
    }


def said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def installed(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def fetch(version: str, wheels: Path) -> int:
    """Wheels of PACKAGES for Python `version` on Linux x86-64, in the versions of the requirements files."""
    pins: dict[str, str] = {}
    for name in ("requirements.txt", "requirements-gpu.txt", "requirements-dev.txt", "requirements-harness.txt"):
        if (ROOT / name).is_file():
            found = re.findall(
                r"^([\w.-]+)==([\w.]+)(?![\w.+])", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE
            )
            pins = dict(found) | pins
    wanted = [f"{name}=={pins[name]}" if name in pins else name for name in PACKAGES.values()]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--only-binary", ":all:"]
    command += ["--python-version", version, "--implementation", "cp"]
    for platform_tag in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", platform_tag]
    # Not exllamav2's own: it wants torch and pandas.
    status = subprocess.run(
        [*command, "-d", str(wheels), *(w for w in wanted if not w.startswith("exllamav2="))]
    ).returncode
    own = subprocess.run([*command, "--no-deps", "-d", str(wheels), *(w for w in wanted if w.startswith("exllamav2="))])
    return status or own.returncode


# -- the steps that run in processes of their own; they may import everything


def package(args: argparse.Namespace, limit_s: float = 60) -> None:
    """Imports exllamav2, as the engine does, or on the CPU harness."""
    if args.cpu_harness:
        of_tests("exllamav2.harness").install()
        return
    from workers.engines.exllamav2 import extension

    said_at = [0.0]

    def report(part: float, what: str) -> None:
        if time.monotonic() - said_at[0] > 5:
            said_at[0] = time.monotonic()
            print(f"{what}: {part:.0%}", flush=True)

    extension.load_package(args.work / "cache", limit_s, report)


def build(args: argparse.Namespace) -> dict[str, Any]:
    """The extension in a folder of its own, into which an ended build's lock file is put first: no wait for it."""
    from workers.engines.exllamav2 import extension

    stale = "not tried"
    if not args.cpu_harness:
        extension.check()
        lock = extension._folder(args.work / "cache") / "exllamav2_ext" / "lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
        stale = "ignored"
    package(args, args.limit - 10)
    import exllamav2

    made = sys.modules["exllamav2_ext"]
    file = getattr(made, "__file__", None)
    return {
        "exllamav2": exllamav2.__version__,
        "extension": file or "the CPU harness",
        "bytes": Path(file).stat().st_size if file else 0,
        "stale_lock": stale,
    } | torch_facts()


def torch_facts() -> dict[str, Any]:
    import torch

    facts = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpu": ""}
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        facts |= {"gpu": torch.cuda.get_device_name(), "capability": capability, "gpus": torch.cuda.device_count()}
    return facts


def models(args: argparse.Namespace) -> dict[str, Any]:
    """The tiny random Llama."""
    folder = args.work / "tiny"
    shutil.rmtree(folder, ignore_errors=True)
    of_tests("exllamav2.models").write_tiny_llama(folder)
    return {"bytes": sum(file.stat().st_size for file in folder.iterdir())}


def convert(args: argparse.Namespace) -> dict[str, Any]:
    """The tiny model to EXL2, by the package's own converter and with the calibration texts that it carries."""
    # Where flash-attn is missing, the calibration would run without the causal mask (0.2.9 to 0.3.2, `_attn_torch`).
    os.environ["EXLLAMA_NO_SDPA"] = "1"
    package(args)
    # Imported at the top of its tokenize.py, and used for a calibration file of the caller's only. Gone again right
    # after, since torch looks at what else is imported.
    lacking = [name for name in ("pandas", "fastparquet") if importlib.util.find_spec(name) is None]
    sys.modules.update({name: ModuleType(name) for name in lacking})
    importlib.import_module("exllamav2.conversion.tokenize")
    for name in lacking:
        del sys.modules[name]
    made, folder = args.work / "tiny-exl2", args.work / "converting"
    for old in (made, folder):
        shutil.rmtree(old, ignore_errors=True)
    options = {"-i": args.work / "tiny", "-o": folder, "-cf": made, "-b": 6.0, "-hb": 8, "-l": 256, "-ml": 256}
    sys.argv = ["convert_exl2", "-nr", *(str(part) for option in options.items() for part in option)]
    try:
        runpy.run_module("exllamav2.conversion.convert_exl2", run_name="__main__")
    except SystemExit as ended:
        # It ends with status 0 whatever went wrong, so what it made is looked at.
        print(f"The converter ended with {ended.code}.", flush=True)
    config = json.loads((made / "config.json").read_text(encoding="utf-8")) if made.is_dir() else {}
    if "quantization_config" not in config or not list(made.glob("*.safetensors")):
        raise Failure(f"The converter left no whole model in {made}.")
    size = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    return {"bytes": size, "quantization": config["quantization_config"]}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The EXL2 model's distributions against those of the weights it was made from, through our engine."""
    ours, theirs = (distributions(args, args.work / name) for name in ("tiny-exl2", "tiny"))
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    found = {"positions": len(ours), "argmax_agreement": agreement, "kl_mean": float(divergence.mean())}
    found["kl_most"] = float(divergence.max())
    if agreement < LEAST_AGREEMENT or found["kl_mean"] > MOST_DIVERGENCE:
        raise Failure(f"EXL2 is too far from its weights: {found}.")
    return found


def distributions(args: argparse.Namespace, model: Path) -> Any:
    """Logprobs [positions, vocab] behind 1500 random tokens."""
    import random

    import torch

    from shared.settings import Settings
    from workers.engines.base import EngineRequest, Failed, Finished, PromptLogprobs
    from workers.engines.exllamav2.engine import ExLlamaV2Engine
    from workers.engines.exllamav2.options import ExLlamaV2Options

    settings = Settings(cache_dir=args.work / "cache", lanes=1)
    engine = ExLlamaV2Engine(ExLlamaV2Options.from_settings(settings, model, "compared"))
    card = engine.load(lambda part, what: None)
    drawn = random.Random(0)
    prompt = [drawn.randrange(card.vocab_size) for _ in range(1500)]
    engine.add(EngineRequest("compared", prompt, 0, seed=0, prompt_logprobs=card.vocab_size))
    rows = torch.empty(len(prompt) - 1, card.vocab_size, dtype=torch.float64)
    at = 0
    while True:
        for event in engine.step():
            if isinstance(event, Failed):
                raise Failure(f"Scoring failed: {event.error}.")
            if isinstance(event, Finished):
                engine.close()
                return rows
            if isinstance(event, PromptLogprobs):
                for entry in filter(None, event.logprobs):
                    for token, value in entry[1]:
                        rows[at, token] = value
                    at += 1


def of_tests(module: str) -> Any:
    """Models and harness are part of the tests, which only a checkout has."""
    return importlib.import_module(f"tests.{module}")


STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "build": build,
    "models": models,
    "convert": convert,
    "compare": compare,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="deploy/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = os.environ.get("SLUICE_GPU_WHEELS")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=Path(named) if named else WHEELS,
        metavar="DIR",
        help="packages to install from, default deploy/wheels (or SLUICE_GPU_WHEELS)",
    )
    parser.add_argument("--fetch", metavar="PYTHON", help="fill that folder for this version of Python, and end")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a real model, to measure as well")
    parser.add_argument(
        "--json", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="default gpu_check.json"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gpu-check", metavar="DIR", help="default build/gpu-check"
    )
    parser.add_argument("--limit", type=float, default=580.0, metavar="S", help="seconds for all steps (default 580)")
    parser.add_argument(
        "--cpu-harness", action="store_true", help="without a GPU: the steps that the CPU harness can do"
    )
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("json", "work", "wheels", "model"):
        if getattr(args, name) is not None:
            setattr(args, name, getattr(args, name).resolve())
    if args.fetch:
        return fetch(args.fetch, args.wheels)
    if args.step is None:
        return Check(args).run()
    try:
        found = STEPS[args.step](args)
    except Exception as error:  # noqa: BLE001 - the parent reads it
        import traceback

        traceback.print_exc()
        args.json.write_text(
            json.dumps({"why": " ".join(f"{error}".split()) or type(error).__name__}), encoding="utf-8"
        )
        return 1
    args.json.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
