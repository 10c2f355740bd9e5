"""The report of simulated runs: one self-contained HTML page."""

from plexrl.sim.report.bills import Billed
from plexrl.sim.report.page import write_report

__all__ = ["Billed", "write_report"]
