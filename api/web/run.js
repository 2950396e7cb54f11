// One request to the server, streamed: chunks of either endpoint in, the same plain events out. Knows no page.

import { ApiError, call } from "/web/api.js";
import { events } from "/web/sse.js";

export const PATHS = { raw: "/v1/completions", chat: "/v1/chat/completions" };

/** How long a cancelled stream has to end by itself, ms. */
const PATIENCE = 2000;

/** A token of an answer. `top`: [text, logprob] of what was likeliest, best first. `control`: it ended the text. */
const token = (text, logprob, top, control) => ({ text, logprob, top, control });

export class Run {
  #abort = new AbortController();
  #path;
  #body;
  #stopped = false;

  /** `request`: {path, body}. */
  constructor({ path, body }) {
    this.#path = path;
    this.#body = { ...body, stream: true };
    this.id = null;
  }

  /** What comes, in order: {waiting: words}, {index, text, reasoning, tokens}, {index, finish}, {usage}, {stopped, usage}.
   *  Throws ApiError. */
  async *events() {
    try {
      const response = await call(this.#path, { method: "POST", body: this.#body, signal: this.#abort.signal });
      this.id = response.headers.get("x-sluice-id");
      yield* this.#read(response);
    } catch (error) {
      if (!this.#stopped || (error.code !== "cancelled" && error.name !== "AbortError")) throw error;
    }
    if (this.#stopped) yield { stopped: true, usage: await this.#used() };
  }

  /** Cancels the request, wherever it is. The events end soon after. */
  async stop() {
    if (this.#stopped) return;
    this.#stopped = true;
    if (this.id === null) {
      this.#abort.abort();
      return;
    }
    setTimeout(() => this.#abort.abort(), PATIENCE);
    await this.#cancel().catch(() => this.#abort.abort());
  }

  async *#read(response) {
    for await (const { data, comment } of events(response)) {
      if (data === "[DONE]") return;
      if (data === undefined) {
        if (comment) yield { waiting: comment };
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(200, chunk.error, response.headers);
      for (const choice of chunk.choices) {
        const { index } = choice;
        const piece = choice.delta ? chatPiece(choice) : rawPiece(choice);
        if (piece.text || piece.reasoning || piece.tokens.length) yield { index, ...piece };
        if (choice.finish_reason) yield { index, finish: choice.finish_reason };
      }
      if (chunk.usage) yield { usage: chunk.usage };
    }
    if (!this.#stopped) throw new ApiError(0, { message: "The connection broke before the answer was complete." });
  }

  async #cancel() {
    return (await call(`${this.#path}/${this.id}/cancel`, { method: "POST" })).json();
  }

  /** Cancelling is idempotent, and its answer says what was used. */
  async #used() {
    if (this.id === null) return null;
    return this.#cancel().then((job) => job.usage, () => null);
  }
}

function rawPiece({ text, logprobs, finish_reason: finish }) {
  const tokens = (logprobs?.tokens ?? []).map((written, i) =>
    token(written, logprobs.token_logprobs[i], best(Object.entries(logprobs.top_logprobs?.[i] ?? {})), !text && !!finish));
  return { text, reasoning: "", tokens };
}

function chatPiece({ delta, logprobs, finish_reason: finish }) {
  const text = delta.content ?? "";
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  const tokens = (logprobs?.content ?? []).map((entry) =>
    token(entry.token, entry.logprob, best(entry.top_logprobs.map((other) => [other.token, other.logprob])), !text && !reasoning && !!finish));
  return { text, reasoning, tokens };
}

function best(entries) {
  return entries.sort((a, b) => b[1] - a[1]);
}
