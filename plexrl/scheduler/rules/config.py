"""Configuration of the scheduler process."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, get_type_hints

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.events.config import BrokerConfig
from plexrl.scheduler.rules.ordering import ORDERINGS
from plexrl.scheduler.rules.policies import make_policy
from plexrl.wire.links.address import TlsAddress, parse_address
from plexrl.wire.links.credentials import TlsFiles

PROCESS_SETTINGS = frozenset(
    {
        *("listen", "journal", "journal_bytes_max", "snapshot_events", "lease_s", "holder"),
        *("operator_key_digest", "tenants", "node_grace_s", "state_dir", "events", "tls"),
        *("archive_url", "archive_days", "archive_bytes_max"),
    }
)
"""Settings of the scheduler process. All other settings are the core's: they determine its
decisions, so they are journalled."""


LOAD_ROUNDING = 1e-9
"""Far below any duty, far above the rounding error of a sum of duties."""

_COUNT = (1, 1 << 40)
_SECONDS = (0.0, 1e9)

RANGES: dict[str, tuple[float, float]] = {
    "journal_bytes_max": (1, 1 << 62),
    "snapshot_events": _COUNT,
    "archive_days": (0.0, 36_500.0),
    "archive_bytes_max": (1 << 24, 1 << 62),
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
    "node_lease_s": (0.5, 3600.0),
    "node_replace_s": _SECONDS,
    "snapshot_operations": _COUNT,
    "snapshot_work_s": (1.0, 1e9),
    "rebuild_operations": (0, 1 << 40),
    "rebuild_payload_bytes_max": (0, 1 << 62),
    "burst_hold_s": _SECONDS,
    "burst_max_s": _SECONDS,
    "burst_interruptions": (0.0, 1e6),
    "launch_attempts": _COUNT,
    "operation_overdue_s": _SECONDS,
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
"""Minimum and maximum of every number in `SchedulerConfig`."""

LATER_SETTINGS: dict[str, float | bool | None] = {
    "operation_overdue_s": 0.0,
    "burst_interruptions": 0.0,
    "reservations": False,
    "mixed_sizes": False,
    "learns_from_jobs": False,
}
"""Settings that older versions lacked, as those versions decided: a replay must decide likewise."""

PLANNING = (
    *("policy", "ordering", "anticipation", "horizon_slots", "period_tolerance", "load_max"),
    *("overlap_max", "interference_weight", "starvation_bound_s", "reservations"),
    *("mixed_sizes", "learns_from_jobs", "longest_first"),
    "starvation_ratio",
    *("waiting_part_max", "relief_after_s", "profile_cycles", "drift_tolerance"),
    *("repack_interval_s", "cold_start_patience_s", "burst_hold_s", "burst_max_s"),
    *("burst_interruptions", "residents_max"),
)
"""Settings that decide which jobs share and who goes next; recordings hold them."""

WAITING_PART_MAX = 0.3
"""Default of `waiting_part_max`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Fixed during the life of a scheduler process; the core reads all but `PROCESS_SETTINGS`."""

    listen: tuple[str, ...]
    """Addresses for routers and node agents: `unix:/path` for this machine's, `tls://HOST:PORT` for
    those of other machines."""
    journal: str
    """Path of an SQLite file, or the URL of a database: `postgresql://user@host/name`."""
    operator_key_digest: str
    """Hex SHA-256 of the operator's API key."""
    journal_bytes_max: int | None = None
    """Maximum size of an SQLite journal file; None: limited by the disk."""
    snapshot_events: int = 50_000
    """Events between two snapshots; a restart replays at most about as many."""
    archive_url: str = ""
    """Where the history is archived: an absolute path, or a prefix of an object store. Empty:
    nowhere, and what a snapshot replaces is deleted."""
    archive_days: float = 7.0
    """How long archived events are kept; 0: nothing is archived."""
    archive_bytes_max: int = 2 << 30
    """Maximum bytes of the archive, of which the oldest go first: about 15 million operations."""
    lease_s: float = 10.0
    """Silence of the leader after which a standby takes over: longer than a slow disk or a busy
    machine delays the leader, short compared with client timeouts. Without a standby it has no
    effect: a leader continues with an expired lease that no other scheduler took."""
    holder: str = ""
    """Name of this scheduler in the lease. It must be unique, and stable over restarts, so that a
    restarted scheduler takes its own lease at once. Empty: host name and `listen`."""
    state_dir: str = ""
    """The cluster's data directory. If it has state of jobs but the journal is empty, the journal
    was lost or is the wrong one, and the scheduler refuses to start. Empty: not checked."""
    policy: str = "spread+backfill"
    """Placement: `isolated`, `pack`, `spread`, `spread+backfill` or `co-execution` (see
    `policies`)."""
    horizon_slots: int = 28_800
    """Slots of the planning ring, of one second each: 8 h (PlexRL §5.2.1)."""
    period_tolerance: float = 0.02
    """A job's period may be stretched by this part to divide the ring."""
    load_max: float = 0.9
    """Maximum sum of duties in a group. Near 1 waiting times grow steeply, and the rest of the time
    must also cover the switches."""
    longest_first: bool = False
    """Among waiting jobs of equal class and share the longest expected one goes first: a backlog
    ends sooner, and short jobs wait longer. Otherwise the highest response ratio."""
    mixed_sizes: bool = True
    """A deployment may share a part of the GPUs of a larger one."""
    learns_from_jobs: bool = True
    """What a job does not declare is expected to be as it was in earlier jobs: its demand as in
    deployments like its own, of any tenant, and its length as in jobs of its tenant and name. Where
    there were none, the first measured cycle says what the demand is. If off, a group is closed
    until the profiles of its members are complete."""
    overlap_max: float = 2.0
    """Maximum planned overlap, as a part of the job's busy time and summed over residents: at 2, no
    more than two residents are busy at the same time on average. `waiting_part_max` bounds the
    predicted waiting once phases have settled."""
    interference_weight: float = 10.0
    """λ: seconds of setup that weigh as much as one second of interference per cycle."""
    starvation_bound_s: float = 600.0
    """Wait for GPUs or for a group after which no other may go first."""
    reservations: bool = True
    """The first job that has waited for GPUs beyond `starvation_bound_s` has a reservation: jobs
    behind it run meanwhile if, by expected lengths, they do not delay it. If off, they leave it all
    free GPUs that it might get."""
    starvation_ratio: float = 2.0
    """Response ratio from which a burst starts even during another member's critical segment. 2: it
    has waited as long as the burst and its switches take."""
    waiting_part_max: float = WAITING_PART_MAX
    """Maximum waiting / (waiting + running) of a job. Beyond it the group accepts no members, and
    the job that waits most is moved (PlexRL §7.2)."""
    relief_after_s: float = 60.0
    """Minimum time on a group before a job is moved because it waits; phases settle first."""
    profile_cycles: int = 3
    """Cycles of a profile, not counting the warm-up."""
    drift_tolerance: float = 0.2
    """Relative change of period or busy time, in consecutive cycles, that renews a profile."""
    repack_interval_s: float = 600.0
    """Minimum time between two moves of a job; each move doubles it."""
    migrates: bool = True
    """Whether StateManagers can copy versions between nodes; otherwise jobs stay on their nodes."""
    cold_start_patience_s: float = 60.0
    """How long a job without a profile waits for its own group before it shares one."""
    ordering: str = "hrrs"
    """Order in which a group's members run: a name in `plexrl.scheduler.rules.ordering`."""
    anticipation: bool | None = None
    """Whether an idle group switches to the member that is expected next, so that its cycle does
    not wait for the switch. None: the ordering's default (on for `hrrs`; off for the others, as
    published)."""
    node_grace_s: float = 5.0
    """Silence of a node agent after which its node counts as lost."""
    node_lease_s: float = 15.0
    """How long the agent of a node of another machine may run workers without a heartbeat that the
    scheduler answered. Then it ends them, and the node counts as lost a little later. Heartbeats
    are six times as frequent; a connection without them for half of this time is ended. Longer than
    a switch of the network's paths takes, short compared with a training step that is lost. The
    schedulers of a journal should have the same value. Without effect on Unix sockets."""
    node_replace_s: float = 120.0
    """How long WPGs wait for a lost node before they are placed elsewhere. Waiting for a reboot is
    cheaper than copying and launching all its WPGs."""
    snapshot_operations: int = 64
    """Mutations after which a WPG gets a snapshot if no switch has offloaded it. Bounds the replay
    of a recovery."""
    snapshot_work_s: float = 600.0
    """Compute seconds of these mutations after which a WPG gets a snapshot, if that comes first.
    Ten minutes are near the optimum (Daly: √(2 x snapshot x time between failures)) for a job of
    about 400 GPUs with snapshots of 1 to 2 s and one lost node a day."""
    rebuild_operations: int = 128
    """Mutations of a WPG before its durable version that are kept with their payloads, so that the
    version can be recomputed if it is damaged or lost; 0: none. They reach back to the initial
    weights or the last loaded checkpoint, or, if these would be too many, to an earlier version
    that the StateManagers keep. Twice `snapshot_operations`, so that they reach that version. Up to
    twice as many are kept until that version is on NVMe."""
    rebuild_payload_bytes_max: int = 1 << 30
    """Maximum bytes of their payloads in the blob store, for each WPG; twice that until then."""
    lost_nodes_return: bool = True
    """Whether a lost node may come back with its state. If so, WPGs that need the state wait
    without a limit; otherwise their job ends as FAILED after `node_replace_s`."""
    burst_hold_s: float = 0.05
    """Maximum time that a group idles for the holder's next operation while others wait."""
    burst_max_s: float = 300.0
    """A burst that has lasted this long while others wait yields at the next operation boundary.
    Longer than any cycle's work on a group, because an interrupted burst costs two more
    switches."""
    burst_interruptions: float = 20.0
    """A burst yields before that: after this many times the switches to another member and back,
    but not before a second. One that is not three times as long as usual may last for five times as
    long. So others wait for seconds if switches take tenths of a second, and interruptions take
    1 / 21 of the time at most. 0: after `burst_max_s` only."""
    launch_attempts: int = 3
    """Losses of a WPG's processes in a row, at the same operation or before any, after which one
    more ends the job. So does one more after ten times as many without new work in between."""
    operation_overdue_s: float = 600.0
    """Least time after which the workers of an operation, or of a move of state, that does not end
    count as hung and are replaced; 0: never. It is longer where ten times the slowest run of that
    kind is, six times as long for a kind that the deployment has not run yet, and doubles with each
    replacement until an operation has ended. After half of it the condition `operation_overdue`
    names the operation."""
    residents_max: int = 8
    """Maximum members of a node group."""
    pending_operations_max: int = 1024
    """Maximum queued operations of a deployment."""
    tenant_operations_max: int = 16_384
    """Maximum unfinished operations of a tenant."""
    deployment_payload_bytes_max: int = 8 << 30
    """Maximum bytes in the blob store for the payloads of a deployment's unfinished operations."""
    tenant_payload_bytes_max: int = 32 << 30
    """The same limit for a tenant."""
    tenant_live_jobs_max: int | None = None
    """Maximum unfinished jobs of a tenant without a limit of its own; None: no limit. `plexrl up`
    sets it."""
    history: int = 50_000
    """Finished operations kept with their results."""
    ended_jobs: int = 10_000
    """Ended jobs kept with their usage; the oldest are evicted first."""
    profiles: int = 10_000
    """Measured profiles kept for later jobs of the same name; the oldest are evicted first."""
    searches_max: int = 16
    """Failed searches for waiting jobs of one size before no more are made until capacity becomes
    free. A search takes a millisecond, and a backlog may be long."""
    tls: TlsFiles | None = None
    """Certificate for `tls://` addresses; None: there are only Unix sockets."""
    tenants: tuple[tuple[str, str], ...] = ()
    """(name, key digest) of tenants created at the first start."""
    events: BrokerConfig | None = None
    """MQTT broker that gets the states of jobs, nodes and groups; None: none does."""

    @property
    def load_bound(self) -> float:
        """`load_max` plus a tolerance for rounding, to compare a sum of duties with."""
        return self.load_max + LOAD_ROUNDING

    def __post_init__(self) -> None:
        make_policy(self.policy)
        _check_addresses(self.listen, self.tls)
        if self.ordering not in ORDERINGS:
            raise InvalidRequestError(
                f"ordering {self.ordering!r} is unknown: use one of {', '.join(ORDERINGS)}"
            )
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            # In this form the check also refuses NaN, which compares as false.
            if value is not None and not least <= value <= most:
                raise InvalidRequestError(
                    f"{name} is {value}: it must be at least {least:g} and at most {most:g}"
                )


def _check_addresses(listen: tuple[str, ...], tls: TlsFiles | None) -> None:
    if not listen:
        raise InvalidRequestError("listen is empty: give at least one address")
    for text in listen:
        if isinstance(parse_address(text), TlsAddress) and tls is None:
            raise InvalidRequestError(
                f"listen has {text}, which needs a certificate: set tls (ca, certificate, key)"
            )


def core_settings(config: SchedulerConfig) -> dict[str, Any]:
    """The settings that determine the core's decisions, as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return {name: value for name, value in plain.items() if name not in PROCESS_SETTINGS}


def planning(config: SchedulerConfig) -> dict[str, str | int | float | bool | None]:
    """The settings in `PLANNING`."""
    return {name: getattr(config, name) for name in PLANNING}


def with_core_settings(config: SchedulerConfig, settings: Mapping[str, Any]) -> SchedulerConfig:
    """`config` with the core settings that `core_settings` returned.

    Unknown settings are ignored. Missing settings keep the value of `config`, except
    `LATER_SETTINGS`.

    Raises:
        InvalidRequestError: this version does not accept a value.
    """
    hints = _types()
    known = {field.name for field in fields(SchedulerConfig)} - PROCESS_SETTINGS
    try:
        changes = {
            name: msgspec.convert(value, hints[name])
            for name, value in settings.items()
            if name in known
        }
        if settings:
            changes = {**LATER_SETTINGS, **changes}
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the settings in the journal cannot be used: {error}") from error
    return replace(config, **changes)


@cache
def _types() -> dict[str, Any]:
    """The type of each setting; to read them anew takes as long as to decode a small snapshot."""
    return get_type_hints(SchedulerConfig)
