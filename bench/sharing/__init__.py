"""Blocks saved by sharing, counted in a running server's block tables."""
