"""PlexRL: LLM execution for RL with verifiable rewards, as a shared service of the cluster.

A controller imports this package and nothing heavy comes with it: no torch, no server.
"""

from plexrl import errors, losses
from plexrl.client import (
    AsyncFuture,
    Batch,
    Chunk,
    Cluster,
    DemandTrace,
    ForwardResult,
    Future,
    GenerateFuture,
    GenerateResult,
    Job,
    ReferenceDeployment,
    RewardDeployment,
    RolloutDeployment,
    Sample,
    ScoreResult,
    Segment,
    StepResult,
    TrainDeployment,
    TrainResult,
    connect,
)
from plexrl.client.aio import AsyncCluster, AsyncJob, connect_async
from plexrl.errors import PlexRLError
from plexrl.lora import LoraSpec
from plexrl.model_spec import ModelSpec, tiny_qwen2
from plexrl.parallelism import Parallelism
from plexrl.progress import Progress
from plexrl.tokenizer import BOS, EOS, PAD, Tokenizer
from plexrl.wire.operations import AdamParams, LossSpec, SamplingParams

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "AdamParams",
    "AsyncCluster",
    "AsyncFuture",
    "AsyncJob",
    "Batch",
    "Chunk",
    "Cluster",
    "DemandTrace",
    "ForwardResult",
    "Future",
    "GenerateFuture",
    "GenerateResult",
    "Job",
    "LoraSpec",
    "LossSpec",
    "ModelSpec",
    "Parallelism",
    "PlexRLError",
    "Progress",
    "ReferenceDeployment",
    "RewardDeployment",
    "RolloutDeployment",
    "Sample",
    "SamplingParams",
    "ScoreResult",
    "Segment",
    "StepResult",
    "Tokenizer",
    "TrainDeployment",
    "TrainResult",
    "connect",
    "connect_async",
    "errors",
    "losses",
    "tiny_qwen2",
]
