"""A whole `async` controller on a real cluster, with its queries."""

import asyncio
from pathlib import Path

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import VOCABULARY, checkpoint_weights, some_batch

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)


async def train(job: plexrl.AsyncJob) -> bytes:
    """Two steps; returns the weights after them."""
    actor, rollout = await asyncio.gather(
        job.train_deployment("actor", MODEL, max_sequence_tokens=64),
        job.rollout_deployment("rollout", MODEL, max_concurrent_samples=4),
    )
    tokenizer = await actor.tokenizer()
    prompt = tokenizer.encode("12=")
    for number in range(2):
        await actor.forward_backward(some_batch(number), plexrl.losses.grpo())
        step = await actor.optim_step(learning_rate=1e-3, weight_decay=0.01, grad_clip_norm=1.0)
        assert (await step.result(120)).trainer_step == number + 1
        assert await step.done()
        assert (await step.status())["state"] == "finished"
        await rollout.sync_weights(actor)
        sampling = plexrl.SamplingParams(max_tokens=4, seed=number, ignore_eos=True)
        *chunks, result = [
            each async for each in rollout.generate_stream([prompt], n=2, sampling=sampling)
        ]
        assert isinstance(result, plexrl.GenerateResult)
        assert {sample.trainer_step for sample in result.samples[0]} == {number + 1}
        drawn: list[int] = []
        for chunk in chunks:
            assert isinstance(chunk, plexrl.Chunk)
            drawn += chunk.tokens if chunk.sample == 0 else []
        assert drawn == result.samples[0][0].tokens
        await job.log(number, {"step": number})
    saving = await actor.save_checkpoint("end", keep_last=1)
    assert (await saving.pinned(120))["name"] == "end"
    saved = await saving
    assert saved["durable"] is True
    return (Path(saved["path"]) / "model.safetensors").read_bytes()


async def control(embedded: EmbeddedCluster) -> bytes:
    async with await plexrl.connect_async(embedded.url, embedded.api_key) as cluster:
        assert len(await cluster.nodes()) >= 1
        job = await cluster.create_job("later", priority=1)
        weights = await train(job)
        assert [row["values"] for row in await job.metrics()] == [{"step": 0.0}, {"step": 1.0}]
        assert [each["name"] for each in await job.checkpoints()] == ["end"]
        assert (await job.read_logs("actor"))["failed"] == []
        assert "summary" in await job.explain()
        assert (await job.deployment_status("actor"))["trainer_step"] == 2
        kinds = {each["kind"] for each in await cluster.operations(job=job.job)}
        assert {"optim_step", "generate"} <= kinds
        assert {each["group"] for each in await cluster.groups()}
        await job.finish()
        assert (await job.status())["state"] == "COMPLETED"
        assert repr(job) == f"<AsyncJob {job.job!r} ended>"
    return weights


def test_an_async_controller_trains_the_same_weights_as_a_blocking_one(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    found = asyncio.run(control(embedded))
    with cluster.create_job("blocking") as job:
        actor = job.train_deployment("actor", MODEL, max_sequence_tokens=64)
        before = checkpoint_weights(actor, "before")
        for number in range(2):
            actor.forward_backward(some_batch(number), plexrl.losses.grpo())
            actor.optim_step(learning_rate=1e-3, weight_decay=0.01, grad_clip_norm=1.0)
        assert found == checkpoint_weights(actor) != before
