"""What torch and Triton read from the environment when they are first imported, which any engine may do.

Triton's interpreter where there is no GPU. Threads of OpenMP that wait sleep: on a machine whose cores are taken, those
that spin cost a product on two threads twenty times its work.
"""

from __future__ import annotations

import os
from pathlib import Path

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
