"""Metrics, the log line of each request, and traces."""
