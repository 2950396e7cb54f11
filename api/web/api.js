// Calls this server's own API with the visitor's key. Knows nothing of what is asked for.

import { key } from "/web/key.js";

/** An answer that is no success; `message`, `param` and `code` as the server wrote them, `status` 0 if there was none. */
export class ApiError extends Error {
  constructor(status, error, headers) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.param = error?.param ?? null;
    this.code = error?.code ?? null;
    this.requestId = headers?.get("x-request-id") ?? null;
    this.retryAfter = headers?.get("retry-after") ?? null;
  }
}

/** The response to a call that succeeded. Throws ApiError, or AbortError if `signal` was used. */
export async function call(path, { method = "GET", body, signal, headers = {} } = {}) {
  const sent = new Headers(headers);
  if (key()) sent.set("Authorization", `Bearer ${key()}`);
  if (body !== undefined) sent.set("Content-Type", "application/json");
  let response;
  try {
    response = await fetch(path, { method, headers: sent, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached." });
  }
  if (!response.ok) throw new ApiError(response.status, await errorIn(response), response.headers);
  return response;
}

async function errorIn(response) {
  try {
    return (await response.json()).error;
  } catch {
    return null;
  }
}
