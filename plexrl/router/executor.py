"""Carries out what the scheduler admits: split, send to every rank, gather, store, report."""

import asyncio
import json
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from plexrl.backend_capabilities import backend_capabilities
from plexrl.errors import ExecutionError, PlexRLError
from plexrl.ids import BlobRef
from plexrl.router.blobs import RESULT_SUFFIX, BlobStore
from plexrl.router.dispatch import DispatchPlan, plan_batch
from plexrl.router.reductions import (
    gather_metrics,
    gather_moves,
    loss_denominator,
    state_moved,
)
from plexrl.router.worker_link import Answer, RunName, WorkerGoneError, WorkerLink
from plexrl.scheduler.commands import CODEC, AbortOperation, DiscardBlobs, RunOperation
from plexrl.wire.operations import MUTATING, PARAMS_BY_KIND, OperationKind
from plexrl.wire.rpc import Peer
from plexrl.wire.tensors import Arrays, decode_body, encode_body

if TYPE_CHECKING:
    from plexrl.router.scheduler_link import SchedulerLink
    from plexrl.router.specs import DeploymentSpecs

LOG = logging.getLogger(__name__)

OTHER_RANKS_TIMEOUT_S = 5.0
"""How long the other ranks are waited for once one has failed: they may hang in a collective."""

SPLIT_KINDS = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD})
CHUNKS_MAX = 200_000
STREAMS_MAX = 256
Plain = dict[str, Any]
_Grant = tuple[str, int, tuple[str, ...]]
"""Group, token and workers that a run was admitted to."""


@dataclass(slots=True)
class Stream:
    """Chunks of one streamed generation, and a bell for those who read them."""

    chunks: list[Plain] = field(default_factory=list)
    done: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def ring(self) -> None:
        """Wake every reader."""
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class _Parts:
    """One run as its ranks see it."""

    payloads: list[bytes]
    """By rank; ranks that replicate share one."""
    rank_params: Plain
    plan: DispatchPlan | None
    """Of a batch whose rows are split; None of anything else."""


class Executor:
    """All runs in flight of one router."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._links: dict[str, WorkerLink] = {}
        self._runs: dict[str, tuple[_Grant, asyncio.Task[None]]] = {}
        """By operation."""
        self.streams: OrderedDict[str, Stream] = OrderedDict()
        self.scheduler: SchedulerLink | None = None
        self.specs: DeploymentSpecs | None = None

    async def on_run(self, peer: Peer, params: Plain) -> None:
        """The scheduler admits a run."""
        del peer
        command = CODEC.from_plain(params["command"])
        assert isinstance(command, RunOperation)
        # Each group counts its tokens from 1, and a WPG that has lost its node is in another group.
        grant: _Grant = (command.group, command.token, command.addresses)
        current = self._runs.get(command.operation)
        if current is not None:
            if current[0] == grant and not current[1].done():
                return
            # The run of a former grant can have no answer any more.
            current[1].cancel()
        task = asyncio.create_task(self._execute(command))
        self._runs[command.operation] = (grant, task)
        task.add_done_callback(lambda _: self._forget(command.operation, task))

    async def on_abort(self, peer: Peer, params: Plain) -> None:
        """The scheduler has a generation ended early."""
        del peer
        command = CODEC.from_plain(params["command"])
        assert isinstance(command, AbortOperation)
        for address in command.addresses:
            await self._link(address).send({"request": "abort", "operation": command.operation})

    async def on_discard(self, peer: Peer, params: Plain) -> None:
        """The scheduler gives blobs up."""
        del peer
        command = CODEC.from_plain(params["command"])
        assert isinstance(command, DiscardBlobs)
        for ref in command.blobs:
            self._blobs.discard(ref)

    async def close(self) -> None:
        """Stop everything; the scheduler has another router carry on."""
        for _, task in list(self._runs.values()):
            task.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def stream(self, operation: str) -> Stream:
        """The stream of an operation, begun if need be."""
        found = self.streams.setdefault(operation, Stream())
        while len(self.streams) > STREAMS_MAX:
            self.streams.popitem(last=False)
        return found

    def _forget(self, operation: str, task: "asyncio.Task[None]") -> None:
        current = self._runs.get(operation)
        if current is not None and current[1] is task:
            del self._runs[operation]

    def _link(self, address: str) -> WorkerLink:
        return self._links.setdefault(address, WorkerLink(address))

    async def _execute(self, command: RunOperation) -> None:
        # Once the workers have answered, a failure here no longer leaves the state as it was.
        is_applied = False
        try:
            parts = await self._parts(command)
            answers = await self._ask_ranks(command, parts)
            is_applied = command.kind in MUTATING
            await self._conclude(command, parts, answers)
        except WorkerGoneError as error:
            LOG.info("%s: worker %s is gone", command.operation, error)
        except PlexRLError as error:
            self._report_failure(command, error, state_intact=not is_applied)
        except Exception:
            LOG.exception("%s failed in the router", command.operation)
            failure = ExecutionError("the router could not carry the operation out: see its log")
            self._report_failure(command, failure, state_intact=False)

    async def _parts(self, command: RunOperation) -> _Parts:
        ranks = len(command.addresses)
        if command.payload is None:
            return _Parts([b""] * ranks, {"job": command.job}, None)
        body = await self._blobs.read(command.payload)
        if command.kind not in SPLIT_KINDS:
            return _Parts([body] * ranks, {}, None)
        assert self.specs is not None
        spec = await self.specs.await_own(command.deployment)
        _, arrays = decode_body(body)
        params: Any = msgspec.json.decode(command.params_json, type=PARAMS_BY_KIND[command.kind])
        plan = plan_batch(
            spec.layout,
            arrays["lengths"].tolist(),
            micro_batch_tokens=params.micro_batch_tokens,
            packs=backend_capabilities(spec.kind, spec.backend).packs,
        )
        rank_params: Plain = {"micro_batches": plan.micro_batches}
        if command.kind == OperationKind.FORWARD_BACKWARD:
            rank_params["denominator"] = loss_denominator(params.loss, arrays)
        parts = [encode_body({}, part) for part in plan.inputs(arrays)]
        return _Parts([parts[plan.part_of(rank)] for rank in range(ranks)], rank_params, plan)

    async def _ask_ranks(self, command: RunOperation, parts: _Parts) -> list[Answer | None]:
        """Every rank's answer; None for one that gave none after another had failed."""
        header = {
            "request": "run",
            "command": CODEC.to_plain(command),
            "rank_params": parts.rank_params,
        }
        name: RunName = (command.operation, command.token)
        on_chunk = None
        if command.kind == OperationKind.GENERATE:
            stream = self.stream(command.operation)

            def on_chunk(chunk: Plain) -> None:
                # A worker that is asked again tells its chunks from the first one on.
                if chunk["index"] == len(stream.chunks) and len(stream.chunks) < CHUNKS_MAX:
                    keys = ("index", "sample", "tokens", "logprobs")
                    stream.chunks.append({key: chunk[key] for key in keys})
                    stream.ring()

        tasks = [
            asyncio.create_task(self._link(address).run(name, header, payload, on_chunk))
            for address, payload in zip(command.addresses, parts.payloads, strict=True)
        ]
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result()[0]["reply"] == "failed" for task in done):
                    if pending:
                        await asyncio.wait(pending, timeout=OTHER_RANKS_TIMEOUT_S)
                    break
            return [task.result() if task.done() else None for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _conclude(
        self, command: RunOperation, parts: _Parts, answers: list[Answer | None]
    ) -> None:
        failed = [a[0] for a in answers if a is not None and a[0]["reply"] == "failed"]
        if failed:
            intact = len(failed) == len(answers) and all(f["state_intact"] for f in failed)
            self._report(
                "operation_failed",
                command,
                error_json=json.dumps(failed[0]["error"]),
                state_intact=intact,
            )
            return
        # An answer is only missing beside one that failed.
        finished = [answer for answer in answers if answer is not None]
        results = [header["result"] for header, _ in finished]
        arrays: Arrays = {}
        if command.replay:
            result: Plain = {}
        elif parts.plan is not None:
            ranks = parts.plan.layout.output_ranks
            per_rank = {rank: decode_body(finished[rank][1])[1]["logprobs"] for rank in ranks}
            arrays = {"logprobs": parts.plan.join(per_rank)}
            counted = [results[rank] for rank in ranks]
            result = gather_metrics(counted) if "sums" in counted[0] else {}
        else:
            result = gather_moves(results)
            if finished[0][1]:
                _, arrays = decode_body(finished[0][1])
        ref: BlobRef | None = None
        if arrays:
            ref = BlobRef(f"{command.operation}{RESULT_SUFFIX}")
            await self._blobs.write(ref, encode_body({}, arrays))
        self._report(
            "operation_finished",
            command,
            compute_s=max(float(header["compute_s"]) for header, _ in finished),
            result=ref,
            result_json=json.dumps(result),
            moved=state_moved(command.kind, result),
        )

    def _report_failure(
        self, command: RunOperation, error: PlexRLError, *, state_intact: bool
    ) -> None:
        self._report(
            "operation_failed",
            command,
            error_json=json.dumps(error.to_wire()),
            state_intact=state_intact,
        )

    def _report(self, method: str, command: RunOperation, **fields: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.report(
            method, {"operation": command.operation, "token": command.token, **fields}
        )
        if command.kind == OperationKind.GENERATE:
            stream = self.stream(command.operation)
            stream.done = True
            stream.ring()
