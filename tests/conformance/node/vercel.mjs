import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { url, fields, stop, report } from "./asked.mjs";

// The SDK writes "user:" and "assistant:" around the prompt itself; the fetch below shows what it really sent.
let sent = null;
const provider = createOpenAICompatible({
  name: "sluice",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  fetch: (to, init) => {
    sent = JSON.parse(init.body);
    return fetch(to, init);
  },
});
const asked = {
  model: provider.completionModel(fields.model),
  prompt: fields.prompt,
  maxOutputTokens: fields.max_tokens,
  temperature: 0,
  seed: 1,
  maxRetries: 0,
};
const plain = await generateText(asked);
const stream = streamText(asked);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
const stopped = await generateText({ ...asked, stopSequences: stop });
const failed = await generateText({ ...asked, temperature: 9 }).catch((error) => error);

report({
  sent_prompt: sent.prompt,
  sent_stop: sent.stop,
  text: plain.text,
  finish: plain.finishReason,
  usage: { prompt_tokens: plain.usage.inputTokens, completion_tokens: plain.usage.outputTokens },
  streamed,
  streamed_finish: await stream.finishReason,
  streamed_usage: await stream.usage.then((u) => ({ prompt_tokens: u.inputTokens, completion_tokens: u.outputTokens })),
  stopped: stopped.text,
  stopped_finish: stopped.finishReason,
  error: { kind: failed.name, status: failed.statusCode, message: failed.message },
});
