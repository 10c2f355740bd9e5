"""A job and its deployments, for a blocking controller."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from plexrl.client import requests
from plexrl.client.argument_checks import scoring
from plexrl.client.checkpoints import CheckpointFuture, list_call
from plexrl.client.controller import Controller, check_completed
from plexrl.client.demand import DemandTrace, plain_trace
from plexrl.client.deployment import Deployment
from plexrl.client.futures import Future, wait_final
from plexrl.client.generations import GenerateFuture
from plexrl.client.heartbeats import send_heartbeats
from plexrl.client.metric_rows import metrics_row, read_rows
from plexrl.client.results import (
    Chunk,
    ForwardResult,
    GenerateResult,
    ScoreResult,
    StepResult,
    TrainResult,
)
from plexrl.client.transport import Call, Transport
from plexrl.errors import PlexRLError
from plexrl.parallelism import Parallelism
from plexrl.wire.operations import AdamParams, LossSpec, SamplingParams

if TYPE_CHECKING:
    from plexrl.client.batch import Batch
    from plexrl.lora import LoraSpec
    from plexrl.model_spec import ModelSpec

LOG = logging.getLogger(__name__)

MICRO_BATCH_TOKENS = 16_384
Plain = dict[str, Any]


class TrainDeployment(Deployment):
    """A model that learns."""

    def forward(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Future[ForwardResult]:
        """Logprobs of every token given those before it."""
        return self._submit(requests.forward(self.deployment, batch, micro_batch_tokens))

    def forward_backward(
        self,
        batch: "Batch",
        loss: LossSpec,
        *,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> Future[TrainResult]:
        """Add the gradients of `loss` to those that wait for a step."""
        return self._submit(
            requests.forward_backward(self.deployment, batch, loss, micro_batch_tokens)
        )

    def optim_step(self, params: AdamParams | None = None, **fields: float) -> Future[StepResult]:
        """One AdamW step with the gradients that wait: `optim_step(learning_rate=1e-4)`."""
        return self._submit(requests.optim_step(self.deployment, params or AdamParams(**fields)))

    def zero_grad(self) -> Future[Plain]:
        """Drop the gradients that wait for a step; a step does so itself."""
        return self._submit(requests.zero_grad(self.deployment))

    def save_checkpoint(self, name: str, **options: Any) -> CheckpointFuture:
        """Write parameters and optimizer state; `transformers` loads the directory as it is.

        Training goes on once they are pinned (`.pinned()`); `.result()` waits until they are on the
        disk. `options` are those of `plexrl.wire.operations.CheckpointParams`: `overwrite`,
        `format` (`both`, `hf`, `training`), `dtype`, `shard_bytes_max`, `step`, `keep`,
        `keep_last`, `keep_every`, `upload`.
        """
        submission = requests.save_checkpoint(self.deployment, name, options)
        return CheckpointFuture(self._transport, self._post(submission), submission.decoder)


class ReferenceDeployment(Deployment):
    """A model that only says how likely tokens are: a reference policy, a teacher."""

    def forward(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Future[ForwardResult]:
        """Logprobs of every token given those before it."""
        return self._submit(requests.forward(self.deployment, batch, micro_batch_tokens))

    def sync_weights(
        self,
        source: TrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
    ) -> Future[Plain]:
        """As `RolloutDeployment.sync_weights`: until the next one it is that old policy."""
        return self._submit(
            requests.sync_weights(self.deployment, source, delta=delta, digest=digest)
        )


class RewardDeployment(Deployment):
    """A model that scores rows."""

    def score(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Future[ScoreResult]:
        """The score of every row, as its last token has it."""
        return self._submit(requests.score(self.deployment, batch, micro_batch_tokens))


class RolloutDeployment(Deployment):
    """A model that generates."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        stream: bool = False,
    ) -> GenerateFuture:
        """`n` samples of every prompt; with `stream` the future tells tokens as they are drawn."""
        submission = requests.generate(
            self.deployment, prompts, n, sampling or SamplingParams(), stream=stream
        )
        return GenerateFuture(self._transport, self._post(submission), submission.decoder, n)

    def generate_stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> Iterator[Chunk | GenerateResult]:
        """Tokens as they are drawn, then the whole result.

        A router that goes away in between is waited for; no chunk is given twice.
        """
        future = self.generate(prompts, n=n, sampling=sampling, stream=True)
        yield from future.stream()
        yield future.result()

    def sync_weights(
        self,
        source: TrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
        in_flight: bool = False,
        recompute_kv: bool = True,
    ) -> Future[Plain]:
        """Take over the trainer's weights as they are after what was submitted to it before.

        `delta` is whether only blocks that have changed are brought, where this deployment holds an
        earlier version of the same trainer (else all are): `"auto"` where that is quicker, `True`
        also within a machine, where comparing takes longer than copying. The result says
        `bytes_wanted`, `bytes_moved`, `fraction` of the two, the `way` (`full`, `delta`), `sources`
        (bytes by transport), and with `digest` that of the weights as they are then.

        It waits for the generations that were submitted before it; `in_flight`, they stop between
        two tokens and go on with the new weights, and each sample's `weights` says which versions
        drew it. What they have cached is computed anew, unless `recompute_kv` is False.
        """
        return self._submit(
            requests.sync_weights(
                self.deployment,
                source,
                delta=delta,
                digest=digest,
                in_flight=in_flight,
                recompute_kv=recompute_kv,
            )
        )

    def pause(self, *, for_s: float = 600.0) -> list[Plain]:
        """Have what it generates stop between two tokens, until `resume`, or for `for_s` seconds
        (at most an hour) if nobody says so; returns how its engines stand.

        What runs keeps its place and its GPUs, and can be interrupted or given other weights
        meanwhile; what is submitted meanwhile waits. To pause what is paused begins the time anew.

        Raises:
            ConflictError: it has no workers now, or their weights are not on the device.
        """
        call = requests.engine_order(self.deployment, "pause", {"for_s": for_s})
        return list(self._transport.request(call).json()["engines"])

    def resume(self) -> list[Plain]:
        """Let what it generates go on; no harm where it was not paused. Raises as `pause`."""
        call = requests.engine_order(self.deployment, "resume")
        return list(self._transport.request(call).json()["engines"])


class Job:
    """A job of this controller. As a context manager it ends the job when the block does."""

    def __init__(self, transport: Transport, view: Plain, *, heartbeat: bool) -> None:
        self._transport = transport
        self.job: str = view["job"]
        self.name: str = view["name"]
        self.gradients_found: dict[str, int] = {
            each["deployment"]: each["waiting_gradients"]
            for each in view.get("deployments", ())
            if each.get("waiting_gradients")
        }
        """`forward_backward`s without a step when this controller came, by deployment."""
        self._control = transport.controller or Controller()
        self._control.heard(view.get("failure"), self._control.mark)
        self._ended = threading.Event()
        self._path = f"/v1/jobs/{quote(self.job)}"
        if heartbeat:
            # A third of the shortest useful timeout: two beats may be lost.
            period_s = min(20.0, float(view.get("controller_timeout_s", 60.0)) / 3)
            send_heartbeats(transport, self._control, self.job, self._ended, period_s)

    @property
    def controller(self) -> Controller | None:
        """This process, where it controls the job; absent where it only looks at it."""
        return self._transport.controller

    def train_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        workers: int | None = None,
        parallelism: Parallelism | None = None,
        exclusive: bool = False,
        backend: str | None = None,
        optimizer: Literal["device", "host"] = "device",
        lora: "LoraSpec | None" = None,
        compute_dtype: Literal["float32", "bfloat16"] = "float32",
        activation_checkpointing: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, Any] | None = None,
    ) -> TrainDeployment:
        """Create (or take up again) a model that learns, on `workers` GPUs, of nodes of `node_type`
        where one is named. By a `trace` of its demand it is placed at once, without a measurement.

        `parallelism` lays the model over the GPUs, and says how many there are: `workers` can then
        be left out. Without it each of `workers` (1) GPUs gets other rows. No other call changes.

        With `optimizer="host"` the optimizer's state stays in host memory and the CPU steps it, so
        a context switch moves parameters only; a step takes longer.

        With `lora` the model is frozen and adapters on it are trained; they are all its state that
        moves. Deployments of the same model on the same GPUs share the frozen weights.

        With `compute_dtype="bfloat16"` the model computes in that; its parameters, their gradients
        and steps are float32 all the same. `activation_checkpointing` computes each layer's
        activations again in the backward pass instead of keeping them: the same bits, less memory.

        Raises:
            ModelDoesNotFitError, CapacityError: not even the empty cluster could hold it.
            LayoutError: the backend does not run this layout, or the model cannot be cut so; its
                message says what can.
        """
        options = {
            "workers": workers,
            "parallelism": parallelism,
            "exclusive": exclusive,
            "backend": backend,
            "optimizer": optimizer,
            "lora": lora,
            "compute_dtype": compute_dtype,
            "activation_checkpointing": activation_checkpointing,
            "max_sequence_tokens": max_sequence_tokens,
            "node_type": node_type,
            "trace": plain_trace(trace),
        }
        return TrainDeployment(self._transport, self._deploy(name, "train", model, options))

    def rollout_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        backend: str | None = None,
        dtype: str = "float32",
        max_sequence_tokens: int = 512,
        max_concurrent_samples: int = 256,
        kv_cache_bytes: int | None = None,
        lora: "LoraSpec | None" = None,
        parallelism: Parallelism | None = None,
        node_type: str = "",
    ) -> RolloutDeployment:
        """Create (or take up again) a model that generates, on GPUs of its own: one, or as
        `parallelism` says. `tp` ranks share each matrix; `dp` replicas share the prompts of every
        `generate`. What is drawn is the same.

        `kv_cache_bytes` bounds each worker's cache, beside the weights: samples that find no room
        in it wait and are computed anew, which results count as `metrics["preemptions"]`.

        It computes from weights in `dtype` (`float32`, `bfloat16`); what the trainer has is cast on
        the way, as torch casts it.

        With `lora`, its trainer's: a sync brings adapters only, which are merged into the model.

        Raises:
            UnsupportedDtypeError: the backend cannot compute from weights in `dtype`.
            ModelDoesNotFitError, CapacityError: not even the empty cluster could hold it.
        """
        options = {
            "backend": backend,
            "dtype": dtype,
            "lora": lora,
            "max_sequence_tokens": max_sequence_tokens,
            "max_concurrent_samples": max_concurrent_samples,
            "kv_cache_bytes": kv_cache_bytes,
            "parallelism": parallelism,
            "node_type": node_type,
        }
        return RolloutDeployment(self._transport, self._deploy(name, "rollout", model, options))

    def reference_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        workers: int = 1,
        dtype: str = "float32",
        exclusive: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, Any] | None = None,
    ) -> ReferenceDeployment:
        """Create (or take up again) a model that only says how likely tokens are, without gradients
        and optimizer: a reference policy, a teacher.

        Each of `workers` GPUs has all its weights, in `dtype`, and gets other rows. It takes turns
        on them with other jobs' deployments, and with this job's trainer.

        Raises:
            UnsupportedDtypeError: the backend cannot compute from weights in `dtype`.
            ModelDoesNotFitError, CapacityError: not even the empty cluster could hold it.
        """
        options = {
            "workers": workers,
            "dtype": dtype,
            "exclusive": exclusive,
            "max_sequence_tokens": max_sequence_tokens,
            "node_type": node_type,
            "trace": plain_trace(trace),
        }
        return ReferenceDeployment(self._transport, self._deploy(name, "forward", model, options))

    def reward_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        workers: int = 1,
        dtype: str = "float32",
        exclusive: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, Any] | None = None,
    ) -> RewardDeployment:
        """Create (or take up again) a model that scores rows: `model` with a head of one label, as
        `transformers`' `AutoModelForSequenceClassification` has it. Otherwise as
        `reference_deployment`.
        """
        options = {
            "workers": workers,
            "dtype": dtype,
            "exclusive": exclusive,
            "max_sequence_tokens": max_sequence_tokens,
            "node_type": node_type,
            "trace": plain_trace(trace),
        }
        deployed = self._deploy(name, "forward", scoring(model), options)
        return RewardDeployment(self._transport, deployed)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add a row to the job's metrics. Raises `InvalidRequestError` for what are no numbers."""
        self._control.check()
        body = metrics_row(step, values)
        self._transport.request(Call(method="POST", path=f"{self._path}/metrics", json=body))

    def metrics(self, after: int = 0) -> list[Plain]:
        """Rows of the job's metrics behind row `after`."""
        found: list[Plain] = []
        while True:
            call = Call(method="GET", path=f"{self._path}/metrics", query={"after": after})
            rows = self._transport.request(call).json()["rows"]
            if not rows:
                return found
            found += read_rows(rows)
            after = rows[-1]["index"]

    def logs(self, deployment: str | None = None, lines: int = 100) -> list[Plain]:
        """The ends of its workers' logs; a warning is logged for every node that gave none."""
        found = self.read_logs(deployment, lines)
        for each in found["failed"]:
            LOG.warning("no logs of node %s: %s", each["node"], each["reason"])
        return list(found["logs"])

    def read_logs(self, deployment: str | None = None, lines: int = 100) -> Plain:
        """`logs`: the ends of its workers' logs; `failed`: the nodes that gave none, and why."""
        query: Plain = {"lines": lines}
        if deployment is not None:
            query["deployment"] = deployment
        call = Call(method="GET", path=f"{self._path}/logs", query=query)
        return dict(self._transport.request(call).json())

    def checkpoints(self) -> list[Plain]:
        """Its checkpoints by name, with `state`, `step`, bytes written and how `upload` goes."""
        return list(self._transport.request(list_call(self.job)).json()["checkpoints"])

    def delete_checkpoint(self, name: str) -> None:
        """Delete a checkpoint from the disk. Raises `CheckpointNotFoundError`."""
        path = f"{self._path}/checkpoints/{quote(name, safe='')}"
        self._transport.request(Call(method="DELETE", path=path))

    def explain(self) -> Plain:
        """Why it waits or runs as it does: a summary, its unfinished operations with reason, holder
        and estimated start, its deployments with how they got their group or why they have none."""
        call = Call(method="GET", path=f"{self._path}/explain")
        return dict(self._transport.request(call).json())

    def operations(self, after: int = 0, limit: int = 1000) -> list[Plain]:
        """As `Cluster.operations`, of this job."""
        query = {"job": self.job, "after": after, "limit": limit}
        call = Call(method="GET", path="/v1/operations", query=query)
        return list(self._transport.request(call).json()["operations"])

    def status(self) -> Plain:
        """The job as the scheduler sees it."""
        return dict(self._transport.request(Call(method="GET", path=self._path)).json())

    def deployment_status(self, deployment: str) -> Plain:
        """As `Deployment.status`, by name (`<job>/<name>`, or the name alone)."""
        name = quote(deployment.rpartition("/")[2])
        call = Call(method="GET", path=f"{self._path}/deployments/{name}")
        return dict(self._transport.request(call).json())

    def finish(self, outcome: str = "completed", reason: str = "") -> None:
        """End the job: `completed`, `failed` or `cancelled`. A job that ended stays as it is.

        A job is completed once all steps and checkpoints that were submitted are done.

        Raises:
            EarlierFailureError: one of them failed and its future was not read; the job has ended
                as failed.
            JobEndedError: it was to be completed, and has ended otherwise before.
        """
        if outcome == "completed":
            for operation in self._control.last_operations():
                wait_final(self._transport, operation)
        body = {"outcome": outcome, "reason": reason}
        call = Call(method="POST", path=f"{self._path}/finish", json=body)
        try:
            view = self._transport.request(call).json()
        finally:
            # Not before: a cluster that holds is to see that this controller lives.
            self._ended.set()
        if outcome == "completed":
            check_completed(view)

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            if not self._ended.is_set():
                self._complete()
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        try:
            self.finish("cancelled" if interrupted else "failed", reason)
        except PlexRLError as second:
            # The block's own error is the one to show.
            LOG.warning("the job could not be ended: %s", second)

    def _complete(self) -> None:
        try:
            self.finish()
        except KeyboardInterrupt:
            # Whoever interrupts the wait for the last operations does not want them.
            self.finish("cancelled", "KeyboardInterrupt")
            raise

    def _deploy(self, name: str, kind: str, model: "ModelSpec", options: Plain) -> str:
        self._control.check()
        call = requests.create_deployment(self.job, name, kind, model, options)
        LOG.info("deployment %s: once it has GPUs its workers load torch and the model", name)
        return str(self._transport.request(call).json()["deployment"])
