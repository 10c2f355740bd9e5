"""The SDK against a server that misbehaves on purpose."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl import errors
from plexrl.cli.app import app
from plexrl.client.calls.controller import Controller
from plexrl.client.calls.heartbeats import beat
from plexrl.client.calls.transport import Call
from tests.client.fake_router import FakeRouter

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def actor(router: FakeRouter) -> Iterator[plexrl.TrainDeployment]:
    with plexrl.connect(router.url, "key", timeout_s=20) as cluster:
        yield cluster.create_job("j").train_deployment("actor", plexrl.tiny_qwen2("01"))


BATCH = plexrl.Batch([[3, 4], [3, 4, 3]], {"mask": [[0, 1], [0, 1, 1]]})


@pytest.mark.parametrize(
    "fault",
    [
        *("reset", "unavailable", "overloaded", "untyped", "no_answer"),
        *("storage_full", "journal_full", "journal_unavailable"),
    ],
)
def test_a_transient_failure_repeats_a_submission_under_the_same_id(
    router: FakeRouter, actor: plexrl.TrainDeployment, fault: str
) -> None:
    router.requests.clear()
    router.faults = [fault, fault]
    actor.optim_step(learning_rate=0.1)
    posts = [path for method, path in router.requests if method == "POST"]
    assert len(posts) == 3
    assert len(set(posts)) == 1, "every try must name the same operation"


def test_a_refusal_is_final_and_keeps_its_error_class(
    router: FakeRouter, actor: plexrl.TrainDeployment
) -> None:
    router.requests.clear()
    router.faults = ["capacity"]
    with pytest.raises(errors.CapacityError, match="injected"):
        actor.barrier()
    assert len(router.requests) == 1


@pytest.mark.slow
def test_retries_go_on_while_the_cluster_is_unavailable_beyond_the_timeout(
    router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    with plexrl.connect(router.url, "key", timeout_s=0.2) as cluster:
        actor = cluster.create_job("j").train_deployment("actor", plexrl.tiny_qwen2("01"))
        router.faults = ["journal_full"] * 12
        future = actor.barrier()
        router.faults = ["journal_unavailable"] * 12
        assert future.done() is False
        assert "unavailable for now: injected" in future.explain()
        assert future.result()["metrics"] == {"loss": 0.5}
        router.faults = ["overloaded"] * 100
        with pytest.raises(errors.OverloadedError):
            actor.barrier()
    messages = [
        record.message for record in caplog.records if "unavailable for now" in record.message
    ]
    assert len(messages) == 2, "one message for each reason"


def test_a_timeout_while_the_cluster_is_unavailable_is_not_the_operations_error(
    router: FakeRouter, actor: plexrl.TrainDeployment
) -> None:
    future = actor.barrier()
    router.faults = ["no_answer"] * 10**6
    with pytest.raises(errors.DeadlineExceededError, match="unavailable for now: injected"):
        future.result(timeout_s=0.05)
    router.faults = []
    assert future.result()["metrics"] == {"loss": 0.5}


def test_a_checkpoint_timeout_while_the_cluster_is_unavailable_is_not_its_error(
    router: FakeRouter, actor: plexrl.TrainDeployment
) -> None:
    router.result = {"job": "j", "name": "c", "seq": 1, "durable": False}
    future = actor.save_checkpoint("c")
    assert future.pinned() == router.result
    # More faults than listings in the given time; the rest is not used.
    router.faults = ["no_answer"] * 500
    with pytest.raises(errors.DeadlineExceededError, match="unavailable for now: injected"):
        future.result(timeout_s=0.05)
    router.faults = ["no_answer"] * 500
    assert future.done() is False
    router.faults = []
    assert future.result()["durable"]


@pytest.mark.parametrize("code", ["storage_full", "unavailable", "deadline_exceeded"])
def test_an_operations_own_error_is_final_whatever_its_status(
    router: FakeRouter, actor: plexrl.TrainDeployment, code: str
) -> None:
    future = actor.barrier()
    router.requests.clear()
    router.faults = [f"{code} final"]
    with pytest.raises(errors.PlexRLError, match="injected") as caught:
        future.result()
    assert caught.value.code == code
    polls = [path for method, path in router.requests if method == "GET"]
    assert len(polls) == 1


def test_waiting_survives_polls_and_lost_connections(
    router: FakeRouter, actor: plexrl.TrainDeployment
) -> None:
    future = actor.forward_backward(BATCH, plexrl.losses.cross_entropy())
    router.polls_until_done = 3
    router.faults = ["reset"]
    result = future.result()
    assert result.metrics == {"loss": 0.5}
    assert [row.tolist() for row in result.logprobs] == [[0, 1], [2, 3, 4]]


def test_a_poll_explains_the_wait_and_a_timeout_leaves_the_operation_running(
    router: FakeRouter, actor: plexrl.TrainDeployment
) -> None:
    router.polls_until_done = 10**6
    future = actor.forward_backward(BATCH, plexrl.losses.cross_entropy())
    with pytest.raises(
        errors.DeadlineExceededError, match=r"b has the group, starts in about 2\.0 s"
    ):
        future.result(timeout_s=0.01)
    assert not future.done()
    router.polls_until_done = 1
    assert future.result().metrics == {"loss": 0.5}
    assert future.done()


def test_submissions_keep_the_order_of_the_calls(
    router: FakeRouter, actor: plexrl.TrainDeployment
) -> None:
    router.requests.clear()
    futures = [actor.optim_step(learning_rate=float(i)) for i in range(20)]
    posted = [path.partition("operation=")[2] for _, path in router.requests]
    assert posted == [future.operation for future in futures]


def test_an_unreachable_cluster_is_reported_within_the_timeout() -> None:
    with pytest.raises(errors.ConnectionLostError, match="check that the cluster is up"):
        plexrl.connect("http://127.0.0.1:9", "key", timeout_s=0.2)


def test_async_controllers_have_the_same_surface(router: FakeRouter) -> None:
    async def control() -> None:
        async with await plexrl.connect_async(router.url, "key") as cluster:
            job = await cluster.create_job("j")
            actor = await job.train_deployment("actor", plexrl.tiny_qwen2("01"))
            future = await actor.forward_backward(BATCH, plexrl.losses.cross_entropy())
            router.polls_until_done = 2
            assert (await future).metrics == {"loss": 0.5}

    asyncio.run(control())


def test_a_job_ends_with_the_outcome_of_its_block(router: FakeRouter) -> None:
    with plexrl.connect(router.url, "key") as cluster:
        with cluster.create_job("j"):
            pass
        with pytest.raises(RuntimeError, match="boom"), cluster.create_job("j"):
            raise RuntimeError("boom")
    finishes = [path for _, path in router.requests if path.endswith("/finish")]
    assert len(finishes) == 2


def test_an_async_controller_can_be_interrupted_while_its_last_operation_waits(
    router: FakeRouter,
) -> None:
    router.polls_until_done = 10**6
    polling = threading.Event()
    router.on_poll = polling.set

    async def control() -> None:
        async with (
            await plexrl.connect_async(router.url, "key") as cluster,
            await cluster.create_job("j") as job,
        ):
            actor = await job.train_deployment("actor", plexrl.tiny_qwen2("01"))
            await actor.optim_step(learning_rate=0.1)

    async def interrupt() -> None:
        task = asyncio.create_task(control())
        assert await asyncio.to_thread(polling.wait, 30.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupt())
    assert router.bodies["/v1/jobs/j/finish"]["outcome"] == "cancelled"


def test_a_stream_request_carries_the_controller_token(router: FakeRouter) -> None:
    with plexrl.connect(router.url, "key") as cluster:
        rollout = cluster.create_job("j").rollout_deployment("actor", plexrl.tiny_qwen2("01"))
        router.tokens.clear()
        assert list(rollout.generate([[3]], stream=True).stream()) == []
    assert len(router.tokens) >= 2
    assert len(set(router.tokens)) == 1, "the submission's and the stream's"


def test_an_attached_controller_beats_within_the_timeout_of_its_job(router: FakeRouter) -> None:
    router.job = {**router.job, "controller_timeout_s": 0.3}
    with plexrl.connect(router.url, "key") as cluster:
        job = cluster.attach_job("j")
        assert router.beaten.wait(10.0), "by default a controller beats every 20 s"
        job.detach()


def test_a_node_without_logs_is_reported(
    router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    with plexrl.connect(router.url, "key") as cluster:
        job = cluster.attach_job("j", heartbeat=False)
        assert job.logs() == []
        assert "no logs from node n7: it is silent" in caplog.text
        assert [each["node"] for each in job.read_logs()["failed"]] == ["n7"]
    where = {"PLEXRL_URL": router.url, "PLEXRL_API_KEY": "key"}
    found = CliRunner().invoke(app, ["logs", "j", "--json"], env=where)
    assert found.stdout == "[]\n"
    assert "n7: it is silent" in found.stderr


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_the_sdk_loads_nothing_heavy() -> None:
    loaded = loaded_by("from plexrl import *")
    assert "plexrl.client.blocking.cluster" in loaded
    assert not loaded & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("part", ["scheduler", "router", "statemanager", "cluster", "worker"])
def test_parts_do_not_load_the_sdk(part: str) -> None:
    if part in ("statemanager", "worker"):
        pytest.importorskip("ml_dtypes", reason="parts of a node need the extra `worker`")
    loaded = loaded_by(f"import plexrl.{part}.__main__")
    assert not loaded & {"plexrl.client.public", "plexrl.rewards", "httpx", "rich"}


def test_an_unknown_name_is_no_public_name() -> None:
    with pytest.raises(AttributeError, match="module 'plexrl' has no attribute 'conect'"):
        getattr(plexrl, "conect")  # noqa: B009  # mypy refuses the attribute
    assert "connect" in dir(plexrl)


def test_the_public_names_are_these() -> None:
    assert all(hasattr(plexrl, name) for name in plexrl.__all__)
    assert sorted(plexrl.__all__, key=str.casefold) == sorted(set(plexrl.__all__), key=str.casefold)
    assert {"connect", "Batch", "losses", "SamplingParams", "tiny_qwen2"} <= set(plexrl.__all__)


def test_a_batch_says_how_old_the_oldest_weights_are_that_drew_it() -> None:
    def sample(*steps: int) -> plexrl.Sample:
        spans = tuple(plexrl.WeightsSpan(at, at, step) for at, step in enumerate(steps))
        return plexrl.Sample([3, 4], np.zeros(2, np.float32), "stop", spans)

    groups = [[sample(5, 6), sample(7)], [sample(2)]]
    batch = plexrl.Batch.from_samples([[1], [1]], groups, [[1.0, 1.0], [1.0]])
    assert batch.with_values("ref_logprobs", [[0.0] * 3] * 3).sampled_step == 2
    kept = plexrl.Batch.from_samples([[1], [1]], groups, [[1.0, 1.0], [1.0]], keep=[True, False])
    assert kept.sampled_step == 5
    unknown = plexrl.Batch.from_samples([[1]], [[sample(1), sample()]], [[1.0, 1.0]])
    assert unknown.sampled_step is None
    assert plexrl.Batch([[1, 2]]).sampled_step is None


def test_from_samples_puts_values_on_completions_only() -> None:
    sample = plexrl.Sample([5, 6], np.array([-0.5, -0.25], dtype=np.float32), "stop")
    batch = plexrl.Batch.from_samples(
        [[3, 4], [7]], [[sample], [sample]], [[2.0], [9.0]], keep=[True, False]
    )
    arrays = batch.arrays()
    assert len(batch) == 1
    assert arrays["tokens"].tolist() == [3, 4, 5, 6]
    assert arrays["mask"].tolist() == [0, 0, 1, 1]
    assert arrays["logprobs"].tolist() == [0, 0, -0.5, -0.25]
    assert arrays["advantages"].tolist() == [0, 0, 2, 2]


def test_completions_and_values_of_unequal_length_are_refused_by_name() -> None:
    with pytest.raises(errors.BatchShapeError, match="logprobs: row 1 has 1 values"):
        plexrl.Batch.from_completions([[3], [3]], [[4], [4, 5]], logprobs=[[0.0], [0.0]])


@pytest.mark.parametrize(
    ("rows", "error", "names"),
    [
        (["abc"], errors.BatchShapeError, "row 0 is 'abc', not a list of token ids"),
        ([1, 2, 3], errors.BatchShapeError, "row 0 is 1, not a list of token ids"),
        ([[1], [0.5]], errors.BatchShapeError, "row 1 is"),
        ([[[1, 2], [3]]], errors.BatchShapeError, "row 0 is ragged"),
        ([[1], [1 << 40]], errors.TokenRangeError, "32 bits"),
    ],
)
def test_rows_that_are_not_token_lists_are_refused(
    rows: Any, error: type[errors.PlexRLError], names: str
) -> None:
    with pytest.raises(error, match=names):
        plexrl.Batch(rows)


def test_rows_may_be_empty_or_arrays() -> None:
    rows: list[Any] = [[], np.array([3, 4], dtype=np.uint8), [5]]
    batch = plexrl.Batch(rows)
    assert batch.lengths == [0, 2, 1]
    arrays = batch.arrays()
    assert arrays["tokens"].dtype == np.int32
    assert arrays["tokens"].tolist() == [3, 4, 5]


@pytest.mark.parametrize("seconds", [0, -3.0, float("nan"), float("inf"), "a"])
def test_an_invalid_deadline_is_refused(router: FakeRouter, seconds: Any) -> None:
    with plexrl.connect(router.url, "key") as cluster, cluster.create_job("j") as job:
        rollout = job.rollout_deployment("rollout", plexrl.tiny_qwen2("ab"))
        with pytest.raises(errors.InvalidRequestError, match=r"deadline_s is .* must be"):
            rollout.within(seconds)


@pytest.mark.parametrize("example", ["grpo_digits", "distill_digits"])
def test_an_example_shows_a_refusal_as_one_line(example: str) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{example}.py")],
        env={**os.environ, "PLEXRL_URL": " , ", "PLEXRL_API_KEY": "key"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("InvalidRequestError: "), result.stderr


def test_a_trace_that_cannot_be_written_is_reported(router: FakeRouter, tmp_path: Path) -> None:
    where = {"PLEXRL_URL": router.url, "PLEXRL_API_KEY": "key"}
    words = ["trace", "--out", str(tmp_path / "no" / "x.json")]
    result = CliRunner().invoke(app, words, env=where)
    assert isinstance(result.exception, errors.StorageError), result.output


def test_a_payload_that_the_cluster_lost_is_sent_again_as_it_was() -> None:
    server = FakeRouter()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with plexrl.connect(server.url, "key", timeout_s=5.0) as cluster:
            job = cluster.create_job("j")
            actor = job.train_deployment("actor", plexrl.tiny_qwen2("0123456789"))
            batch = plexrl.Batch.from_completions([[1, 2]], [[3, 4]])
            first = actor.forward(batch, micro_batch_tokens=128)
            actor.barrier()
            submitted = next(each for each in server.requests if first.operation in each[1])
            server.requests.clear()
            server.lost_payloads = [first.operation, "unknown"]
            beat(job._transport, "j")
            assert submitted in server.requests, "with the same id"
            assert not any("unknown" in path for _, path in server.requests)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_controller_keeps_the_newest_batches_within_a_bound() -> None:
    controller = Controller(sent_bytes_max=250)
    calls = [Call(method="POST", path=str(number), content=bytes(100)) for number in range(3)]
    for number, call in enumerate(calls):
        controller.record_sent(str(number), call)
    controller.record_sent("1", calls[1])
    assert controller.sent("0") is None
    assert [controller.sent(name) for name in "12"] == calls[1:]
    controller.record_sent("large", Call(method="POST", path="", content=bytes(251)))
    assert [controller.sent(name) for name in ("1", "2", "large")] == [None] * 3


@pytest.mark.parametrize(("setting", "is_short"), [("", True), ("full", False)])
def test_a_traceback_ends_near_the_controllers_call(
    router: FakeRouter,
    actor: plexrl.TrainDeployment,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    is_short: bool,
) -> None:
    monkeypatch.setenv("PLEXRL_TRACEBACK", setting)
    future = actor.barrier()
    router.faults = ["invalid_request final"]
    with pytest.raises(errors.InvalidRequestError) as caught:
        future.result(20)
    own, *inner = [each.name for each in caught.traceback]
    assert own == "test_a_traceback_ends_near_the_controllers_call"
    assert (inner == ["result", "run"]) == is_short, inner
