"""The ways to run a job that a plan compares, each with the lines of Python that choose it. Pure.

The names are those of `plexrl simulate-rollout --system`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.client.data.rollout_policy import OVER_LAUNCH
from plexrl.sim.rollout.setting import Parts, System, SystemName


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to run a job."""

    name: str
    system: System
    python: tuple[str, ...]
    """Arguments of `job.rollout`, and calls, that choose it."""
    trained: str
    """Which weights draw what is trained, in a few words."""

    @property
    def is_on_policy(self) -> bool:
        """Whether every sample is drawn with the weights that it trains."""
        return self.system.staleness == 0


SYNC = Mode(
    name="sync",
    system=System(name=SystemName.SYNC),
    python=("policy=plexrl.BoundedStaleness(0)",),
    trained="on-policy",
)
TAIL_PROMPTS = Mode(
    name="tail, prompts",
    system=System(name=SystemName.TAIL, over_launch_responses=1.0),
    python=(f"policy=plexrl.TailBatching(over_launch={OVER_LAUNCH:g}, over_launch_responses=1)",),
    trained="on-policy, reordered",
)
TAIL = Mode(
    name="tail",
    system=System(name=SystemName.TAIL),
    python=(f"policy=plexrl.TailBatching(over_launch={OVER_LAUNCH:g})",),
    trained="on-policy, shorter first",
)
FLEXES = Mode(
    name="flexes",
    system=System(name=SystemName.FLEXES, parts=Parts(parallelism=False)),
    python=(
        f"policy=plexrl.TailBatching(over_launch={OVER_LAUNCH:g}, scale_down=True)",
        "shares_gpus=True",
        "for part in rollout.parts(…)",
    ),
    trained="on-policy, shorter first",
)
SKEW = Mode(
    name="streamrl-skew",
    system=System(name=SystemName.STREAMRL_SKEW),
    python=("policy=plexrl.BoundedStaleness(0, length_aware=True)",),
    trained="on-policy",
)
STREAM = Mode(
    name="streamrl-sync",
    system=System(name=SystemName.STREAMRL_SYNC),
    python=(
        "policy=plexrl.BoundedStaleness(0, length_aware=True)",
        "for part in rollout.parts(…)",
    ),
    trained="on-policy",
)
STREAM_AHEAD = Mode(
    name="streamrl-async",
    system=System(name=SystemName.STREAMRL_ASYNC, staleness=1),
    python=(
        "policy=plexrl.BoundedStaleness(1, length_aware=True)",
        "for part in rollout.parts(…)",
    ),
    trained="1 step old",
)
PAT = Mode(
    name="pat",
    system=System(name=SystemName.PAT),
    python=("policy=plexrl.BoundedStaleness(0), tp_sizes=(1, 2, 4, 8)",),
    trained="on-policy",
)


def modes(staleness: Sequence[int], *, has_model: bool) -> list[Mode]:
    """All modes, `sync` first; those with a bound for each of `staleness`. With a model the
    latencies of several tensor-parallel sizes are known, which `pat` needs."""
    found = [SYNC, TAIL_PROMPTS, TAIL, FLEXES, SKEW, STREAM]
    found += [PAT] if has_model else []
    return [*found, STREAM_AHEAD, *(_bounded(each) for each in staleness if each)]


def _bounded(staleness: int) -> Mode:
    return Mode(
        name=f"staleflow η={staleness}",
        system=System(name=SystemName.STALEFLOW, staleness=staleness),
        python=(f"policy=plexrl.BoundedStaleness({staleness})",),
        trained=f"up to {staleness} step{'s' if staleness > 1 else ''} old",
    )
