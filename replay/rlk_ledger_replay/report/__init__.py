"""The report: one self-contained HTML file about a run, made of the ledger alone.

`gather` reads and computes, `page` renders, `figures` draws, `write` puts the file in place and records that it did.
"""

import importlib.util

from rlk_ledger_schemas.errors import UsageError

if importlib.util.find_spec("jinja2") is None:
    raise UsageError("a report needs jinja2: pip install 'rlk-ledger[report]'.")

from rlk_ledger_replay.report.gather import Report, gather
from rlk_ledger_replay.report.page import render
from rlk_ledger_replay.report.text import ReportError
from rlk_ledger_replay.report.write import ReportInfo, write_report

__all__ = ["Report", "ReportError", "ReportInfo", "gather", "render", "write_report"]
