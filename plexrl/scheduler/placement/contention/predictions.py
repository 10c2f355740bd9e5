"""Predictions of contention that are kept: a waiting deployment tries a group many times."""

from plexrl.scheduler.placement.contention.contention import (
    Contention,
    ContentionConfig,
    Resident,
    predict,
)
from plexrl.scheduler.rules.settings import Settings

PREDICTIONS_KEPT = 1024


class Predictions:
    """The predictions under these settings."""

    def __init__(self, settings: Settings) -> None:
        self._rule = ContentionConfig(
            anticipates=settings.anticipates,
            guards_slack=settings.policy.guards_slack,
            starvation_ratio=settings.config.starvation_ratio,
            starvation_bound_s=settings.config.starvation_bound_s,
            horizon_slots=settings.config.horizon_slots,
            period_tolerance=settings.config.period_tolerance,
            profile_cycles=settings.config.profile_cycles,
        )
        self._kept: dict[tuple[Resident, ...], Contention] = {}

    def of(self, residents: tuple[Resident, ...]) -> Contention:
        """The predicted contention of these residents of one group."""
        known = self._kept.get(residents)
        if known is None:
            if len(self._kept) >= PREDICTIONS_KEPT:
                self._kept.clear()
            known = self._kept[residents] = predict(residents, self._rule)
        return known
