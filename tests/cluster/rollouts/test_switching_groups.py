"""Tensor-parallel groups that change while the last samples of a batch are generated, on a real
cluster: beside the same training without switches, and with `kill -9`."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

import plexrl
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.client.data.decode_profile import DecodeProfile, ProfilePoint
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.wire.messages.rollout_views import RolloutStatus
from tests.cluster.rollouts.test_asynchronous_rollouts import SAMPLING, prompts, reward
from tests.cluster.rollouts.test_streamed_rollouts import MODEL, add_gradients, step
from tests.cluster.tools import checkpoint_weights, process_of

PROMPTS, SAMPLES, STEPS = 4, 2, 2
# Each token ends a sample with a probability of about 1/150, so a few samples outlast the others.
LONG = replace(SAMPLING, max_tokens=240)
PAIR = plexrl.Parallelism(tp=2)


def rollout_of(
    job: plexrl.Job, actor: plexrl.TrainDeployment, policy: plexrl.RolloutPolicy
) -> BoundedRollout:
    return job.rollout(
        "rollout",
        MODEL,
        actor,
        instances=1,
        policy=policy,
        prompts=PROMPTS,
        samples=SAMPLES,
        sampling=LONG,
        parallelism=PAIR,
        tp_sizes=(1, 2),
    )


def trained(
    job: plexrl.Job,
    policy: plexrl.RolloutPolicy,
    meanwhile: Callable[[BoundedRollout, RolloutBatch], None] = lambda *_: None,
) -> tuple[list[list[list[int]]], bytes, RolloutStatus]:
    """The tokens of all samples, the weights after training, and the rollout's status."""
    actor = job.train_deployment("actor", MODEL)
    rollout = rollout_of(job, actor, policy)
    found = []
    rows = islice(prompts(), STEPS * PROMPTS)
    for batch in rollout.batches(rows, reward, steps=STEPS):
        meanwhile(rollout, batch)
        step(actor, add_gradients(actor, batch))
        found += [[sample.tokens for sample in samples] for samples in batch.samples]
    return found, checkpoint_weights(actor), rollout.status()


def invented(measured: DecodeProfile) -> DecodeProfile:
    """A profile of the same engine in which pairs are faster for up to three rows."""
    return replace(
        measured,
        switch_s=1e-3,
        kv_bytes_per_s=None,
        points=tuple(
            ProfilePoint(
                tp=tp,
                rows=rows,
                prompt_tokens=8,
                kv_tokens=8 * rows,
                step_s=0.02 if tp == 1 else 0.005 * rows,
                prefill_s=0.01,
            )
            for tp in (1, 2)
            for rows in (1, 2, 4, 8)
        ),
    )


@pytest.fixture(scope="module")
def profile(embedded: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> DecodeProfile:
    path = tmp_path_factory.mktemp("profile") / "decode.json"
    with (
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("profile") as job,
    ):
        engine = job.rollout_deployment(
            "engine",
            MODEL,
            parallelism=PAIR,
            tp_sizes=(1, 2),
            max_concurrent_samples=4,
            max_sequence_tokens=128,
        )
        none = engine.profile_decoding(path, minutes=0)
        assert (none.points, none.switch_s > 0) == ((), True)
        # It goes on where it ended, and has nothing to do when all is measured.
        found = engine.profile_decoding(path, minutes=0.05)
        assert found.points
        assert plexrl.read_profile(path) == found
        assert {each.tp for each in found.points} == {1, 2}
        with pytest.raises(LayoutError, match="no tensor-parallel groups of 4 ranks: choose one"):
            engine.switch_tp(4)
        assert [each["tp"] for each in engine.switch_tp(2)] == [2]
        other = replace(found, subject=replace(found.subject, dtype="bfloat16"))
        path.write_text(other.to_json())
        with pytest.raises(InvalidRequestError, match="measured with dtype 'bfloat16', and the"):
            engine.profile_decoding(path)
        fixed = job.rollout_deployment("fixed", MODEL)
        with pytest.raises(InvalidRequestError, match="create it with tp_sizes"):
            fixed.profile_decoding(path)
    return invented(found)


# Engines that switch draw the same tokens (`tests/worker/rollout/engine/tensor_parallel`), and the
# service orders switches and survives crashes (`tests/rollout/test_service_membership.py`).
@pytest.mark.slow
def test_rounds_whose_engines_switch_train_what_others_train(
    cluster: plexrl.Cluster, embedded: EmbeddedCluster, profile: DecodeProfile
) -> None:
    killed = []

    def kill(rollout: BoundedRollout, batch: RolloutBatch) -> None:
        if not batch.version:
            killed.append(rollout.status()["tp_switches"])
            process_of(embedded, "plexrl.rollout").kill()

    with cluster.create_job("plain") as job:
        wanted, weights, status = trained(job, plexrl.BoundedStaleness(0))
        assert (status["tp_switches"], status["adaptive_tp"]) == (0, False)
    with cluster.create_job("adaptive") as job:
        policy = plexrl.BoundedStaleness(0, adaptive_tp=profile)
        found, same, status = trained(job, policy, kill)
    assert killed[0] >= 1, "no switch before the kill"
    # Whether another one pays after it depends on the machine.
    assert status["tp_switches"] >= killed[0], "the kill lost switches"
    assert status["adaptive_tp"]
    assert found == wanted
    assert same == weights


def test_a_profile_of_another_engine_or_an_engine_without_groups_is_refused(
    job: plexrl.Job, profile: DecodeProfile
) -> None:
    actor = job.train_deployment("actor", MODEL)
    other = replace(profile, subject=replace(profile.subject, model="another"))
    with pytest.raises(InvalidRequestError, match="measured with model 'another'"):
        rollout_of(job, actor, plexrl.TailBatching(adaptive_tp=other))
    with pytest.raises(InvalidRequestError, match=r"'fixed-0' \(backend torch\) do not change"):
        job.rollout(
            "fixed",
            MODEL,
            actor,
            instances=1,
            policy=plexrl.BoundedStaleness(0, adaptive_tp=profile),
            prompts=2,
            samples=1,
            sampling=LONG,
        )
    for policy in (
        plexrl.BoundedStaleness(1, adaptive_tp=profile),
        plexrl.TailBatching(adaptive_tp=profile, plans_parallelism=True),
    ):
        with pytest.raises(InvalidRequestError, match=r"and adaptive_tp: .*set only one of them"):
            rollout_of(job, actor, policy)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{}")
    for name in ("a", "missing"):
        with pytest.raises(InvalidRequestError, match="profile"):
            plexrl.read_profile(tmp_path / name)
