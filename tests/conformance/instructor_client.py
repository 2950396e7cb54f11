"""instructor, by a tool and by a schema, asked for the same object: `python instructor_client.py URL MODEL`."""

from __future__ import annotations

import json
import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=130)
    mood: Literal["happy", "sad"]


asked = [{"role": "user", "content": "Ann is 31 years old and happy."}]
found = dict[str, object]()
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    person = client.chat.completions.create(
        model=model, messages=asked, response_model=Person, temperature=0, max_tokens=200, max_retries=0
    )
    found[mode.value] = person.model_dump()

print(json.dumps(found))
