"""`python -m rlk_ledger`: the command line where its script is not on the path."""

from rlk_ledger.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
