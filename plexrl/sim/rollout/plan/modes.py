"""The ways to run a job that a plan compares. Pure.

The names are those of `plexrl simulate-rollout --system`. Only what a live rollout can do is here:
its trainer has the same GPUs in each step, so none trains on GPUs that a round frees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from plexrl.client.data.rollout_policy import RolloutPolicy
from plexrl.sim.rollout.setting import STREAMED, System, SystemName
from plexrl.sim.rollout.systems.coordinated import policy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to run a job."""

    name: str
    system: System
    trained: str
    """Which weights draw what is trained, in a few words."""

    @property
    def is_on_policy(self) -> bool:
        """Whether every sample is drawn with the weights that it trains."""
        return self.system.staleness == 0

    @property
    def policy(self) -> str:
        """The policy, as Python. That of `pat` has a `profile` of `profile_decoding`."""
        if self.system.name == SystemName.PAT:
            return "plexrl.BoundedStaleness(0, adaptive_tp=profile)"
        return python_of(policy_of(self.system))

    @property
    def calls(self) -> tuple[str, ...]:
        """Lines of the controller besides the arguments of `job.rollout`."""
        return ("for part in rollout.parts(…)",) if self.system.name in STREAMED else ()


def python_of(policy: RolloutPolicy) -> str:
    """The policy as an expression, with the fields that are not the default."""
    given = []
    for field in fields(policy):
        value = getattr(policy, field.name)
        if field.name == "staleness":
            given.append(f"{value}")
        elif value != field.default or field.name == "over_launch":
            given.append(
                f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}"
            )
    return f"plexrl.{type(policy).__name__}({', '.join(given)})"


SYNC = Mode(name="sync", system=System(name=SystemName.SYNC), trained="on-policy")
TAIL_PROMPTS = Mode(
    name="tail, prompts",
    system=System(name=SystemName.TAIL, over_launch_responses=1.0),
    trained="on-policy, reordered",
)
TAIL = Mode(name="tail", system=System(name=SystemName.TAIL), trained="on-policy, shorter first")
SKEW = Mode(name="streamrl-skew", system=System(name=SystemName.STREAMRL_SKEW), trained="on-policy")
STREAM = Mode(
    name="streamrl-sync", system=System(name=SystemName.STREAMRL_SYNC), trained="on-policy"
)
STREAM_AHEAD = Mode(
    name="streamrl-async",
    system=System(name=SystemName.STREAMRL_ASYNC, staleness=1),
    trained="1 step old",
)
PAT = Mode(name="pat", system=System(name=SystemName.PAT), trained="on-policy")


def modes(staleness: Sequence[int], *, has_model: bool) -> list[Mode]:
    """All modes, `sync` first; those with a bound for each of `staleness`. With a model the
    latencies of several tensor-parallel sizes are known, which `pat` needs."""
    found = [SYNC, TAIL_PROMPTS, TAIL, SKEW, STREAM]
    found += [PAT] if has_model else []
    return [*found, STREAM_AHEAD, *(_bounded(each) for each in staleness if each)]


def _bounded(staleness: int) -> Mode:
    return Mode(
        name=f"staleflow η={staleness}",
        system=System(name=SystemName.STALEFLOW, staleness=staleness),
        trained=f"up to {staleness} step{'s' if staleness > 1 else ''} old",
    )
