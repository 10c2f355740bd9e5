"""The report of simulated runs: one HTML page that needs nothing beside it."""

from plexrl.sim.report.page import write_report

__all__ = ["write_report"]
