"""A job, for a blocking controller."""

import atexit
import logging
import threading
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat
from urllib.parse import quote

from plexrl.client.blocking.deployment_kinds import (
    ReferenceDeployment,
    RewardDeployment,
    RolloutDeployment,
    TrainDeployment,
)
from plexrl.client.calls import requests
from plexrl.client.calls.controller import Controller, check_completed
from plexrl.client.calls.heartbeats import send_heartbeats
from plexrl.client.calls.transport import Call, Transport
from plexrl.client.data.argument_checks import scoring
from plexrl.client.data.demand import DemandTrace, plain_trace
from plexrl.client.data.metric_rows import metrics_row, read_rows
from plexrl.client.display.handle_repr import handle_repr
from plexrl.client.display.leaving import leave_block, tell_detached, warn_if_unfinished
from plexrl.client.futures.checkpoints import list_call
from plexrl.client.futures.futures import wait_final
from plexrl.model.parallelism import Parallelism

if TYPE_CHECKING:
    from plexrl.model.lora import LoraSpec
    from plexrl.model.spec import ModelSpec

LOG = logging.getLogger(__name__)

Plain = dict[str, Any]
Dtype = Literal["float32", "bfloat16"]
Outcome = Literal["completed", "failed", "cancelled"]


class Job:
    """A job of this controller. As a context manager it ends the job when the block does."""

    def __init__(self, transport: Transport, view: Plain, *, heartbeat: bool) -> None:
        self._transport = transport
        self.job: str = view["job"]
        self.name: str = view["name"]
        self.place = transport.place
        """Where another process finds its cluster."""
        self.gradients_found: dict[str, int] = {
            each["deployment"]: each["waiting_gradients"]
            for each in view.get("deployments", ())
            if each.get("waiting_gradients")
        }
        """`forward_backward`s without a step when this controller came, by deployment."""
        self._control = transport.controller or Controller()
        self._control.heard(view.get("failure"), self._control.mark)
        self.left = threading.Event()
        """Set once this controller has ended the job, or detached it."""
        self._path = f"/v1/jobs/{quote(self.job)}"
        self._at_exit = partial(warn_if_unfinished, self, transport)
        if heartbeat:
            # A third of the shortest useful timeout: two beats may be lost.
            period_s = min(20.0, float(view.get("controller_timeout_s", 60.0)) / 3)
            send_heartbeats(transport, self.job, self.left, period_s)
            atexit.register(self._at_exit)

    def __repr__(self) -> str:
        marks = [] if self._transport.controller is not None else ["looked at"]
        return handle_repr(self, self.job, *marks, *(["ended"] if self.left.is_set() else []))

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
        compute_dtype: Dtype = "float32",
        activation_checkpointing: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> TrainDeployment:
        """Create a model that learns, on `workers` GPUs, or take it up again: `name` names it in
        the job, and `model` is what its weights and its optimizer begin with.

        `parallelism` lays the model over the GPUs, and says how many there are: `workers` can then
        be left out. Without it each of `workers` (1) GPUs gets other rows. No other call changes.

        `backend` is what trains (`fsdp`, the default; `megatron`, `deepspeed`). A row, prompt and
        completion together, has at most `max_sequence_tokens` (512) tokens.

        It takes turns on its GPUs with other jobs' deployments, unless it is `exclusive`. It is put
        on nodes of `node_type` where one is named. With a `trace` of its demand it is placed at
        once, without a measurement.

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
        dtype: Dtype = "float32",
        max_sequence_tokens: int = 512,
        max_concurrent_samples: int = 256,
        kv_cache_bytes: int | None = None,
        lora: "LoraSpec | None" = None,
        parallelism: Parallelism | None = None,
        node_type: str = "",
    ) -> RolloutDeployment:
        """Create a model that generates, on GPUs of its own, or take it up again: `name` names it
        in the job, and `model` is what its weights are before the first sync.

        It has one GPU, or as many as `parallelism` says: `tp` ranks share each matrix, `dp`
        replicas share the prompts of every `generate`. What is drawn is the same. It is put on
        nodes of `node_type` where one is named. `backend` is what draws (`torch`, the default, or
        `vllm`).

        A prompt and its completion have at most `max_sequence_tokens` (512) tokens together: a
        sample that comes there ends. At most `max_concurrent_samples` (256) are drawn side by side
        on each replica; more wait.

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
        dtype: Dtype = "float32",
        exclusive: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> ReferenceDeployment:
        """Create a model that only says how likely tokens are, without gradients and optimizer, or
        take it up again: a reference policy, a teacher. `name` names it in the job, `model` is what
        its weights are before the first sync.

        Each of `workers` GPUs has all its weights, in `dtype` (`float32`, `bfloat16`), and gets
        other rows of at most `max_sequence_tokens` (512) tokens. It takes turns on them with other
        jobs' deployments, and with this job's trainer, unless it is `exclusive`. `node_type` and
        `trace` are as those of `train_deployment`.

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
        dtype: Dtype = "float32",
        exclusive: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> RewardDeployment:
        """Create a model that scores rows, or take it up again: `model` with a head of one label,
        as `transformers`' `AutoModelForSequenceClassification` has it.

        `name`, `workers`, `dtype`, `exclusive`, `max_sequence_tokens`, `node_type` and `trace` are
        as those of `reference_deployment`. Raises as that.
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

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Add a row to the job's metrics: `values` by name, of the `step` by the controller's own
        count. NaN and infinite values are kept as such. Rows are only added: a second one of the
        same step replaces nothing.

        Raises:
            InvalidRequestError: one of `values` is no number.
        """
        self._control.check()
        body = metrics_row(step, values)
        self._transport.request(Call(method="POST", path=f"{self._path}/metrics", json=body))

    def metrics(self, *, after: int = 0) -> list[Plain]:
        """Rows of the job's metrics whose `index` is above `after`, oldest first; each has `index`,
        `step`, `time` (seconds since the epoch) and `values`."""
        found: list[Plain] = []
        while True:
            call = Call(method="GET", path=f"{self._path}/metrics", query={"after": after})
            rows = self._transport.request(call).json()["rows"]
            if not rows:
                return found
            found += read_rows(rows)
            after = rows[-1]["index"]

    def logs(self, deployment: str | None = None, *, lines: int = 100) -> list[Plain]:
        """The last `lines` of each worker's log, of one `deployment` (`<job>/<name>`, or the name)
        or of all; a warning is logged for every node that gave none."""
        found = self.read_logs(deployment, lines=lines)
        for each in found["failed"]:
            LOG.warning("no logs of node %s: %s", each["node"], each["reason"])
        return list(found["logs"])

    def read_logs(self, deployment: str | None = None, *, lines: int = 100) -> Plain:
        """`logs`: the last `lines` of each worker's log, of one `deployment` or of all; `failed`:
        the nodes that gave none, and why."""
        query: Plain = {"lines": lines}
        if deployment is not None:
            query["deployment"] = deployment
        call = Call(method="GET", path=f"{self._path}/logs", query=query)
        return dict(self._transport.request(call).json())

    def checkpoints(self) -> list[Plain]:
        """Its checkpoints by name, with `state`, `step`, bytes written and how `upload` goes."""
        return list(self._transport.request(list_call(self.job)).json()["checkpoints"])

    def delete_checkpoint(self, name: str) -> None:
        """Delete the checkpoint `name` from the disk. Raises `CheckpointNotFoundError`."""
        path = f"{self._path}/checkpoints/{quote(name, safe='')}"
        self._transport.request(Call(method="DELETE", path=path))

    def explain(self) -> Plain:
        """Why it waits or runs as it does: a summary, its unfinished operations with reason, holder
        and estimated start, its deployments with how they got their group or why they have none,
        and as `holders` the jobs that have the GPUs it waits for, those left open first."""
        call = Call(method="GET", path=f"{self._path}/explain")
        return dict(self._transport.request(call).json())

    def operations(self, *, after: int = 0, limit: int = 1000) -> list[Plain]:
        """Finished operations of this job behind index `after`, oldest first, at most `limit`: as
        `Cluster.operations`."""
        query = {"job": self.job, "after": after, "limit": limit}
        call = Call(method="GET", path="/v1/operations", query=query)
        return list(self._transport.request(call).json()["operations"])

    def status(self) -> Plain:
        """The job as the scheduler sees it: `state`, `reason`, its deployments and times."""
        return dict(self._transport.request(Call(method="GET", path=self._path)).json())

    def deployment_status(self, deployment: str) -> Plain:
        """As `Deployment.status`, of the `deployment` of that name (`<job>/<name>`, or the name
        alone)."""
        name = quote(deployment.rpartition("/")[2])
        call = Call(method="GET", path=f"{self._path}/deployments/{name}")
        return dict(self._transport.request(call).json())

    def finish(self, outcome: Outcome = "completed", reason: str = "") -> None:
        """End the job with an `outcome`: `completed`, `failed` or `cancelled`. `reason` is shown to
        whoever looks at it. A job that ended stays as it is.

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
            self._leave()
        if outcome == "completed":
            check_completed(view)

    def cancel(self, reason: str = "") -> None:
        """End the job as cancelled. Operations that have not been carried out never are.
        `reason` is shown to whoever looks at the job."""
        self.finish("cancelled", reason)

    def detach(self) -> None:
        """Leave the job to whoever attaches it. What was submitted goes on."""
        self._leave()
        tell_detached(self._transport, self.job)

    def _leave(self) -> None:
        self.left.set()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave_block(self, error)

    def _deploy(self, name: str, kind: str, model: "ModelSpec", options: Plain) -> str:
        self._control.check()
        call = requests.create_deployment(self.job, name, kind, model, options)
        LOG.info("deployment %s: once it has GPUs its workers load torch and the model", name)
        return str(self._transport.request(call).json()["deployment"])
