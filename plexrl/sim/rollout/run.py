"""Runs one system."""

from collections.abc import Callable

from plexrl.errors import InvalidRequestError
from plexrl.sim.rollout.recorder import Recorder
from plexrl.sim.rollout.setting import SPLIT, Setting, System, SystemName
from plexrl.sim.rollout.systems.inflight import InFlight
from plexrl.sim.rollout.systems.one_step import OneStep
from plexrl.sim.rollout.systems.synchronous import Synchronous
from plexrl.sim.rollout.world import Policy, World


def simulate_rollout(
    setting: Setting,
    system: System,
    *,
    with_history: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> Recorder:
    """Simulate `system` for `setting.steps` training steps. Deterministic.

    Raises:
        InvalidRequestError: the split of GPUs leaves rollout or training without GPUs.
        InvariantError: the run breaks one of its own invariants.
    """
    if system.name in SPLIT and not (setting.costs.gpus <= system.rollout_gpus < setting.gpus):
        raise InvalidRequestError(
            f"{system.rollout_gpus} rollout GPUs of {setting.gpus}: give {setting.costs.gpus} to "
            f"{setting.gpus - 1}, so that rollout and training have some each"
        )
    recorder = Recorder(with_history=with_history)
    world = World(setting, system, recorder)
    world.run(_policy(world, system), on_step)
    return recorder


def _policy(world: World, system: System) -> Policy:
    match system.name:
        case SystemName.SYNC:
            return Synchronous(world)
        case SystemName.ONE_STEP:
            return OneStep(world)
        case SystemName.INFLIGHT:
            return InFlight(world, system.staleness)
    raise InvalidRequestError(f"unknown system {system.name}")
