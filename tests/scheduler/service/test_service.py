"""The scheduler's socket: roles, access checks, connections."""

import asyncio
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plexrl import errors
from plexrl.wire.rpc import Peer
from tests.examples import examples
from tests.scheduler.live_service import (
    OPERATOR,
    Live,
    Plain,
    barrier_of,
    deployment_of,
    digest,
    greeting,
    job_of,
    live,
    run_live,
)

A: Plain = {"tenant": "a"}
B: Plain = {"tenant": "b"}

ROUTER_ASKS: dict[str, Plain] = {
    "create_tenant": {"name": "c", "key_digest": "0"},
    "list_tenants": {},
    "list_keys": {"name": "a"},
    "add_key": {"name": "a", "key_digest": "0"},
    "revoke_key": {"name": "a", "key": "0"},
    "submit_job": {
        "job": "new",
        "name": "new",
        "controller_timeout_s": 1.0,
        "reattach_timeout_s": 1.0,
    },
    "finish_job": {"job": "j", "outcome": "completed"},
    "heartbeat": {"job": "j"},
    "list_jobs": {},
    "get_job": {"job": "j"},
    "create_deployment": deployment_of({}, "j", "new"),
    "get_deployment": {"deployment": "j/actor"},
    "submit_operation": barrier_of({}, "j/actor", "new"),
    "cancel_operation": {"operation": "o"},
    "wait_operation": {"operation": "o", "timeout_s": 0.0},
    "list_operations": {},
    "list_nodes": {},
    "list_groups": {},
    "status": {},
    "read_log": {"job": "j"},
    "list_checkpoints": {"job": "j"},
}
ROUTER_REPORTS: dict[str, Plain] = {
    "authenticate": {"key_digest": digest("a")},
    "needless_payloads": {"blobs": ["o.0.in"]},
    "operation_finished": {"operation": "o", "token": 1, "compute_s": 0.0},
    "operation_failed": {
        "operation": "o",
        "token": 1,
        "error": errors.ExecutionError("no").to_wire(),
        "state_intact": True,
    },
}
AGENT_REPORTS: dict[str, Plain] = {
    "worker_ready": {"deployment": "j/actor", "rank": 0, "incarnation": 1, "address": "x"},
    "worker_exited": {"deployment": "j/actor", "rank": 0, "incarnation": 1, "reason": "x"},
}
EVERY_CALL = {
    **{name: {**OPERATOR, **params} for name, params in ROUTER_ASKS.items()},
    **ROUTER_REPORTS,
    **AGENT_REPORTS,
}
ONE_TENANTS_OBJECT = (
    *("finish_job", "heartbeat", "get_job", "create_deployment", "get_deployment"),
    *("submit_operation", "cancel_operation", "wait_operation", "read_log"),
    "list_checkpoints",
)


async def refusal(peer: Peer, method: str, params: Plain) -> errors.PlexRLError:
    """The error that answers a call."""
    try:
        answer = await peer.call(method, params)
    except errors.PlexRLError as error:
        return error
    pytest.fail(f"{method} {params} was not refused but answered {answer}")


async def with_one_job(cluster: Live) -> Peer:
    """A router; tenant `a` has job `j` with deployment `j/actor` on node `n` and operation `o`."""
    router = await cluster.router()
    await cluster.agent("n")
    await router.call("submit_job", job_of("a", "j"))
    await router.call("create_deployment", deployment_of(A, "j"))
    await router.call("submit_operation", barrier_of(A, "j/actor", "o"))
    return router


# Roles


def test_nothing_but_hello_is_served_before_hello(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            stranger = await cluster.connect()
            for method, params in EVERY_CALL.items():
                error = await refusal(stranger, method, params)
                assert isinstance(error, errors.PermissionDeniedError), method
                assert "hello" in error.message
            router = await cluster.router()
            tenants = (await router.call("list_tenants", OPERATOR))["tenants"]
            assert [view["tenant"] for view in tenants] == ["operator", "a", "b"]

    run_live(talk)


def test_routers_and_agents_cannot_make_each_others_calls(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await with_one_job(cluster)
            before = await router.call("get_deployment", {**A, "deployment": "j/actor"})
            for method, params in AGENT_REPORTS.items():
                error = await refusal(router, method, params)
                assert isinstance(error, errors.PermissionDeniedError), method
            agent = await cluster.agent("other")
            for method, params in EVERY_CALL.items():
                if method not in AGENT_REPORTS:
                    error = await refusal(agent, method, params)
                    assert isinstance(error, errors.PermissionDeniedError), method
            after = await router.call("get_deployment", {**A, "deployment": "j/actor"})
            assert after == before

    run_live(talk)


def test_a_router_learns_which_payloads_no_operation_needs(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await with_one_job(cluster)
            submitted = {**barrier_of(A, "j/actor", "o2"), "payload": "o2.0.in"}
            await router.call("submit_operation", submitted)
            asked = {"blobs": ["o2.0.in", "o2.1.in"]}
            assert await router.call("needless_payloads", asked) == {"blobs": ["o2.1.in"]}
            await router.call("cancel_operation", {**A, "operation": "o2"})
            assert await router.call("needless_payloads", asked) == asked

    run_live(talk)


def test_an_agent_reports_only_on_workers_of_its_node(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await with_one_job(cluster)
            view = await router.call("get_deployment", {**A, "deployment": "j/actor"})
            assert [rank["node"] for rank in view["ranks"]] == ["n"]
            stranger, own = await cluster.agent("other"), await cluster.agent("n")
            worker = {"deployment": "j/actor", "rank": 0, "incarnation": view["incarnation"]}
            ready = {**worker, "address": "addr"}
            for method, params in (
                ("worker_ready", ready),
                ("worker_exited", {**worker, "reason": "killed"}),
            ):
                error = await refusal(stranger, method, params)
                assert isinstance(error, errors.PermissionDeniedError), method
            beyond = await refusal(own, "worker_ready", {**ready, "rank": 7})
            assert isinstance(beyond, errors.PermissionDeniedError)
            assert await own.call("worker_ready", ready) == {"wanted": True}
            old = {**ready, "incarnation": view["incarnation"] - 1}
            for agent in (stranger, own):
                assert await agent.call("worker_ready", old) == {"wanted": False}
            assert await own.call("worker_ready", {**ready, "deployment": "no/such"}) == {
                "wanted": False
            }
            view = await router.call("get_deployment", {**A, "deployment": "j/actor"})
            assert [rank["address"] for rank in view["ranks"]] == ["addr"]

    run_live(talk)


def test_a_connection_says_hello_once_and_properly(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            peer = await cluster.connect()
            for strange in (
                {},
                {"role": "operator"},
                {"role": ["router"], "router": "r"},
                {"role": "router"},
                {"role": "router", "router": 3},
                {"role": "router", "router": "r", "tenant": "a"},
                {"role": "agent", "node": "n"},
                greeting("n", gpus="many"),
                greeting("n", workers=[{"deployment": "d"}]),
            ):
                error = await refusal(peer, "hello", strange)
                assert isinstance(error, errors.InvalidRequestError), strange
            await peer.call("hello", {"role": "router", "router": "r"})
            for again in ({"role": "router", "router": "r2"}, greeting("n")):
                error = await refusal(peer, "hello", again)
                assert isinstance(error, errors.ConflictError)
            assert (await peer.call("status", OPERATOR))["routers"] == 1
            assert (await peer.call("list_nodes", OPERATOR))["nodes"] == []

    run_live(talk)


# Tenants


def test_a_router_call_names_its_tenant(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await with_one_job(cluster)
            for method, params in ROUTER_ASKS.items():
                for claim in (
                    {},
                    {"tenant": None},
                    {"as_operator": True},
                    {"tenant": None, "as_operator": False},
                    {"tenant": None, "as_operator": 1},
                    {"tenant": "a", "as_operator": True},
                    {"tenant": ["a"]},
                ):
                    error = await refusal(router, method, {**params, **claim})
                    assert isinstance(error, errors.InvalidRequestError), (method, claim)

    run_live(talk)


def test_tenants_cannot_make_operator_calls(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            for method in ("create_tenant", "list_tenants", "list_groups"):
                error = await refusal(router, method, {**A, **ROUTER_ASKS[method]})
                assert isinstance(error, errors.PermissionDeniedError), method

    run_live(talk)


def test_a_tenant_sees_the_machines_and_nothing_of_other_tenants(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await with_one_job(cluster)
            await router.call("submit_job", job_of("b", "k"))
            (whole,) = (await router.call("list_nodes", OPERATOR))["nodes"]
            for claim in (A, B):
                (node,) = (await router.call("list_nodes", claim))["nodes"]
                hidden = {"groups", "host", "statemanager", "foreign_memory"}
                assert whole.keys() - node.keys() == hidden
                assert node == {name: whole[name] for name in node}
            everybody = await router.call("status", OPERATOR)
            assert (everybody["tenants"], everybody["jobs_total"]) == (3, 2)
            assert everybody["operations_pending"] == 1
            of_a, of_b = [await router.call("status", claim) for claim in (A, B)]
            faults = {"steps_set_aside", "newest_set_aside", "snapshot_error", "events"}
            assert everybody.keys() - of_a.keys() == {"tenants", "context_switches", *faults}
            assert (of_a["jobs_total"], of_a["jobs_live"], of_a["operations_pending"]) == (1, 1, 1)
            assert (of_b["jobs_total"], of_b["jobs_live"], of_b["operations_pending"]) == (1, 1, 0)
            assert of_a["gpus"] == everybody["gpus"]
            await router.call("finish_job", {**B, "job": "k", "outcome": "completed"})
            of_b = await router.call("status", B)
            assert (of_b["jobs_total"], of_b["jobs_live"]) == (1, 0)

    run_live(talk)


def test_a_created_tenant_is_not_an_operator(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            create = {**OPERATOR, "name": "c", "key_digest": digest("c")}
            error = await refusal(router, "create_tenant", {**create, "is_operator": True})
            assert isinstance(error, errors.InvalidRequestError)
            assert "is_operator" in error.message
            await router.call("create_tenant", create)
            answer = await router.call("authenticate", {"key_digest": digest("c")})
            rest = {"user": "", "scope": "all", "valid_s": None, "job": None}
            assert answer == {"tenant": "c", "is_operator": False, "role": "admin", **rest}
            taken = {**create, "name": "operator", "key_digest": digest("operator")}
            assert isinstance(await refusal(router, "create_tenant", taken), errors.ConflictError)
            answer = await router.call("authenticate", {"key_digest": digest("operator")})
            assert answer["is_operator"] is True
            unknown = await refusal(router, "authenticate", {"key_digest": digest("x")})
            assert isinstance(unknown, errors.AuthenticationError)

    run_live(talk)


def test_another_tenants_object_is_answered_like_one_that_does_not_exist(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await with_one_job(cluster)
            for method in ONE_TENANTS_OBJECT:
                params = ROUTER_ASKS[method]
                foreign = await refusal(router, method, {**params, **B})
                missing = await refusal(
                    router, method, {name: _missing(value) for name, value in params.items()} | B
                )
                assert isinstance(foreign, errors.NotFoundError), method
                assert foreign.code == missing.code, method
                assert foreign.details == missing.details, method
                assert foreign.message == missing.message.replace("nix", "j").replace("x", "o"), (
                    method
                )
            assert (await router.call("list_jobs", B))["jobs"] == []
            assert (await router.call("list_operations", {**B, "job": "j"}))["operations"] == []
            assert [job["job"] for job in (await router.call("list_jobs", A))["jobs"]] == ["j"]
            assert (await router.call("get_job", {**A, "job": "j"}))["state"] != "completed"
            for claim in (A, OPERATOR):
                for method in ("get_job", "get_deployment", "wait_operation", "read_log"):
                    await router.call(method, {**ROUTER_ASKS[method], **claim})

    run_live(talk)


def _missing(value: Any) -> Any:
    return {"j": "nix", "j/actor": "nix/actor", "j/new": "nix/new", "o": "x"}.get(value, value)


def test_weights_are_not_pulled_from_another_tenants_deployment(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await with_one_job(cluster)
            await router.call("submit_job", job_of("b", "k"))
            rollout = deployment_of(B, "k", "rollout", kind="rollout")
            await router.call("create_deployment", rollout)
            for source in ("j/actor", "no/such"):
                pull = barrier_of(B, "k/rollout", "pull", kind="sync_weights", source=source)
                error = await refusal(router, "submit_operation", pull)
                assert isinstance(error, errors.UnknownDeploymentError), source

    run_live(talk)


def test_a_deployment_name_starts_with_its_job(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await with_one_job(cluster)
            await router.call("submit_job", job_of("b", "k"))
            squatting = {**deployment_of(B, "k"), "deployment": "j/critic"}
            error = await refusal(router, "create_deployment", squatting)
            assert isinstance(error, errors.InvalidRequestError)

    run_live(talk)


# Malformed calls

strange_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from(["a", "j", "j/actor", "o", "n", "completed"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@st.composite
def strange_calls(draw: st.DrawFn) -> tuple[str, Plain]:
    method = draw(st.sampled_from(sorted(EVERY_CALL)))
    params = dict(EVERY_CALL[method])
    for name in draw(st.lists(st.sampled_from(["extra", *sorted(params)]), max_size=2)):
        if draw(st.booleans()):
            params[name] = draw(strange_values)
        else:
            params.pop(name, None)
    return method, params


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(strange_calls(), min_size=10, max_size=40))
def test_any_call_is_answered_and_the_journal_can_be_read_again(
    said: list[tuple[str, Plain]],
) -> None:
    async def talk(folder: Path) -> None:
        async with live(folder) as cluster:
            router = await with_one_job(cluster)
            agent = await cluster.agent("n")
            for method, params in said:
                peer = agent if method in AGENT_REPORTS else router
                try:
                    await peer.call(method, params)
                except errors.ConnectionLostError:
                    raise
                except errors.PlexRLError:
                    continue
            jobs = await router.call("list_jobs", OPERATOR)
            operations = await router.call("list_operations", OPERATOR)
        async with live(folder) as cluster:
            router = await cluster.router()
            again = await router.call("list_jobs", OPERATOR)
            assert [job["job"] for job in again["jobs"]] == [job["job"] for job in jobs["jobs"]]
            assert await router.call("list_operations", OPERATOR) == operations

    with tempfile.TemporaryDirectory() as folder:
        run_live(lambda: talk(Path(folder)))


@pytest.mark.parametrize("timeout_s", [math.inf, -math.inf, math.nan])
def test_a_number_that_json_lacks_is_refused_before_the_journal(
    tmp_path: Path, timeout_s: float
) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            job = {**job_of("a", "j"), "controller_timeout_s": timeout_s}
            error = await refusal(router, "submit_job", job)
            assert isinstance(error, errors.InvalidRequestError)
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            assert (await router.call("list_jobs", OPERATOR))["jobs"] == []

    run_live(talk)


def test_an_operations_error_can_be_shown_whatever_numbers_it_holds(tmp_path: Path) -> None:
    async def talk() -> None:
        admitted: asyncio.Queue[Plain] = asyncio.Queue()

        async def run(_: Peer, params: Plain) -> None:
            admitted.put_nowait(params["command"])

        async with live(tmp_path) as cluster:
            router = await cluster.router("r", {"run": run})
            agent = await cluster.agent("n")
            await router.call("submit_job", job_of("a", "j"))
            view = await router.call("create_deployment", deployment_of(A, "j"))
            worker = {"deployment": "j/actor", "rank": 0, "incarnation": view["incarnation"]}
            await agent.call("worker_ready", {**worker, "address": "addr"})
            await router.call("submit_operation", barrier_of(A, "j/actor", "o"))
            while (command := await admitted.get())["operation"] != "o":
                report = {"operation": command["operation"], "token": command["token"]}
                await router.call("operation_finished", {**report, "compute_s": 0.0})
            report = {"operation": "o", "token": command["token"], "state_intact": True}
            told = {"code": "non_finite_input", "message": "m", "details": {"norm": math.nan}}
            wrong: list[object] = ["", [], {}, {**told, "details": 1}]
            for no_error in wrong:
                error = await refusal(router, "operation_failed", {**report, "error": no_error})
                assert isinstance(error, errors.InvalidRequestError)
            await router.call("operation_failed", {**report, "error": told})
            seen = await router.call("wait_operation", {**A, "operation": "o", "timeout_s": 5.0})
            assert seen["state"] == "failed"
            assert seen["error"] == {**told, "details": {"norm": None}}

    run_live(talk)
