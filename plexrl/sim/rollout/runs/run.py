"""Runs one system."""

from collections.abc import Callable

from plexrl.errors import InvalidRequestError
from plexrl.sim.rollout.results.recorder import Recorder
from plexrl.sim.rollout.setting import SPLIT, Setting, System, SystemName, check_system
from plexrl.sim.rollout.systems.coordinated import Coordinated
from plexrl.sim.rollout.systems.flexes.on_policy import OnPolicy
from plexrl.sim.rollout.systems.pat.adaptive_tp import AdaptiveTpSystem
from plexrl.sim.rollout.systems.streamed import Streamed
from plexrl.sim.rollout.systems.synchronous import Synchronous
from plexrl.sim.rollout.world import Policy, World

LANE_BUFFERS = 4
"""Last training steps whose trajectories a history keeps."""


def simulate_rollout(
    setting: Setting,
    system: System,
    *,
    with_history: bool = False,
    policy: Callable[[World, System], Policy] | None = None,
) -> Recorder:
    """Simulate `system` for `setting.steps` training steps. Deterministic.

    `policy`: decides in place of the system, with the system's GPUs and η.

    Raises:
        InvalidRequestError: the split of GPUs leaves rollout or training without GPUs.
        InvariantError: the run breaks one of its own invariants.
    """
    if system.name in SPLIT and not system.rollout_gpus:
        raise InvalidRequestError(f"{system.label} has no rollout GPUs: give some")
    check_system(setting, system)
    lanes_from = max(0, setting.steps - LANE_BUFFERS) if with_history else None
    recorder = Recorder(lanes_from=lanes_from)
    world = World(setting, system, recorder)
    world.run((policy or _policy)(world, system))
    return recorder


def _policy(world: World, system: System) -> Policy:
    match system.name:
        case SystemName.SYNC:
            return Synchronous(world)
        case SystemName.STALEFLOW:
            return Coordinated(world, system)
        case SystemName.TAIL | SystemName.FLEXES | SystemName.STREAMRL_SKEW:
            return OnPolicy(world, system)
        case SystemName.STREAMRL_SYNC | SystemName.STREAMRL_ASYNC:
            return Streamed(world, system)
        case SystemName.PAT:
            return AdaptiveTpSystem(world, system)
