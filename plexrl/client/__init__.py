"""The SDK: what a controller imports; no torch."""

from plexrl.client.asynchronous.cluster import AsyncCluster, connect_async
from plexrl.client.asynchronous.deployment_kinds import (
    AsyncReferenceDeployment,
    AsyncRewardDeployment,
    AsyncRolloutDeployment,
    AsyncTrainDeployment,
)
from plexrl.client.asynchronous.job import AsyncJob
from plexrl.client.blocking.cluster import Cluster, connect
from plexrl.client.blocking.deployment_kinds import (
    ReferenceDeployment,
    RewardDeployment,
    RolloutDeployment,
    TrainDeployment,
)
from plexrl.client.blocking.job import Job
from plexrl.client.data.batch import Batch
from plexrl.client.data.demand import DemandTrace, Segment
from plexrl.client.data.results import (
    Chunk,
    ForwardResult,
    GenerateResult,
    LoadedCheckpoint,
    Sample,
    SavedCheckpoint,
    ScoreResult,
    StepResult,
    SyncReport,
    TrainResult,
    WeightsSpan,
)
from plexrl.client.futures.checkpoints import AsyncCheckpointFuture, CheckpointFuture
from plexrl.client.futures.futures import AsyncFuture, Future
from plexrl.client.futures.generations import AsyncGenerateFuture, GenerateFuture

__all__ = [
    "AsyncCheckpointFuture",
    "AsyncCluster",
    "AsyncFuture",
    "AsyncGenerateFuture",
    "AsyncJob",
    "AsyncReferenceDeployment",
    "AsyncRewardDeployment",
    "AsyncRolloutDeployment",
    "AsyncTrainDeployment",
    "Batch",
    "CheckpointFuture",
    "Chunk",
    "Cluster",
    "DemandTrace",
    "ForwardResult",
    "Future",
    "GenerateFuture",
    "GenerateResult",
    "Job",
    "LoadedCheckpoint",
    "ReferenceDeployment",
    "RewardDeployment",
    "RolloutDeployment",
    "Sample",
    "SavedCheckpoint",
    "ScoreResult",
    "Segment",
    "StepResult",
    "SyncReport",
    "TrainDeployment",
    "TrainResult",
    "WeightsSpan",
    "connect",
    "connect_async",
]
