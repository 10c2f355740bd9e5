"""The SDK: what a controller imports; no torch."""

from plexrl.client.batch import Batch
from plexrl.client.cluster import Cluster, connect
from plexrl.client.demand import DemandTrace, Segment
from plexrl.client.futures import AsyncFuture, Future
from plexrl.client.generations import GenerateFuture
from plexrl.client.job import (
    Job,
    ReferenceDeployment,
    RewardDeployment,
    RolloutDeployment,
    TrainDeployment,
)
from plexrl.client.results import (
    Chunk,
    ForwardResult,
    GenerateResult,
    Sample,
    ScoreResult,
    StepResult,
    TrainResult,
)

__all__ = [
    "AsyncFuture",
    "Batch",
    "Chunk",
    "Cluster",
    "DemandTrace",
    "ForwardResult",
    "Future",
    "GenerateFuture",
    "GenerateResult",
    "Job",
    "ReferenceDeployment",
    "RewardDeployment",
    "RolloutDeployment",
    "Sample",
    "ScoreResult",
    "Segment",
    "StepResult",
    "TrainDeployment",
    "TrainResult",
    "connect",
]
