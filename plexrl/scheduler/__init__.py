"""The scheduler: a pure core that decides, and the service shell round it."""

from plexrl.scheduler.config import SchedulerConfig
from plexrl.scheduler.core.core import SchedulerCore

__all__ = ["SchedulerConfig", "SchedulerCore"]
