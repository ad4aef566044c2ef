// Receives the server's frames. A hidden page closes its connection, so that the server computes nothing for it.

/** Calls `onFrame(frame)` for each frame, and `onConnection(isOpen)` when the connection opens or closes. */
export function listen(onFrame, onConnection) {
  let source = null;

  function open() {
    source = new EventSource("/live/events");
    source.addEventListener("open", () => onConnection(true));
    source.addEventListener("message", (event) => onFrame(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      onConnection(false);
      if (source?.readyState === EventSource.CLOSED) retry(); // refused: the browser does not retry by itself
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
