"""LangChain's `OpenAI` class, asked the same as every client: `python langchain_client.py URL MODEL PROMPT`."""

from __future__ import annotations

import json
import sys

import openai
from langchain_openai import OpenAI

url, model, prompt = sys.argv[1:]


def client(**more: object) -> OpenAI:
    asked = {"temperature": 0, "max_tokens": 24, "seed": 1, "max_retries": 0, **more}
    return OpenAI(base_url=f"{url}/v1", api_key="none", model=model, **asked)


answer = client().generate([prompt])
pieces = list(client().stream(prompt))
stopped = client().generate([prompt], stop=["."])
try:
    client(temperature=9).invoke(prompt)
    error = None
except openai.APIStatusError as raised:
    error = {"kind": type(raised).__name__, "status": raised.status_code, "code": raised.code, "param": raised.param}
batch = client(n=2, best_of=2).generate([prompt, "Once upon a time"])

print(
    json.dumps(
        {
            "text": answer.generations[0][0].text,
            "finish": answer.generations[0][0].generation_info["finish_reason"],
            "usage": answer.llm_output["token_usage"],
            "streamed": "".join(pieces),
            "stopped": stopped.generations[0][0].text,
            "stopped_finish": stopped.generations[0][0].generation_info["finish_reason"],
            "error": error,
            "batch": [[one.text for one in choices] for choices in batch.generations],
        }
    )
)
