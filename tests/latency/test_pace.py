"""The pace of a worker: its text, and the seconds of each step."""

from dataclasses import replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.latency.gpus import A40, GPUS, H800, MOVE_FIXED_S
from plexrl.latency.models import MODELS, QWEN25_14B
from plexrl.latency.pace import parse_pace
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.scenario import NodeType, Pool
from plexrl.traces.generate.published import MODEL_CLASSES


@pytest.mark.parametrize("gpu", sorted(GPUS))
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_an_engine_takes_what_the_simulators_instance_takes(gpu: str, tp: int) -> None:
    decoding = parse_pace(f"{gpu}:qwen2.5-14b").decoding(tp)
    costs = replace(QWEN25_14B, gpu=GPUS[gpu]).costs(tp)
    assert decoding.steps_s(7, 64, 100_000, 900) == costs.steps_s(7, 64, 100_000)
    assert decoding.prefill_s(500) == costs.prefill_s(500)
    assert decoding.pull_s() == costs.pull_s
    steps = decoding.steps_within(1.0, 64, 100_000, 900)
    assert costs.steps_s(steps, 64, 100_000) <= 1.0 < costs.steps_s(steps + 1, 64, 100_000)


def test_the_forward_and_the_update_are_parts_of_the_simulators_training() -> None:
    training = parse_pace("h800:qwen2.5-14b").training(32)
    costs = QWEN25_14B.costs(2)
    # Log-probs of actor and reference, and the update.
    whole = 2 * training.log_prob_s(10**6) + training.update_s(10**6) + training.step_s()
    assert whole == pytest.approx(costs.train_s(10**6, 32))


@pytest.mark.parametrize("name", sorted(MODEL_CLASSES))
def test_the_steps_of_a_published_cycle_add_up_to_its_period(name: str) -> None:
    pace = parse_pace(f"published:{name}")
    training, decoding = pace.training(8), pace.decoding(1)
    cycle_s = (
        decoding.prefill_s(100)
        + decoding.steps_s(64, 12, 3000, 64)
        + training.log_prob_s(5000)
        + training.update_s(5000)
        + training.step_s()
        + training.publish_s()
        + decoding.pull_s()
    )
    assert cycle_s == pytest.approx(MODEL_CLASSES[name].period_s)


@pytest.mark.parametrize("workers", [2, 8])
def test_a_move_takes_what_the_simulators_takes(workers: int) -> None:
    node = NodeType()
    costs = MoveCosts([Pool(node_type=node, nodes=1)])
    pace = parse_pace("published:7b")
    nbytes = pace.state_bytes("train", workers)
    assert nbytes == 14 * MODEL_CLASSES["7B"].parameters / workers
    for tier in ("host", "nvme"):
        expected = costs.load_s(node.name, round(nbytes * workers), workers, tier)
        assert pace.move_s(nbytes, tier, workers) == pytest.approx(expected)


def test_the_link_is_the_gpus_unless_it_is_set() -> None:
    assert parse_pace("h800:qwen2.5-7b").link == H800.host_link
    assert parse_pace("a40:qwen2.5-7b").link == A40.host_link < H800.host_link
    slow = parse_pace("a40:qwen2.5-7b@0.5,link=1e9")
    assert (slow.link, slow.scale) == (1e9, 0.5)
    assert slow.move_s(3e9, "host", 8) == MOVE_FIXED_S + 3.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("h800", "no GPU and model"),
        ("", "no GPU and model"),
        (":qwen2.5-7b", "no GPU and model"),
        ("b300:qwen2.5-7b", "'b300'"),
        ("h800:gpt-9", "'gpt-9'"),
        ("published:14b", "'14b'"),
        ("h800:qwen2.5-7b@", "scale"),
        ("h800:qwen2.5-7b@0", "scale"),
        ("h800:qwen2.5-7b@2", "scale"),
        ("h800:qwen2.5-7b@nan", "scale"),
        ("h800:qwen2.5-7b@fast", "scale"),
        ("h800:qwen2.5-7b,link=0", "link"),
        ("h800:qwen2.5-7b,link=inf", "link"),
        ("h800:qwen2.5-7b,speed=2", "'speed'"),
    ],
)
def test_an_invalid_pace_is_refused_with_its_form(text: str, named: str) -> None:
    with pytest.raises(InvalidRequestError, match="GPU:MODEL@SCALE") as refused:
        parse_pace(text)
    assert named in refused.value.message


def test_weights_that_do_not_fit_a_group_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="room for 145 GB"):
        parse_pace("h800:qwen2.5-72b").decoding(1)


def test_all_models_and_profiles_can_be_paced() -> None:
    for model in MODELS:
        assert parse_pace(f"H800:{model.upper()}@0.01").modelled.name == model
