"""Counts how often a bound was reached that protects the process, not the model.

Requests that a bound refuses are also counted in `quire_requests_rejected_total`, if they were read at all.
"""

import os
from collections import Counter

LOG_LINES = "log_lines"
MESSAGE_FIELDS = "message_fields"
OPEN_CONNECTIONS = "open_connections"
READS = "reads"
SILENT_CONNECTIONS = "silent_connections"
STALLED_READERS = "stalled_readers"

NUM_LIMITED: Counter[str] = Counter(
    dict.fromkeys((LOG_LINES, MESSAGE_FIELDS, OPEN_CONNECTIONS, READS, SILENT_CONNECTIONS, STALLED_READERS), 0)
)
"""One process has one scheduler, and a log filter or a connection knows no other object of it."""


def limited(limit: str) -> None:
    """Counts that a bound was reached: that a line was left out, or a connection closed."""
    NUM_LIMITED[limit] += 1


def num_open_files() -> int:
    """Returns the number of open file descriptors, or 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
