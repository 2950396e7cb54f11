"""What `sluice up` makes of its options, and what it says when it cannot start."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from scripts import ports
from scripts.scaling import Range
from scripts.store import DataFolder
from scripts.up import CannotStart, Options, _workers, base_url, parse_workers, pools, up
from shared.settings import Settings, WrongSettings, given
from tests.stack import free_port
from workers.engines.llamacpp.carried import CARRIED_MODEL_ID


@pytest.mark.parametrize(("text", "pair"), [("1:1", (1, 1)), ("0:4", (0, 4)), ("3", (3, 3)), ("0:0", (0, 0))])
def test_workers(text: str, pair: tuple[int, int]) -> None:
    assert parse_workers(text) == Range(*pair)


@pytest.mark.parametrize("text", ["", "a", "2:1", "-1:1", "1:2:3", ":", "1:", "9999"])
def test_workers_that_are_none(text: str) -> None:
    with pytest.raises(CannotStart, match="MIN:MAX"):
        parse_workers(text)


def test_a_model_is_a_path_with_or_without_a_name(tmp_path: Path) -> None:
    folder, file = tmp_path / "llama-3", tmp_path / "Tiny.Q4_1.gguf"
    folder.mkdir()
    file.touch()
    for text, model_id in [(folder, "llama-3"), (file, "Tiny"), (f"{folder}=org/name", "org/name")]:
        [pool] = pools(Options(("llamacpp",), (str(text),)))
        assert pool.model_id == model_id


def test_pools_get_their_models_and_aliases(tmp_path: Path) -> None:
    made = pools(Options(("scripted", "llamacpp"), (f"{tmp_path}=small",), ("s=scripted", "gpt-4=small")))
    assert [(p.engine, p.model_id, p.aliases) for p in made] == [
        ("scripted", "scripted", ["s=scripted"]),
        ("llamacpp", "small", ["gpt-4=small"]),
    ]


def test_each_pool_has_its_own_range_and_the_fewest_run_from_the_start() -> None:
    options = Options(("scripted", "llamacpp", "scripted"), workers=(Range(0, 2), Range(1, 2), Range(0, 0)))
    made = pools(options)
    programs = [program for pool in _workers(made, Settings(), "redis://x") for program in pool]
    assert [(p.name, p.wanted) for p in programs] == [
        ("scripted-1", False),
        ("scripted-2", False),
        ("llamacpp-1", True),
        ("llamacpp-2", False),
    ]
    assert [pool.workers for pool in pools(Options(("scripted", "llamacpp"), workers=(Range(0, 4),)))] == [
        Range(0, 4)
    ] * 2


def test_an_alias_of_the_carried_model() -> None:
    [pool] = pools(Options(("llamacpp",), (), (f"gpt-4={CARRIED_MODEL_ID}",)))
    assert (pool.model_id, pool.model, len(pool.aliases)) == (CARRIED_MODEL_ID, None, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(("vllm",)), "no such engine.*llamacpp"),
        (Options(("scripted",), ("/tmp",)), "more models than engines"),
        (Options(("exllamav2",)), "needs --model"),
        (Options(("llamacpp",), ("/no/such/folder",)), "there is no /no/such/folder"),
        (Options(("scripted",), (), ("nonsense",)), "NAME=MODEL"),
        (Options(("scripted",), workers=(Range(0, 1), Range(1, 2))), "--workers: 2 for 1 engines"),
        (Options(("scripted",), (), ("a=other",)), "no model other; it serves scripted"),
    ],
)
def test_options_that_cannot_work_say_why(options: Options, says: str) -> None:
    with pytest.raises(CannotStart, match=says):
        pools(options)


def test_a_port_in_use_is_said_with_its_owner_and_another_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not ports.is_free("127.0.0.1", port)
        with pytest.raises(CannotStart, match=rf"Port {port} is in use by pid {os.getpid()} .*--port \d+"):
            up(Options(("scripted",)), Settings(port=port, data_dir=tmp_path / "data"))
    assert ports.is_free("127.0.0.1", port)
    assert ports.owner(port) is None


def test_an_address_that_is_not_ours_is_said(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"Cannot listen on 192\.0\.2\.1"):
        up(Options(("scripted",)), Settings(host="192.0.2.1", insecure=True, data_dir=tmp_path / "data"))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_where_a_client_on_this_machine_connects(host: str, url: str) -> None:
    assert base_url(Settings(host=host, port=8000)) == url


def test_an_address_open_to_everyone_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="--insecure"):
        up(Options(("scripted",)), Settings(host="0.0.0.0", data_dir=tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_settings_that_are_wrong_are_said_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sluice.toml").write_text("port 9104\n")
    with pytest.raises(WrongSettings, match=r"sluice\.toml.*line 1"):
        given()
    (tmp_path / "sluice.toml").write_text("port = 'many'\n")
    with pytest.raises(WrongSettings, match=r"port: .*'many'"):
        given()
    assert given(port=9105).port == 9105
    (tmp_path / "sluice.toml").unlink()
    monkeypatch.setenv("SLUICE_EXL2_GPU_SPLIT", "20,22")
    with pytest.raises(WrongSettings, match=r"exl2_gpu_split: .*JSON.*\[20, 22\].*'20,22'"):
        given()
    monkeypatch.delenv("SLUICE_EXL2_GPU_SPLIT")
    with pytest.raises(WrongSettings, match=r"trusted_proxies: .*nginx"):
        given(port=9105, trusted_proxies=["nginx"])


def test_a_store_without_keys_is_not_served_to_everyone(tmp_path: Path) -> None:
    """The folder has been used before; whether it has keys is known once its store runs, which then ends again."""
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(CannotStart, match="sluice keys add"):
        up(
            Options(("scripted",), workers=(Range(0, 0),)),
            Settings(host="0.0.0.0", port=free_port(), data_dir=data),
        )
    with DataFolder(data):  # nobody holds it any more
        pass


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"", "--engine exllamav2"),
        ("readme.txt", b"", "files are: none"),
        ("model.gguf", b"GGML", "no GGUF file"),
    ],
)
def test_what_llamacpp_cannot_run_is_said_before_anything_runs(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(content)
    settings = Settings(data_dir=tmp_path / "data", port=ports.any_free())
    with pytest.raises(CannotStart, match=says):
        up(Options(("llamacpp",), (str(folder),)), settings)
    assert not (tmp_path / "data" / "store").exists()
