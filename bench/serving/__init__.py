"""Throughput and latency of servers on one trace."""
