"""How far an admission pass has come: the state of an interrupted pass, which a snapshot holds.

Collections whose members are unique are dicts, because their order is the same in every process.
What a pass computes again from the cluster, such as fit bounds, is not here.
"""

from dataclasses import dataclass, field

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.admission.order import AdmissionKey
from plexrl.scheduler.admission.queues.gangs import BlockingRequest, EquivalenceKey
from plexrl.scheduler.admission.queues.pass_entries import Entry, IndexId
from plexrl.scheduler.placement.waiting.queue_heads import Head
from plexrl.scheduler.placement.waiting.waiting import Owner, Size, Sizes


@dataclass(slots=True, kw_only=True)
class PassProgress:
    """The state of one pass."""

    began_at: float
    newcomers: dict[DeploymentId, None] | None
    """The only deployments that may be placed; None: all."""
    has_begun_again: bool
    """It replaces an interrupted pass."""
    has_begun: bool = False
    """It was interrupted at least once."""
    deferred_newcomers: list[DeploymentId] = field(default_factory=list)
    """Newcomers since it was interrupted, for the pass after it."""
    deferred_retry: bool = False
    """Whether the pass after it considers all deployments."""
    is_over: bool = False
    heap: list[tuple[AdmissionKey, int]] = field(default_factory=list)
    """(key, number of the entry)."""
    entries: list[tuple[Entry, bool]] = field(default_factory=list)
    """(entry, whether it is a candidate). An entry that only blocks others is none."""
    blocking_sizes: dict[Sizes, None] | None = field(default_factory=dict)
    """Sizes whose blocking requests matter; None: all."""
    candidates: int = 0
    """Deployments in the heap that may be placed, and closed queues that may hold some."""
    heads: dict[DeploymentId, tuple[IndexId, Head]] = field(default_factory=dict)
    """The head of each index that is in the heap."""
    passed: dict[IndexId, Head] = field(default_factory=dict)
    """The last head of each index that was considered."""
    exhausted: dict[IndexId, None] = field(default_factory=dict)
    """Indexes in which nothing else may fit."""
    unopened_owners: dict[int, list[Owner]] = field(default_factory=dict)
    """The owners of a class that is being opened, last first."""
    unopened: dict[Sizes, int] = field(default_factory=dict)
    """Owners whose indexes of these sizes are not open yet, for sizes that may fit."""
    full: dict[Sizes, None] = field(default_factory=dict)
    """Sizes for which nothing fits, so their queues need not be opened."""
    skipped: dict[Sizes, list[Owner]] = field(default_factory=dict)
    """Owners whose indexes were not opened because the sizes were full."""
    reached: AdmissionKey | None = None
    """The key of the deployment that is considered."""
    blockers: dict[DeploymentId, tuple[Sizes, Owner]] = field(default_factory=dict)
    """Deployments in the heap that stand for equal blocking requests."""
    seen: dict[DeploymentId, None] = field(default_factory=dict)
    blocking: dict[BlockingRequest, None] = field(default_factory=dict)
    """Requests that no deployment behind them may pass."""
    reserved: dict[DeploymentId, None] = field(default_factory=dict)
    """The first deployments that starve."""
    failed: dict[tuple[EquivalenceKey, ...], None] = field(default_factory=dict)
    gang_searches: int = 0
    """Number of gangs whose search failed in this pass."""
    shares: dict[TenantId, float] = field(default_factory=dict)
    refused: dict[Size, int] = field(default_factory=dict)
    """The smallest state for which a search for free GPUs failed. Free GPUs only get fewer."""
