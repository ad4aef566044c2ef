"""Calls of tools in the texts of models: reads them, and writes the grammars that force them. It does no I/O."""
