// The server's frames. A page that nobody sees does not listen, so that nobody computes for it.

/** Calls `onFrame(frame)` for each, and `onConnection(isOpen)` when that changes. */
export function listen(onFrame, onConnection) {
  let source = null;

  function open() {
    source = new EventSource("/live/events");
    source.addEventListener("open", () => onConnection(true));
    source.addEventListener("message", (event) => onFrame(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      onConnection(false);
      if (source?.readyState === EventSource.CLOSED) retry(); // refused; it does not come back by itself
    });
  }

  function close() {
    source?.close();
    source = null;
  }

  function retry() {
    close();
    setTimeout(() => document.hidden || source || open(), 3000);
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (!source) open();
  });
  if (!document.hidden) open();
}
