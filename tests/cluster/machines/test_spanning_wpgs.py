"""WPGs whose ranks are on two nodes that share no folder, against the same ranks on one node."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.wire.links.address import TlsAddress, parse_address
from tests.cluster.machines.machines import Machines, machines
from tests.cluster.tools import VOCABULARY, some_batch, train

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=6)
STEPS = 3
PROBE = some_batch(99)


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with machines(nodes=2, gpus=1) as found:
        yield found


def bytes_of(actor: plexrl.TrainDeployment) -> bytes:
    """The log-probabilities of a fixed batch: equal bits only for equal weights."""
    result = actor.forward(PROBE).result(120)
    return b"".join(np.asarray(row).tobytes() for row in result.logprobs)


def trained(job: plexrl.Job, **layout: Any) -> bytes:
    return bytes_of(trained_actor(job, **layout))


def trained_actor(job: plexrl.Job, **layout: Any) -> plexrl.TrainDeployment:
    actor = job.train_deployment("actor", MODEL, **layout)
    for step in range(STEPS):
        train(actor, step).result(120)
    return actor


def worker_at(address: str) -> int:
    """Process id of the worker that listens there."""
    wanted = parse_address(address)
    assert isinstance(wanted, TlsAddress)
    for found in psutil.net_connections(kind="tcp"):
        if found.status == psutil.CONN_LISTEN and tuple(found.laddr) == (wanted.host, wanted.port):
            assert found.pid is not None
            return int(found.pid)
    raise AssertionError(f"nobody listens on {address}")


def test_training_over_two_nodes_gives_the_bits_of_one_node(
    two: Machines, cluster: plexrl.Cluster
) -> None:
    with cluster.create_job("near") as job:
        expected = trained(job, workers=2)
    with two.connect() as far, far.create_job("far") as job:
        actor = trained_actor(job, workers=2)
        assert bytes_of(actor) == expected
        assert [rank["node"] for rank in actor.status()["ranks"]] == ["n0", "n1"]
        assert {entry["node"] for entry in job.logs()} == {"n0", "n1"}
    for node in two.nodes:
        assert not list((node.folder / "run").glob("r-*")), "the ranks met at a file"


@pytest.mark.slow
def test_a_killed_rank_on_one_node_restarts_all_ranks_at_another_port(
    two: Machines, cluster: plexrl.Cluster
) -> None:
    with cluster.create_job("near") as job:
        expected = trained(job, workers=2)
    with two.connect() as far, far.create_job("far") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        waiting = [train(actor, step) for step in range(STEPS)]
        waiting[0].result(120)
        before = actor.status()
        os.kill(worker_at(before["ranks"][1]["address"] or ""), signal.SIGKILL)
        for future in waiting:
            future.result(120)
        assert bytes_of(actor) == expected
        after = actor.status()
        assert after["incarnation"] == before["incarnation"] + 1
        former = {rank["address"] for rank in before["ranks"]}
        assert not former & {rank["address"] for rank in after["ranks"]}


@pytest.mark.parametrize(
    "layout",
    [plexrl.Parallelism(tp=2), pytest.param(plexrl.Parallelism(dp=2), marks=pytest.mark.slow)],
    ids=["tp", "dp"],
)
def test_a_rollout_whose_ranks_are_on_two_nodes_draws_the_tokens_of_one_node(
    two: Machines, cluster: plexrl.Cluster, layout: plexrl.Parallelism
) -> None:
    def tokens(job: plexrl.Job) -> list[list[int]]:
        rollout = job.rollout_deployment("rollout", MODEL, parallelism=layout)
        sampling = plexrl.SamplingParams(max_tokens=12, seed=3)
        result = rollout.generate([[3, 4, 5], [6, 7]], n=3, sampling=sampling).result(120)
        return [sample.tokens for samples in result.samples for sample in samples]

    with cluster.create_job("near") as job:
        expected = tokens(job)
    with two.connect() as far, far.create_job("far") as job:
        assert tokens(job) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp", plexrl.Parallelism(tp=2)),
        ("megatron", plexrl.Parallelism(pp=2)),
        ("megatron", plexrl.Parallelism(tp=2)),
        ("deepspeed", plexrl.Parallelism(dp=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_every_backend_trains_over_two_nodes_with_the_bits_of_one(
    two: Machines, cluster: plexrl.Cluster, backend: str, layout: plexrl.Parallelism
) -> None:
    pytest.importorskip(
        {"megatron": "megatron.core", "deepspeed": "deepspeed"}.get(backend, "torch")
    )
    with cluster.create_job("near") as job:
        expected = trained(job, parallelism=layout, backend=backend)
    with two.connect() as far, far.create_job("far") as job:
        assert trained(job, parallelism=layout, backend=backend) == expected


@pytest.mark.slow
def test_weights_go_from_a_trainer_on_two_nodes_to_a_rollout_on_one_of_them(
    cluster: plexrl.Cluster,
) -> None:
    def tokens(job: plexrl.Job) -> list[list[int]]:
        actor = trained_actor(job, workers=3)
        rollout = job.rollout_deployment("rollout", MODEL)
        rollout.sync_weights(actor).result(120)
        sampling = plexrl.SamplingParams(max_tokens=12, seed=3)
        result = rollout.generate([[3, 4, 5], [6, 7]], n=3, sampling=sampling).result(120)
        return [sample.tokens for samples in result.samples for sample in samples]

    with cluster.create_job("near") as job:
        expected = tokens(job)
    with machines(2, gpus=2) as found, found.connect() as far, far.create_job("far") as job:
        assert tokens(job) == expected


@pytest.mark.slow
def test_a_node_lost_for_good_is_replaced_by_another_one(cluster: plexrl.Cluster) -> None:
    """Its StateManager is lost too, so the state is computed again on other nodes."""
    with cluster.create_job("near") as job:
        expected = trained(job, workers=2)
    lease = {"node_lease_s": 2.0, "node_grace_s": 1.0, "node_replace_s": 1.0}
    with machines(3, gpus=1, **lease) as found, found.connect() as far, far.create_job("j") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        train(actor, 0).result(120)
        used = {rank["node"] for rank in actor.status()["ranks"]}
        lost = next(node for node in found.nodes if node.name in used)
        waiting = [train(actor, step) for step in range(1, STEPS)]
        lost.lose()
        for future in waiting:
            future.result(120)
        assert bytes_of(actor) == expected
        assert lost.name not in {rank["node"] for rank in actor.status()["ranks"]}


@pytest.mark.slow
def test_a_killed_agent_and_its_ranks_are_replaced_and_no_step_is_lost(
    two: Machines, embedded: EmbeddedCluster
) -> None:
    with plexrl.connect(embedded.url, embedded.api_key) as near, near.create_job("near") as job:
        expected = trained(job, workers=2)
    with two.connect() as far, far.create_job("far") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        waiting = [train(actor, step) for step in range(STEPS)]
        waiting[0].result(120)
        node = two.nodes[1]
        node.agent.kill()
        node.agent.wait()
        node.start_agent(two.stack)
        for future in waiting:
            future.result(120)
        assert bytes_of(actor) == expected
