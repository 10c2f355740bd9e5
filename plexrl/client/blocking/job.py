"""A job, for a blocking controller."""

import atexit
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from plexrl.client.blocking.bounded_rollout import BoundedRollout
from plexrl.client.blocking.deployment_kinds import (
    ReferenceDeployment,
    RewardDeployment,
    RolloutDeployment,
    TrainDeployment,
)
from plexrl.client.blocking.job_records import JobRecords, TrainSource
from plexrl.client.calls import requests
from plexrl.client.calls.controller import Controller, check_completed
from plexrl.client.calls.heartbeats import send_heartbeats
from plexrl.client.calls.job_exit import end_with_block, report_detached, warn_if_unfinished
from plexrl.client.calls.transport import Transport
from plexrl.client.data.argument_checks import source_deployment, with_reward_head
from plexrl.client.data.demand import DemandTrace, plain_trace
from plexrl.client.data.rollout_policy import SYNCHRONOUS, RolloutPolicy, plain_fields
from plexrl.client.display.handle_repr import handle_repr
from plexrl.client.futures.futures import wait_final
from plexrl.client.profiling.declared_job import DeclaringTransport
from plexrl.client.profiling.job_quotes import JobQuotes
from plexrl.errors import ConflictError
from plexrl.limits import check_numbers
from plexrl.model.parallelism import Parallelism
from plexrl.wire.messages.overview_views import QuoteView
from plexrl.wire.messages.views import JobView
from plexrl.wire.operations import SamplingParams
from plexrl.wire.parameter_checks import check_rollout_sampling

if TYPE_CHECKING:
    from plexrl.model.lora import LoraSpec
    from plexrl.model.spec import ModelSpec

LOG = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]
Outcome = Literal["completed", "failed", "cancelled"]


class Job(JobRecords):
    """A job of this controller. As a context manager it ends the job with the block."""

    def __init__(self, transport: Transport, view: JobView, *, heartbeat: bool) -> None:
        super().__init__(transport, view, transport.controller or Controller())
        self.gradients_found: dict[str, int] = {
            deployment["deployment"]: deployment["waiting_gradients"]
            for deployment in view["deployments"]
            if deployment["waiting_gradients"]
        }
        """By deployment: the `forward_backward` calls since its last step, at the attachment."""
        self._control.receive_failure(view["failure"], self._control.acknowledged_count)
        self.left = threading.Event()
        """Set once this controller has ended the job or detached from it."""
        self._at_exit = partial(warn_if_unfinished, self, transport)
        if heartbeat:
            # A third of the timeout, so that two lost heartbeats do no harm.
            period_s = min(20.0, view["controller_timeout_s"] / 3)
            send_heartbeats(transport, self.job, self.left, period_s)
            atexit.register(self._at_exit)

    def __repr__(self) -> str:
        marks = [] if self._transport.controller is not None else ["read only"]
        return handle_repr(self, self.job, *marks, *(["ended"] if self.left.is_set() else []))

    @property
    def _is_inherited(self) -> bool:
        """Whether this process is a fork of the controller, which does not end the job."""
        return self._transport.is_inherited

    @property
    def controller(self) -> Controller | None:
        """This process as the job's controller; absent: it only reads the job."""
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
        reduce_once: bool = False,
        max_sequence_tokens: int | None = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int | None = None,
        checkpoint_bytes: int | None = None,
        pace: str = "",
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> TrainDeployment:
        """Create a model to train on `workers` GPUs, or return the existing deployment: `name` is
        unique in the job, and `model` has the initial weights.

        `parallelism` is the layout of the model over the GPUs, and implies their number. Without it
        each of `workers` (1) GPUs gets different rows. No other call depends on the layout.

        `backend` is the training backend (`fsdp`, the default; `megatron`, `deepspeed`). A row,
        prompt and completion together, has at most `max_sequence_tokens` tokens (absent: as many
        as the model has positions, at most 8192).

        It shares its GPUs in turns with other jobs' deployments, unless `exclusive`. It is placed
        on nodes of `node_type`, if given; with a demand `trace` at once, without a profile.

        With `optimizer="host"` the optimizer's state stays in host memory and the CPU makes the
        steps: a context switch moves parameters only, and a step takes longer.

        With `lora` the model is frozen, and adapters on it are trained; a context switch moves only
        the adapters. Deployments of the same model on the same GPUs share the frozen weights.

        With `compute_dtype="bfloat16"` the model computes in that dtype; parameters, gradients and
        steps stay float32. `activation_checkpointing` recomputes each layer's activations in the
        backward pass instead of keeping them: bit-identical, with less memory. `reduce_once`
        reduces gradients over the data ranks once for each `forward_backward`, not for each
        micro-batch: less communication, 4 bytes a parameter more memory.

        After each `checkpoint_every` optimizer steps the cluster saves a checkpoint `NAME-step-N`,
        and keeps the newest `checkpoint_keep` of them, in `checkpoint_bytes` bytes (absent: all).

        With a `pace`, such as `h800:qwen2.5-14b@0.01`, nothing is computed: each step sleeps as
        long as that model would take on such GPUs, times 0.01, to try scheduling without GPUs.

        Raises:
            ModelDoesNotFitError, CapacityError: not even an empty cluster could hold it.
            LayoutError: the backend cannot run the layout, or the model cannot be split so; the
                message says what is possible.
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
            "reduce_once": reduce_once,
            "max_sequence_tokens": max_sequence_tokens,
            "checkpoint_every": checkpoint_every,
            "checkpoint_keep": checkpoint_keep,
            "checkpoint_bytes": checkpoint_bytes,
            "pace": pace,
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
        max_sequence_tokens: int | None = None,
        max_concurrent_samples: int = 256,
        kv_cache_bytes: int | None = None,
        cuda_graphs: bool = True,
        lora: "LoraSpec | None" = None,
        parallelism: Parallelism | None = None,
        tp_sizes: Sequence[int] = (),
        pace: str = "",
        node_type: str = "",
        shares_gpus: bool | None = None,
        trace: DemandTrace | Mapping[str, object] | None = None,
        preemptible: bool = False,
    ) -> RolloutDeployment:
        """Create a model that generates, or return the existing deployment: `name` is unique in the
        job, and `model` has the weights before the first sync.

        It has one GPU, or as many as `parallelism` has ranks: `tp` ranks share each matrix, `dp`
        replicas share the prompts of every `generate`. The samples do not depend on it. It is
        placed on nodes of `node_type`, if given. `backend` is the engine: `torch` or `vllm`.

        A prompt and its completion have at most `max_sequence_tokens` tokens together (absent: as
        in `train_deployment`, and so that one fits into `kv_cache_bytes`); a sample ends there.
        Each replica draws at most `max_concurrent_samples` (256) at the same time; others wait.

        `kv_cache_bytes` bounds each worker's KV cache, in addition to the weights. Samples that do
        not fit are preempted and recomputed later; results count them in `metrics["preemptions"]`.

        On GPUs the steps that draw one token for each sample are captured as CUDA graphs and
        replayed, unless `cuda_graphs=False`.

        The weights are in `dtype` (`float32`, `bfloat16`); a sync casts the trainer's.
        `lora` must be the trainer's: a sync then transfers adapters only, which are merged into the
        model.

        With `tp_sizes`, such as `(1, 2, 4)` for `tp=4`, the `tp` ranks generate in smaller groups
        that join while it generates (`switch_tp`); each rank has the weights of the smallest group.

        With `shares_gpus` it shares its GPUs in turns with other deployments, as a
        `train_deployment` does: with those of other jobs, or with this job's training, which works
        while the rollout waits. Each turn moves its weights between host memory and the GPUs, and
        generations in progress end before it. With `shares_gpus=False` it has GPUs of its own. By
        default it has, too, and begins to share them if others wait for GPUs, it does not work at
        the same time as the training, and the cluster's policy plans by time; `Job.explain` says
        why. `trace` is its demand if it may share.

        With `preemptible`, it gets no GPUs of its own: it uses the idle time of a group of other
        deployments with as many GPUs, of any job, and gives way at once. Its `generate`s are
        interrupted and continued later, with the samples of an undisturbed run. For evaluation and
        data generation that may wait.

        `pace` is as in `train_deployment`. A response's length then follows from the seed, with a
        mean of a quarter of `max_tokens`.

        Raises:
            UnsupportedDtypeError: the backend cannot compute with weights in `dtype`.
            ModelDoesNotFitError, CapacityError: not even an empty cluster could hold it.
        """
        options = {
            "backend": backend,
            "dtype": dtype,
            "lora": lora,
            "max_sequence_tokens": max_sequence_tokens,
            "max_concurrent_samples": max_concurrent_samples,
            "kv_cache_bytes": kv_cache_bytes,
            "cuda_graphs": cuda_graphs,
            "parallelism": parallelism,
            "tp_sizes": tp_sizes,
            "pace": pace,
            "node_type": node_type,
            "shares_gpus": shares_gpus,
            "trace": plain_trace(trace),
            "preemptible": preemptible,
        }
        return RolloutDeployment(self._transport, self._deploy(name, "rollout", model, options))

    def rollout(
        self,
        name: str,
        model: "ModelSpec",
        source: TrainSource,
        *,
        instances: int,
        policy: RolloutPolicy = SYNCHRONOUS,
        prompts: int,
        samples: int,
        sampling: SamplingParams,
        dynamic_sampling: bool = False,
        first_batch: int = 0,
        failed_prompts_max: int = 0,
        backend: str | None = None,
        dtype: Dtype = "float32",
        max_sequence_tokens: int | None = None,
        max_concurrent_samples: int = 256,
        kv_cache_bytes: int | None = None,
        cuda_graphs: bool = True,
        lora: "LoraSpec | None" = None,
        parallelism: Parallelism | None = None,
        tp_sizes: Sequence[int] = (),
        pace: str = "",
        node_type: str = "",
        shares_gpus: bool | None = None,
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> BoundedRollout:
        """Create `instances` rollout deployments, called `name`-0 and so on, that generate while
        `source` is trained, or return the existing ones. `batches` of the result gives what to
        train on.

        Each batch has `prompts` prompts with `samples` samples each. `policy` says which weights
        may draw them. With `BoundedStaleness(0)` that is synchronous training: the samples are
        those that `generate` draws with the `seed` of `sampling`, which is needed.

        With `dynamic_sampling`, a prompt whose rewards are all equal, but for rounding (1e-6 of the
        largest, or of 1), is dropped, and another one is trained in its place. The policy of an
        existing rollout may change: what is in flight is trained if the new policy allows it, and
        otherwise begins anew before other prompts.

        The batches are numbered from `first_batch`: for a model that was trained on so many before,
        such as one whose checkpoint was loaded. The rollout fails if more than
        `failed_prompts_max` prompts are dropped one after another because all that was tried for
        them failed; 0: as many as a batch has, and at least 8.

        `backend`, `dtype`, `max_sequence_tokens`, `max_concurrent_samples`, `kv_cache_bytes`,
        `cuda_graphs`, `lora`, `parallelism`, `tp_sizes`, `pace`, `node_type`, `shares_gpus` and
        `trace` are as in `rollout_deployment`, for each instance. No two of them share a group.

        Raises:
            InvalidRequestError: a number is out of range, or `sampling` has no seed.
            ConflictError: `name` has other settings than these, beside the policy, or `source` has
                made steps since.
            ModelDoesNotFitError, CapacityError: not even an empty cluster could hold it.
        """
        check_rollout_sampling(sampling)
        numbers = {
            "instances": instances,
            "prompts": prompts,
            "samples": samples,
            "first_batch": first_batch,
            "failed_prompts_max": failed_prompts_max,
        }
        check_numbers("rollout", numbers)
        names = [f"{name}-{index}" for index in range(instances)]
        for each in names:
            self.rollout_deployment(
                each,
                model,
                backend=backend,
                dtype=dtype,
                max_sequence_tokens=max_sequence_tokens,
                max_concurrent_samples=max_concurrent_samples,
                kv_cache_bytes=kv_cache_bytes,
                cuda_graphs=cuda_graphs,
                lora=lora,
                parallelism=parallelism,
                tp_sizes=tp_sizes,
                pace=pace,
                node_type=node_type,
                shares_gpus=shares_gpus,
                trace=trace,
            )
        order = {
            "name": name,
            "source": source_deployment(source).rpartition("/")[2],
            "instances": names,
            **plain_fields(policy),
            "dynamic_sampling": dynamic_sampling,
            "prompts": prompts,
            "samples": samples,
            "sampling": asdict(sampling),
            "first_batch": first_batch,
            "failed_prompts_max": failed_prompts_max,
        }
        # Not `source` itself, which may be of an `async` controller.
        trainer = TrainDeployment(self._transport, source.deployment)
        return BoundedRollout(self._transport, self.job, order, trainer)

    def reference_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        workers: int | None = None,
        parallelism: Parallelism | None = None,
        backend: str | None = None,
        dtype: Dtype = "float32",
        exclusive: bool = False,
        max_sequence_tokens: int | None = None,
        layers_on_device: int | None = None,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> ReferenceDeployment:
        """Create a model that computes logprobs only, such as a reference policy or a teacher, or
        return the existing deployment. `name` is unique in the job, and `model` has the weights
        before the first sync.

        Each of `workers` (1) GPUs has all weights, in `dtype` (`float32`, `bfloat16`), and gets
        different rows of at most `max_sequence_tokens` tokens; with `backend="megatron"`,
        `parallelism` may cut the weights by tp, pp and ep. The deployment shares its GPUs in turns
        with other jobs' deployments and this job's trainer, unless `exclusive`.
        `node_type` and `trace` are as in `train_deployment`.

        With `layers_on_device` the model's layers stay in host memory, and are copied to so many
        places on the device while others compute: a context switch moves the other weights only.
        With two or more, copies and computation overlap. Such a deployment cannot sync its weights.

        Raises:
            UnsupportedDtypeError: the backend cannot compute with weights in `dtype`.
            ModelDoesNotFitError, CapacityError: not even an empty cluster could hold it.
        """
        options = {
            "workers": workers,
            "parallelism": parallelism,
            "backend": backend,
            "dtype": dtype,
            "exclusive": exclusive,
            "max_sequence_tokens": max_sequence_tokens,
            "layers_on_device": layers_on_device,
            "node_type": node_type,
            "trace": plain_trace(trace),
        }
        return ReferenceDeployment(self._transport, self._deploy(name, "forward", model, options))

    def reward_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        workers: int | None = None,
        parallelism: Parallelism | None = None,
        backend: str | None = None,
        dtype: Dtype = "float32",
        exclusive: bool = False,
        max_sequence_tokens: int | None = None,
        layers_on_device: int | None = None,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> RewardDeployment:
        """Create a model that scores rows, or return the existing deployment: `model` gets a head
        with one label, as in `transformers`' `AutoModelForSequenceClassification`.

        `name`, `workers`, `parallelism`, `backend`, `dtype`, `exclusive`, `max_sequence_tokens`,
        `layers_on_device`, `node_type` and `trace` are as in `reference_deployment`. Raises as
        that.
        """
        options = {
            "workers": workers,
            "parallelism": parallelism,
            "backend": backend,
            "dtype": dtype,
            "exclusive": exclusive,
            "max_sequence_tokens": max_sequence_tokens,
            "layers_on_device": layers_on_device,
            "node_type": node_type,
            "trace": plain_trace(trace),
        }
        deployed = self._deploy(name, "forward", with_reward_head(model), options)
        return RewardDeployment(self._transport, deployed)

    def finish(self, outcome: Outcome = "completed", reason: str = "") -> None:
        """End the job with an `outcome`: `completed`, `failed` or `cancelled`. `reason` is shown
        with the job. A job that has ended stays as it is.

        A completed job ends once all submitted steps and checkpoints have finished.

        Raises:
            EarlierFailureError: one of them failed and its future was not read; the job has ended
                as failed.
            JobEndedError: the job was to be completed, but had ended with another outcome.
        """
        if outcome == "completed":
            for operation in self._control.last_operations():
                self._transport.run(wait_final(operation))
        body = {"outcome": outcome, "reason": reason}
        try:
            view = self._transport.ask("POST", f"{self._path}/finish", body=body)
        finally:
            # Not earlier: until the cluster accepts the request, heartbeats keep the job attached.
            self._leave(outcome)
        if outcome == "completed":
            check_completed(view)

    def cancel(self, reason: str = "") -> None:
        """End the job as cancelled, and show `reason` with it. Pending operations never run."""
        self.finish("cancelled", reason)

    def detach(self) -> None:
        """Leave the job to the next controller that attaches it. Submitted operations continue."""
        self._leave()
        report_detached(self._transport, self.job)

    def _leave(self, outcome: Outcome | None = None) -> None:
        self.left.set()
        self._close_trackers(outcome)
        atexit.unregister(self._at_exit)

    def quote(self, *, steps: int | None = None, price: float | None = None) -> QuoteView:
        """When this job of a dry run (`create_job(dry_run=True)`) would start and end if it was
        submitted now with the deployments that it has declared, what it would cost, and whom it
        would delay. It makes `steps` cycles (absent: by its `expected_s`, or as long as earlier
        jobs of its name); `price` is that of a GPU-hour.

        Raises:
            ConflictError: the job was submitted.
            InvalidRequestError: nothing was declared, or nothing is known of its cycles.
            CapacityError, OverloadedError: as `Cluster.quotes.like`.
        """
        transport = self._transport
        if not isinstance(transport, DeclaringTransport):
            raise ConflictError(f"job {self.job!r} was submitted: `explain` says when it ends")
        asked = {**transport.declared.body(), "steps": steps, "price": price}
        return JobQuotes(transport).ask(asked)

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_with_block(self, error)

    def _deploy(
        self, name: str, kind: str, model: "ModelSpec", options: Mapping[str, object]
    ) -> str:
        self._control.check()
        call = requests.create_deployment(self.job, name, kind, model, options)
        LOG.info("deployment %s: once placed, its workers load torch and the model", name)
        deployment = str(self._transport.request(call).json()["deployment"])
        self._begin_fork(deployment, kind)
        return deployment
