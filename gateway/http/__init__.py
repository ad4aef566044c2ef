"""The gateway's HTTP server: routes, the bounds of bodies, connections and readers, and the chat page."""
