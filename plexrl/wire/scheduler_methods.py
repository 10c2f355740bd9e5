"""The methods that routers call at the scheduler, each with the view that it answers with.

A method is its name on the wire. `SchedulerLink.call` gives an answer the method's type, and the
scheduler's table of handlers is checked against it, so both ends agree. Answers are not validated
when they arrive: a newer scheduler may say more.
"""

from typing import Generic, TypeVar

from plexrl.access import AddedKeyView, KeyOwnerView, Keys
from plexrl.wire.messages.cluster_views import (
    CheckpointOwnerView,
    ClusterView,
    ConditionsView,
    EmptyView,
    EtaQualityView,
    ForgottenNode,
    Groups,
    ModelRootsView,
    NeedlessPayloadsView,
    Nodes,
    NodeView,
    ServiceLevels,
    Tenants,
    TenantView,
    UsageReport,
)
from plexrl.wire.messages.node_queries import (
    JobCheckpoints,
    JobLogs,
)
from plexrl.wire.messages.overview_views import (
    JobTimesView,
    LanesView,
    OverviewView,
    PlanView,
    QueueView,
    SharesView,
)
from plexrl.wire.messages.views import (
    DeploymentView,
    ExplainedJobView,
    FailureView,
    HeartbeatView,
    Jobs,
    JobView,
    Operations,
    OperationView,
)

AnswerT = TypeVar("AnswerT")


class Method(str, Generic[AnswerT]):
    """The name of a method whose answer is an `AnswerT`."""

    __slots__ = ()


AUTHENTICATE = Method[KeyOwnerView]("authenticate")
CREATE_TENANT = Method[EmptyView]("create_tenant")
CONFIGURE_TENANT = Method[TenantView]("configure_tenant")
LIST_TENANTS = Method[Tenants]("list_tenants")
GET_TENANT = Method[TenantView]("get_tenant")
LIST_KEYS = Method[Keys]("list_keys")
ADD_KEY = Method[AddedKeyView]("add_key")
REVOKE_KEY = Method[EmptyView]("revoke_key")
MODEL_ROOTS = Method[ModelRootsView]("model_roots")
CHECKPOINT_OWNER = Method[CheckpointOwnerView]("checkpoint_owner")
LIST_USAGE = Method[UsageReport]("list_usage")
STATUS = Method[ClusterView]("status")
CONDITIONS = Method[ConditionsView]("conditions")
ETA_QUALITY = Method[EtaQualityView]("eta_quality")
OVERVIEW = Method[OverviewView]("overview")
READ_LANES = Method[LanesView]("read_lanes")
READ_QUEUE = Method[QueueView]("read_queue")
READ_PLAN = Method[PlanView]("read_plan")
JOB_TIMES = Method[JobTimesView]("job_times")
LIST_SHARES = Method[SharesView]("list_shares")
SERVICE_LEVELS = Method[ServiceLevels]("service_levels")
LIST_NODES = Method[Nodes]("list_nodes")
DRAIN_NODE = Method[NodeView]("drain_node")
REMOVE_NODE = Method[ForgottenNode]("remove_node")
LIST_GROUPS = Method[Groups]("list_groups")
SUBMIT_JOB = Method[JobView]("submit_job")
FINISH_JOB = Method[JobView]("finish_job")
ATTACH_JOB = Method[JobView]("attach_job")
HEARTBEAT = Method[HeartbeatView]("heartbeat")
GET_JOB = Method[JobView]("get_job")
LIST_JOBS = Method[Jobs]("list_jobs")
EXPLAIN_JOB = Method[ExplainedJobView]("explain_job")
ADD_JOB_KEY = Method[EmptyView]("add_job_key")
REVOKE_JOB_KEYS = Method[EmptyView]("revoke_job_keys")
CREATE_DEPLOYMENT = Method[DeploymentView]("create_deployment")
RELAYOUT_DEPLOYMENT = Method[DeploymentView]("relayout_deployment")
END_DEPLOYMENT = Method[DeploymentView]("end_deployment")
GET_DEPLOYMENT = Method[DeploymentView]("get_deployment")
SUBMIT_OPERATION = Method[OperationView]("submit_operation")
CANCEL_OPERATION = Method[OperationView]("cancel_operation")
WAIT_OPERATION = Method[OperationView]("wait_operation")
LIST_OPERATIONS = Method[Operations]("list_operations")
ACKNOWLEDGE = Method[FailureView]("acknowledge")
NEEDLESS_PAYLOADS = Method[NeedlessPayloadsView]("needless_payloads")
READ_LOG = Method[JobLogs]("read_log")
LIST_CHECKPOINTS = Method[JobCheckpoints]("list_checkpoints")
