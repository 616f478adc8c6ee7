"""Records the golden bits of the kernels for the class of this device, after a change that is meant to move them.

    python tools/golden/kernel_bits.py [--device cpu|cuda] [--interpret] [DIR]

Writes one file a class of device, by default into the package. Nothing is written when a suite accuses an operator:
bits that are wrong are not worth keeping. Say in the commit what moved them and why.
"""

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    """Measures and writes; returns 1 when a suite failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--interpret", action="store_true", help="Triton kernels, in Triton's interpreter")
    asked = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if asked.interpret else "0"
    from rlk_ledger_kernels.suite import golden
    from rlk_ledger_kernels.suite.certificate import Scope, certify

    scope = Scope(asked.device, backends=("triton",) if asked.interpret else ())
    found = certify(scope, lambda what, done, total: print(f"{done}/{total} {what}", file=sys.stderr))
    wrong = [
        one for one in found.checked if "failed" in (one.invariance.outcome, one.backward.outcome, one.accuracy.outcome)
    ]
    for one in wrong:
        print(f"{one.operator} ({one.backend}) fails a suite; its bits are not recorded")
    spoilt = {(one.operator, one.backend) for one in wrong}
    for name, bits in found.golden.items():
        kept = {
            operator: {backend: cases for backend, cases in backends.items() if (operator, backend) not in spoilt}
            for operator, backends in bits.items()
        }
        print(golden.save(name, {operator: backends for operator, backends in kept.items() if backends}, asked.folder))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
