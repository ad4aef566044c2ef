// Server-sent events in the body of a response, as in https://html.spec.whatwg.org/multipage/server-sent-events.html.
// EventSource cannot send a POST.

/** Yields the data of each event. The stream of bytes can be cut anywhere; an event without its end is left out. */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let data = [];
  try {
    for await (const line of lines(reader)) {
      if (line.startsWith("data:")) {
        data.push(line.slice(5).replace(/^ /, ""));
      } else if (line === "data") {
        data.push("");
      } else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // a reader that stops early closes the connection
  }
}

/** Yields complete lines. A line ends with CR, LF or both, and the two can be in different pieces. */
async function* lines(reader) {
  let rest = "";
  let endedWithCr = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const piece = endedWithCr && value.startsWith("\n") ? value.slice(1) : value;
    endedWithCr = piece.endsWith("\r");
    const found = (rest + piece).split(/\r\n|\r|\n/);
    rest = found.pop();
    yield* found;
  }
}
