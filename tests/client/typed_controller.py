"""A controller for `mypy --strict`, which checks the type of each result.

Nothing runs it: `typing.assert_type` is for the type checker, and fails there for a result of type
`Any`.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import assert_type

import numpy as np
import numpy.typing as npt

import plexrl


def advantages_of(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    means: npt.NDArray[np.float64] = rewards.mean(axis=1, keepdims=True)
    return rewards - means


def control(prompts: Sequence[Sequence[int]], rewards: npt.NDArray[np.float64]) -> None:
    """One step, and the queries of a user."""
    with plexrl.connect(timeout_s=60) as cluster, cluster.create_job("typed", gang=2) as job:
        assert_type(cluster, plexrl.Cluster)
        assert_type(job, plexrl.Job)
        assert_type(job.job, str)
        model = assert_type(plexrl.tiny_qwen2("01"), plexrl.ModelSpec)
        actor = assert_type(job.train_deployment("a", model, workers=2), plexrl.TrainDeployment)
        rollout = assert_type(job.rollout_deployment("r", model), plexrl.RolloutDeployment)
        reference = assert_type(
            job.reference_deployment("f", model, dtype="bfloat16"), plexrl.ReferenceDeployment
        )
        reward = assert_type(job.reward_deployment("s", model), plexrl.RewardDeployment)
        assert_type(actor.within(30), plexrl.TrainDeployment)
        assert_type(actor.tokenizer().encode("01"), list[int])

        sampling = plexrl.SamplingParams(max_tokens=4, temperature=0.7, seed=1)
        future = assert_type(
            rollout.generate(prompts, n=4, sampling=sampling), plexrl.GenerateFuture
        )
        assert_type(future.stream(), Iterator[plexrl.Chunk])
        result = assert_type(future.result(60), plexrl.GenerateResult)
        sample = assert_type(result.samples[0][0], plexrl.Sample)
        assert_type(sample.tokens, list[int])
        assert_type(sample.logprobs, npt.NDArray[np.float32])
        assert_type(sample.trainer_step, int)
        assert_type(sample.weights, tuple[plexrl.WeightsSpan, ...])
        assert_type(sample.weights[0].start, int)
        assert_type(
            rollout.generate_stream(prompts), Iterator[plexrl.Chunk | plexrl.GenerateResult]
        )

        batch = plexrl.Batch.from_samples(prompts, result.samples, advantages_of(rewards))
        forward = assert_type(reference.forward(batch), plexrl.Future[plexrl.ForwardResult])
        logprobs = assert_type(forward.result().logprobs, list[npt.NDArray[np.float32]])
        batch = assert_type(batch.with_values("ref_logprobs", logprobs), plexrl.Batch)
        assert_type(reward.score(batch).result().scores, npt.NDArray[np.float32])
        loss = assert_type(plexrl.losses.grpo(kl_coef=0.01), plexrl.LossSpec)
        trained = actor.forward_backward(batch, loss, micro_batch_tokens=4096)
        assert_type(trained, plexrl.Future[plexrl.TrainResult])
        step = actor.optim_step(learning_rate=1e-4, weight_decay=0.1, grad_clip_norm=1.0)
        assert_type(step.result().metrics, dict[str, float])
        assert_type(step.result().trainer_step, int)
        report = assert_type(rollout.sync_weights(actor).result(), plexrl.SyncReport)
        assert_type(report["bytes_moved"], int)
        saving = actor.save_checkpoint("end", format="hf", dtype="bfloat16", keep_last=2)
        assert_type(saving, plexrl.CheckpointFuture)
        assert_type(saving.pinned()["path"], str)
        assert_type(saving.result(), plexrl.SavedCheckpoint)
        loaded = assert_type(actor.load_checkpoint("end").result(), plexrl.LoadedCheckpoint)
        assert_type(loaded["trainer_step"], int)
        job.log(1, {"reward": rewards.mean(), "loss": trained.result().metrics["loss"]})


async def control_async(prompts: Sequence[Sequence[int]], batch: plexrl.Batch) -> None:
    """The same for `async`."""
    async with await plexrl.connect_async() as cluster:
        job = assert_type(await cluster.create_job("typed"), plexrl.AsyncJob)
        model = plexrl.ModelSpec(path="/models/qwen")
        actor = await job.train_deployment("a", model, parallelism=plexrl.Parallelism(dp=2))
        assert_type(actor, plexrl.AsyncTrainDeployment)
        rollout = await job.rollout_deployment("r", model, backend="vllm")
        assert_type(rollout, plexrl.AsyncRolloutDeployment)
        future = assert_type(await rollout.generate(prompts), plexrl.AsyncGenerateFuture)
        assert_type(await future, plexrl.GenerateResult)
        assert_type(future.stream(), AsyncIterator[plexrl.Chunk])
        trained = await actor.forward_backward(batch, plexrl.losses.ppo())
        assert_type(await trained, plexrl.TrainResult)
        step = await actor.optim_step(learning_rate=1e-4)
        assert_type(step, plexrl.AsyncFuture[plexrl.StepResult])
        assert_type(await step.done(), bool)
        assert_type(await (await rollout.sync_weights(actor)), plexrl.SyncReport)
        saving = assert_type(await actor.save_checkpoint("end"), plexrl.AsyncCheckpointFuture)
        assert_type(await saving.pinned(), plexrl.SavedCheckpoint)
        sampling = plexrl.SamplingParams(seed=1)
        ahead = await job.rollout(
            "a", model, actor, instances=2, prompts=4, samples=2, sampling=sampling
        )
        assert_type(ahead, plexrl.AsyncBoundedRollout)
        await job.finish("cancelled", reason="enough")
