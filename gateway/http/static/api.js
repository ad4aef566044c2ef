// The two calls of OpenAI's API that the page makes.

import { eventData } from "./sse.js";

/** A call failed; the message is for people. `status` is 0 if there was no answer; `param` names a field. */
export class ApiError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Returns the name of the model. Throws ApiError. */
export async function modelName(key) {
  const response = await call("/v1/models", key, {});
  return (await response.json()).data[0].id;
}

/** Yields the chunks of a streamed answer. Throws ApiError, also if the answer breaks off; AbortError after a stop. */
export async function* chat(request, key, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const headers = { "Content-Type": "application/json" };
  const response = await call("/v1/chat/completions", key, { method: "POST", headers, body, signal });
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, response.status, chunk.error.param);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(`The answer broke off: ${error.message}.`);
  }
  throw new ApiError("The answer broke off.");
}

async function call(path, key, { headers, ...options }) {
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers, ...authorization } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const { message, param } = (await response.json().catch(() => ({}))).error ?? {};
  throw new ApiError(message ?? `The server answers with status ${response.status}.`, response.status, param);
}
