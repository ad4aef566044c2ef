"""Says whether this process runs Triton's interpreter."""

from __future__ import annotations

import os

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
