"""File descriptors: how many connections each server may hold, so that the health endpoint always has one left.

┌ gRPC: one half ──────────────┬ HTTP: one quarter ┬ executor, checkpoint, logs, threads: the rest ┐
"""

import resource

_MOST = 1 << 16
_MOST_HTTP = 1024


def raise_descriptor_limit() -> int:
    """Raises this process's limit of open files as far as the system allows it, and returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _limit()


def max_grpc_connections() -> int:
    return max(1, _limit() // 2)


def max_http_connections() -> int:
    return max(1, min(_limit() // 4, _MOST_HTTP))


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
