"""The kinds of deployment, for blocking controllers: train, reference, reward, rollout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plexrl.client.blocking.deployment import Deployment, OpenAIAccess, open_access, read_captured
from plexrl.client.blocking.judges import (
    Answers,
    ask_for_probabilities,
    ask_for_replies,
    ask_for_scores,
)
from plexrl.client.calls import requests
from plexrl.client.calls.transport import deployment_path
from plexrl.client.data.decode_profile import DecodeProfile
from plexrl.client.data.results import (
    CapturedSegment,
    Chunk,
    ForwardResult,
    GenerateResult,
    Sample,
    ScoreResult,
    StepResult,
    SyncReport,
    TrainResult,
)
from plexrl.client.futures.checkpoints import CheckpointFuture
from plexrl.client.futures.futures import Future
from plexrl.client.futures.generations import GenerateFuture
from plexrl.client.profiling.decode_profiler import DecodeProfiler
from plexrl.model.parallelism import Parallelism
from plexrl.rewards.graders.judge import Judge
from plexrl.wire.messages.workers import EngineView
from plexrl.wire.operations import (
    MICRO_BATCH_TOKENS,
    SHARD_BYTES_MAX,
    AdamParams,
    CheckpointParams,
    ForwardParams,
    LossSpec,
    SamplingParams,
)

if TYPE_CHECKING:
    import os

    from plexrl.client.data.batch import Batch
    from plexrl.wire.messages.views import EngineStates

JudgingPrompt = Callable[[list[int], Sample], list[int]]
"""Maps a prompt and one of its samples to what a judge is asked, in the judge's token ids."""
JUDGED_ROWS = 256
"""Most judging prompts of one operation."""
JUDGED_AT_ONCE = 8
"""Most generations of a judge at the same time: its engine batches them."""
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


class TrainDeployment(Deployment):
    """A model that is trained."""

    def forward(
        self,
        batch: "Batch",
        *,
        entropy: bool = False,
        top_logprobs: int = 0,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> Future[ForwardResult]:
        """Logprobs of every token of `batch` given the tokens before it. Gradients do not change.

        With `entropy` also the entropy of each token's distribution, and with `top_logprobs` ids
        and logprobs of so many likeliest tokens (at most 128).

        `micro_batch_tokens` (16 384) bounds the tokens, padding included, that one GPU runs through
        the model at once. It changes memory and speed, and the result by rounding only.
        """
        params = ForwardParams(
            entropy=entropy, top_logprobs=top_logprobs, micro_batch_tokens=micro_batch_tokens
        )
        return self._submit(requests.forward(self.deployment, batch, params))

    def forward_backward(
        self,
        batch: "Batch",
        loss: LossSpec,
        *,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> Future[TrainResult]:
        """Add the gradients of `loss` over `batch` to the accumulated gradients.

        `loss` is one of `plexrl.losses`; its docstring lists the per-token values that the batch
        must have and how tokens are reduced to one number (`reduction`). The mean is over this
        batch: gradients of several calls before a step are added, not averaged.

        `micro_batch_tokens` (16 384) bounds the tokens, padding included, that one GPU runs through
        the model at once. A larger batch is run in parts whose gradients add up to the same.

        Raises:
            BatchShapeError: the batch lacks values that the loss needs.
        """
        return self._submit(
            requests.forward_backward(self.deployment, batch, loss, micro_batch_tokens)
        )

    def optim_step(
        self,
        *,
        learning_rate: float,
        optimizer: Literal["adamw", "sgd", "muon"] = "adamw",
        momentum: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
        divide_by: float = 1.0,
    ) -> Future[StepResult]:
        """Make one optimizer step with the accumulated gradients, and zero them. Each step has its
        own `learning_rate`, so the controller decides on the schedule (`plexrl.schedules`).

        `optimizer` is AdamW (Loshchilov & Hutter 2019); SGD as of torch, whose weight decay is
        added to the gradients; or Muon (Jordan et al. 2024), for the matrices of decoder layers:
        AdamW steps the rest with the same rate. `momentum` is that of SGD (absent: 0) or Muon
        (absent: 0.95). Muon needs backend fsdp or deepspeed, and its state on the device. Choose
        one optimizer for a deployment: momentum is kept in place of AdamW's first moment.

        `beta1` and `beta2` are the decay rates of the first and second moment; `eps` is added to
        the root of the second moment. `weight_decay` is decoupled: every parameter is first
        multiplied by 1 - learning_rate · weight_decay. `grad_clip_norm` is the largest global norm
        of the gradients, to which larger ones are scaled down; 0 does not clip.

        `divide_by` divides the gradients before all else. After losses with the `reduction` `sum`
        (or `sequence_sum`), with the tokens (or rows) that count in all batches since the last
        step, the step is that by the mean over all of them, whatever their sizes.

        Raises, from the future:
            NonFiniteGradientError: the norm is not finite. The gradients are dropped, the
                parameters are unchanged, and the step does not count.
            NonFiniteWeightsError: the step made a parameter infinite or NaN; weights and gradients
                are those before the step.
        """
        params = AdamParams(
            learning_rate=learning_rate,
            optimizer=optimizer,
            momentum=momentum,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
            divide_by=divide_by,
        )
        return self._submit(requests.optim_step(self.deployment, params))

    def zero_grad(self) -> Future[dict[str, object]]:
        """Drop the accumulated gradients; a step also drops them. The result is empty."""
        return self._submit(requests.zero_grad(self.deployment))

    def publish(self) -> Future[dict[str, object]]:
        """Publish the weights for syncs with `published`. The result has the number of optimizer
        steps in them (`trainer_step`)."""
        return self._submit(requests.publish(self.deployment))

    def save_checkpoint(
        self,
        name: str,
        *,
        overwrite: bool = False,
        format: Literal["both", "hf", "training"] = "both",
        dtype: Literal["bfloat16", "float16"] | None = None,
        shard_bytes_max: int = SHARD_BYTES_MAX,
        step: int | None = None,
        keep: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_bytes: int | None = None,
        keep_prefix: str = "",
    ) -> CheckpointFuture:
        """Write parameters and optimizer state; `transformers` can load the directory.

        Training may continue once they are pinned (`.pinned()`); `.result()` waits until they are
        on the disk.

        `name` is a directory name of letters, digits, `.`, `_` and `-`; `overwrite` replaces a
        checkpoint of that name. `format` is what to write: `hf` for `transformers`, `training` to
        resume training, or `both`. `dtype` casts the `hf` part; training always resumes from
        uncast state. A file of more than `shard_bytes_max` bytes is split.

        `step` orders checkpoints (absent: the count of operations that changed the state). Once
        this checkpoint is whole, `keep_last` deletes the job's others except the newest so many,
        `keep_every` those except at a multiple of so many steps, and `keep_bytes` the oldest that
        are too many bytes; absent: none. With a `keep_prefix` they count and delete only those
        whose names are it and a number. `keep` protects this one from later such deletions.

        Raises, from the future:
            CheckpointExistsError: the name exists, and `overwrite` is not set.
            QuotaExceededError: the tenant has reached its bound on checkpoints or on their bytes.
        """
        params = CheckpointParams(
            name=name,
            overwrite=overwrite,
            format=format,
            dtype=dtype,
            shard_bytes_max=shard_bytes_max,
            step=step,
            keep=keep,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_bytes=keep_bytes,
            keep_prefix=keep_prefix,
        )
        return self._submit_for(requests.save_checkpoint(self.deployment, params), CheckpointFuture)


class ReferenceDeployment(Deployment):
    """A model that computes logprobs only, such as a reference policy or a teacher."""

    def forward(
        self,
        batch: "Batch",
        *,
        entropy: bool = False,
        top_logprobs: int = 0,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> Future[ForwardResult]:
        """Logprobs of every token of `batch` given the tokens before it. `entropy` and
        `top_logprobs` are as in `TrainDeployment.forward`.

        `micro_batch_tokens` (16 384) bounds the tokens, padding included, that one GPU runs through
        the model at once.
        """
        params = ForwardParams(
            entropy=entropy, top_logprobs=top_logprobs, micro_batch_tokens=micro_batch_tokens
        )
        return self._submit(requests.forward(self.deployment, batch, params))

    def sync_weights(
        self,
        source: TrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
    ) -> Future[SyncReport]:
        """Set the weights to those of the trainer `source` after the operations submitted to it so
        far. They stay until the next sync.

        `delta` and `digest` are as in `RolloutDeployment.sync_weights`.
        """
        return self._submit(
            requests.sync_weights(self.deployment, source, delta=delta, digest=digest)
        )

    def judge(
        self,
        *,
        prompt: JudgingPrompt,
        answers: Answers,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        timeout_s: float = 300.0,
    ) -> Judge[Sample]:
        """This model as a judge of samples, for `rewards.Graded`: it reads `prompt(prompt, sample)`
        and the probability of each of `answers` after it. The score of a sample is the mean of the
        answers' scores, weighted by these probabilities.

        `answers` are token ids with a score each, such as `[(yes, 1.0), (no, 0.0)]`: then the score
        is the probability of `yes` among the two. `micro_batch_tokens` is as in `forward`. An
        operation that has no result after `timeout_s` seconds fails; they include waiting for the
        GPUs.

        Raises:
            InvalidRequestError: there are fewer than two answers, one has no tokens, or two are
                alike.
        """
        ask = ask_for_probabilities(self, answers, micro_batch_tokens, timeout_s)
        return Judge(ask, prompt=prompt, rows_max=max(1, JUDGED_ROWS // len(answers)))


class RewardDeployment(Deployment):
    """A model that scores rows."""

    def score(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Future[ScoreResult]:
        """The score of every row of `batch`, computed at the row's last token.

        `micro_batch_tokens` (16 384) bounds the tokens, padding included, that one GPU runs through
        the model at once.
        """
        return self._submit(requests.score(self.deployment, batch, micro_batch_tokens))

    def judge(
        self,
        *,
        prompt: JudgingPrompt,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        timeout_s: float = 300.0,
    ) -> Judge[Sample]:
        """This model as a judge of samples, for `rewards.Graded`: its score of the row
        `prompt(prompt, sample)`. `micro_batch_tokens` and `timeout_s` are as in
        `ReferenceDeployment.judge`."""
        ask = ask_for_scores(self, micro_batch_tokens, timeout_s)
        return Judge(ask, prompt=prompt, rows_max=JUDGED_ROWS)


class RolloutDeployment(Deployment):
    """A model that generates."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        stream: bool | Literal["rows"] = False,
        first_samples: Sequence[int] | None = None,
    ) -> GenerateFuture:
        """Draw `n` samples for each of `prompts`, which are lists of token ids.

        `sampling` controls how tokens are drawn (absent: `SamplingParams()`, at most 64 tokens at
        temperature 1). With `stream` the future also yields tokens as they are drawn, by
        `future.stream()`; with `stream="rows"` each sample when it has ended, by
        `future.samples()`.

        `first_samples` has the `first_sample` of each prompt, so that its samples do not depend on
        the other prompts of the call.

        Raises:
            BatchShapeError: a row or `first_samples` has another form or length.
        """
        submission = requests.generate(
            self.deployment,
            prompts,
            n,
            sampling or SamplingParams(),
            stream=stream,
            settings=requests.streams_of(first_samples, prompts),
        )
        return self._submit_for(submission, GenerateFuture, n)

    def generate_stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> Iterator[Chunk | GenerateResult]:
        """Yield tokens as they are drawn, then the whole result. `prompts`, `n` and `sampling` are
        as in `generate`.

        After a lost connection the stream continues on any router; no chunk comes twice.
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
        published: bool = False,
    ) -> Future[SyncReport]:
        """Set the weights to those of the trainer `source` after the operations submitted to it so
        far. The result has the number of optimizer steps in them (`trainer_step`) and what moved.

        `delta` transfers only changed blocks, if this deployment has an earlier version of the same
        trainer: `"auto"` does so where it is faster, `True` also within a machine, where comparing
        takes longer than copying. With `digest` the result has the digest of the weights after the
        sync.

        The sync waits for generations that were submitted before it. With `in_flight` they stop
        between two tokens and continue with the new weights, and each sample's `weights` lists the
        versions that drew it. Their KV cache is recomputed, unless `recompute_kv` is False.

        With `published` the weights are those of the trainer's newest `publish`, and the sync does
        not wait for the trainer's operations. The trainer publishes first if it has not yet.
        """
        return self._submit(
            requests.sync_weights(
                self.deployment,
                source,
                delta=delta,
                digest=digest,
                in_flight=in_flight,
                recompute_kv=recompute_kv,
                published=published,
            )
        )

    def set_parallelism(self, parallelism: Parallelism) -> None:
        """Divide the GPUs as `parallelism` says, which has as many ranks as before: a larger `tp`
        has room for a larger KV cache, and a larger `dp` draws more samples at the same time. The
        samples do not depend on it.

        The workers start again, with the weights of the last sync; generations in progress are
        repeated. `rollout_deployment` still takes the first layout, and changes nothing.

        Raises:
            LayoutError: it has another number of ranks, or the backend cannot run it.
            InvalidRequestError: one sequence would not fit into a worker's KV cache.
        """
        path = f"{deployment_path(self.deployment)}/parallelism"
        self._transport.ask("PUT", path, body=asdict(parallelism))

    def judge(
        self,
        *,
        prompt: JudgingPrompt,
        score: Callable[[Sample], float],
        sampling: SamplingParams | None = None,
        timeout_s: float = 300.0,
    ) -> Judge[Sample]:
        """This model as a judge of samples, for `rewards.Graded`: it replies to
        `prompt(prompt, sample)`, and `score` reads the reply. If `score` raises an error, the
        sample is not graded.

        `sampling` controls how the reply is drawn (absent: greedy, at most 64 tokens). `timeout_s`
        is as in `ReferenceDeployment.judge`.
        """
        ask = ask_for_replies(self, score, sampling or GREEDY, timeout_s)
        return Judge(ask, prompt=prompt, rows_max=JUDGED_ROWS, batches_max=JUDGED_AT_ONCE)

    def openai(self, trajectory: str | None = None) -> OpenAIAccess:
        """The deployment's OpenAI-compatible endpoint: `base_url`, `api_key` and `model`. The key
        is new, opens this job's endpoints only, and is valid until the job ends or has another
        controller. With a `trajectory`, calls are captured under this name. Raises as
        `captured`."""
        access = open_access(self._transport, self.deployment)
        return access if trajectory is None else access.for_trajectory(trajectory)

    def captured(self, trajectory: str) -> list[CapturedSegment]:
        """What the model read and wrote in a trajectory's calls, for `Batch.from_segments`.

        Raises:
            NotFoundError: nothing is captured under this name, or its last call was an hour ago.
            InvalidRequestError: the name cannot be a file name.
        """
        return read_captured(self._transport, self.deployment, trajectory)

    def pause(self, *, for_s: float = 600.0) -> list[EngineView]:
        """Pause all generations between two tokens, until `resume` or for `for_s` seconds (at most
        3600). Returns the states of the engines.

        Running samples keep their slots and GPUs; they can be interrupted and can get new weights
        meanwhile. New generations wait. A second pause restarts the time.

        Raises:
            ConflictError: there are no workers now, or their weights are not on the device.
        """
        call = requests.pause(self.deployment, for_s)
        found: EngineStates = self._transport.request(call).json()
        return found["engines"]

    def resume(self) -> list[EngineView]:
        """Resume paused generations; does nothing if none is paused. Raises as `pause`."""
        path = f"{deployment_path(self.deployment)}/resume"
        found: EngineStates = self._transport.ask("POST", path)
        return found["engines"]

    def switch_tp(
        self, tp: int, *, kv: Literal["migrate", "recompute"] = "migrate"
    ) -> list[EngineView]:
        """Continue all generations in tensor-parallel groups of `tp` ranks, one of `tp_sizes`.
        Returns the states of the engines.

        The KV cache of unfinished samples moves to the ranks of their new groups, or is computed
        again there with `kv="recompute"`. Their tokens do not depend on it. The next generation
        after all samples have ended begins in the smallest groups.

        Raises:
            LayoutError: the deployment has no groups of that size.
            ConflictError: there are no workers now, or their weights are not on the device.
        """
        call = requests.switch_tp(self.deployment, tp, kv)
        found: EngineStates = self._transport.request(call).json()
        return found["engines"]

    def profile_decoding(
        self, path: "str | os.PathLike[str]", *, minutes: float = 10.0
    ) -> DecodeProfile:
        """Measure decode steps, prefill and switches for each of `tp_sizes`, which
        `adaptive_tp` of a policy needs, and write them to the file `path` after each measurement.

        It takes at most about so many `minutes`. A further call with the same file goes on where
        the last one ended; it measures nothing that the file has. The deployment must have nothing
        else to generate meanwhile. The weights do not matter.

        Raises:
            InvalidRequestError: the deployment has no `tp_sizes`, or the file has a profile of
                another model, dtype, processor or other sizes.
            ConflictError: there are no workers now.
            StorageError: the file cannot be written.
        """
        return DecodeProfiler(self, self._transport, Path(path)).run(minutes)
