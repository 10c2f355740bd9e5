"""The report of simulated runs: one self-contained HTML page."""

from plexrl.sim.report.bills import Billed
from plexrl.sim.report.page import write_report
from plexrl.sim.report.plots.what_ifs import WhatIf

__all__ = ["Billed", "WhatIf", "write_report"]
