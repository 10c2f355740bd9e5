"""The systems that `staleflow` is compared with, by name.

A rival takes its GPUs and its η from a `System` with the name `staleflow`, and decides by a policy
of its own.
"""

from enum import StrEnum

from benchmarks.rollout_systems.inflight import InFlight
from benchmarks.rollout_systems.one_step import OneStep
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.results.recorder import Recorder
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import Setting, System, SystemName
from plexrl.sim.rollout.world import Policy, World


class Rival(StrEnum):
    """A way to overlap rollout and training."""

    ONE_STEP = "one-step"
    """Batch i + 1 is generated while batch i is trained, as verl-pipeline. η is 1."""
    INFLIGHT = "inflight"
    """At most (η + 1) batches in flight, trained in the order of the prompts, which keeps the
    bound; every update interrupts all instances, and a trajectory stays on its instance."""
    INFLIGHT_REBALANCED = "inflight-rebalanced"
    """As inflight, and every update distributes all trajectories anew."""
    INFLIGHT_LOOSE = "inflight-loose"
    """As inflight in the order of completion: the bound is not kept for each trajectory."""

    def policy(self, world: World, system: System) -> Policy:
        """The decisions of the rival."""
        if self is Rival.ONE_STEP:
            return OneStep(world)
        return InFlight(
            world,
            system.staleness,
            in_order=self is not Rival.INFLIGHT_LOOSE,
            is_rebalanced=self is Rival.INFLIGHT_REBALANCED,
        )

    def simulate(self, setting: Setting, system: System, *, with_history: bool = False) -> Recorder:
        """One run."""
        return simulate_rollout(setting, system, with_history=with_history, policy=self.policy)

    def outcome(self, setting: Setting, system: System) -> RolloutOutcome:
        """The figures of one run."""
        return outcome(setting, system, self.simulate(setting, system))


BOUNDED = (Rival.INFLIGHT, Rival.INFLIGHT_REBALANCED, Rival.INFLIGHT_LOOSE)
"""Rivals with a choice of η."""


def split(staleness: int, rollout_gpus: int = 0) -> System:
    """GPUs and η of a rival."""
    return System(name=SystemName.STALEFLOW, staleness=staleness, rollout_gpus=rollout_gpus)
