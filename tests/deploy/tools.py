"""The tools that judge what is in deploy/: those from PyPI in an environment apart, the others from PATH. A test whose tool is
missing is skipped, and says which."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.conformance import environments

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = DEPLOY / "compose.yaml"
NGINX = DEPLOY / "nginx" / "sluice.conf"
CADDY = DEPLOY / "caddy" / "Caddyfile"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def on_path(name: str) -> str:
    """Also where Debian puts what is for root."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not on PATH")
    return found


def python() -> str:
    """The interpreter of the environment with the tools of PyPI; what they are is in conformance/requirements-deploy.txt."""
    try:
        return str(environments.python("deploy"))
    except RuntimeError as error:
        pytest.skip(f"the tools of deploy/ cannot be installed: {str(error)[-300:]}")


def program(name: str) -> str:
    """A program of that environment."""
    return str(Path(python()).with_name(name))


def run(*command: str | Path, fails: bool = False, **more: object) -> str:
    """Runs a tool; its output. Its exit status must be 0, or with `fails` another one."""
    # The suite may be running as if jsonschema were not there; the tools have their own.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in command],
        env=environment | dict(more.pop("env", {})),  # type: ignore[call-overload]
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        **more,  # type: ignore[arg-type]
    )
    output: str = ended.stdout
    assert (ended.returncode != 0) == fails, f"{command[0]} ended with {ended.returncode}:\n{output[-3000:]}"
    return output


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    whole, key = folder / "fullchain.pem", folder / "privkey.pem"
    run(
        *(on_path("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", key, "-out", whole),
    )
    return whole, key


def believing(whole: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(whole))


def nginx_conf(
    folder: Path, certificate: tuple[Path, Path], *, port: int, upstream: int, read_timeout: str = ""
) -> Path:
    """The example as a whole configuration, its names and addresses replaced by those of this machine."""
    text = swap(
        NGINX.read_text(encoding="utf-8"),
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{upstream};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("    listen [::]:443 ssl;\n", ""),
        ("    listen [::]:80;\n", ""),
        ("listen 80;", f"listen unix:{folder}/80;"),
        ("/etc/ssl/sluice/fullchain.pem", str(certificate[0])),
        ("/etc/ssl/sluice/privkey.pem", str(certificate[1])),
        *([("proxy_read_timeout 3660s;", f"proxy_read_timeout {read_timeout};")] if read_timeout else []),
    )
    (folder / "sluice.conf").write_text(text, encoding="utf-8")
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = folder / "nginx.conf"
    whole.write_text(
        f"{'user root;' if os.geteuid() == 0 else ''}\nworker_processes 1;\ndaemon off;\npid {folder}/pid;\n"
        f"error_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}\ninclude {folder}/sluice.conf;\n}}\n",
        encoding="utf-8",
    )
    return whole


def caddyfile(folder: Path, certificate: tuple[Path, Path], *, port: int, upstream: int) -> Path:
    """The example with the names and addresses of this machine, and without the way to get certificates."""
    text = swap(
        CADDY.read_text(encoding="utf-8"),
        ("sluice.example.com {", f"https://127.0.0.1:{port} {{\n\ttls {certificate[0]} {certificate[1]}"),
        ("reverse_proxy 127.0.0.1:8000 {", f"reverse_proxy 127.0.0.1:{upstream} {{"),
    )
    whole = folder / "Caddyfile"
    options = "{\n\tadmin off\n\tauto_https disable_redirects\n\tdefault_sni 127.0.0.1\n}\n"
    whole.write_text(options + text, encoding="utf-8")
    return whole


def swap(text: str, *pairs: tuple[str, str]) -> str:
    """The text with each first replaced by its second. All must be there: else the example has changed."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text
