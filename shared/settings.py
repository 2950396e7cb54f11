"""Every setting of Sluice, in one class.

Read from the environment (`SLUICE_<NAME>`), else from `sluice.toml` in the current folder, else the default.
`docs/settings.md` is generated from this file (`python -m scripts.settings_table`); a test compares them.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)


class WrongSettings(Exception):
    """A setting or the settings file is wrong; the message says which and how."""


def given(**values: Any) -> Settings:
    """The settings, with those values that are not None in place of what is configured. Raises WrongSettings."""
    try:
        return Settings(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise WrongSettings(f"A setting is wrong: {wrong}. docs/settings.md lists them all.") from None
    except SettingsError as error:  # text in the environment that is no JSON, where a list is wanted
        name = next(iter(re.findall(r'"(\w+)"', str(error))), "")
        raise WrongSettings(
            f'A setting is wrong: {name}: a list is written as JSON, [20, 22] or ["a", "b"] (got '
            f"{os.environ.get(f'SLUICE_{name.upper()}', '')!r}). docs/settings.md lists them all."
        ) from None
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
        description="The store (`redis://`, `rediss://`, `unix://`, `redis+sentinel://`). Unset: `sluice up` starts a "
        "server of its own.",
    )
    redis_ca: Path | None = Field(
        None, description="Certificates (PEM) by which the store's is judged, with `rediss://`. Unset: the system's."
    )
    redis_cert: Path | None = Field(None, description="Our own certificate for the store (PEM), if it asks for one.")
    redis_key: Path | None = Field(None, description="The private key of `redis_cert` (PEM).")
    data_dir: Path = Field(
        Path(".sluice"), description="Where `sluice up` keeps the store's data and its lock. One `up` per folder."
    )
    cache_dir: Path = Field(
        default_factory=_cache_dir, description="Downloaded and converted models (`~/.cache/sluice`)."
    )
    files_url: str | None = Field(
        None,
        description="Where uploaded files and the results of batches lie: a folder, or `s3://bucket/prefix` (extra `s3`). "
        "All API processes and batch runners need the same. Unset: `files` in `data_dir`.",
    )
    files_options: dict[str, Any] = Field(
        default_factory=dict,
        description='Options of that file system (fsspec), as JSON: `{"endpoint_url": "https://s3.example"}`.',
    )
    host: str = Field("127.0.0.1", description="Address the API listens on.")
    port: int = Field(8000, ge=1, le=65535, description="Port the API listens on.")
    api_workers: int = Field(1, ge=1, le=256, description="API processes of one `up`.")

    # Models and engines
    default_model: str | None = Field(
        None, description="Model for requests that name none. Unset: the only one served."
    )
    lanes: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Requests a worker runs at once. Unset: llamacpp 16, exllamav2 32, scripted 64.",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the llamacpp engine. Unset: the cores this process may use."
    )
    context_cells: int | None = Field(
        None,
        ge=256,
        description="Tokens of all running requests together (KV cache). More than one full context lets long requests "
        "run side by side. Unset: llamacpp 8192; exllamav2 one full context, 8192 at least.",
    )
    context_length: int | None = Field(
        None, ge=16, description="Longest prompt + completion of one request. Unset: the model's."
    )
    batch_tokens: int = Field(512, ge=16, description="llamacpp: tokens decoded in one step, at most.")
    prefill_chunk: int | None = Field(
        None,
        ge=16,
        description="Prompt tokens in one step while other requests decode. Unset: llamacpp 128; exllamav2 2048, which "
        "are those of each request and a multiple of 256.",
    )
    prefix_cache: int = Field(
        16,
        ge=0,
        description="llamacpp: finished sequences kept in free memory for requests that begin alike; 0 = no reuse.",
    )
    libllama: Path | None = Field(
        None, description="llamacpp: another llama.cpp library than the one of the xllamacpp wheel."
    )
    exl2_cache_mode: Literal["FP16", "Q4", "Q6", "Q8"] = Field(
        "FP16", description="exllamav2: how the KV cache is stored. Q4 holds four times as many tokens, less exactly."
    )
    exl2_gpu_split: list[float] = Field(
        default_factory=list,
        description="exllamav2: GB of weights for each GPU, `[20, 22]`. Empty: one GPU after the other, as they fill up.",
    )
    exl2_reserve_mb: int = Field(
        192,
        ge=0,
        description="exllamav2: MB left free on each of several GPUs while they are filled up (no split given).",
    )
    exl2_tensor_parallel: bool = Field(
        False, description="exllamav2: split each layer over all GPUs instead of giving each GPU some layers."
    )
    exl2_draft_model: Path | None = Field(
        None, description="exllamav2: folder of a small model of the same vocabulary that proposes tokens."
    )
    exl2_draft_tokens: int = Field(
        4, ge=1, le=32, description="exllamav2: tokens proposed at a time, by a draft model or by n-grams."
    )
    exl2_ngram_draft: bool = Field(
        False, description="exllamav2: propose tokens that followed the last few earlier in the text; no draft model."
    )
    exl2_loras: list[str] = Field(
        default_factory=list, description='exllamav2: LoRA folders laid over the model, `["DIR", "DIR=0.5"]` (scale).'
    )
    exl2_rope_scale: float | None = Field(
        None, gt=0, description="exllamav2: linear RoPE scale instead of the model's."
    )
    exl2_rope_alpha: float | None = Field(None, gt=0, description="exllamav2: NTK RoPE alpha instead of the model's.")
    exl2_build_limit_s: float = Field(
        1800, gt=0, description="exllamav2: longest wait, s, for its CUDA extension to compile (once per machine)."
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
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = Field(
        "reasoning_content", description="What the reasoning of a chat is called in messages and deltas."
    )
    strict_fields: bool = Field(
        False, description="Refuse unknown top-level fields instead of ignoring and naming them."
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Host names that a server without API keys answers to, besides the loopback ones.",
    )
    require_keys: bool = Field(
        False, description="Let nobody in without an API key, also while there is none (docs/keys.md)."
    )
    trusted_proxies: list[str] = Field(
        default_factory=list,
        description="Addresses or networks of proxies whose `X-Forwarded-Proto` is believed. Nothing else is ever read "
        "from forwarding headers.",
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origins whose web pages may use the API (`https://app.example`). None: CORS is off.",
    )
    insecure: bool = Field(
        False, description="Listen on other than loopback addresses although no API key is configured."
    )

    # How much may wait
    max_waiting: int = Field(
        10_000,
        ge=0,
        description="Interactive requests of one model that may wait; more are refused (429). 0 = any number.",
    )
    max_waiting_batch: int = Field(
        100_000, ge=0, description="The same for batch requests, with the interactive ones, which come before them."
    )
    max_wait_s: float = Field(
        600,
        ge=0,
        description="Longest wait, by the measured rate, at which an interactive request is still accepted. 0 = any. (A batch "
        "request's is batch_timeout_s.)",
    )
    max_tenant_requests: int = Field(
        0, ge=0, description="Waiting and running requests of one tenant, for each model. 0 = any number."
    )
    store_max_mb: int | None = Field(
        None,
        ge=16,
        description="Memory of the store that `sluice up` starts. From 80 % of it on, new requests are refused. Unset: half of "
        "the machine's. (Another store: its own `maxmemory`.)",
    )

    # Files and batches
    max_file_bytes: int = Field(200_000_000, ge=1024, description="Largest file that may be uploaded.")
    max_batch_lines: int = Field(50_000, ge=1, description="Requests of one batch.")
    max_tenant_batches: int = Field(
        100, ge=0, description="Unfinished batches of one tenant; more are refused (429). 0 = any number."
    )
    batch_window: int | None = Field(
        None,
        ge=1,
        description="Requests of one batch that wait or run at one time. Unset: four times the lanes of the model's workers, "
        "64 at least.",
    )
    batch_reserve: int | None = Field(
        None,
        ge=0,
        description="Lanes of each worker that batch work leaves free while others are in use, so that an interactive request begins at "
        "once. Unset: one in sixteen.",
    )
    file_ttl_s: int = Field(
        2_592_000,
        ge=3600,
        description="How long files are kept that do not say, and batches after their end (30 days).",
    )

    # Webhooks
    webhook_targets: list[str] = Field(
        default_factory=list,
        description="Origins that webhooks may go to (`https://hooks.example`, `https://*.example.com:8443`). Empty: there are none.",
    )
    webhook_secret: str | None = Field(
        None,
        description="What webhooks are signed with, as the official SDK's `webhooks.unwrap` takes it: `whsec_` and base64.",
    )
    webhook_private: bool = Field(
        False, description="Webhooks may also go to addresses that are not of the public internet."
    )

    # Times, in seconds
    request_timeout_s: float = Field(3600, gt=0, description="A request's deadline, from its submission.")
    background_timeout_s: float = Field(86400, gt=0, description="The same of a background request.")
    batch_timeout_s: float = Field(86_400, gt=0, description="The same for batch requests.")
    batch_age_s: float = Field(
        600,
        gt=0,
        description="Batch requests of that age become interactive, one after the other, so that they do not starve.",
    )
    cold_start_s: float = Field(
        120, gt=0, description="How long a request may wait for a worker that is being started."
    )
    scales_from_zero: list[str] = Field(
        default_factory=list,
        description="Models for which something else than `sluice up` starts workers (KEDA): requests are accepted, and wait, also "
        "without one (docs/scaling.md).",
    )
    idle_s: float = Field(
        300, ge=0, description="`sluice up --workers MIN:MAX` ends a worker that has been one too many for this long."
    )
    drain_s: float = Field(30, ge=0, description="How long a stopping process lets its running requests go on.")
    stall_s: float = Field(
        30, gt=0, description="A worker whose engine gets nowhere for this long, with requests running, exits."
    )
    lease_s: float = Field(6, gt=1, description="A worker or batch runner not heard of for this long is dead.")
    orphan_grace_s: float = Field(30, gt=3, description="How long the requests of a dead API process run on.")
    result_ttl_s: int = Field(3600, ge=1, description="How long a result is readable by id.")
    log_ttl_s: int = Field(300, ge=1, description="How long an ended stream can be replayed.")
    store_wait_s: float = Field(30, gt=0, description="How long a response waits for a store that is away.")
    fanout_all: bool = Field(
        False, description="Every request's frames go to its public channel, as with the field `fanout`."
    )
    sse_heartbeat: Literal["comment", "off"] = Field("comment", description="Keep-alive and queue comments in streams.")
    sse_heartbeat_s: float = Field(8, gt=0, le=10, description="Longest silence of a stream.")
    websocket_ping_s: float = Field(
        10,
        gt=0,
        le=60,
        description="Seconds between pings on a WebSocket. A client that has not answered one by the next, or takes longer "
        "for one message, is gone.",
    )

    # Watching it
    request_monitor: bool = Field(
        False,
        description="Show the last 100 requests on /monitor, with the beginnings of prompts and texts, to keys with the scope `admin` "
        "(without keys: to all). They lie in the store for `result_ttl_s`.",
    )

    # Logs
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least level that is logged.")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto",
        description="json: one JSON object a line, also of `sluice up` itself. auto: text on a terminal, else JSON.",
    )

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, given: list[str]) -> list[str]:
        for network in given:
            ipaddress.ip_network(network)
        return given

    @model_validator(mode="after")
    def _check_webhooks(self) -> Self:
        if self.webhook_targets and not self.webhook_secret:
            raise ValueError("webhook_targets needs a webhook_secret: webhooks are always signed")
        if self.webhook_secret and self.webhook_secret.startswith("whsec_"):
            base64.b64decode(self.webhook_secret[6:], validate=True)
        return self

    @model_validator(mode="after")
    def _fold_certificates_in(self) -> Self:
        """The store's address carries all that is needed to reach it, so that whoever has it needs no settings."""
        files = {"ssl_ca_certs": self.redis_ca, "ssl_certfile": self.redis_cert, "ssl_keyfile": self.redis_key}
        given = {name: str(path.absolute()) for name, path in files.items() if path is not None}
        if self.redis_url and given and self.redis_url.startswith("rediss"):
            parts = urlsplit(self.redis_url)
            # what the address says itself comes first, and so wins; a second pass adds nothing
            named = {name for name, _ in parse_qsl(parts.query)}
            more = urlencode({name: value for name, value in given.items() if name not in named})
            self.redis_url = urlunsplit(parts._replace(query="&".join(filter(None, (parts.query, more)))))
        return self

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
