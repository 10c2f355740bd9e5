"""Runs the operations that the scheduler admits: splits, sends, gathers, stores, reports."""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plexrl.errors import ExecutionError, PlexRLError
from plexrl.ids import BlobRef, DeploymentId
from plexrl.router.blobs.store import (
    INLINE_BYTES_MAX,
    PAYLOAD_SUFFIX,
    RESULT_SUFFIX,
    STORE_AWAY,
    BlobStore,
    digested_ref,
)
from plexrl.router.dispatch.reductions import cause_of, gather_metrics, gather_moves, state_moved
from plexrl.router.dispatch.run_parts import (
    SPLIT_KINDS,
    RunParts,
    blobs_of,
    digest_of,
    join,
    join_samples,
    result_error,
    split,
    unfinished_samples,
)
from plexrl.router.execution.early_transfers import EarlyTransfers, Workers
from plexrl.router.execution.worker_link import WorkerGoneError, WorkerLink
from plexrl.wire.messages import (
    AbortOperation,
    AbortRun,
    AnyReply,
    AnyRun,
    DiscardBlobs,
    Failed,
    Finished,
    SaveCheckpoint,
    StartRun,
    WorkerName,
    frame_header,
    read_reply,
    read_run,
)
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.messages.reports import (
    LiveWorkers,
    OperationFailed,
    OperationFinished,
    RouterReport,
    WorkersGone,
)
from plexrl.wire.operations import (
    MUTATING,
    OperationKind,
    OperationParams,
)
from plexrl.wire.rpc import Handler, as_type, method_of, on_command, on_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plexrl.router.execution.deployment_specs import DeploymentSpecs
    from plexrl.router.execution.scheduler_link import SchedulerLink
    from plexrl.router.job_files.checkpoint_quota import CheckpointQuota
    from plexrl.router.observe.run_watch import RunWatch
    from plexrl.wire.links.credentials import Credentials
    from plexrl.wire.tensors import Body

LOG = logging.getLogger(__name__)

OTHER_RANKS_TIMEOUT_S = 5.0
"""How long the router waits for the other ranks once one has failed: a collective may hang."""

STORE_RETRY_S = 1.0
"""Delay before the next try to store a result."""

UNCHANGING = frozenset({OperationKind.PUBLISH, OperationKind.SNAPSHOT})
"""Kinds that do not change a rank's state and may be repeated on ranks that have finished them."""

COUNTED_STEPS = frozenset(
    {
        OperationKind.OPTIM_STEP,
        OperationKind.LOAD_CHECKPOINT,
        OperationKind.PUBLISH,
        OperationKind.SYNC_WEIGHTS,
    }
)
"""Kinds whose workers report the number of optimizer steps in the weights."""

GONE_MAX = 10_000
"""Most deployments whose last ended incarnation is remembered."""

Answer = tuple[AnyReply, bytearray]
_Grant = tuple[str, int, tuple[str, ...]]
"""Group, fencing token and workers of an admitted run."""


@dataclass(slots=True)
class _Run:
    """A run that is executing."""

    grant: _Grant
    workers: WorkerName
    """The first of its workers."""
    task: asyncio.Task[None]
    sent: asyncio.Event
    """Set once the requests to the workers are being sent."""
    is_interrupted: bool = False
    """It was told to stop, and is continued in another run."""


class Executor:
    """All executing runs of one router."""

    def __init__(self, blobs: BlobStore, credentials: "Credentials | None" = None) -> None:
        """`credentials`: for workers on other machines."""
        self._blobs = blobs
        self._credentials = credentials
        self._links: dict[WorkerName, WorkerLink] = {}
        self._latest: dict[str, Workers] = {}
        """By deployment: the workers of its latest run with a batch."""
        self._early = EarlyTransfers()
        self._gone: OrderedDict[str, int] = OrderedDict()
        """Highest incarnation of each deployment whose workers have ended; newest last."""
        self._runs: dict[str, _Run] = {}
        self._unstored: dict[str, str] = {}
        """By operation: why its result cannot be stored yet."""
        self.scheduler: SchedulerLink | None = None
        self.specs: DeploymentSpecs | None = None
        self.checkpoint_quota: CheckpointQuota | None = None
        self.watch: RunWatch | None = None

    def handlers(self) -> dict[str, Handler]:
        """The handlers of what the scheduler tells a router."""
        return {
            "run": on_command(read_run, self.on_run),
            "abort": on_command(as_type(AbortOperation), self.on_abort),
            "discard": on_command(as_type(DiscardBlobs), self._on_discard),
            method_of(WorkersGone): on_message(WorkersGone, self.on_workers_gone),
            method_of(LiveWorkers): on_message(LiveWorkers, self.on_live_workers),
        }

    async def on_run(self, command: AnyRun) -> None:
        """Handle the admission of a run."""
        # Tokens count from 1 in each group, and a WPG that loses its node moves to another group.
        grant: _Grant = (command.group, command.token, command.addresses)
        current = self._runs.get(command.operation)
        if current is not None:
            if current.grant == grant and not current.task.done():
                return
            # Nobody accepts the result of an earlier grant's run.
            current.task.cancel()
        sent = asyncio.Event()
        task = asyncio.create_task(self._execute(command, sent))
        workers = WorkerName(command.deployment, 0, command.incarnation)
        self._runs[command.operation] = _Run(grant, workers, task, sent)
        task.add_done_callback(lambda _: self._forget(command.operation, task))

    async def on_abort(self, command: AbortOperation) -> None:
        """Handle the early end of a generation, or of some of its rows."""
        run = self._runs.get(command.operation)
        if run is not None:
            run.is_interrupted |= command.token == run.grant[1]
            # A worker does not have the run yet while its payload is still being read.
            sent = asyncio.create_task(run.sent.wait())
            await asyncio.wait({run.task, sent}, return_when=asyncio.FIRST_COMPLETED)
            sent.cancel()
        workers = _workers(command.deployment, command.incarnation, command.addresses)
        await asyncio.gather(*(self._abort(command, worker, at) for worker, at in workers))

    async def _abort(self, command: AbortOperation, worker: WorkerName, address: str) -> None:
        try:
            await self.link(worker, address).send(frame_header(AbortRun(abort=command)))
        except (WorkerGoneError, PlexRLError, OSError) as error:
            # Nothing runs on this rank.
            LOG.info("%s did not receive the abort of %s: %s", worker, command.operation, error)

    async def on_workers_gone(self, told: WorkersGone) -> None:
        """Handle the end of a deployment's workers, up to an incarnation. Their runs end without a
        report; the scheduler orders them again when there are other workers."""
        deployment = told.deployment
        self._gone[deployment] = max(told.incarnation, self._gone.pop(deployment, 0))
        while len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)
        self._end({worker for worker in self._known(deployment) if self._is_gone(worker)})

    async def on_live_workers(self, told: LiveWorkers) -> None:
        """Handle the list of all live incarnations, by deployment: what ended while no scheduler
        was connected is not reported otherwise."""
        live = told.incarnations
        found = {
            worker
            for worker in self._known()
            # Newer workers than those in the list have come up since.
            if worker.incarnation
            < live.get(DeploymentId(worker.deployment), worker.incarnation + 1)
        }
        self._end(found)

    def _known(self, deployment: str | None = None) -> Iterator[WorkerName]:
        """The workers of all links and runs, or of one deployment's."""
        for worker in self._links:
            if deployment in (None, worker.deployment):
                yield worker
        for run in self._runs.values():
            if deployment in (None, run.workers.deployment):
                yield run.workers

    def _is_gone(self, worker: WorkerName) -> bool:
        return worker.incarnation <= self._gone.get(worker.deployment, -1)

    def _end(self, gone: set[WorkerName]) -> None:
        for worker in gone & self._links.keys():
            self._links.pop(worker).worker_gone()
            latest = self._latest.get(worker.deployment)
            if latest is not None and latest.incarnation == worker.incarnation:
                del self._latest[worker.deployment]
        for run in list(self._runs.values()):
            # Also a run that still reads its payload or stores its result: nobody wants it.
            if run.workers in gone:
                run.task.cancel()

    async def _on_discard(self, command: DiscardBlobs) -> None:
        """Handle the deletion of blobs."""
        self._blobs.discard_all(command.blobs)

    @property
    def runs_count(self) -> int:
        """Number of runs that are executing."""
        return len(self._runs)

    def unstored_reason(self, operation: str) -> str | None:
        """Why this router cannot store the result of an operation that has run; None if it can."""
        return self._unstored.get(operation)

    def transfer_early(
        self, deployment: str, params: OperationParams, payload: BlobRef, body: "Body"
    ) -> None:
        """Send the payload of an operation that is being submitted on to the deployment's workers,
        if this router has executed a run of theirs."""
        assert self.specs is not None
        workers = self._latest.get(deployment)
        if workers is None:
            return
        owned = self.specs.cached(deployment, workers.incarnation)
        if owned is None:
            return
        nbytes = memoryview(body).nbytes

        async def read() -> "Body":
            # A large upload is a map of its file, and only a read checks what the file holds.
            return body if nbytes <= INLINE_BYTES_MAX else await self._blobs.read(payload)

        self._early.begin(deployment, params, payload, nbytes, read, workers, owned.spec)

    def discard_early(self, deployment: str, payload: BlobRef) -> None:
        """Let the workers forget the payload of an operation that was not accepted."""
        self._early.discard(deployment, payload)

    async def close(self) -> None:
        """Stop all runs; the scheduler assigns them to another router."""
        await self._early.close()
        for run in list(self._runs.values()):
            run.task.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _forget(self, operation: str, task: "asyncio.Task[None]") -> None:
        current = self._runs.get(operation)
        if current is not None and current.task is task:
            del self._runs[operation]

    def unreachable(self) -> list[tuple[WorkerName, float]]:
        """The workers to which requests wait for a connection, and since when, in seconds since the
        epoch. They may live: the scheduler has not said that they are gone."""
        return [
            (worker, link.unreachable_since)
            for worker, link in self._links.items()
            if link.unreachable_since is not None
        ]

    def link(self, worker: WorkerName, address: str) -> WorkerLink:
        """The connection to a worker; it is made on first use.

        Raises:
            WorkerGoneError: the worker has ended.
        """
        if self._is_gone(worker):
            raise WorkerGoneError(f"{worker} has ended")
        found = self._links.get(worker)
        if found is None:
            found = self._links[worker] = WorkerLink(worker, address, self._credentials)
        return found

    async def _execute(self, command: AnyRun, sent: asyncio.Event) -> None:
        began_at = time.monotonic()
        # After the workers have replied, a failure here no longer means unchanged state.
        is_applied = False
        try:
            if isinstance(command, SaveCheckpoint) and command.params is not None:
                assert self.checkpoint_quota is not None
                await self.checkpoint_quota.check(command.job, command.params.name)
            parts = await self._parts(command)
            answers = await self._send_to_ranks(command, parts, sent)
            is_applied = command.kind in MUTATING
            await self._conclude(command, parts, answers, began_at)
        except WorkerGoneError as error:
            LOG.info("%s: %s", command.operation, error)
        except PlexRLError as error:
            self._report_failed(command, error.to_wire(), state_intact=not is_applied)
        except Exception:
            LOG.exception("%s failed in the router", command.operation)
            failure = ExecutionError("the router could not execute the operation: see its log")
            self._report_failed(command, failure.to_wire(), state_intact=False)

    async def _parts(self, command: AnyRun) -> RunParts:
        assert self.specs is not None
        spec = None
        if command.kind in SPLIT_KINDS or (
            self.watch is not None and command.kind in self.watch.kinds
        ):
            owned = await self.specs.await_own(command.deployment, command.incarnation)
            spec = owned.spec
        payload, partial = blobs_of(command)
        if payload is not None:
            workers = command.incarnation, len(command.addresses)
            early = await self._early.take(command.deployment, payload, *workers)
            if early is not None and partial is None:
                return early
        body = None if payload is None else await self._blobs.read(payload)
        drawn = None if partial is None else await self._blobs.read(partial)
        return await split(command, body, spec, drawn)

    async def _send_to_ranks(
        self, command: AnyRun, parts: RunParts, sent: asyncio.Event
    ) -> list[Answer | None]:
        """Every rank's reply; None for a rank that did not reply after another had failed."""
        run = parts.run_of(command)
        workers = _workers(command.deployment, command.incarnation, command.addresses)
        if command.kind in SPLIT_KINDS:
            links = tuple(self.link(*worker) for worker in workers)
            self._latest[command.deployment] = Workers(command.incarnation, links)
        payload_name, partial = blobs_of(command)
        # What is left of an interrupted generation is another payload.
        staged = "" if payload_name is None or partial is not None else payload_name
        tasks = []
        targets = [
            (self.link(*workers[rank]), share) for rank, share in parts.requests(len(workers))
        ]
        for (link, share), payload in zip(targets, parts.payloads, strict=True):
            request = StartRun(run=run, share=share)
            tasks.append(asyncio.create_task(_reply(link, request, payload, staged)))
        try:
            # After one pass of the event loop each request has its position in its worker's queue.
            await asyncio.sleep(0)
            sent.set()
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(isinstance(task.result()[0], Failed) for task in done):
                    if pending:
                        await asyncio.wait(pending, timeout=OTHER_RANKS_TIMEOUT_S)
                    break
            return [task.result() if task.done() else None for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _conclude(
        self,
        command: AnyRun,
        parts: RunParts,
        answers: list[Answer | None],
        began_at: float,
    ) -> None:
        failed = [a[0] for a in answers if a is not None and isinstance(a[0], Failed)]
        if failed:
            # If only some ranks failed, the others have changed, unless the kind changes nothing.
            is_even = len(failed) == len(answers) or command.kind in UNCHANGING
            intact = is_even and None not in answers and all(each.state_intact for each in failed)
            self._report_failed(command, cause_of(failed), state_intact=intact)
            return
        # A reply is missing only if another rank failed.
        finished = [(a[0], a[1]) for a in answers if a is not None and isinstance(a[0], Finished)]
        results = [reply.result for reply, _ in finished]
        # Every rank returns the same refusal: the ranks decide together.
        refusal = results[0].pop("error", None) if command.kind in MUTATING else None
        result, body = await self._joined(command, parts, finished)
        if refusal is not None:
            result, body = {}, ()
        if self.watch is not None:
            self.watch.finished(command, parts.payloads, result, body, refusal)
        if body and (spoilt := await asyncio.to_thread(result_error, command.kind, body)):
            self._report_failed(command, spoilt.to_wire(), state_intact=True)
            return
        steps = [result["trainer_step"] for result in results if "trainer_step" in result]
        ref: BlobRef | None = None
        unfinished = 0
        if body:
            run = self._runs.get(command.operation)
            if run is not None and run.is_interrupted:
                unfinished = await asyncio.to_thread(unfinished_samples, body)
            digest = await digest_of(body)
            ref = digested_ref(command.operation, digest, RESULT_SUFFIX)
            if unfinished:
                # Kept like a payload for as long as the operation may be continued.
                stem = f"{command.operation}.{command.token}.partial"
                ref = digested_ref(stem, digest, PAYLOAD_SUFFIX)
            await self._store(command, ref, body)
        compute_s = max(reply.compute_s for reply, _ in finished)
        report = OperationFinished(
            operation=command.operation,
            token=command.token,
            compute_s=compute_s,
            transfer_s=max(0.0, time.monotonic() - began_at - compute_s),
            peak_bytes=max(reply.peak_bytes for reply, _ in finished),
            result_bytes=sum(memoryview(part).nbytes for part in body),
            result=ref,
            result_json=json.dumps(result),
            error=None if command.replay else refusal,
            moved=state_moved(command.kind, result),
            trainer_step=max(steps) if command.kind in COUNTED_STEPS and steps else None,
            unfinished_rows=unfinished,
        )
        self._report(report)

    async def _joined(
        self, command: AnyRun, parts: RunParts, finished: list[tuple[Finished, bytearray]]
    ) -> tuple[dict[str, Any], "Sequence[Body]"]:
        """The ranks' results as one result and one body in parts."""
        results = [reply.result for reply, _ in finished]
        payloads = [payload for _, payload in finished]
        if command.replay:
            return {}, ()
        if parts.plan is not None:
            body = await join(parts.plan, payloads)
            counted = [results[rank] for rank in parts.plan.layout.output_ranks]
            return gather_metrics(counted) if "sums" in counted[0] else {}, body
        if parts.generation is not None:
            body = join_samples(parts.generation, payloads, parts.continuation)
            return parts.generation.join_results(results), body
        return gather_moves(results), (payloads[0],) if payloads[0] else ()

    async def _store(self, command: AnyRun, ref: BlobRef, body: "Sequence[Body]") -> None:
        """Store a result; while the disk is full or the object store does not answer, retry. The
        operation has run, and the only other copies of its result are in the memory of this router
        and of the workers."""
        try:
            while True:
                try:
                    await self._blobs.write(ref, *body)
                    return
                except STORE_AWAY as error:
                    if command.operation not in self._unstored:
                        LOG.warning(
                            "the result of %s waits for its store: %s", command.operation, error
                        )
                    self._unstored[command.operation] = error.message
                await asyncio.sleep(STORE_RETRY_S)
        finally:
            self._unstored.pop(command.operation, None)

    def _report_failed(self, command: AnyRun, error: ErrorView, *, state_intact: bool) -> None:
        report = OperationFailed(
            operation=command.operation,
            token=command.token,
            error=error,
            state_intact=state_intact,
        )
        self._report(report)

    def _report(self, report: RouterReport) -> None:
        assert self.scheduler is not None
        self.scheduler.report(report)


async def _reply(
    link: WorkerLink, request: StartRun, payload: "Sequence[Body]", staged: str
) -> Answer:
    """The reply to a run on one rank. Raises as `WorkerLink.run`."""
    header, body = await link.run(request.run.name, frame_header(request), payload, staged)
    return read_reply(header), body


def _workers(
    deployment: str, incarnation: int, addresses: "Sequence[str]"
) -> list[tuple[WorkerName, str]]:
    """The workers of an incarnation, by rank, and their addresses."""
    return [
        (WorkerName(deployment, rank, incarnation), address)
        for rank, address in enumerate(addresses)
    ]
