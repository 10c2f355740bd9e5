"""Throughput of the simulated systems relative to synchronous training. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.setting import COORDINATED, ON_POLICY, Strategies, SystemName


def gain_over_sync(outcome: RolloutOutcome, outcomes: Iterable[RolloutOutcome]) -> float | None:
    """Throughput relative to the synchronous run of the same limit; None without one. On-policy
    runs train the same prompts as it, and tail batching short and long ones in turn: theirs is the
    ratio of the whole runs' times."""
    sync = next(
        (
            other
            for other in outcomes
            if other.system.name == SystemName.SYNC and other.limit == outcome.limit
        ),
        None,
    )
    if sync is None:
        return None
    if outcome.system.name in ON_POLICY:
        return sync.run_s / outcome.run_s
    return outcome.throughput / sync.throughput


def gain_lines(outcomes: Sequence[RolloutOutcome]) -> list[str]:
    """The gains of the coordinator's systems, one sentence each."""
    lines = []
    bounded = [
        gain
        for outcome in outcomes
        if outcome.system.name == SystemName.STALEFLOW
        and outcome.system.strategies == Strategies()
        and (gain := gain_over_sync(outcome, outcomes)) is not None
    ]
    if bounded:
        most = "" if len(bounded) == 1 else f", at most {max(bounded):.2f}"
        lines.append(f"staleflow trains {fmean(bounded):.2f} times the tokens/s of sync{most}")
    for outcome in outcomes:
        gain = gain_over_sync(outcome, outcomes)
        if outcome.system.name in COORDINATED and gain is not None:
            lines.append(
                f"{outcome.system.label} trains the prompts of sync {gain:.2f} times as fast, "
                f"{outcome.limit:,} tokens"
            )
    return lines
