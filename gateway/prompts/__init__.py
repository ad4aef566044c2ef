"""Reads prompts as a scheduler does, without an engine, so that the gateway knows which prefixes they share."""
