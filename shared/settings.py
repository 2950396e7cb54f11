"""Every setting of Sluice, in one class.

Read from the environment (`SLUICE_<NAME>`), else from `sluice.toml` in the current folder, else the default.
`docs/settings.md` is generated from this file (`python -m scripts.settings_table`); a test compares them.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource


class WrongSettings(Exception):
    """A setting or the settings file is wrong; the message says which and how."""


def given(**values: Any) -> Settings:
    """The settings, with those values that are not None in place of what is configured. Raises WrongSettings."""
    try:
        return Settings(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise WrongSettings(f"A setting is wrong: {wrong}. docs/settings.md lists them all.") from None
    except tomllib.TOMLDecodeError as error:
        raise WrongSettings(f"sluice.toml is not valid TOML: {error}.") from None


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


class Settings(BaseSettings):
    """The settings of one process. `Settings()` reads them; tests pass values by name."""

    model_config = SettingsConfigDict(
        env_prefix="SLUICE_", toml_file="sluice.toml", extra="ignore", populate_by_name=True
    )

    # Where things are
    redis_url: str | None = Field(
        None,
        validation_alias=AliasChoices("SLUICE_REDIS_URL", "REDIS_URL", "redis_url"),
        description="The store (`redis://`, `rediss://`, `unix://`). Unset: `sluice up` starts a server of its own.",
    )
    data_dir: Path = Field(
        Path(".sluice"), description="Where `sluice up` keeps the store's data and its lock. One `up` per folder."
    )
    cache_dir: Path = Field(
        default_factory=_cache_dir, description="Downloaded and converted models (`~/.cache/sluice`)."
    )
    host: str = Field("127.0.0.1", description="Address the API listens on.")
    port: int = Field(8000, ge=1, le=65535, description="Port the API listens on.")
    api_workers: int = Field(1, ge=1, le=256, description="API processes of one `up`.")

    # Models and engines
    default_model: str | None = Field(
        None, description="Model for requests that name none. Unset: the only one served."
    )
    lanes: int | None = Field(
        None, ge=1, le=4096, description="Requests a worker runs at once. Unset: llamacpp 16, scripted 64."
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the llamacpp engine. Unset: the cores this process may use."
    )
    context_cells: int = Field(
        8192, ge=256, description="llamacpp: tokens of all running requests together (KV cells)."
    )
    context_length: int | None = Field(
        None, ge=16, description="llamacpp: longest prompt + completion of one request. Unset: the model's."
    )
    batch_tokens: int = Field(512, ge=16, description="llamacpp: tokens decoded in one step, at most.")
    prefill_chunk: int = Field(
        128, ge=16, description="llamacpp: prompt tokens in one step while other requests decode."
    )
    prefix_cache: int = Field(
        16,
        ge=0,
        description="llamacpp: finished sequences kept in free memory for requests that begin alike; 0 = no reuse.",
    )
    libllama: Path | None = Field(
        None, description="llamacpp: another llama.cpp library than the one of the xllamacpp wheel."
    )

    # What a request may ask
    default_max_tokens: int | None = Field(
        None, ge=1, description="Cap where max_tokens is absent. Unset: all remaining context."
    )
    fit_max_tokens: bool = Field(False, description="Clamp a max_tokens that does not fit instead of answering 400.")
    max_body_bytes: int = Field(10_000_000, ge=1024, description="Largest request body.")
    max_prompts: int = Field(1024, ge=1, description="Prompts in one request.")
    max_choices: int = Field(256, ge=1, description="Prompts x best_of of one request.")
    max_logprobs: int = Field(20, ge=0, description="Largest `logprobs`.")
    max_stops: int = Field(64, ge=1, description="Stop strings of one request.")
    max_logit_bias: int = Field(1024, ge=1, description="Entries of one logit_bias.")
    strict_fields: bool = Field(
        False, description="Refuse unknown top-level fields instead of ignoring and naming them."
    )
    allowed_hosts: list[str] = Field(
        default_factory=list, description="Host names that open mode answers to, besides the loopback ones."
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origins whose web pages may use the API (`https://app.example`). None: CORS is off.",
    )
    insecure: bool = Field(
        False, description="Listen on other than loopback addresses although no API key is configured."
    )

    # Times, in seconds
    request_timeout_s: float = Field(3600, gt=0, description="A request's deadline, from its submission.")
    cold_start_s: float = Field(
        120, gt=0, description="How long a request may wait for a worker that is being started."
    )
    drain_s: float = Field(30, ge=0, description="How long a stopping process lets its running requests go on.")
    stall_s: float = Field(30, gt=0, description="A worker whose engine makes no step for this long exits.")
    lease_s: float = Field(6, gt=1, description="A worker not heard of for this long is dead.")
    orphan_grace_s: float = Field(30, gt=3, description="How long the requests of a dead API process run on.")
    result_ttl_s: int = Field(3600, ge=1, description="How long a result is readable by id.")
    log_ttl_s: int = Field(300, ge=1, description="How long an ended stream can be replayed.")
    store_wait_s: float = Field(30, gt=0, description="How long a response waits for a store that is away.")
    sse_heartbeat: Literal["comment", "off"] = Field("comment", description="Keep-alive and queue comments in streams.")
    sse_heartbeat_s: float = Field(8, gt=0, le=10, description="Longest silence of a stream.")

    # Logs
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least level that is logged.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)
