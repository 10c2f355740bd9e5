"""The public names of `plexrl`: what a controller imports.

Nothing heavy comes with them: no torch, no server.
"""

import plexrl.errors as errors
import plexrl.losses as losses
import plexrl.rewards as rewards
import plexrl.schedules as schedules
from plexrl.client.asynchronous.bounded_rollout import AsyncBoundedRollout
from plexrl.client.asynchronous.cluster import AsyncCluster, connect_async
from plexrl.client.asynchronous.deployment_kinds import (
    AsyncReferenceDeployment,
    AsyncRewardDeployment,
    AsyncRolloutDeployment,
    AsyncTrainDeployment,
)
from plexrl.client.asynchronous.job import AsyncJob
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.client.blocking.cluster import Cluster, connect
from plexrl.client.blocking.deployment import OpenAIAccess
from plexrl.client.blocking.deployment_kinds import (
    ReferenceDeployment,
    RewardDeployment,
    RolloutDeployment,
    TrainDeployment,
)
from plexrl.client.blocking.job import Job
from plexrl.client.data.batch import Batch
from plexrl.client.data.decode_profile import DecodeProfile
from plexrl.client.data.demand import DemandTrace, Segment
from plexrl.client.data.results import (
    CapturedSegment,
    Chunk,
    ForwardResult,
    GenerateResult,
    LoadedCheckpoint,
    Sample,
    SavedCheckpoint,
    ScoreResult,
    StepResult,
    SyncReport,
    TopLogprobs,
    TrainResult,
    WeightsSpan,
)
from plexrl.client.data.rollout_policy import (
    BoundedStaleness,
    Elastic,
    RolloutPolicy,
    TailBatching,
)
from plexrl.client.display.progress import Progress
from plexrl.client.futures.checkpoints import AsyncCheckpointFuture, CheckpointFuture
from plexrl.client.futures.forks import Fork
from plexrl.client.futures.futures import AsyncFuture, Future
from plexrl.client.futures.generations import AsyncGenerateFuture, GenerateFuture
from plexrl.client.profiling.decode_profiler import read_profile
from plexrl.errors import PlexRLError
from plexrl.model.lora import LoraSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.model.text.tokenizer import BOS, EOS, PAD, Tokenizer
from plexrl.wire.operations import LossSpec, SamplingParams

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "AsyncBoundedRollout",
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
    "BoundedRollout",
    "BoundedStaleness",
    "CapturedSegment",
    "CheckpointFuture",
    "Chunk",
    "Cluster",
    "DecodeProfile",
    "DemandTrace",
    "Elastic",
    "Fork",
    "ForwardResult",
    "Future",
    "GenerateFuture",
    "GenerateResult",
    "Job",
    "LoadedCheckpoint",
    "LoraSpec",
    "LossSpec",
    "ModelSpec",
    "OpenAIAccess",
    "Parallelism",
    "PlexRLError",
    "Progress",
    "ReferenceDeployment",
    "RewardDeployment",
    "RolloutBatch",
    "RolloutDeployment",
    "RolloutPolicy",
    "Sample",
    "SamplingParams",
    "SavedCheckpoint",
    "ScoreResult",
    "Segment",
    "StepResult",
    "SyncReport",
    "TailBatching",
    "Tokenizer",
    "TopLogprobs",
    "TrainDeployment",
    "TrainResult",
    "WeightsSpan",
    "connect",
    "connect_async",
    "errors",
    "losses",
    "read_profile",
    "rewards",
    "schedules",
    "tiny_qwen2",
]
