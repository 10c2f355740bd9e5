"""What node agents and routers tell the scheduler: that they have joined, and what has happened.

Most reports are events: the scheduler journals them as they arrive. The method of a report is the
name of its type in snake case.
"""

from typing import Any, TypedDict

import msgspec

from plexrl.ids import BlobRef, DeploymentId, FencingToken, NodeId, OperationId, RouterId
from plexrl.process.conditions import Condition
from plexrl.wire.messages.cluster_views import ErrorView


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events. The tag is the name of the class, under the key `type`."""


class RouterJoined(Event, frozen=True, kw_only=True):
    """A router connected, for the first time or again."""

    router: RouterId


class NodeJoined(Event, frozen=True, kw_only=True):
    """A node agent connected, for the first time or again."""

    node: NodeId
    gpus: int
    gpu_memory_bytes: int
    """Memory of each GPU."""
    host_memory_bytes: int
    """Capacity of the node's host tier."""
    statemanager: str
    """Address of the node's StateManager: a Unix socket path."""
    workers: tuple["WorkerSeen", ...] = ()
    """Worker processes that the agent already runs."""
    states: tuple[DeploymentId, ...] = ()
    """Deployments whose state the node's StateManager holds."""
    node_type: str = ""
    """The operator's name for nodes of this kind, such as `h200`."""
    block: str = ""
    """Position in the topology, such as `row1/rack3`; nodes of one block are close together."""
    nvme_bytes: int = 0
    """Capacity of the node's NVMe tier."""
    host: str = ""
    """Address at which other machines reach the node; empty: they do not, and all nodes without an
    address are on the scheduler's machine."""
    ports: tuple[int, int] = (0, 0)
    """First and last port at which the ranks of a WPG may meet on this node; 0: none."""
    fabric: str = ""
    """`trusted`: the network to other trusted nodes may carry the ranks' collectives, which are not
    encrypted. Empty: WPGs do not span this node and others. Without effect if `host` is empty."""
    was_fenced: bool = False
    """The agent has ended its workers, because its lease had run out while it was cut off."""
    machine: str = ""
    """The machine on which the agent runs; another one cannot be this node as long as its lease
    lasts. Empty: the scheduler's own, or unknown."""
    gpu_kind: str = ""
    """Name of its GPUs, as the driver prints it; empty: they are virtual, and workers compute on
    the CPU."""
    speed: float = 0.0
    """Speed of training relative to other nodes; 0: by the names of its GPUs and its type."""


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker process, as an agent reports it when it connects."""

    deployment: DeploymentId
    rank: int
    incarnation: int
    address: str


class WorkerReady(Event, frozen=True, kw_only=True):
    """A worker process of this incarnation accepts connections; its GPU holds no state yet."""

    deployment: DeploymentId
    rank: int
    incarnation: int
    address: str


class WorkerExited(Event, frozen=True, kw_only=True):
    """A worker process of this incarnation ended."""

    deployment: DeploymentId
    rank: int
    incarnation: int
    reason: str
    """Exit code or signal, and the last line of its log if there is one."""
    code: str = ""
    """Code of the error that ended the process, if it reported one."""


class StateResidency(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers of a deployment's newest version on a node."""

    deployment: DeploymentId
    host_bytes: int
    nvme_bytes: int
    """Bytes that only NVMe holds, not host memory."""
    on_nvme: tuple[int, ...] = ()
    """All versions that are whole on NVMe, of the ranks on this node."""


class StateReported(Event, frozen=True, kw_only=True):
    """A node's StateManager moved state between its tiers; deployments that are not named did not
    change."""

    node: NodeId
    states: tuple[StateResidency, ...]


class StateMoved(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that a WPG's load or offload moved."""

    bytes_moved: int
    """Bytes of all ranks together."""
    tier: str
    """`host` or `nvme`: the slowest tier that a rank's state came from, or went to."""
    prefetched_bytes: int = 0
    """Bytes of these that a load found on the device, copied during the offload before it."""
    prefetch_s: float = 0.0
    """Duration of those copies."""


class OperationFinished(Event, frozen=True, gc=False):
    """A WPG completed a run of an operation on all its ranks."""

    operation: OperationId
    token: FencingToken
    """Token of the run's command; a report with another token belongs to an earlier run, and is
    ignored."""
    compute_s: float
    """Seconds on the slowest rank."""
    result: BlobRef | None = None
    result_json: str = "{}"
    """Small results and measurements as JSON text. The scheduler passes the text on to the router
    that answers the controller, and reads nothing of it. It keeps tens of thousands of these, and
    the garbage collector does not look into text."""
    moved: StateMoved | None = None
    """What a load or offload moved; None if the workers did not report it."""
    transfer_s: float = 0.0
    """Seconds in the router, without `compute_s`: splitting, sending, joining, storing."""
    result_bytes: int = 0
    error: ErrorView | None = None
    """The error of a mutation that changed the state in another way than requested, such as a step
    that dropped its gradients. The mutation is replayed like any other. None: it succeeded."""
    trainer_step: int | None = None
    """Optimizer steps in the weights after a step, checkpoint, sync or publish; None if the workers
    did not report it."""
    unfinished_rows: int = 0
    """For a generation that was interrupted: rows that are to be continued from `result`. 0: the
    result is whole."""
    peak_bytes: int = 0
    """Most memory of torch's allocator on a GPU during the run, which excludes the arenas. 0: not
    measured."""


class OperationFailed(Event, frozen=True, kw_only=True):
    """A run ended without completing."""

    operation: OperationId
    token: FencingToken
    error: ErrorView
    state_intact: bool
    """True: the WPG's state did not change, and the caller gets the error. False: a rank's state
    may have changed, or a rank hangs; the WPG is restarted from its last complete version."""


class HostMemoryReported(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a node's host tier its StateManager has allocated in advance. It is shown only,
    so it is no event."""

    node: NodeId
    ready_bytes: int
    wanted_bytes: int


class NodeConditionsReported(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong on a node now. It is shown only, so it is no event."""

    node: NodeId
    conditions: tuple[Condition, ...]


AgentReport = (
    WorkerReady | WorkerExited | StateReported | HostMemoryReported | NodeConditionsReported
)
RouterReport = OperationFinished | OperationFailed


class WorkerWanted(TypedDict):
    """The answer to `WorkerReady`."""

    wanted: bool
    """False: nobody needs the worker, and the agent ends it."""


class LiveWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a router that has connected which workers live."""

    incarnations: dict[DeploymentId, int]


class WorkersGone(msgspec.Struct, frozen=True, kw_only=True):
    """Tells all routers that a deployment's workers have ended, up to an incarnation."""

    deployment: DeploymentId
    incarnation: int


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat of a router or node agent on another machine than the scheduler's."""

    crl_number: int | None = None
    """Number of its list of revoked certificates; None: it keeps none."""


class Heartbeat(TypedDict, total=False):
    """The scheduler's answer to a hello or a `Beat`; empty on a Unix socket."""

    is_holding: bool
    """The scheduler cannot use its journal, and carries nothing out."""
    heartbeat_s: float
    """Interval of the beats that the scheduler expects; absent: it expects none."""
    silence_s: float
    """Silence after which either end closes the connection."""
    lease_s: float
    """Length of the node's lease from the beat on; 0: it is not extended. For agents only."""
    crl: str
    """A newer list of revoked certificates, as PEM."""


Hello = RouterJoined | NodeJoined
"""The first message of a connection to the scheduler."""

HELLOS: dict[str, type[Hello]] = {"router": RouterJoined, "agent": NodeJoined}
"""By the role that the sender names."""


def hello_fields(hello: Hello) -> dict[str, Any]:
    """The parameters of the call `hello`, of which `role` is one."""
    (role,) = (role for role, kind in HELLOS.items() if kind is type(hello))
    return {"role": role, **msgspec.structs.asdict(hello)}
