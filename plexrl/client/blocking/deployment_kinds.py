"""Deployments by what they do, for a blocking controller: train, say logprobs, score, generate."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from plexrl.client.blocking.deployment import Deployment
from plexrl.client.calls import requests
from plexrl.client.data.results import (
    Chunk,
    ForwardResult,
    GenerateResult,
    ScoreResult,
    StepResult,
    SyncReport,
    TrainResult,
)
from plexrl.client.futures.checkpoints import CheckpointFuture
from plexrl.client.futures.futures import Future
from plexrl.client.futures.generations import GenerateFuture
from plexrl.wire.operations import (
    MICRO_BATCH_TOKENS,
    SHARD_BYTES_MAX,
    AdamParams,
    CheckpointParams,
    LossSpec,
    SamplingParams,
)

if TYPE_CHECKING:
    from plexrl.client.data.batch import Batch

Plain = dict[str, Any]


class TrainDeployment(Deployment):
    """A model that learns."""

    def forward(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Future[ForwardResult]:
        """Logprobs of every token of `batch` given those before it; gradients stay as they are.

        `micro_batch_tokens` (16 384) bounds the tokens, padding included, that one GPU runs through
        the model at once. It changes memory and speed, not the result beyond rounding.
        """
        return self._submit(requests.forward(self.deployment, batch, micro_batch_tokens))

    def forward_backward(
        self,
        batch: "Batch",
        loss: LossSpec,
        *,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> Future[TrainResult]:
        """Add the gradients of `loss` over `batch` to those that wait for a step.

        `loss` is one of `plexrl.losses`, which says what per-token values the batch must have, and
        how tokens become one number (`reduction`). The mean is over this batch: several calls
        before a step add up their gradients and are not averaged.

        `micro_batch_tokens` (16 384) bounds the tokens, padding included, that one GPU runs through
        the model at once. A batch of more is run in parts whose gradients add up to the same.

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
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> Future[StepResult]:
        """One AdamW step (Loshchilov & Hutter 2019) with the gradients that wait, which are zero
        after it. Each step names its own `learning_rate`, so a schedule is the controller's.

        `beta1` and `beta2` are the decay rates of the first and second moment, `eps` is added to
        the root of the second. `weight_decay` is decoupled: every parameter is first multiplied by
        1 - learning_rate · weight_decay. `grad_clip_norm` is the largest global norm of the
        gradients, which are scaled down to it; 0 does not clip.

        Raises, from the future:
            NonFiniteGradientError: the norm is not finite. The gradients are dropped, the
                parameters are as before, and the step does not count.
            NonFiniteWeightsError: the step made a parameter infinite or not a number; the weights
                and gradients are those of before it.
        """
        params = AdamParams(
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
        )
        return self._submit(requests.optim_step(self.deployment, params))

    def zero_grad(self) -> Future[Plain]:
        """Drop the gradients that wait for a step; a step does so itself. The result is empty."""
        return self._submit(requests.zero_grad(self.deployment))

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
        upload: bool = False,
    ) -> CheckpointFuture:
        """Write parameters and optimizer state; `transformers` loads the directory as it is.

        Training goes on once they are pinned (`.pinned()`); `.result()` waits until they are on the
        disk.

        `name` is a directory name of letters, digits, `.`, `_` and `-`; with `overwrite` a
        checkpoint of that name is replaced. `format` is what is written: `hf`, what `transformers`
        loads; `training`, what training resumes from; or `both`. `dtype` casts what `transformers`
        loads; absent, it is as it is, and training resumes from what it had in any case. A file of
        more than `shard_bytes_max` bytes is cut.

        `step` orders checkpoints (absent: the count of operations that changed the state). Once
        this one is whole, `keep_last` deletes the job's others but for the newest so many, and
        `keep_every` but for those at a multiple of so many steps; both absent, none is deleted.
        `keep` has no later checkpoint delete this one. `upload` has it uploaded to where the
        operator has uploads go.

        Raises, from the future:
            CheckpointExistsError: there is one of that name, and `overwrite` is not set.
            QuotaExceededError: the tenant has as many checkpoints, or bytes of them, as it may.
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
            upload=upload,
        )
        submission = requests.save_checkpoint(self.deployment, params)
        return CheckpointFuture(self._transport, self._post(submission), submission.decoder)


class ReferenceDeployment(Deployment):
    """A model that only says how likely tokens are: a reference policy, a teacher."""

    def forward(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Future[ForwardResult]:
        """Logprobs of every token of `batch` given those before it.

        `micro_batch_tokens` (16 384) bounds the tokens, padding included, that one GPU runs through
        the model at once.
        """
        return self._submit(requests.forward(self.deployment, batch, micro_batch_tokens))

    def sync_weights(
        self,
        source: TrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
    ) -> Future[SyncReport]:
        """Take over the weights of the trainer `source` as they are after what was submitted to it
        before: until the next sync this deployment is that old policy.

        `delta` and `digest` are as those of `RolloutDeployment.sync_weights`.
        """
        return self._submit(
            requests.sync_weights(self.deployment, source, delta=delta, digest=digest)
        )


class RewardDeployment(Deployment):
    """A model that scores rows."""

    def score(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Future[ScoreResult]:
        """The score of every row of `batch`, as its last token has it.

        `micro_batch_tokens` (16 384) bounds the tokens, padding included, that one GPU runs through
        the model at once.
        """
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
        """Draw `n` samples of every one of `prompts`, which are lists of token ids.

        `sampling` says how tokens are drawn (absent: `SamplingParams()`, at most 64 tokens at
        temperature 1). With `stream` the future also gives tokens as they are drawn, by
        `future.stream()`.

        Raises:
            BatchShapeError: a prompt is no list of whole numbers.
        """
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
        """Tokens as they are drawn, then the whole result. `prompts`, `n` and `sampling` are as
        those of `generate`.

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
    ) -> Future[SyncReport]:
        """Take over the weights of the trainer `source` as they are after what was submitted to it
        before. The result says which of its steps they are of (`trainer_step`), and what moved.

        `delta` is whether only blocks that have changed are brought, where this deployment holds an
        earlier version of the same trainer (else all are): `"auto"` where that is quicker, `True`
        also within a machine, where comparing takes longer than copying. With `digest` the result
        says the digest of the weights as they are then.

        It waits for the generations that were submitted before it. With `in_flight` they stop
        between two tokens and go on with the new weights, and each sample's `weights` says which
        versions drew it. What they have cached is computed anew, unless `recompute_kv` is False.
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
        (at most 3600) if nobody says so; returns how its engines stand.

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
