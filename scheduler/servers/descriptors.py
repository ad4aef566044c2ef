"""File descriptors: how many connections each server may hold, so that the health endpoint always has one left.

┌ gRPC: one half ──────────────┬ HTTP: one quarter ┬ executor, checkpoint, logs, threads: the rest ┐
"""

from quire.descriptors import descriptor_limit

_MOST_HTTP = 1024


def max_grpc_connections() -> int:
    return max(1, descriptor_limit() // 2)


def max_http_connections() -> int:
    return max(1, min(descriptor_limit() // 4, _MOST_HTTP))
