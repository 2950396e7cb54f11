"""The request model of raw completions: types, ranges, nulls, and what becomes of them in the job."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.schemas.completions import CompletionRequest
from api.schemas.generation import Call
from api.schemas.stream_options import StreamOptions
from api.strict_json import parse
from shared import jobs
from shared.cards import Fim, ModelCard
from shared.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from shared.jobs import Placement
from shared.settings import Settings

CARD = ModelCard(id="m", engine="scripted", context=100, vocab_size=65536, lanes=4, fingerprint="fp")
WITH_BOS = ModelCard(id="b", engine="x", context=100, vocab_size=10, lanes=4, fingerprint="fp", add_bos=True, bos_id=1)
NEVER_ADDS = ModelCard(id="b", engine="x", context=100, vocab_size=10, lanes=4, fingerprint="fp", bos_id=1)


def call(body: dict[str, Any], card: ModelCard = CARD, **settings: Any) -> Call:
    return CompletionRequest.read(body).to_call(card, Settings(**settings), created=7)


def job(card: ModelCard = CARD, settings: dict[str, Any] | None = None, **body: Any) -> jobs.Job:
    return call({"prompt": "x", **body}, card, **(settings or {})).job


def refused(body: dict[str, Any], card: ModelCard = CARD, **settings: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call({"prompt": "x", **body}, card, **settings)
    assert caught.value.status == 400 and caught.value.message
    return caught.value


WRONG_VALUES = [
    ("model", 5), ("prompt", {}), ("prompt", {"a": 1}), ("prompt", 5), ("prompt", True), ("prompt", []),
    ("prompt", [True]), ("prompt", [1, "a"]), ("prompt", ["a", 1]), ("prompt", [[]]), ("prompt", [[1], "a"]),
    ("prompt", [[1], 2]), ("prompt", [1, [2]]), ("prompt", [[True]]), ("prompt", [1.0]), ("prompt", [-1]),
    ("prompt", [99999999]), ("prompt", [[0, 65536]]), ("prompt", ["a"] * 1025), ("prompt", ""), ("prompt", [None]),
    ("max_tokens", 1.5), ("max_tokens", 2.0), ("max_tokens", "10"), ("max_tokens", True), ("max_tokens", [1]),
    ("temperature", 9), ("temperature", -0.1), ("temperature", "1"), ("temperature", True), ("temperature", [1]),
    ("top_p", -1), ("top_p", 2), ("top_p", "0.5"), ("top_p", False), ("n", 0), ("n", -1), ("n", 129), ("n", 1.5),
    ("n", 2.0), ("n", True), ("n", False), ("n", "1"), ("best_of", 0), ("best_of", 21), ("best_of", True),
    ("best_of", 1.0), ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", ["a", None]), ("stop", 5), ("stop", {}),
    ("stop", True), ("stop", ["a"] * 65), ("stop", "x" * 1001), ("echo", "yes"), ("echo", 1), ("stream", "true"),
    ("stream", "false"), ("stream", 1), ("logprobs", 50), ("logprobs", -1), ("logprobs", True), ("logprobs", 1.0),
    ("logit_bias", []), ("logit_bias", {"1": 500}), ("logit_bias", {"1": -101}), ("logit_bias", {"1": "5"}),
    ("logit_bias", {"1": True}), ("logit_bias", {"1": None}), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {" 5": 1}), ("logit_bias", {"05": 1}), ("logit_bias", {"1.0": 1}), ("logit_bias", {"٥": 1}),
    ("logit_bias", {"": 1}), ("logit_bias", {"65536": 1}), ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"9" * 5000: 1}), ("logit_bias", {str(i): 1 for i in range(1025)}), ("presence_penalty", 3),
    ("frequency_penalty", -2.1), ("presence_penalty", "1"), ("seed", "x"), ("seed", "1"), ("seed", 1.0),
    ("seed", True), ("seed", 2**63), ("seed", -(2**63) - 1), ("suffix", 5), ("user", 5), ("user", ["a"]),
    ("stream_options", {"include_usage": True}), ("stream_options", 5), ("reasoning_effort", "banana"),
    ("reasoning_effort", 1), ("reasoning", {"effort": "banana"}), ("reasoning", 1), ("thinking", {"type": "x"}),
    ("thinking", True), ("enable_thinking", "false"), ("enable_thinking", 0),
    ("chat_template_kwargs", {"enable_thinking": "no"}), ("chat_template_kwargs", {"thinking": 0}),
    ("response_format", "text"), ("response_format", {}), ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}), ("regex", ""),
    ("regex", 5), ("grammar", 5), ("choice", []), ("choice", [""]), ("choice", [1]), ("choice", "a"), ("top_k", -2),
    ("top_k", 1.0), ("min_p", 1.1), ("typical_p", -0.1), ("repetition_penalty", 0), ("min_tokens", -1),
    ("min_tokens", True), ("ignore_eos", "x"), ("stop_token_ids", [65536]), ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]), ("stop_token_ids", 5), ("stop_token_ids", [1] * 1025), ("add_special_tokens", 1),
    ("parse_special", "x"), ("fit_max_tokens", 1), ("skip_special_tokens", 1), ("return_tokens_as_token_ids", 1),
    ("service_tier", "gold"), ("service_tier", 1), ("priority", 1.0), ("background", 1), ("fanout", "x"),
    ("store", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG_VALUES, ids=lambda value: ascii(value)[:40])
def test_wrong_values_name_their_field(field: str, value: Any) -> None:
    """FB-026, FB-039, FB-040: no boolean and no string passes as a number, no fraction as an integer."""
    error = refused({field: value})
    assert (error.param, error.code) == (field, "invalid_value")
    assert "pydantic" not in error.message and error.message.isprintable() and len(error.message) < 400


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("top_k", 10**7, "top_k must be at most 1000000."),
        ("seed", 2**63, "seed must be at most 9223372036854775807."),
        ("seed", -(2**63) - 1, "seed must be at least -9223372036854775808."),
        ("min_tokens", 2**31, "min_tokens must be at most 2147483647."),
        ("repetition_penalty", 0, "repetition_penalty must be at least 0.01."),
        ("temperature", 3, "temperature must be at most 2."),
        ("service_tier", "gold", "service_tier must be 'auto', 'default', 'flex' or 'priority'."),
    ],
)
def test_what_would_be_right_is_said_so_that_it_can_be_sent(field: str, value: Any, said: str) -> None:
    assert refused({field: value}).message == said


NOT_BUILT = [
    ("suffix", "x"), ("webhook_url", "https://x"), ("dry_multiplier", 0.8),
    ("xtc_probability", 0.1), ("mirostat_tau", 5), ("token_healing", True), ("banned_strings", ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), NOT_BUILT, ids=lambda value: ascii(value)[:40])
def test_what_is_not_built_is_refused_and_named(field: str, value: Any) -> None:
    error = refused({field: value})
    assert isinstance(error, UnsupportedParameter) and error.param == field


THINKING_OFF = [
    ("enable_thinking", False), ("chat_template_kwargs", {"enable_thinking": False}),
    ("chat_template_kwargs", {"thinking": False}), ("thinking", {"type": "disabled"}),
    *[("reasoning_effort", effort) for effort in ("none", "off", "minimal", "disabled")],
    *[("reasoning", {"effort": effort}) for effort in ("none", "off", "minimal", "disabled")],
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), THINKING_OFF, ids=ascii)
def test_every_spelling_of_thinking_off(field: str, value: Any) -> None:
    """FB-061, FB-063: an explicit off wins over any on, and is not served together with a suffix."""
    made = job(**{field: value})
    assert (made.prompts, made.tail) == (["x"], "")
    assert CompletionRequest.read({field: value}).thinking_switch() == (False, field)
    for on in ({"enable_thinking": True}, {"reasoning_effort": "high"}, {"thinking": {"type": "enabled"}}):
        if field not in on:
            assert CompletionRequest.read({field: value, **on}).thinking_switch() == (False, field)
    assert refused({field: value, "suffix": "y"}).param == field


@pytest.mark.parametrize("on", [{}, {"enable_thinking": True}, {"reasoning_effort": "low"}, {"thinking": {}}])
def test_thinking_that_is_not_off(on: dict[str, Any]) -> None:
    assert CompletionRequest.read(on).thinking_switch()[0] is not False


def test_a_request_brings_no_template_and_no_misspelt_switch() -> None:
    """FB-061, FB-069 (CVE-2025-61620)"""
    evil = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
    for body in ({"chat_template": evil}, {"chat_template_kwargs": {"chat_template": evil}}, {"chat_template": ""}):
        assert isinstance(error := refused(body), UnsupportedParameter) and error.param == next(iter(body))
    assert refused({"chat_template_kwargs": {"enable_thinkng": False}}).param == "chat_template_kwargs"
    call({"prompt": "x", "chat_template_kwargs": {"enable_thinkng": None}})


NULLABLE = [
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stream",
    "stop",
    "logprobs",
    "echo",
    "seed",
    "logit_bias",
    "suffix",
    "user",
    "best_of",
    "stream_options",
    "presence_penalty",
    "frequency_penalty",
    "response_format",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "add_special_tokens",
    "parse_special",
    "fit_max_tokens",
    "reasoning_effort",
    "thinking",
    "enable_thinking",
    "background",
    "fanout",
    "store",
    "service_tier",
    "priority",
    "regex",
    "grammar",
    "choice",
    "dry_multiplier",
    "unknown",
]


def test_null_is_absent() -> None:
    """FB-025"""
    body = {"prompt": "x", **dict.fromkeys(NULLABLE)}
    plain, nulls = call({"prompt": "x", "seed": 1}), call({**body, "seed": 1})
    assert CompletionRequest.unknown(body) == []
    same = {"id": plain.job.id}
    assert nulls.stream is False
    assert {f: getattr(nulls.job, f) for f in plain.job.__struct_fields__} | same == {
        f: getattr(plain.job, f) for f in plain.job.__struct_fields__
    }


def test_neutral_values_of_later_fields_are_fine() -> None:
    call(
        {
            "prompt": ["x"], "n": 1, "best_of": 1, "suffix": "", "response_format": {"type": "text"}, "store": True,
            "reasoning_effort": "high", "thinking": {"type": "enabled"}, "service_tier": "default", "user": "someone",
            "stop": [], "logit_bias": {}, "stream_options": {}, "stop_token_ids": [],
        }
    )  # fmt: skip


@pytest.mark.parametrize("value", [None, 0, -1, -186])
def test_all_remaining_context(value: int | None) -> None:
    """FB-026 as the contract has it: absent, null, zero and negative mean the same."""
    assert job(max_tokens=value).max_tokens is None
    assert job().max_tokens is None


def test_max_tokens_beyond_the_context() -> None:
    """FB-027: never cut silently; refused where the prompts are counted (test_prompts, test_tokens)."""
    assert job(max_tokens=99).max_tokens == 99
    for value in (10**300, 10**5000):
        error = refused({"max_tokens": value})
        assert isinstance(error, ContextLengthExceeded) and error.param == "max_tokens" and len(error.message) < 200
        assert "100 tokens" in error.message
    for value in (100, 100_000_000):
        assert (job(max_tokens=value).max_tokens, job(max_tokens=value).fit_max_tokens) == (value, False)
    fitted = call({"prompt": "x", "max_tokens": 10**300, "fit_max_tokens": True})
    assert (fitted.job.max_tokens, fitted.job.fit_max_tokens, fitted.fit_from) == (99, True, 10**300)
    assert job(settings={"fit_max_tokens": True}, max_tokens=500).max_tokens == 99
    assert job(settings={"fit_max_tokens": True}, max_tokens=500, fit_max_tokens=False).max_tokens == 500


def test_default_max_tokens_caps_the_absent_case_only() -> None:
    capped = call({"prompt": "x"}, default_max_tokens=16)
    assert (capped.job.max_tokens, capped.job.fit_max_tokens, capped.fit_from) == (16, True, None)
    assert job(settings={"default_max_tokens": 16}, max_tokens=0).max_tokens is None
    assert job(settings={"default_max_tokens": 16}, max_tokens=20).max_tokens == 20


def test_choices() -> None:
    assert refused({"n": 3, "best_of": 2}).code == "invalid_value"
    assert refused({"n": 1, "best_of": 3, "stream": True}).code == "invalid_value"
    assert job(n=30, best_of=30).candidates == job(n=30).candidates == 30
    assert (job(n=2, best_of=5).n, job(n=2, best_of=5).candidates) == (2, 5)
    assert refused({"n": 30, "best_of": 31}).param == "best_of"
    assert refused({"prompt": ["a"] * 3, "n": 100}).param == "n"


def test_sampling_fields_reach_the_job() -> None:
    """Integers are fine where a number is asked for; -1 is no seed."""
    fields: dict[str, Any] = {
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0.5,
        "typical_p": 0.9,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "logit_bias": {"0": 1, "65535": -100},
    }
    made = job(**fields, seed=-5, stop="a", add_special_tokens=False, parse_special=False, echo=True)
    assert made.params.logit_bias == {0: 1.0, 65535: -100.0} and made.params.stop_token_ids == (5,)
    for name in fields.keys() - {"logit_bias", "stop_token_ids"}:
        assert getattr(made.params, name) == fields[name]
    assert (made.seed, made.stop, made.add_special, made.parse_special, made.echo) == (-5, ["a"], False, False, True)
    assert (made.model, made.created, made.prompts) == ("m", 7, ["x"]) and made.id.startswith("cmpl-")
    assert job(seed=-1).seed >= 0 and job().seed != job().seed
    assert job(seed=2**63 - 1).seed == 2**63 - 1
    assert jobs.from_rq(jobs.to_rq(made)) == made


def test_empty_prompts_need_a_bos_to_start_from() -> None:
    for prompt in (None, "", [""], [None], ["", "a"]):
        assert refused({"prompt": prompt}).param == "prompt"
        assert "" in job(WITH_BOS, prompt=prompt).prompts
        assert "" in job(NEVER_ADDS, prompt=prompt).prompts


def test_every_form_of_prompt_reaches_the_job() -> None:
    """FB-012."""
    for prompt, prompts in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])):
        assert job(prompt=prompt).prompts == prompts
    for prompt in ([], [1, "a"], [[1], "a"], [[]], [True], [1.0], [-1], [[-1]], [9223372036854775808], {"a": 1}):
        assert refused({"prompt": prompt}).param == "prompt"
    for mixed in (["a", [1]], [[1], "a"], [None, [1]], [[1], None], [1, [2]]):
        assert "mixes" in refused({"prompt": mixed}).message


def test_how_a_request_is_placed() -> None:
    assert call({"prompt": "x"}).placement == Placement()
    assert call({"prompt": "x", "service_tier": "flex"}).placement == Placement(klass="batch")
    assert call({"prompt": "x", "service_tier": "priority", "priority": 5}).placement == Placement()
    assert call({"prompt": "x", "priority": -1, "fanout": True, "store": False}).placement == Placement(
        ahead=True, fanout=True, keep=False
    )


def test_scoring_is_max_tokens_0_with_echo_and_logprobs() -> None:
    """FB-008."""
    assert job(max_tokens=0, echo=True, logprobs=0).scores_only
    assert not job(max_tokens=0, echo=True).scores_only
    assert not job(max_tokens=0, logprobs=1).scores_only
    assert not job(max_tokens=-1, echo=True, logprobs=1).scores_only


def test_stream_options() -> None:
    def options(**value: Any) -> StreamOptions:
        return call({"prompt": "x", "stream": True, "stream_options": value}).stream_options

    assert options() == options(include_usage=None, anything=None) == StreamOptions()
    assert options(include_usage=True, include_obfuscation=True) == StreamOptions(True)
    assert options(continuous_usage_stats=True) == StreamOptions(None, True)
    for bad in ({"x": 1}, {"include_usage": "yes"}, {"include_usage": 1}):
        assert refused({"stream": True, "stream_options": bad}).param == "stream_options"
    assert refused({"stream_options": {"include_usage": False}}).param == "stream_options"


def test_unknown_fields_are_found() -> None:
    body = {"prompt": "x", "foo": 1, "bar": None, "dry_base": 1, "metadata": {}}
    assert CompletionRequest.unknown(body) == ["foo", "metadata"]


def test_what_the_engine_refuses() -> None:
    unsupported = ("typical_p", "dry_*")
    card = ModelCard(id="m", engine="x", context=9, vocab_size=9, lanes=1, fingerprint="f", unsupported=unsupported)
    assert job(card, typical_p=1).params.typical_p == 1.0
    assert isinstance(refused({"typical_p": 0.5}, card), UnsupportedParameter)
    error = refused({"dry_base": 1.5}, card)
    assert isinstance(error, UnsupportedParameter) and error.param == "dry_base" and "engine of m" in error.message
    assert "this server" in refused({"xtc_threshold": 0.1}, card).message, "not the engine's fault"
    assert job(card, dry_base=None, xtc_threshold=None).prompts == ["x"]


def test_filling_in_the_middle() -> None:
    card = ModelCard(
        id="m", engine="x", context=99, vocab_size=9, lanes=1, fingerprint="f", fim=Fim(prefix=1, suffix=2, middle=3)
    )
    assert job(card, suffix="s").suffix == "s" and job(card, prompt=[1], suffix="s").prompts == [[1]]
    assert job(card, prompt="", suffix="s").prompts == [""], "there is something to begin with"
    assert refused({"prompt": ""}, card).param == "prompt"
    assert job(suffix="").suffix is None and job(suffix=None).suffix is None
    assert refused({"suffix": "s", "echo": True}, card).param == "echo"
    assert isinstance(error := refused({"suffix": "s"}), UnsupportedParameter) and error.param == "suffix"


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    assert job().skip_special is True and job(skip_special_tokens=False).skip_special is False


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(CompletionRequest.model_fields)), VALUES))
def test_any_values_are_a_job_or_a_400(body: dict[str, Any]) -> None:
    """FB-039: nothing a client sends is a 500."""
    try:
        made = call(body)
    except InvalidRequest as error:
        assert error.param in body or error.param == "prompt"
    else:
        assert jobs.from_rq(jobs.to_rq(made.job)) == made.job


def test_integers_beyond_int64() -> None:
    body = parse(b'{"prompt":"x","temperature":' + b"9" * 500 + b"}")
    assert refused(body).param == "temperature"
    for field in ("seed", "n", "top_k", "min_tokens", "logprobs"):
        assert refused({field: 10**300}).param == field
