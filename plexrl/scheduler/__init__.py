"""The scheduler: a pure core that decides, and a service shell around it."""

from plexrl.scheduler.context.config import SchedulerConfig
from plexrl.scheduler.core.core import SchedulerCore

__all__ = ["SchedulerConfig", "SchedulerCore"]
