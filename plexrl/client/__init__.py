"""The SDK: what a controller imports; no torch."""

from plexrl.client.aio import AsyncCluster, connect_async
from plexrl.client.async_deployments import (
    AsyncReferenceDeployment,
    AsyncRewardDeployment,
    AsyncRolloutDeployment,
    AsyncTrainDeployment,
)
from plexrl.client.async_job import AsyncJob
from plexrl.client.batch import Batch
from plexrl.client.checkpoints import AsyncCheckpointFuture, CheckpointFuture
from plexrl.client.cluster import Cluster, connect
from plexrl.client.demand import DemandTrace, Segment
from plexrl.client.deployment_kinds import (
    ReferenceDeployment,
    RewardDeployment,
    RolloutDeployment,
    TrainDeployment,
)
from plexrl.client.futures import AsyncFuture, Future
from plexrl.client.generations import AsyncGenerateFuture, GenerateFuture
from plexrl.client.job import Job
from plexrl.client.results import (
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
