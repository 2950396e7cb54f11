"""Random requests after the server's own OpenAPI document; what it answers is held against the document.

Runs in the environment with schemathesis: `python fuzz.py URL --model ID --vocab N --requests N`, and prints a report as
JSON. Knows of the server what the document says, and the few rules between fields that a schema cannot express (`fit`).
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import traceback
from typing import Any

import jsonschema_rs
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks

NO_SERVER_ERROR = schemathesis.checks.not_a_server_error
CHECKS = [
    NO_SERVER_ERROR,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
#: Answers of 500 and above (status, code) that are no fault of the server: a text that the model could not give the form that
#: was asked for, and a cursor that its stream never had.
DOCUMENTED = ((502, "structured_output_failed"), (503, "log_lost"))
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
#: Of all requests, those that go to each; and of those and of each other kind, those that break the schema.
SHARES, BROKEN = {COMPLETIONS: 0.55, CHATS: 0.3}, 0.3
#: A stream without an end, which no test here would ever have read.
ENDLESS = ("/monitor/events",)
#: Fields of a chat whose valid values this server refuses.
NOT_SERVED = ("functions", "function_call", "tool_choice")
#: Headers that say how long a client waits.
IMPATIENT = ("X-Request-Deadline-Ms", "X-Stainless-Read-Timeout")
#: A request says a handful of things, as a client's does; with all fields set each time, some rule always refuses.
MOST_FIELDS = 7
PROMPTS = ("Once upon a time", "The capital of France is", "für Ökonomen: 你好 🌍", "{", " ")


class Report:
    def __init__(self) -> None:
        self.requests = 0
        self.valid = 0
        self.valid_served = 0
        self.statuses: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()
        self.operations: collections.Counter[str] = collections.Counter()
        self.not_served: list[str] = []
        self.failures: list[dict[str, Any]] = []


class Fuzz:
    """One run against one server."""

    def __init__(self, url: str, model: str, vocab: int, most_tokens: int, unbounded: float, number: int) -> None:
        self.url, self.model, self.vocab = url, model, vocab
        self.most_tokens, self.unbounded = most_tokens, unbounded
        self.random = random.Random(number)
        self.number = number
        self.session = requests.Session()
        self.document = self.session.get(f"{url}/openapi.json", timeout=30).json()
        self.schema = schemathesis.openapi.from_dict(self.document)
        self.schema.config.update(base_url=url)
        self.schema.config.max_stream_events = 100_000  # by default it reads but the first ones
        self.chunks = {COMPLETIONS: self._validator("CompletionChunk"), CHATS: self._validator("ChatCompletionChunk")}
        self.error = self._validator("ErrorAnswer")
        self.bodies = {COMPLETIONS: self._validator("CompletionRequest"), CHATS: self._validator("ChatRequest")}
        self.report = Report()
        self.jobs: dict[str, list[str]] = {COMPLETIONS: [], CHATS: []}
        self.keys = 0
        self.files: list[str] = []
        self.batches: list[str] = []

    def _validator(self, name: str) -> Any:
        components = {"components": self.document["components"]}
        return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", **components})

    def run(self, count: int) -> None:
        others = [
            (path, method.upper())
            for path, methods in self.document["paths"].items()
            for method in methods
            if path not in (*SHARES, *ENDLESS) and self._served(path, method)
        ]
        shares = {(path, "POST"): int(count * share) for path, share in SHARES.items()}
        to_others = count - sum(shares.values())
        for index, other in enumerate(others):
            shares[other] = to_others // len(others) + (index < to_others % len(others))
        for (path, method), share in shares.items():
            operation = self.schema[path][method]
            may_break = bool(self.document["paths"][path][method.lower()].get("requestBody"))
            broken = int(share * BROKEN) if may_break else 0
            self._operation(operation, GenerationMode.POSITIVE, share - broken)
            if broken:
                self._operation(operation, GenerationMode.NEGATIVE, broken)

    def _served(self, path: str, method: str) -> bool:
        """Not everything that is described is there already."""
        for kind, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHATS, {"messages": [{"role": "user", "content": "x"}]})):
            job = self.session.post(self.url + kind, json={"model": self.model, "max_tokens": 1, **prompt})
            self.jobs[kind].append(job.json()["id"])
        self._batch()
        filled = path.format(
            model=self.model, job_id=self.jobs[_kind(path)][-1], file_id=self.files[-1], batch_id=self.batches[-1]
        )
        answer = self.session.request(method, self.url + filled, json={}, timeout=30)
        there = not (answer.status_code == 404 and answer.json()["error"]["code"] == "not_found")
        if not there:
            self.report.not_served.append(path)
        return there

    def _batch(self) -> None:
        """A batch that fails at once, and a file that none needs."""
        for raw in (b"{}", b"x"):
            form = {"file": ("requests.jsonl", raw)}
            answer = self.session.post(f"{self.url}/v1/files", data={"purpose": "batch"}, files=form, timeout=30)
            self.files.append(answer.json()["id"])
        asked = {"input_file_id": self.files[-2], "endpoint": COMPLETIONS, "completion_window": "24h"}
        self.batches.append(self.session.post(f"{self.url}/v1/batches", json=asked, timeout=30).json()["id"])

    def _operation(self, operation: Any, mode: GenerationMode, count: int) -> None:
        """Generation may come to repeat itself before `count`; then it begins anew with another seed."""
        sent, rounds = 0, 0
        while sent < count and rounds < 20 + count:

            @seed(self.number + rounds)
            @settings(
                max_examples=count - sent,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(operation.as_strategy(mode))
            def one(case: Any) -> None:
                nonlocal sent
                if sent < count:
                    sent += 1
                    self.send(case, mode)

            one()
            rounds += 1

    def send(self, case: Any, mode: GenerationMode) -> None:
        completes = case.path in SHARES
        if completes and mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = self.fit_chat(case.body) if case.path == CHATS else self.fit_raw(case.body)
        elif (
            completes and isinstance(case.body, dict) and not isinstance(case.body.get("max_tokens"), str | bool | list)
        ):
            case.body["max_tokens"] = self.most_tokens  # what is wrong must be another field
        elif case.path == "/v1/models/{model}" and self.random.random() < 0.6:
            case.path_parameters = {"model": self.model}
        elif "{job_id}" in case.path and self.random.random() < 0.6:
            case.path_parameters = {"job_id": self.random.choice(self.jobs[_kind(case.path)])}
            if self.random.random() < 0.5:  # any other cursor is one of another run
                for given in (case.headers, case.query):
                    for name in ("Last-Event-ID", "starting_after"):
                        if given:
                            given.pop(name, None)
        elif "{file_id}" in case.path and self.random.random() < 0.6:
            case.path_parameters = {"file_id": self.random.choice(self.files)}
        elif "{batch_id}" in case.path and self.random.random() < 0.6:
            case.path_parameters = {"batch_id": self.random.choice(self.batches)}
        for name in IMPATIENT:  # a deadline of a few milliseconds is a right one, and passes
            if case.headers:
                case.headers.pop(name, None)
        if completes and case.headers and "Idempotency-Key" in case.headers and self.random.random() < 0.8:
            self.keys += 1
            case.headers["Idempotency-Key"] = f"{self.number}-{self.keys}"
        valid = mode is GenerationMode.POSITIVE and (not completes or self.bodies[case.path].is_valid(case.body))
        if completes and mode is GenerationMode.POSITIVE and not valid:
            raise AssertionError(f"`fit` broke a request: {case.body!r}")
        report = self.report
        report.requests += 1
        report.operations[f"{case.method} {case.path}"] += 1
        try:
            response = case.call(session=self.session, timeout=60)
            status = response.status_code
            report.statuses[str(status)] += 1
            report.valid += valid
            report.valid_served += valid and status < 300
            documented = False
            if status >= 400 and response.content:
                error = response.json()["error"]
                documented = (status, error["code"]) in DOCUMENTED
                report.refusals[f"{status} {error['code']} {error['param'] if valid else '-'}"] += 1
            if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
                self.check_stream(response.content.decode(), self.chunks[_kind(case.path)])
            case.validate_response(
                response, checks=[check for check in CHECKS if check is not NO_SERVER_ERROR or not documented]
            )
        except (Exception, FailureGroup) as error:  # all of them are findings
            text = "".join(traceback.format_exception_only(error))
            found = {"request": f"{case.method} {case.path}", "body": repr(case.body)[:2000], "error": text[:2000]}
            report.failures.append(found)

    def check_stream(self, text: str, chunk: Any) -> None:
        events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        assert events and events[-1] == "[DONE]", text[-300:]
        for event in events[:-1]:
            value = json.loads(event)
            if "error" in value:
                self.error.validate(value)
                assert value["error"]["type"] in ("invalid_request_error", "structured_output_failed"), value
            else:
                chunk.validate(value)

    def fit_raw(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request that keeps the rules between fields and names ids and models that exist; all else stays."""
        draw, made = self.random, self._some_of(body, "prompt")
        if not made.get("prompt") and draw.random() < 0.95:
            made["prompt"] = draw.choice(PROMPTS)  # an empty one is refused by models without a begin-of-text token
        if isinstance(made.get("prompt"), list):
            prompts = [draw.choice(PROMPTS) if p in ("", None) else p for p in made["prompt"][:4]]
            made["prompt"] = [self._ids(p) if isinstance(p, list) else p for p in prompts]
            if isinstance(prompts[0], int | float):
                made["prompt"] = self._ids(prompts)
        self._fit(made)
        if made.get("best_of"):
            made["best_of"] = min(max(made["best_of"], made.get("n") or 1), 6)
            if made.get("stream"):
                made["best_of"] = made.get("n") or 1
        if made.get("suffix"):
            made.pop("echo", None)
        return made

    def fit_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same of a chat: a template may want a last word of the user."""
        made = self._some_of(body, "messages")
        for name in NOT_SERVED:
            made.pop(name, None)
        made["messages"] = [*made["messages"][:4], {"role": "user", "content": self.random.choice(PROMPTS)}]
        self._fit(made)
        if made.pop("max_completion_tokens", None) is not None:
            made["max_completion_tokens"] = self.random.randint(1, self.most_tokens)
        if made.get("top_logprobs") is not None:
            made["top_logprobs"], made["logprobs"] = int(made["top_logprobs"]), True
        return made

    def _some_of(self, body: dict[str, Any], always: str) -> dict[str, Any]:
        """A handful of the fields that were drawn, and `always`."""
        draw = self.random
        said = [name for name, value in body.items() if value is not None and name not in (always, "model")]
        kept = draw.sample(said, min(len(said), draw.randint(0, MOST_FIELDS)))
        made = {name: value for name, value in body.items() if value is None or name in kept or name == always}
        made.pop("webhook_url", None)
        made["model"] = self.model if draw.random() < 0.95 else body.get("model")
        return made

    def _fit(self, made: dict[str, Any]) -> None:
        """What both kinds have."""
        draw = self.random
        if made.get("stop_token_ids"):
            made["stop_token_ids"] = self._ids(made["stop_token_ids"])
        if made.get("logit_bias"):
            made["logit_bias"] = {str(int(key) % self.vocab): bias for key, bias in made["logit_bias"].items()}
        for name in ("max_tokens", "n", "best_of", "top_k", "min_tokens", "seed", "priority", "logprobs"):
            if made.get(name) is not None and not isinstance(made[name], bool):
                made[name] = int(made[name])  # 1.0 is an integer to a schema, and none to us
        if draw.random() < 0.3:
            made["stream"] = True
        if made.get("n"):
            made["n"] = min(made["n"], 4)
        if not made.get("stream"):
            made.pop("stream_options", None)
        if draw.random() >= self.unbounded:
            made["max_tokens"] = draw.randint(1, self.most_tokens)

    def _ids(self, ids: list[Any]) -> list[int]:
        return [int(token) % self.vocab for token in ids]


def _kind(path: str) -> str:
    return CHATS if path.startswith(CHATS) else COMPLETIONS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--unbounded", type=float, default=0.0, help="share of requests without max_tokens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fuzz = Fuzz(options.url, options.model, options.vocab, options.max_tokens, options.unbounded, options.seed)
    fuzz.run(options.requests)
    json.dump(vars(fuzz.report), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
