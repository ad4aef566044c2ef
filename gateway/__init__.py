"""The gateway: OpenAI's API over HTTP, in front of one scheduler or several. It keeps no state of its own."""
