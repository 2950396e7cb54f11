"""What is in deploy/, judged by the tools that will read it, and held against what it is for: names and numbers that stand in
two places say the same, and nothing runs with more rights than it has a use for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from scripts.cli import app
from shared import keys
from shared.settings import Settings
from tests.deploy import tools
from tests.deploy.tools import COMPOSE, KUBERNETES, UNITS

SCHEMAS = Path(__file__).parent / "schemas"
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))
DOCKERFILES = sorted((tools.DEPLOY / "docker").glob("Dockerfile*"))
#: What a stopping process may need beyond drain_s, s: the 30 s of docs/store.md, and some.
LAST_WORDS = 35


def documents(*files: Path) -> list[dict[str, Any]]:
    return [found for file in files for found in yaml.safe_load_all(file.read_text(encoding="utf-8")) if found]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [found for found in documents(*MANIFESTS) if found["kind"] in kinds]


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in of_kind(kind) if one["metadata"]["name"] == name]
    return found


def seconds(duration: str | int) -> int:
    return int(str(duration).removesuffix("s"))


def unknown_settings(names: set[str]) -> set[str]:
    """Of the variables those that look like a setting and are none."""
    known = {f"SLUICE_{name.upper()}" for name in Settings.model_fields}
    return {name for name in names if name.startswith("SLUICE_")} - known


# -- images


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    hadolint = tools.program("hadolint")
    tools.run(hadolint, "--config", file.with_name("hadolint.yaml"), file)


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install flask\n", encoding="utf-8")
    found = tools.run(tools.program("hadolint"), "--config", DOCKERFILES[0].with_name("hadolint.yaml"), bad, fails=True)
    assert {"DL3007", "DL3003", "DL3013"} <= set(re.findall(r"DL\d+", found))


# -- compose


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = documents(COMPOSE)[0]["services"]
    return found


def test_the_compose_file_is_valid() -> None:
    tools.run(tools.python(), "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_docker_reads_the_compose_file_and_nothing_starts_without_a_password() -> None:
    """With Docker's own reader, where it is there; it needs no daemon."""
    docker = tools.on_path("docker")
    try:
        tools.run(docker, "compose", "version")
    except AssertionError:
        pytest.skip("docker has no compose")
    command = (docker, "compose", "--file", COMPOSE, "--profile", "*", "config", "--quiet")
    tools.run(*command, env={"SLUICE_STORE_PASSWORD": "0f"})
    assert "SLUICE_STORE_PASSWORD" in tools.run(*command, env={"SLUICE_STORE_PASSWORD": ""}, fails=True)


def test_each_address_of_the_store_has_a_password_that_must_be_given() -> None:
    addresses = re.findall(r"redis://\S*?@", COMPOSE.read_text(encoding="utf-8").replace(" ", ""))
    assert addresses
    assert all(address.startswith("redis://:${SLUICE_STORE_PASSWORD:?") for address in addresses)
    assert services()["store"]["environment"]["STORE_PASSWORD"].startswith("${SLUICE_STORE_PASSWORD:?")


@pytest.mark.parametrize("name", services())
def test_a_container_has_no_more_rights_than_it_needs(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & set(service)
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:"), "TLS is the business of what is in front of it"
    assert unknown_settings(set(service["environment"])) == set()


@pytest.mark.parametrize("name", sorted(set(services()) - {"store"}))
def test_a_container_is_given_the_time_to_drain(name: str) -> None:
    service = services()[name]
    drain = float(service["environment"].get("SLUICE_DRAIN_S", Settings().drain_s))
    assert seconds(service["stop_grace_period"]) >= drain + LAST_WORDS


# -- Kubernetes


def test_the_manifests_are_valid() -> None:
    """Strictly: a field that is not known is an error. What other schemas are for is looked at below."""
    python = tools.python()
    others = {"Kustomization", *(file.stem for file in SCHEMAS.glob("*.json"))}
    files = [file for file in MANIFESTS if not any(one["kind"] in others for one in documents(file))]
    assert len(files) >= 7
    found = tools.run(python, "-m", "kubernetes_validate", "--strict", "-k", "1.37", *files)
    assert "WARN" not in found
    assert "WARN" not in tools.run(python, "-m", "kubernetes_validate", "--strict", "-k", "1.30", *files)


def test_a_wrong_manifest_would_be_found(tmp_path: Path) -> None:
    bad = named("Deployment", "sluice-api")
    bad["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(bad), encoding="utf-8")
    found = tools.run(tools.python(), "-m", "kubernetes_validate", "--strict", tmp_path / "bad.yaml", fails=True)
    assert "readinesProbe" in found


@pytest.mark.parametrize("schema", sorted(SCHEMAS.glob("*.json")), ids=lambda file: file.stem)
def test_what_others_define_is_valid(schema: Path, tmp_path: Path) -> None:
    found = of_kind(schema.stem)
    assert found
    for number, one in enumerate(found):
        (tmp_path / f"{number}.json").write_text(json.dumps(one), encoding="utf-8")
    command = (tools.python(), "-m", "check_jsonschema", "--schemafile", schema)
    tools.run(*command, *tmp_path.glob("*.json"))
    found[0]["spec"]["nothing"] = 1
    (tmp_path / "0.json").write_text(json.dumps(found[0]), encoding="utf-8")
    tools.run(*command, tmp_path / "0.json", fails=True)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for found in of_kind("Deployment", "StatefulSet"):
        yield found["metadata"]["name"], found["spec"]["template"]


@pytest.mark.parametrize("name", [name for name, _ in pods()])
def test_a_pod_has_no_more_rights_than_it_needs(name: str) -> None:
    pod = dict(pods())[name]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "a Service named sluice would set SLUICE_PORT"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        given = {one["name"]: one for one in container["env"]}
        assert unknown_settings(set(given)) == set()
        assert given["STORE_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "sluice-store", "key": "password"}


def test_the_config_map_holds_settings() -> None:
    data = named("ConfigMap", "sluice")["data"]
    assert unknown_settings(set(data)) == set()
    assert data["SLUICE_REQUIRE_KEYS"] == "true"
    assert isinstance(json.loads(data["SLUICE_TRUSTED_PROXIES"]), list)


@pytest.mark.parametrize("name", ["sluice-api", "sluice-batch", "sluice-worker"])
def test_a_pod_is_given_the_time_to_drain(name: str) -> None:
    pod = dict(pods())[name]["spec"]
    [container] = pod["containers"]
    drain = float({one["name"]: one.get("value") for one in container["env"]}.get("SLUICE_DRAIN_S") or 20)
    before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert before[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(before[1]) + drain + LAST_WORDS


def test_a_worker_that_shall_go_has_time_for_the_longest_request() -> None:
    [container] = dict(pods())["sluice-worker"]["spec"]["containers"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert float(given["SLUICE_DRAIN_S"]) >= Settings.model_fields["request_timeout_s"].default


def test_probes_ask_for_what_there_is() -> None:
    """Which test_compose.py shows."""
    [container] = dict(pods())["sluice-api"]["spec"]["containers"]
    asked = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {"/health", "/ready"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health", "a restart does not bring the store back"


def test_who_selects_pods_finds_some() -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods()]

    def fits(selector: dict[str, Any]) -> bool:
        return any(
            all(one.get(name) == value for name, value in selector.get("matchLabels", {}).items())
            and all(one.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ()))
            for one in labels
        )

    for service in of_kind("Service"):
        assert fits({"matchLabels": service["spec"]["selector"]}), service["metadata"]["name"]
    for budget in of_kind("PodDisruptionBudget"):
        assert fits(budget["spec"]["selector"]), budget["metadata"]["name"]
    for policy in of_kind("NetworkPolicy"):
        assert fits(policy["spec"]["podSelector"]), policy["metadata"]["name"]
    for found in of_kind("Deployment", "StatefulSet"):
        own = {"matchLabels": found["spec"]["template"]["metadata"]["labels"]}
        assert found["spec"]["selector"] == own, found["metadata"]["name"]


def test_keda_counts_the_requests_of_the_model_that_the_workers_have() -> None:
    scaled = named("ScaledObject", "sluice-worker")["spec"]
    worker = named("Deployment", scaled["scaleTargetRef"]["name"])
    assert "replicas" not in worker["spec"], "the manifest would set the number back at each apply"
    [container] = worker["spec"]["template"]["spec"]["containers"]
    model = container["args"][container["args"].index("--model") + 1].rpartition("=")[2]
    [trigger] = scaled["triggers"]
    assert trigger["metadata"]["listName"] == keys.work(model)
    assert json.loads(named("ConfigMap", "sluice")["data"]["SLUICE_SCALES_FROM_ZERO"]) == [model]
    assert (scaled["minReplicaCount"], trigger["metadata"]["activationListLength"]) == (0, "0")
    host, _, port = trigger["metadata"]["address"].partition(":")
    namespace = documents(KUBERNETES / "kustomization.yaml")[0]["namespace"]
    assert host == f"{named('Service', 'sluice-store')['metadata']['name']}.{namespace}.svc"
    assert int(port) == named("Service", "sluice-store")["spec"]["ports"][0]["port"]
    assert named("TriggerAuthentication", trigger["authenticationRef"]["name"])["spec"]["secretTargetRef"] == [
        {"parameter": "password", "name": "sluice-store", "key": "password"}
    ]


def test_the_kustomization_names_every_manifest() -> None:
    file = KUBERNETES / "kustomization.yaml"
    names = set(re.findall(r"- (\w+\.yaml)", file.read_text(encoding="utf-8")))
    assert names == {other.name for other in MANIFESTS} - {file.name}
    images = {one["name"] for one in documents(file)[0]["images"]}
    used = {container["image"] for name, pod in pods() for container in pod["spec"]["containers"]}
    assert images == {image for image in used if image.startswith("sluice-")}


def test_the_store_is_the_same_here_and_there() -> None:
    compose, [container] = services()["store"], dict(pods())["sluice-store"]["spec"]["containers"]
    assert compose["image"] == container["image"]
    for text in (compose["command"][0], container["args"][0]):
        for option in ("--appendonly yes", "--maxmemory-policy noeviction", "requirepass"):
            assert option in text


# -- systemd


def units(folder: Path) -> list[Path]:
    """The units, with programs that there are on this machine."""
    found = []
    for file in UNITS:
        text = tools.swap(file.read_text(encoding="utf-8"), ("/opt/sluice/bin/sluice", str(shutil.which("true"))))
        copy = folder / file.name.replace("@.", "@qwen.")
        copy.write_text(text, encoding="utf-8")
        found.append(copy)
    return found


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    analyze = tools.on_path("systemd-analyze")
    found = units(tmp_path)
    assert tools.run(analyze, "verify", "--man=no", *found) == ""
    found[0].write_text(found[0].read_text(encoding="utf-8").replace("ProtectHome=", "ProtectHouse="), encoding="utf-8")
    assert "ProtectHouse" in tools.run(analyze, "verify", "--man=no", found[0])


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_a_unit_has_no_more_rights_than_it_needs(file: Path, tmp_path: Path) -> None:
    """By systemd's own marks: 0 is shut, 10 is open, and a unit that says nothing has 9.6."""
    analyze = tools.on_path("systemd-analyze")
    unit = units(tmp_path)[UNITS.index(file)]
    # in tenths; the fields that make 5 % of them in workers are those that would hide a GPU
    tools.run(analyze, "security", "--offline=yes", "--no-pager", f"--threshold={35 if '@' in file.name else 20}", unit)


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_a_unit_runs_a_command_and_gives_it_the_time_to_drain(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    given = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    assert int(given["TimeoutStopSec"]) >= Settings.model_fields["drain_s"].default + LAST_WORDS
    assert given["KillMode"] == "mixed"
    assert unknown_settings(set(re.findall(r"(?m)^Environment=.*?\b(SLUICE_\w+)=", text))) == set()
    program, *words = given["ExecStart"].split()
    assert program == "/opt/sluice/bin/sluice"
    command = typer.main.get_command(app)
    for word in words:
        if not word.startswith("$"):
            command = command.commands[word]


# -- proxies


def test_nginx_understands_the_example(tmp_path: Path) -> None:
    nginx = tools.on_path("nginx")
    whole = tools.nginx_conf(tmp_path, tools.certificate(tmp_path), port=8443, upstream=8000)
    assert "test is successful" in tools.run(nginx, "-t", "-e", "stderr", "-p", tmp_path, "-c", whole)


def test_caddy_understands_the_example(tmp_path: Path) -> None:
    caddy = tools.program("caddy")
    folders = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    validate = (caddy, "validate", "--adapter", "caddyfile", "--config")
    assert "Valid configuration" in tools.run(*validate, tools.CADDY, env=folders)
    tools.run(caddy, "fmt", "--diff", tools.CADDY, env=folders)
    whole = tools.caddyfile(tmp_path, tools.certificate(tmp_path), port=8443, upstream=8000)
    assert "Valid configuration" in tools.run(*validate, whole, env=folders)
