"""Counts how often a bound was reached that protects the process, not the model.

Requests that a bound refuses are also counted in `quire_requests_rejected_total`, if they were read at all.
"""

import errno
import os
from collections import Counter

from quire.descriptors import descriptor_limit

GRAMMAR_MEMORY = "grammar_memory"
GRAMMAR_TIME = "grammar_time"
LOG_LINES = "log_lines"
MESSAGE_FIELDS = "message_fields"
OPEN_CONNECTIONS = "open_connections"
READS = "reads"
REQUEST_READS = "request_reads"
RESET_CALLS = "reset_calls"
SILENT_CONNECTIONS = "silent_connections"
STALLED_READERS = "stalled_readers"
STREAMS_OF_A_CALL = "streams_of_a_call"

NUM_LIMITED: Counter[str] = Counter(
    dict.fromkeys(
        (
            GRAMMAR_MEMORY,
            GRAMMAR_TIME,
            LOG_LINES,
            MESSAGE_FIELDS,
            OPEN_CONNECTIONS,
            READS,
            REQUEST_READS,
            RESET_CALLS,
            SILENT_CONNECTIONS,
            STALLED_READERS,
            STREAMS_OF_A_CALL,
        ),
        0,
    )
)
"""One process has one scheduler, and a log filter or a connection knows no other object of it."""


def limited(limit: str) -> None:
    """Counts that a bound was reached: that a line was left out, or a connection closed."""
    NUM_LIMITED[limit] += 1


def num_open_files() -> int:
    """Returns the number of open file descriptors, or 0 where the system does not say.

    To list them takes another one. Where none is left, as many are open as may be.
    """
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError as error:
        return descriptor_limit() if error.errno == errno.EMFILE else 0
