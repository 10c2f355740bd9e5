"""Views of asynchronous rollouts. The rollout service, routers, SDK and CLI share these types."""

from typing import TypedDict

from plexrl.wire.messages.cluster_views import ErrorView


class SampleCount(TypedDict):
    """Samples and the tokens of their responses."""

    samples: int
    tokens: int


class RolloutOrderView(TypedDict):
    """What the controller has ordered, and whether it is served."""

    job: str
    name: str
    source: str
    """Name of the deployment that is trained."""
    staleness: int
    """Bound η on the versions between drawing and training."""
    over_launch_prompts: float
    over_launch_responses: float
    fixed_over_launch: bool
    plans_parallelism: bool
    scale_down: bool
    instances_min: int
    instances_max: int
    adaptive_tp: bool
    length_aware: bool
    prompts: int
    """Prompts of a batch."""
    samples: int
    """Samples of each prompt."""
    state: str
    """`joining`, `running` or `failed`."""
    failure: ErrorView | None
    """Why it failed; None: it did not."""
    joined: bool
    """All instances have the weights of the trained deployment."""
    waits_for: str
    """What it waits for, as a sentence; empty: it generates, or has failed."""


class InstanceLoadView(TypedDict):
    """The load of one instance."""

    state: str
    """`joining`, `joined`, `freed`, `draining` or `lost`."""
    reason: str
    """Why it is lost; empty: it is not."""
    version: int | None
    """Version of its weights; None, as are the next fields that may be: it has not joined."""
    trajectories: int
    """Trajectories that it holds."""
    running: int
    waiting: int
    kv_tokens: int | None
    """Tokens in its KV cache."""
    kv_budget: int | None
    """Tokens for which it has room."""
    tp: int | None
    """Size of its tensor-parallel groups; None: unknown."""
    completed: int
    """Trajectories that it has completed."""


class InstanceView(InstanceLoadView):
    """One instance."""

    pulls: int
    """Times that it got new weights."""
    pause_s: float
    """Seconds without tokens for new weights."""
    transfer_s: float
    """Seconds of fetching new weights beside generations."""


class RolloutInstancesView(TypedDict):
    """The instances, and how their number and parallelism changed."""

    scale_downs: int
    instances_wanted: int
    instances_added: int
    instances_removed: int
    instances_reason: str
    """Why their number changed last."""
    tp_switches: int
    instances: dict[str, InstanceView]


class LatestBatchView(TypedDict):
    """The batch that was requested last."""

    version: int
    trainer_step: int | None
    """Optimizer steps in the weights of that version; None: unknown."""


class BufferView(TypedDict):
    """One buffer of the staleness protocol: a batch that is being filled."""

    version: int
    state: str
    """`waiting`, `ready` or `stuck`."""
    reserved: int
    """Entries that are reserved for trajectories in flight."""
    occupied: int
    """Entries that hold a trajectory with its reward."""
    size: int


class TrainedBatchView(LatestBatchView):
    """One of the latest trained batches."""

    samples: int
    tokens: int
    """Tokens of the responses."""
    staleness: dict[str, int]
    """Samples by the number of versions between drawing and training."""
    round: str | None
    """Kind of its round of tail batching; None: none."""


class RolloutBatchesView(TypedDict):
    """The batches that are filled, ready and trained."""

    groups_wanted: int
    """Prompts that the rollout would take now."""
    next_group: int
    """Number of the next prompt."""
    next_batch: int
    latest_batch: LatestBatchView | None
    newest_version: int
    buffers: list[BufferView]
    batches_ready: int
    """Complete batches that no trainer has taken."""
    batches: list[TrainedBatchView]


class UnrewardedView(TypedDict):
    """The trajectory that has waited longest for its reward."""

    prompt: int
    waiting_s: float


class RolloutTotals(TypedDict):
    """What became of all samples so far."""

    generated: SampleCount
    trained: SampleCount
    dropped: SampleCount
    unfinished: int
    """Samples of dropped prompts that were not generated to their end."""
    aborted: SampleCount
    aborted_prompts: int
    failed_generations: int


class TrajectoriesView(TypedDict):
    """Prompts and samples: what waits, what is generated, and what became of them."""

    ranked_prompts: int
    """Prompts from which the length ranker has learnt."""
    round: str | None
    """Kind of the present round of tail batching; None: none."""
    round_extra_prompts: int
    """Prompts that the present round of tail batching starts beyond what is trained."""
    round_extra_samples: int
    """Samples of each prompt that it starts beyond what is trained."""
    over_launch_gain: float | None
    """Expected seconds for a batch without what a short round may start beyond what is trained, by
    those with the best part of it; below 1.02 nothing is started beyond. None: it is not chosen."""
    queued_prompts: int
    """Prompts that wait for a long round."""
    waiting: int
    """Trajectories that wait for an instance."""
    unrewarded: int
    oldest_unrewarded: UnrewardedView | None
    dropped: int
    """Prompts dropped."""
    dropped_reason: str
    in_flight: int
    in_flight_max: int
    staleness_seen: dict[str, int]
    """Trained samples by the number of versions between drawing and training."""
    totals: RolloutTotals
    tokens_generated: int
    tokens_per_s: float


class RolloutJournalView(TypedDict):
    """Size of the rollout's journal."""

    bytes: int
    events: int
    """Events since its last snapshot."""


class RolloutStatus(RolloutOrderView, RolloutInstancesView, RolloutBatchesView, TrajectoriesView):
    """One asynchronous rollout."""

    journal: RolloutJournalView


class Rollouts(TypedDict):
    """Asynchronous rollouts."""

    rollouts: list[RolloutStatus]


class DecodeCoefficients(TypedDict):
    """The fitted coefficients of a decode step, by token in the KV cache."""

    k1: float
    k2: float
    k3: float
    k4: float


class MeasuredRollout(TypedDict):
    """What a rollout has measured of itself, for its profile."""

    source: str
    instances: list[str]
    prompts: int
    samples: int
    max_tokens: int
    lengths: list[tuple[int, list[int]]]
    """Tokens of each of the latest trained prompts, and of its responses."""
    kv_tokens: int
    """Tokens for which the smallest instance has room."""
    decode: DecodeCoefficients
    measured_steps: int


class RolloutBody(TypedDict):
    """The answer to an exchange, or to a request for a batch."""

    body: bytes | None
    """Parameters and arrays, as `encode_body` writes them; None: there is no more of the batch."""


class ExchangeView(RolloutStatus):
    """The parameters of the answer to an exchange; its arrays hold the samples."""

    cursor: int
    events: list[int]
    """Number of the event that ended each sample."""


class BatchView(TypedDict):
    """The parameters of the answer with samples of a batch; its arrays hold the samples."""

    version: int
    rows: int
    """Samples of the whole batch."""
    rewards: list[float]
    versions: list[int]
