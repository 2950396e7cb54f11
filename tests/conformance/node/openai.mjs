import OpenAI from "openai";
import { url, fields, stop, report } from "./asked.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const plain = await client.completions.create(fields);

let streamed = "";
let usage = null;
let finish = null;
const chunks = await client.completions.create({ ...fields, stream: true, stream_options: { include_usage: true } });
for await (const chunk of chunks) {
  streamed += chunk.choices[0]?.text ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}
const stopped = await client.completions.create({ ...fields, stop });
const failed = await client.completions.create({ ...fields, temperature: 9 }).catch((error) => error);
const missing = await client.completions.create({ ...fields, model: "none" }).catch((error) => error);
const models = [];
for await (const found of client.models.list()) models.push(found.id);

report({
  text: plain.choices[0].text,
  finish: plain.choices[0].finish_reason,
  usage: plain.usage,
  streamed,
  streamed_finish: finish,
  streamed_usage: usage,
  stopped: stopped.choices[0].text,
  stopped_finish: stopped.choices[0].finish_reason,
  error: { kind: failed.constructor.name, status: failed.status, code: failed.code, param: failed.param },
  missing: { kind: missing.constructor.name, status: missing.status, code: missing.code },
  models,
});
