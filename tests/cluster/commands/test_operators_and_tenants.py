"""What operators and tenants see and do, on real processes: reasons, usage, quotas, drain."""

import asyncio
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl import errors
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.wire.messages.views import LoggedOperationView
from tests.cluster.tools import VOCABULARY, checkpoint_weights, some_batch, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Two nodes of different types with two GPUs each, so that it is soon full."""
    running = start_embedded(
        tmp_path_factory.mktemp("small"),
        nodes=2,
        virtual_gpus=2,
        node_types=("fast", "slow"),
        blocks=("row1",),
        policy="spread",
        ordering="fifo-bursts",
        journal=str(tmp_path_factory.mktemp("elsewhere") / "events.sqlite"),
    )
    yield running
    running.close()


@pytest.fixture
def operator(small: EmbeddedCluster) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(small.url, small.api_key) as connected:
        yield connected
        for job in connected.jobs():
            connected.attach_job(job["job"], heartbeat=False).finish("cancelled")
        for node in connected.nodes():
            connected.undrain(node["node"])


@pytest.fixture
def tenant(small: EmbeddedCluster, operator: plexrl.Cluster) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(small.url, operator.create_tenant(name_of_tenant())) as connected:
        yield connected


def name_of_tenant() -> str:
    return f"tenant{next(NUMBERS)}"


def own_name(operator: plexrl.Cluster) -> str:
    """The tenant that was created last."""
    return str(operator.tenants()[-1]["tenant"])


def cli(cluster: plexrl.Cluster, *words: str) -> str:
    where = {"PLEXRL_URL": cluster.url, "PLEXRL_API_KEY": cluster.api_key, "COLUMNS": "240"}
    found = CliRunner().invoke(app, words, env=where)
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output


def train(actor: plexrl.TrainDeployment, step: int) -> float:
    actor.forward_backward(some_batch(step), plexrl.losses.grpo())
    return actor.optim_step(learning_rate=1e-2, grad_clip_norm=1.0).result(120).metrics["grad_norm"]


def test_cluster_options_reach_the_parts(small: EmbeddedCluster, operator: plexrl.Cluster) -> None:
    # The nodes join in any order.
    nodes = sorted(operator.nodes(), key=lambda node: str(node["node"]))
    assert [node["node_type"] for node in nodes] == ["fast", "slow"]
    assert [node["block"] for node in nodes] == ["row1", "row1"]
    assert all(node["nvme_bytes"] > 0 for node in nodes)
    assert [(node["host"], node["fabric"]) for node in nodes] == [("", ""), ("", "")]
    assert not (small.data_dir / "journal.sqlite").exists()
    config = json.loads(next(small_config(small)).read_text())
    assert (config["policy"], config["ordering"]) == ("spread", "fifo-bursts")
    assert Path(config["journal"]).stat().st_size > 0


def small_config(small: EmbeddedCluster) -> Iterator[Path]:
    from plexrl.process.folders.folders import Folders

    yield Folders.of(small.data_dir).run / "scheduler.json"


@pytest.mark.slow
def test_a_job_without_gpus_is_explained_with_an_estimate(
    operator: plexrl.Cluster, tenant: plexrl.Cluster
) -> None:
    first = tenant.create_job("first", expected_s=600)
    first.train_deployment("a", MODEL, workers=2).barrier().result(120)
    second = tenant.create_job("second", expected_s=900)
    second.train_deployment("a", MODEL, workers=2).barrier().result(120)
    with pytest.raises(errors.QuotaExceededError, match="priority 5 is above"):
        tenant.create_job("third", priority=5)
    cli(operator, "tenants", "set", own_name(operator), "--priority-max", "5")
    third = tenant.create_job("third", priority=5)
    waiting = third.train_deployment("actor", MODEL, workers=2)
    future = waiting.barrier()
    story: Any = third.explain()

    (operation,) = story["operations"]
    assert operation["operation"] == future.operation
    assert operation["rule"] == "capacity"
    assert "0 GPUs are in no group" in operation["reason"]
    assert 0 < operation["eta_s"] <= 600
    assert operation["eta_low_s"] is None, "an interval is of waits for a group"
    assert operation["holder"] is None
    assert "waits for GPUs" in story["summary"]
    (deployment,) = story["deployments"]
    assert (deployment["state"], deployment["group"]) == ("waiting", None)
    assert [each["way"] for each in deployment["attempts"]] == ["dedicated"]

    assert json.loads(cli(tenant, "explain", third.job, "--json"))["summary"] == story["summary"]
    words = " ".join(cli(operator, "explain", third.job).split())
    assert words.startswith(f"third of {own_name(operator)} is QUEUED: {waiting.deployment}")
    for expected in ("capacity", "nobody", "starts in", "dedicated", "No estimate"):
        assert expected in words
    assert "none verified yet" in cli(operator, "status")
    figures = httpx.get(f"{operator.url}/v1/metrics", timeout=60).text
    assert 'plexrl_wait_starts_total{start="inside"} 0.0' in figures
    first.finish()
    future.result(120)
    placed: Any = third.explain()
    assert placed["deployments"][0]["placement"]["way"] == "dedicated"


def run_s(row: LoggedOperationView) -> float:
    """Duration of an operation's run."""
    assert row["started_at"] is not None
    assert row["finished_at"] is not None
    return row["finished_at"] - row["started_at"]


def test_a_job_with_a_demand_trace_shows_the_groups_it_fits(tenant: plexrl.Cluster) -> None:
    traces: list[plexrl.DemandTrace | dict[str, Any]] = [
        plexrl.DemandTrace(600, [plexrl.Segment(0, 100, 10)], jitter_s=1),
        {"period_s": 600, "segments": [{"offset_s": 0, "duration_s": 100}]},
    ]
    jobs = [tenant.create_job("known") for _ in traces]
    for job, trace in zip(jobs, traces, strict=True):
        job.train_deployment("actor", MODEL, workers=2, trace=trace).barrier().result(120)
    explained: list[Any] = [job.explain() for job in jobs]
    first, second = (each["deployments"][0] for each in explained)
    assert second["placement"]["way"] == "strict"
    assert second["group"] == first["group"]
    assert second["profile"]["period_s"] == 600
    assert second["profile"]["cycles"] == 0, "declared, not measured"


def test_a_deployment_is_placed_on_the_requested_node_type(tenant: plexrl.Cluster) -> None:
    with tenant.create_job("choosy") as job:
        train_one = job.train_deployment("actor", MODEL, node_type="slow")
        rollout = job.rollout_deployment("rollout", MODEL, node_type="slow")
        nodes = {deployment.status()["ranks"][0]["node"] for deployment in (train_one, rollout)}
        assert nodes == {"node1"}
        with pytest.raises(errors.CapacityError, match="of type 'gold'"):
            job.train_deployment("other", MODEL, node_type="gold")


def test_a_gang_waits_for_its_last_member(tenant: plexrl.Cluster) -> None:
    with tenant.create_job("gang", gang=2) as job:
        actor = job.train_deployment("actor", MODEL)
        future = actor.barrier()
        assert job.explain()["operations"][0]["rule"] == "gang"
        job.train_deployment("critic", MODEL)
        future.result(120)


def test_usage_is_the_sum_of_what_ran(operator: plexrl.Cluster, tenant: plexrl.Cluster) -> None:
    with tenant.create_job("billed") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        for step in range(3):
            train(actor, step)
        with pytest.raises(errors.CheckpointNotFoundError):
            actor.load_checkpoint("nothing").result(120)
        log = operator.operations(job=job.job)
    usage = {row["kind"]: row for row in tenant.usage()}
    ran = Counter(row["kind"] for row in log if row["started_at"] is not None)
    assert {kind: row["operations"] for kind, row in usage.items()} == dict(ran)
    assert usage["forward_backward"]["operations"] == usage["optim_step"]["operations"] == 3
    assert usage["load_checkpoint"]["failed"] == 1
    assert sum(row["failed"] for row in usage.values()) == 1
    assert usage["forward_backward"]["tokens"] == sum(
        sum(some_batch(step).lengths) for step in range(3)
    )
    for kind, row in usage.items():
        spans = [run_s(each) for each in log if each["kind"] == kind]
        assert row["gpu_seconds"] > 0
        assert row["gpu_seconds"] == pytest.approx(2 * sum(spans), rel=1e-6)

    as_json = json.loads(cli(tenant, "usage", "--by", "kind", "--json"))
    as_csv = list(csv.DictReader(io.StringIO(cli(tenant, "usage", "--by", "kind", "--csv"))))
    assert [{key: str(value) for key, value in row.items()} for row in as_json] == as_csv
    assert {row["kind"]: row["operations"] for row in as_json} == dict(ran)
    (whole,) = json.loads(cli(tenant, "usage", "--json"))
    assert whole["gpu_seconds"] == pytest.approx(sum(row["gpu_seconds"] for row in as_json))
    assert whole["gpu_hours"] == pytest.approx(whole["gpu_seconds"] / 3600)
    own = {
        row["tenant"]: row for row in json.loads(cli(operator, "usage", "--by=tenant", "--json"))
    }
    assert own[whole["tenant"]]["operations"] == sum(ran.values())
    assert "GPU-hours" in cli(operator, "usage")


def test_a_switch_is_charged_once_to_the_job_that_caused_it(
    operator: plexrl.Cluster, tenant: plexrl.Cluster
) -> None:
    # The other node is occupied, so that no waiting member is moved there.
    operator.create_job("filler").train_deployment("actor", MODEL, workers=2, exclusive=True)
    trace = plexrl.DemandTrace(600, [plexrl.Segment(0, 100)])
    with tenant.create_job("one") as one, tenant.create_job("two") as two:
        jobs = (one.job, two.job)
        actors = [
            job.train_deployment("actor", MODEL, workers=2, trace=trace) for job in (one, two)
        ]
        for step in range(3):
            for actor in actors:
                train(actor, step)
        log = [row for job in jobs for row in operator.operations(job=job)]
        used = [row for row in tenant.usage() if row["job"] in jobs]
    ran = Counter(row["kind"] for row in log if row["started_at"] is not None)
    assert ran["offload"] >= 5, "the group was to change hands at every step"
    counted: Counter[str] = Counter()
    for row in used:
        counted[row["kind"]] += row["operations"]
    assert counted == ran
    spans = sum(run_s(row) for row in log if row["started_at"])
    assert sum(row["gpu_seconds"] for row in used) == pytest.approx(2 * spans, rel=1e-6)


def test_a_quota_on_jobs_makes_the_next_one_wait(
    operator: plexrl.Cluster, tenant: plexrl.Cluster
) -> None:
    name = own_name(operator)
    view = operator.configure_tenant(name, jobs_max=1, weight=2.5)
    assert (view["jobs_max"], view["weight"], view["gpus_max"]) == (1, 2.5, None)
    first = tenant.create_job("first")
    first.train_deployment("actor", MODEL).barrier().result(120)
    second = tenant.create_job("second")
    future = second.train_deployment("actor", MODEL).barrier()
    (operation,) = second.explain()["operations"]
    assert operation["rule"] == "quota"
    assert "its quota is 1" in operation["reason"]
    assert "its quota is 1" in cli(tenant, "explain", second.job).replace("\n", " ")
    cli(operator, "tenants", "set", name, "--jobs-max", "none")
    future.result(120)
    row = next(each for each in operator.tenants() if each["tenant"] == name)
    assert (row["jobs_max"], row["weight"], row["jobs_running"]) == (None, 2.5, 2)


def test_an_exhausted_budget_refuses_new_work(
    operator: plexrl.Cluster, tenant: plexrl.Cluster
) -> None:
    job = tenant.create_job("before")
    actor = job.train_deployment("actor", MODEL)
    name = own_name(operator)
    changed = json.loads(cli(operator, "tenants", "set", name, "--gpu-seconds-max", "0", "--json"))
    assert changed["gpu_seconds_max"] == 0
    with pytest.raises(errors.QuotaExceededError, match="ask an operator"):
        tenant.create_job("after")
    with pytest.raises(errors.QuotaExceededError):
        actor.barrier()
    assert Path(actor.save_checkpoint("kept").result(120)["path"]).is_dir()
    operator.configure_tenant(name, gpu_seconds_max=None)
    actor.barrier().result(120)


def test_a_drained_nodes_job_continues_elsewhere_unchanged(
    operator: plexrl.Cluster, tenant: plexrl.Cluster
) -> None:
    with tenant.create_job("undisturbed") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        norms = [train(actor, step) for step in range(5)]
        weights = checkpoint_weights(actor)
    with tenant.create_job("moved") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        before = [train(actor, step) for step in range(3)]
        (home,) = {rank["node"] for rank in actor.status()["ranks"]}
        assert json.loads(cli(operator, "nodes", "drain", home, "--json"))["is_draining"]
        wait_until(lambda: _nodes(actor) == {"node0", "node1"} - {home}, "it did not move")
        after = [train(actor, step) for step in range(3, 5)]
        assert checkpoint_weights(actor) == weights
        (deployment,) = job.explain()["deployments"]
        assert deployment["moves"] == 1
        assert deployment["moved_because"] == f"node {home!r} is drained"
        words = " ".join(cli(operator, "nodes", "--json").split())
        drained = {node["node"]: node for node in json.loads(words)}[home]
        assert (drained["is_draining"], drained["gpus_reserved"]) == (True, 0)
    assert before + after == norms
    assert not operator.undrain(home)["is_draining"]


def _nodes(actor: plexrl.TrainDeployment) -> set[str]:
    return {rank["node"] for rank in actor.status()["ranks"]}


def test_a_tenant_sees_only_its_own_jobs_and_cannot_operate(
    operator: plexrl.Cluster, tenant: plexrl.Cluster
) -> None:
    job = operator.create_job("secret")
    job.train_deployment("actor", MODEL).barrier().result(120)
    assert tenant.usage() == []
    response = httpx.get(
        f"{tenant.url}/v1/jobs/{job.job}/explain",
        headers={"Authorization": f"Bearer {tenant.api_key}"},
    )
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_job")
    for forbidden in (
        tenant.tenants,
        lambda: tenant.configure_tenant(own_name(operator), jobs_max=None),
        lambda: tenant.drain("node0"),
        lambda: tenant.undrain("node0"),
    ):
        with pytest.raises(errors.PermissionDeniedError):
            forbidden()
    assert not any(node["is_draining"] for node in operator.nodes())


@pytest.mark.parametrize(
    ("method", "path", "body", "names"),
    [
        ("POST", "jobs", {"priority": 101}, "body.priority"),
        ("POST", "jobs", {"priority": 1.5}, "body.priority"),
        ("POST", "jobs", {"gang": -1}, "body.gang"),
        ("POST", "jobs", {"expected_s": -1.0}, "body.expected_s"),
        ("POST", "jobs", {"expected_s": float("inf")}, "body.expected_s"),
        ("PATCH", "tenants/operator", {"weight": 0}, "body.weight"),
        ("PATCH", "tenants/operator", {"weight": None}, "body.weight"),
        ("PATCH", "tenants/operator", {"jobs_max": -1}, "body.jobs_max"),
        ("PATCH", "tenants/operator", {"gpus_max": "many"}, "body.gpus_max.* 'many'"),
        ("PATCH", "tenants/operator", {"gpu_seconds_max": float("nan")}, "gpu_seconds_max"),
        ("PATCH", "tenants/operator", {"speed": 1}, "body.speed"),
        ("POST", "jobs/careless/deployments", {"trace": {"period_s": 0}}, "trace.period_s"),
        ("POST", "jobs/careless/deployments", {"trace": {"segments": []}}, "trace.segments"),
        (
            "POST",
            "jobs/careless/deployments",
            {"trace": {"segments": [{"offset_s": 50, "duration_s": 60}]}},
            "inside its period",
        ),
        (
            "POST",
            "jobs/careless/deployments",
            {"trace": {"segments": [{"offset_s": 9, "duration_s": 1}] * 2}},
            "out of order",
        ),
        (
            "POST",
            "jobs/careless/deployments",
            {"kind": "rollout", "shares_gpus": False, "trace": {}},
            "needs no demand trace",
        ),
        ("POST", "jobs/careless/deployments", {"node_type": 5}, "body.node_type"),
    ],
)
def test_bad_values_are_refused_with_field_and_remedy(
    operator: plexrl.Cluster, method: str, path: str, body: dict[str, object], names: str
) -> None:
    if path == "jobs":
        body = {"job": "careless", "name": "careless", **body}
    if path.endswith("deployments"):
        operator.create_job("careless", job_id="careless")
        spec = {"architecture": MODEL.architecture, "config_json": MODEL.config_json}
        if isinstance(body.get("trace"), dict):
            good = {"period_s": 100, "segments": [{"offset_s": 0, "duration_s": 1}]}
            body = {**body, "trace": good | dict(body["trace"])}  # type: ignore[call-overload]
        body = {"name": "actor", "kind": "train", "model": spec, **body}
    response = httpx.request(
        method,
        f"{operator.url}/v1/{path}",
        content=json.dumps(body),
        headers={
            "Authorization": f"Bearer {operator.api_key}",
            "Content-Type": "application/json",
        },
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_request"), error
    assert re.search(names, error["message"]), error["message"]


def test_an_unknown_node_or_tenant_is_refused_by_name(operator: plexrl.Cluster) -> None:
    with pytest.raises(errors.NotFoundError, match="node99"):
        operator.drain("node99")
    with pytest.raises(errors.NotFoundError, match="nobody"):
        operator.configure_tenant("nobody", jobs_max=1)


def test_an_ignored_option_or_an_invalid_value_is_refused() -> None:
    for words, expected in (
        (("nodes", "--json", "drain", "node0"), "put --json after drain"),
        (("tenants", "set", "a", "--jobs-max", "x"), "give a number or none"),
        (("tenants", "set", "a"), "nothing to set"),
        (("usage", "--csv", "--json"), "choose one"),
    ):
        found = CliRunner().invoke(app, words, env={"COLUMNS": "240"})
        assert found.exit_code == 2
        assert expected in found.output


def test_async_controllers_can_operate(operator: plexrl.Cluster, tenant: plexrl.Cluster) -> None:
    async def control() -> None:
        async with await plexrl.connect_async(operator.url, operator.api_key) as cluster:
            name = (await cluster.tenants())[-1]["tenant"]
            assert (await cluster.configure_tenant(name, gpus_max=3))["gpus_max"] == 3
            assert (await cluster.drain("node1"))["is_draining"]
            assert not (await cluster.undrain("node1"))["is_draining"]
            async with await cluster.create_job("async", priority=-1) as job:
                trace = plexrl.DemandTrace(10, [plexrl.Segment(0, 1)])
                actor = await job.train_deployment("actor", MODEL, node_type="slow", trace=trace)
                await (await actor.barrier())
                assert (await job.explain())["deployments"][0]["nodes"] == ["node1"]
                assert {row["rank"] for row in await job.logs()} == {0}
            assert name not in {row["tenant"] for row in await cluster.usage()}

    asyncio.run(control())
    assert tenant.usage() == []


def test_tables_are_readable(operator: plexrl.Cluster, tenant: plexrl.Cluster) -> None:
    job = tenant.create_job("shown")
    job.train_deployment("actor", MODEL).barrier().result(120)
    assert "fast" in cli(operator, "nodes")
    (shown, _) = json.loads(cli(tenant, "nodes", "--json"))
    assert not {"host", "statemanager", "groups"} & shown.keys()
    assert shown["fabric"] == ""
    assert f"{job.job}/actor" in cli(operator, "groups")
    assert own_name(operator) in cli(operator, "tenants", "list")
    (log,) = json.loads(cli(tenant, "logs", job.job, "--json"))
    assert "is ready" in log["text"]
    assert f"rank 0 on {log['node']}" in cli(tenant, "logs", job.job)
    explanation = cli(tenant, "explain", job.job)
    assert "waits for its controller" in " ".join(explanation.split())
