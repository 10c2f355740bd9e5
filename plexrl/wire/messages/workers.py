"""What routers and workers say to each other.

A message is the header of a frame: `frame_header` writes it, `read_request` and `read_reply` read
it. The batch of a run and its result are the payload of the frame.
"""

from typing import Any, NamedTuple, NotRequired, TypedDict, get_args

import msgspec

from plexrl.wire.framing import Header
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.messages.commands import AbortOperation, AnyRun


class WorkerName(NamedTuple):
    """One worker process of all times."""

    deployment: str
    rank: int
    incarnation: int


class RankShare(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of the router's plan for one rank of a run."""

    micro_batches: int = 0
    """Number of micro-batches of a batch that is split; every rank computes as many."""
    denominator: float = 0.0
    """Divisor of the loss of the whole batch."""
    first_row: int = 0
    """Number of this rank's first row among all rows of a generation."""


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="request", tag=True):
    """Base of the requests to a worker."""


class StartRun(WorkerRequest, frozen=True, kw_only=True, tag="run"):
    """Run an operation. A worker that knows the run sends its reply again."""

    run: AnyRun
    share: RankShare


class AbortRun(WorkerRequest, frozen=True, kw_only=True, tag="abort"):
    """Stop a generation, or rows of it. It is not answered."""

    abort: AbortOperation


class EngineRequest(WorkerRequest, frozen=True, kw_only=True):
    """Base of the requests to a rollout's engine that are no operations; also the answers' base."""

    ask: str = ""
    """Unique, chosen when it is sent; the reply repeats it as `operation`."""


class EngineStatistics(EngineRequest, frozen=True, kw_only=True, tag="engine_stats"):
    """Counters and queue lengths of the engine."""


class EngineLoad(EngineRequest, frozen=True, kw_only=True, tag="engine_load"):
    """Also the lengths of all unfinished rows."""


class Pause(EngineRequest, frozen=True, kw_only=True, tag="pause"):
    """Draw no tokens for a while."""

    for_s: float


class Resume(EngineRequest, frozen=True, kw_only=True, tag="resume"):
    """End a pause."""


class SetTp(EngineRequest, frozen=True, kw_only=True, tag="set_tp"):
    """Continue in tensor-parallel groups of another size."""

    tp: int
    kv: str


class ReadStream(EngineRequest, frozen=True, kw_only=True, tag="read_stream"):
    """The tokens of a streamed generation after an offset, as soon as there are some."""

    operation: str
    reader: str
    """A newer request of the same reader replaces this one."""
    stream: str
    """Name of the stream that `after` counts in; another one is read from its begin."""
    after: int


AnyEngineRequest = EngineStatistics | EngineLoad | Pause | Resume | SetTp | ReadStream
AnyRequest = StartRun | AbortRun | AnyEngineRequest


RunResult = dict[str, Any]
"""Small results and measurements of a run, by name; they differ from kind to kind and loss to
loss."""


class EngineCounters(TypedDict):
    """An engine's present state and its counters since it was created. `EngineStats` of the workers
    explains the fields."""

    running: int
    waiting: int
    paused: bool
    weights_seq: int
    tokens_drawn: int
    tokens_computed: int
    prefill_s: float
    tokens_recomputed: int
    prefix_tokens_reused: int
    preemptions: int
    kv_bytes_max: int
    block_bytes: int
    block_tokens: int
    blocks: int
    blocks_held: int
    blocks_kept: int
    tp: int
    tp_switches: int
    tp_switch_s: float
    kv_bytes_moved: int
    groups_made: int


class EngineView(EngineCounters):
    """The answer to every request to an engine but `EngineLoad` and `ReadStream`."""

    steps: int
    """Decode steps."""


class EngineSubject(TypedDict):
    """The properties that the times of an engine depend on, beside the sizes of its groups."""

    model: str
    dtype: str
    device: str
    kv_token_bytes: int


EngineRow = tuple[str, int, int, bool]
"""An unfinished row: operation, number of the row, tokens with its prompt, whether it runs."""
EngineStep = tuple[int, int, float, float, int, float]
"""Some decode steps, as `MeasuredSteps` of the workers: number, rows, tokens in the KV cache,
seconds, size of the tensor-parallel groups, and other seconds."""


class EngineLoadView(EngineCounters):
    """The answer to `EngineLoad`."""

    rows: list[EngineRow]
    steps: list[EngineStep]
    """The latest ones."""
    groups: NotRequired[list[int]]
    """Tensor-parallel group of each row."""
    tp_sizes: NotRequired[list[int]]
    """Sizes of groups that the engine can change between, the smallest first."""
    subject: NotRequired[EngineSubject]
    vocab_size: NotRequired[int]
    arrived: str | None
    """The latest sync whose version is on the engine's node."""


class StreamView(TypedDict, total=False):
    """The answer to `ReadStream`: rows, or the end, or neither if too many readers wait."""

    stream: str
    next: int
    """The offset behind the rows."""
    rows: list[Any]
    """`[row, tokens, logprobs]` of each; in a stream of rows also why it ended, its
    weights and, if asked for, its `sampling_logprobs`."""
    ended: bool


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="reply", tag=True):
    """Base of the replies of a worker."""

    operation: str
    """The operation of the run, or the `ask` of an engine request."""
    token: int
    """Fencing token of the run; 0: an engine request."""


class Finished(Reply, frozen=True, kw_only=True, tag="finished"):
    """A run has ended well on this rank."""

    result: RunResult
    compute_s: float
    peak_bytes: int = 0
    """Most memory of torch's allocator during the run. 0: not measured."""


class Failed(Reply, frozen=True, kw_only=True, tag="failed"):
    """A run or an engine request has failed on this rank."""

    error: ErrorView
    state_intact: bool = True
    """The rank's state did not change."""


class Answer(Reply, frozen=True, kw_only=True, tag="answer"):
    """The answer to an engine request."""

    answer: dict[str, Any]


AnyReply = Finished | Failed | Answer


def read_request(header: Header) -> AnyRequest:
    """The request that a worker received.

    Raises:
        msgspec.ValidationError: it is unknown or malformed.
    """
    request: AnyRequest = _read("request", header)
    return request


def read_reply(header: Header) -> AnyReply:
    """The reply of a worker. Raises as `read_request`."""
    reply: AnyReply = _read("reply", header)
    return reply


def _read(field: str, header: Header) -> Any:
    tag = header.get(field)
    # For a union msgspec would prepare all its types at each call, which takes 100 µs.
    made = _BY_TAG.get((field, tag)) if isinstance(tag, str) else None
    if made is None:
        raise msgspec.ValidationError(f"unknown {field} {tag!r}")
    return msgspec.convert(header, made)


_BY_TAG: dict[tuple[str, str], type[msgspec.Struct]] = {
    (str(made.__struct_config__.tag_field), str(made.__struct_config__.tag)): made
    for made in (*get_args(AnyRequest), *get_args(AnyReply))
}


def frame_header(message: WorkerRequest | Reply) -> Header:
    """The header of the frame of a message. The records in its fields are encoded with the frame,
    not before."""
    settings = message.__struct_config__
    assert settings.tag_field is not None
    return {settings.tag_field: settings.tag, **msgspec.structs.asdict(message)}
