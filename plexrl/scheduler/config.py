"""Configuration of the scheduler process."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.dispatch.ordering import ORDERINGS
from plexrl.scheduler.placement.policies import make_policy

PROCESS_SETTINGS = frozenset(
    {
        *("listen", "journal", "journal_bytes_max", "snapshot_events", "lease_s", "holder"),
        *("operator_key_digest", "tenants", "node_grace_s", "state_dir"),
    }
)
"""What a scheduler process is told for itself. All other settings are the core's: its decisions
follow from them, so they are journalled."""


LOAD_ROUNDING = 1e-9
"""Far below any duty, far above the rounding of a sum of them."""

_COUNT = (1, 1 << 40)
_SECONDS = (0.0, 1e9)

RANGES: dict[str, tuple[float, float]] = {
    "journal_bytes_max": (1, 1 << 62),
    "snapshot_events": _COUNT,
    "lease_s": (1e-3, 1e6),
    "horizon_slots": (1, 1 << 24),
    "period_tolerance": (0.0, 0.99),
    "load_max": (1e-6, 1e3),
    "overlap_max": (0.0, 1e6),
    "interference_weight": (0.0, 1e9),
    "starvation_bound_s": _SECONDS,
    "starvation_ratio": (0.0, 1e9),
    "waiting_part_max": (0.0, 1e6),
    "relief_after_s": _SECONDS,
    "profile_cycles": (1, 1 << 20),
    "drift_tolerance": (0.0, 1e6),
    "repack_interval_s": _SECONDS,
    "cold_start_patience_s": _SECONDS,
    "node_grace_s": _SECONDS,
    "node_replace_s": _SECONDS,
    "snapshot_operations": _COUNT,
    "snapshot_work_s": (1.0, 1e9),
    "rebuild_operations": (0, 1 << 40),
    "rebuild_payload_bytes_max": (0, 1 << 62),
    "burst_hold_s": _SECONDS,
    "burst_max_s": _SECONDS,
    "launch_attempts": _COUNT,
    "residents_max": _COUNT,
    "pending_operations_max": _COUNT,
    "tenant_operations_max": _COUNT,
    "deployment_payload_bytes_max": (1, 1 << 62),
    "tenant_payload_bytes_max": (1, 1 << 62),
    "tenant_live_jobs_max": _COUNT,
    "history": _COUNT,
    "ended_jobs": _COUNT,
    "profiles": _COUNT,
    "searches_max": _COUNT,
}
"""Least and most of every number in `SchedulerConfig`."""

LATER_BOUNDS = ("tenant_live_jobs_max",)
"""Bounds that older versions had not: what those accepted is not refused when it is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Fixed for the life of a scheduler's process; the core reads all but `PROCESS_SETTINGS`."""

    listen: str
    """Unix socket path for routers and node agents."""
    journal: str
    """Path of an SQLite file, or the URL of a database: `postgresql://user@host/name`."""
    operator_key_digest: str
    """Hex SHA-256 of the operator's API key."""
    journal_bytes_max: int | None = None
    """Bound of an SQLite journal's file; absent: the disk's."""
    snapshot_events: int = 50_000
    """Events after which the state is written down, and what a restart replays at most, about."""
    lease_s: float = 10.0
    """Silence of the leading scheduler after which a standby takes over: longer than a disk or a
    busy machine holds it up, short beside what clients wait. Without a standby it does not matter:
    a leader goes on with a lease that expired and that nobody took."""
    holder: str = ""
    """Name under which this scheduler leads: stable over its restarts, for it takes over from
    itself at once, and no other's. Empty: made of the machine's name and `listen`."""
    state_dir: str = ""
    """The cluster's data directory. Where it has state of jobs and the journal is empty, the
    journal was lost or is the wrong one, and the scheduler refuses to start. Empty: not checked."""
    policy: str = "pack"
    """Placement: `isolated`, `pack`, `spread`, `spread+backfill` or `co-execution` (see
    `policies`)."""
    horizon_slots: int = 28_800
    """Slots of the planning ring, of one second each: 8 h (PlexRL §5.2.1)."""
    period_tolerance: float = 0.02
    """A job's period may be stretched by this part to divide the ring."""
    load_max: float = 0.9
    """Summed duty up to which a group takes members. Near 1 waits grow out of proportion, and the
    switches are to be had out of what is left."""
    overlap_max: float = 2.0
    """Part of a job's busy time that may collide with residents' by the plan, each counted: at 2,
    not more than two of them are busy then on average. What comes of it once phases have settled is
    predicted, and bounded by `waiting_part_max`."""
    interference_weight: float = 10.0
    """λ: seconds of delayed start that one second of interference a cycle is worth."""
    starvation_bound_s: float = 600.0
    """Longest wait, for GPUs or for a group, after which nobody is let past."""
    starvation_ratio: float = 2.0
    """Response ratio from which a burst is started even into another member's critical segment:
    2 is a wait as long as the burst and its switches."""
    waiting_part_max: float = 0.3
    """Bound on waiting / (waiting + running) of a job; past it its group takes no more members and
    the job that waits most is moved (PlexRL §7.2)."""
    relief_after_s: float = 60.0
    """How long a job must have been on its group before it is moved for waiting: new neighbours
    settle first."""
    profile_cycles: int = 3
    """Cycles, warm-up not counted, that make a profile."""
    drift_tolerance: float = 0.2
    """Relative change of period or busy time, in several cycles running, that renews a profile."""
    repack_interval_s: float = 600.0
    """Least time between two moves of a job; each move doubles it."""
    migrates: bool = True
    """Whether the StateManagers can move a version from node to node; else jobs stay on theirs."""
    cold_start_patience_s: float = 60.0
    """How long a job without a profile waits for a group of its own before it shares."""
    ordering: str = "hrrs"
    """Rule by which a group's members take turns: a name of
    `plexrl.scheduler.dispatch.ordering`."""
    anticipation: bool | None = None
    """Whether a group that nobody waits for is switched to the member that is expected next, so
    that its cycle does not wait for the switch. Absent: as the ordering has it (`hrrs` does, the
    others, taken as they were published, do not)."""
    node_grace_s: float = 5.0
    """Silence of a node agent after which its node counts as lost."""
    node_replace_s: float = 120.0
    """How long WPGs wait for a lost node before they are placed elsewhere: a reboot is cheaper than
    the copies and launches of all its WPGs."""
    snapshot_operations: int = 64
    """Mutations after which a WPG that no switch has offloaded is snapshotted: the most that a
    recovery replays."""
    snapshot_work_s: float = 600.0
    """Seconds of computing in such mutations after which it is snapshotted, if that comes first.
    Ten minutes are near the optimum (Daly: √(2 x snapshot x time between failures)) of a job of
    some 400 GPUs that takes 1 to 2 s for a snapshot and loses a node once a day."""
    rebuild_operations: int = 128
    """Mutations of a WPG, with their payloads, kept beyond its durable version, so that it can be
    computed anew where that version is damaged or lost; 0: none. They reach back to the initial
    weights or the last loaded checkpoint. Where these would be too many, they reach back to an
    earlier version that the StateManagers keep. Twice `snapshot_operations`, so that they do."""
    rebuild_payload_bytes_max: int = 1 << 30
    """Bound on the payloads of these operations, for each WPG: they lie in the blob store."""
    lost_nodes_return: bool = True
    """Whether a lost node may come back with its state: who needs it then waits for as long as that
    takes; else its job ends as FAILED after `node_replace_s`."""
    burst_hold_s: float = 0.05
    """Longest that a group is held idle for the resident's next operation while others wait."""
    burst_max_s: float = 300.0
    """A burst that has lasted this long yields at its next operation boundary. Above the longest
    cycle's work on a group, for a burst cut in two costs two more switches."""
    launch_attempts: int = 3
    """Launches in a row without a completed operation before a job is given up."""
    residents_max: int = 8
    """Most members of one node group."""
    pending_operations_max: int = 1024
    """Queue bound of one deployment."""
    tenant_operations_max: int = 16_384
    """Bound on a tenant's operations that are accepted and not finished."""
    deployment_payload_bytes_max: int = 8 << 30
    """Bound on the payloads of one deployment's operations that are not finished: they lie in the
    blob store."""
    tenant_payload_bytes_max: int = 32 << 30
    """Likewise of a tenant."""
    tenant_live_jobs_max: int | None = None
    """Jobs of one tenant that have not ended, where it has no bound of its own; absent: any number.
    `plexrl up` sets it."""
    history: int = 50_000
    """Finished operations remembered, with their results."""
    ended_jobs: int = 10_000
    """Ended jobs remembered, with what they used; the one that ended first is forgotten first."""
    profiles: int = 10_000
    """Measured profiles remembered for jobs that come again; the oldest is forgotten first."""
    searches_max: int = 16
    """Waiting jobs of one size for which groups are searched in vain before no more are, until
    capacity comes free: a search of groups' time takes a millisecond, and a backlog may be long."""
    tenants: tuple[tuple[str, str], ...] = ()
    """(name, key digest) of tenants made at the first start."""

    @property
    def load_bound(self) -> float:
        """What a sum of duties is compared with: `load_max`, and room for the sum's rounding."""
        return self.load_max + LOAD_ROUNDING

    def __post_init__(self) -> None:
        make_policy(self.policy)
        if self.ordering not in ORDERINGS:
            raise InvalidRequestError(
                f"ordering {self.ordering!r} is unknown: use one of {', '.join(ORDERINGS)}"
            )
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            # Written so that NaN, which compares as false, is refused too.
            if value is not None and not least <= value <= most:
                raise InvalidRequestError(
                    f"{name} is {value}: it must be at least {least:g} and at most {most:g}"
                )


def core_settings(config: SchedulerConfig) -> dict[str, Any]:
    """What the core's decisions follow from, as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return {name: value for name, value in plain.items() if name not in PROCESS_SETTINGS}


def with_core_settings(config: SchedulerConfig, settings: Mapping[str, Any]) -> SchedulerConfig:
    """`config` with the core's part as `core_settings` wrote it down.

    A setting that this version does not know is passed over; one that was not yet known then stays
    as `config` has it, but for `LATER_BOUNDS`.

    Raises:
        InvalidRequestError: a value that this version does not take.
    """
    hints = get_type_hints(SchedulerConfig)
    known = {field.name for field in fields(SchedulerConfig)} - PROCESS_SETTINGS
    try:
        changes = {
            name: msgspec.convert(value, hints[name])
            for name, value in settings.items()
            if name in known
        }
        changes |= {name: None for name in LATER_BOUNDS if settings and name not in settings}
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the settings in the journal cannot be used: {error}") from error
    return replace(config, **changes)
