import { constructLlmApi } from "@continuedev/openai-adapters";
import { url, fields, stop, report } from "./asked.mjs";

const api = constructLlmApi({ provider: "openai", apiBase: `${url}/v1/`, apiKey: "none" });
const never = new AbortController().signal;
const plain = await api.completionNonStream({ ...fields, stream: false }, never);
const read = async (body) => {
  const read = { text: "", usage: null, finish: null };
  for await (const chunk of api.completionStream({ ...body, stream: true }, never)) {
    read.text += chunk.choices[0]?.text ?? "";
    read.finish = chunk.choices[0]?.finish_reason ?? read.finish;
    read.usage = chunk.usage ?? read.usage;
  }
  return read;
};
const streamed = await read(fields);
const stopped = await read({ ...fields, stop });
const failed = await api.completionNonStream({ ...fields, temperature: 9, stream: false }, never).catch((error) => error);
// Fill in the middle, by the field that the completions API has for it.
const filled = await read({ ...fields, prompt: "def add(a, b):\n", suffix: "\n    return c\n" }).catch((error) => error);

report({
  text: plain.choices[0].text,
  finish: plain.choices[0].finish_reason,
  usage: plain.usage,
  streamed: streamed.text,
  streamed_finish: streamed.finish,
  streamed_usage: streamed.usage,
  stopped: stopped.text,
  stopped_finish: stopped.finish,
  error: { kind: failed.constructor.name, status: failed.status, code: failed.code, param: failed.param },
  suffix: filled.text !== undefined ? { text: filled.text } : { status: filled.status, code: filled.code, param: filled.param },
});
