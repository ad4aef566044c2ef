// Streams a completion, and continues it when its stream breaks off: docs/protocol.md, "Streams that break off".

const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 1000;
const PATIENCE_MS = 60_000;
const MAX_FRUITLESS = 20; // breaks in a row without progress: the request may be what ends the server
const MIN_PROGRESS = 2; // new tokens: to compute the received ones again yields one, even if decodes end the server
const CANNOT_CONTINUE = {
  code: "INTERNAL",
  message: "the stream broke off, and the server that answers now cannot continue it",
  violations: [],
};
const UNREACHABLE = { code: "UNAVAILABLE", message: "the server cannot be reached", violations: [] };

/**
 * Yields the messages of all streams of one request, none of them twice. An {error} is the last one. Calls `onBreak()`
 * when the stream breaks off. Throws an AbortError if `signal` ends it.
 */
export async function* completion(request, signal, onBreak) {
  const received = new Received();
  const numNew = new Map(); // tokens of each sequence since the last break
  let [pauseMs, brokenSinceMs, numFruitless, isFirst] = [FIRST_PAUSE_MS, null, 0, true];
  for (; ; isFirst = false) {
    let error = null;
    for await (const message of answer(received.nextRequest(request), signal)) {
      if (message.error) {
        error = message.error;
        break;
      }
      brokenSinceMs = null;
      const isNew = received.accept(message);
      if (!received.canContinue && received.isContinued) error = CANNOT_CONTINUE;
      if (error) break;
      if (!isNew) continue;
      if (isProgress(message, numNew)) [pauseMs, numFruitless] = [FIRST_PAUSE_MS, 0];
      yield message;
    }
    if (!error) return;
    const isBreak = error.code === "UNAVAILABLE" || (error.code === "RESOURCE_EXHAUSTED" && !isFirst);
    if (brokenSinceMs === null) {
      numFruitless += 1;
      numNew.clear();
    }
    brokenSinceMs ??= performance.now();
    const isPatient = performance.now() - brokenSinceMs < PATIENCE_MS && numFruitless <= MAX_FRUITLESS;
    if (!isBreak || !received.canContinue || !isPatient) {
      yield { error };
      return;
    }
    onBreak();
    await pause(Math.max(pauseMs, error.retryAfterMs ?? 0) * (0.5 + Math.random() / 2), signal);
    pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
  }
}

/** Adds the tokens of a new message to `numNew`. Returns whether the stream has made progress since the last break. */
function isProgress({ delta }, numNew) {
  if (!delta) return true;
  numNew.set(delta.index, (numNew.get(delta.index) ?? 0) + (delta.token_ids ?? []).length);
  return numNew.get(delta.index) >= MIN_PROGRESS;
}

/** What was received of the streams of one request. */
class Received {
  isContinued = false;
  #hasStarted = false;
  #continuation = null;
  #sequences = new Map(); // by index, as in `quire.v1.ResumedSequence`

  /** False if the server cannot continue streams. */
  get canContinue() {
    return !this.#hasStarted || this.#continuation !== null;
  }

  nextRequest(request) {
    this.isContinued = this.#hasStarted;
    if (!this.#hasStarted) return { ...request, resumable: true };
    const resume = { continuation: this.#continuation, sequences: [...this.#sequences.values()] };
    return { ...request, resumable: true, resume };
  }

  /** Adds a message. Returns false for the Started of a continued stream. */
  accept({ started, delta, finished }) {
    if (started) {
      if (!this.#hasStarted || !started.continuation) this.#continuation = started.continuation ?? null;
      this.#hasStarted = true;
      return !this.isContinued;
    }
    if (delta) {
      const sequence = this.#sequence(delta.index);
      for (const id of delta.token_ids ?? []) sequence.token_ids.push(id);
      sequence.has_last = delta.last ?? false;
    }
    if (finished) this.#sequence(finished.index).finished = true;
    return true;
  }

  #sequence(index) {
    if (!this.#sequences.has(index)) {
      this.#sequences.set(index, { index, token_ids: [], has_last: false, finished: false });
    }
    return this.#sequences.get(index);
  }
}

/** Yields the messages of one stream. A lost connection becomes an {error}. */
async function* answer(request, signal) {
  try {
    const response = await fetch("/live/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request),
      signal,
    });
    if (response.ok) {
      yield* lines(response.body);
      return;
    }
    const retryAfterMs = 1000 * Number(response.headers.get("Retry-After") ?? 0);
    yield { error: { ...(await response.json()).error, retryAfterMs } };
  } catch (error) {
    if (signal.aborted) throw signal.reason;
    if (!(error instanceof TypeError || error instanceof SyntaxError)) throw error;
    yield { error: UNREACHABLE }; // a lost connection is a TypeError, and a refusal that is cut off a SyntaxError
  }
}

function pause(durationMs, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, durationMs);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
    if (signal.aborted) reject(signal.reason);
  });
}

/** Yields the JSON values of a body with one value on each line. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done && rest) throw new TypeError("the last line is cut off");
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}
