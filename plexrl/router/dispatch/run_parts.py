"""Splits the payload of a run into parts for its ranks, and joins the ranks' results.

Planning, splitting and joining handle whole batches, so large batches are handled in a thread; the
event loop serves other clients meanwhile. If one rank gets all rows, nothing is split: the payload
is sent, and the result stored, byte for byte.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from plexrl.errors import PlexRLError
from plexrl.ids import BlobRef
from plexrl.model.capabilities import backend_capabilities
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.router.blobs.store import INLINE_BYTES_MAX
from plexrl.router.dispatch.continuation import Continuation, unfinished_rows
from plexrl.router.dispatch.generate_plan import GeneratePlan, plan_generate
from plexrl.router.dispatch.plan import DispatchPlan, plan_batch
from plexrl.router.dispatch.reductions import loss_denominator, non_finite_error
from plexrl.wire.messages import AnyRun, Compute, Forward, ForwardBackward, Generate, RankShare
from plexrl.wire.operations import (
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    OperationKind,
    OperationParams,
)
from plexrl.wire.tensors import Arrays, Body, decode_body, encode_parts

SPLIT_KINDS = frozenset(
    {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD, OperationKind.GENERATE}
)


@dataclass(frozen=True, slots=True)
class RunParts:
    """The inputs that the ranks of one run receive."""

    payloads: Sequence[Sequence[Body]]
    """By rank, each in parts to send one after another; ranks that replicate share a payload."""
    share: RankShare
    """What each rank is told beside the run; unlike this, the shares of a `generate` differ."""
    plan: DispatchPlan | None
    """Plan of a batch whose rows are split; None for other runs."""
    generation: GeneratePlan | None = None
    """Plan of a `generate`; `payloads` then has one entry for each share, and other ranks receive
    nothing."""
    continuation: Continuation | None = None
    """The rest of an interrupted `generate`, and the tokens drawn before; its rows are the
    prompts of `generation`."""

    def requests(self, ranks: int) -> list[tuple[int, RankShare]]:
        """The ranks, of so many `ranks`, that receive a request, each with its share; in the order
        of `payloads`."""
        if self.generation is None:
            return [(rank, self.share) for rank in range(ranks)]
        plan = self.generation
        return [(share.rank, RankShare(first_row=plan.first_row(share))) for share in plan.shares]

    def run_of(self, command: AnyRun) -> AnyRun:
        """The run that the ranks receive: a continued generation has other parameters."""
        if self.continuation is None:
            return command
        return msgspec.structs.replace(command, params=self.continuation.params)


async def split(
    command: AnyRun, body: Body | None, spec: DeploymentSpec | None, partial: Body | None = None
) -> RunParts:
    """Split the payload of `command` for its ranks; `spec` is the specification of its deployment,
    needed for the kinds in `SPLIT_KINDS`, and `partial` the blob of a `generate`'s `partial`."""
    ranks = len(command.addresses)
    if body is None or not isinstance(command, Forward | ForwardBackward | Generate):
        return RunParts([() if body is None else (body,)] * ranks, RankShare(), None)
    assert spec is not None
    assert command.params is not None, "the router checked the parameters before it submitted them"
    return await split_batch(command.params, ranks, body, spec, partial)


def blobs_of(command: AnyRun) -> tuple[BlobRef | None, BlobRef | None]:
    """The payload of a run, and what interrupted runs of its operation drew."""
    match command:
        case Generate():
            return command.payload, command.partial
        case Compute():
            return command.payload, None
        case _:
            return None, None


async def split_batch(
    params: OperationParams,
    ranks: int,
    body: Body,
    spec: DeploymentSpec,
    partial: Body | None = None,
) -> RunParts:
    """As `split`, for an operation of a kind in `SPLIT_KINDS` with these parameters and so many
    `ranks`. The same arguments always give the same parts."""
    if memoryview(body).nbytes + memoryview(partial or b"").nbytes <= INLINE_BYTES_MAX:
        return _split(params, ranks, body, spec, partial)
    return await asyncio.to_thread(_split, params, ranks, body, spec, partial)


async def join(plan: DispatchPlan, payloads: Sequence[bytearray]) -> Sequence[Body]:
    """Join the ranks' results about the batch's tokens (`logprobs`, `entropy` and so on) or rows
    (`scores`) into one body, in parts."""
    if sum(len(payload) for payload in payloads) <= INLINE_BYTES_MAX:
        return _join(plan, payloads)
    return await asyncio.to_thread(_join, plan, payloads)


def join_samples(
    plan: GeneratePlan, payloads: Sequence[bytearray], continuation: Continuation | None = None
) -> Sequence[Body]:
    """Join the samples of all shares, and what a continued generation drew before, into one body,
    in parts."""
    if continuation is None and len(payloads) == 1:
        return (payloads[0],)
    joined = plan.join_arrays([decode_body(payload)[1] for payload in payloads])
    if continuation is not None:
        joined = continuation.joined(joined)
    return encode_parts({}, joined)


async def digest_of(body: Sequence[Body]) -> str:
    """The xxh3 digest of a body in parts, in hexadecimal."""

    def compute() -> str:
        digest = xxhash.xxh3_128()
        for part in body:
            digest.update(part)
        return digest.hexdigest()

    if sum(memoryview(part).nbytes for part in body) <= INLINE_BYTES_MAX:
        return compute()
    return await asyncio.to_thread(compute)


def result_error(kind: OperationKind, body: Sequence[Body]) -> PlexRLError | None:
    """As `non_finite_error`, of a joined body in parts. Other kinds compute no such numbers."""
    return non_finite_error(kind, _arrays(body)) if kind in SPLIT_KINDS else None


def unfinished_samples(body: Sequence[Body]) -> int:
    """Number of samples in a joined body that an interruption cut."""
    return unfinished_rows(_arrays(body))


def _arrays(body: Sequence[Body]) -> Arrays:
    return decode_body(body[0] if len(body) == 1 else b"".join(body))[1]


def _split(
    params: OperationParams, ranks: int, body: Body, spec: DeploymentSpec, partial: Body | None
) -> RunParts:
    _, arrays = decode_body(body)
    if isinstance(params, GenerateParams) and partial is not None:
        left = Continuation(params, arrays, decode_body(partial)[1])
        generation = plan_generate(spec.layout, len(left.unfinished), 1)
        shares = [encode_parts({}, share.inputs(left.arrays)) for share in generation.shares]
        return RunParts(shares, RankShare(), None, generation, left)
    if isinstance(params, GenerateParams):
        generation = plan_generate(spec.layout, len(arrays["lengths"]), params.samples_per_prompt)
        if len(generation.shares) == 1:
            return RunParts([(body,)], RankShare(), None, generation)
        shares = [encode_parts({}, share.inputs(arrays)) for share in generation.shares]
        return RunParts(shares, RankShare(), None, generation)
    assert isinstance(params, ForwardParams | ForwardBackwardParams)
    plan = plan_batch(
        spec.layout,
        arrays["lengths"].tolist(),
        micro_batch_tokens=params.micro_batch_tokens,
        packs=backend_capabilities(spec.kind, spec.backend).packs,
    )
    denominator = 0.0
    if isinstance(params, ForwardBackwardParams):
        denominator = loss_denominator(params.loss, arrays)
    added = RankShare(micro_batches=plan.micro_batches, denominator=denominator)
    if plan.is_whole:
        return RunParts([(body,)] * ranks, added, plan)
    parts = [encode_parts({}, part) for part in plan.inputs(arrays)]
    return RunParts([parts[plan.part_of(rank)] for rank in range(ranks)], added, plan)


def _join(plan: DispatchPlan, payloads: Sequence[bytearray]) -> Sequence[Body]:
    ranks = plan.layout.output_ranks
    results = {rank: decode_body(payloads[rank])[1] for rank in ranks}
    names = results[ranks[0]]
    if plan.is_whole:
        wanted = len(plan.lengths) if "scores" in names else plan.tokens
        for name, array in names.items():
            assert len(array) == wanted, f"the rank returned {name} of some rows only"
        return (payloads[ranks[0]],)
    join = plan.join_rows if "scores" in names else plan.join
    return encode_parts(
        {}, {name: join({rank: results[rank][name] for rank in ranks}) for name in names}
    )
