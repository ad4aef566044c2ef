"""What holds for all tests."""

from __future__ import annotations

import os

# Before torch is imported, here and in the processes that tests start: one thread each. The suite's workers, and the
# services they start, share the cores; of two threads that meet at each operator's end, one always waits for a core
# while the other spins on its own, and what takes a second alone takes many. Executors set the number they are given.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
