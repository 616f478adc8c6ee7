"""Triton's interpreter where there is no GPU: Triton reads it when it is first imported, which any engine may do."""

from __future__ import annotations

import os
from pathlib import Path

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
