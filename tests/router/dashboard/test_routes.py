"""What the routes of the operator's page answer to an operator, to tenants and to nobody."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from plexrl.router.http.dashboard.stream import OF_TENANT_MAX, STREAMS_MAX
from tests.router.dashboard.fleet import SMALL, tenant_name
from tests.router.live_router import OPERATOR_KEY, LiveRouter

VIEWS = (
    *("/v1/overview", "/v1/lanes", "/v1/queue", "/v1/queue?which=turns"),
    *("/v1/queue?which=impossible", "/v1/shares"),
)
ADA, GRACE = tenant_name(0), tenant_name(1)


def read_events(client: httpx.Client, count: int) -> Iterator[tuple[str, Any]]:
    """The first events of the stream: names and contents."""
    with client.stream("GET", "/v1/overview/stream") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        for _ in range(count):
            name = next(lines, None)
            if name is None:
                return
            content = next(lines)
            assert next(lines) == ""
            yield name.removeprefix("event: "), json.loads(content.removeprefix("data: "))


def test_an_operator_sees_all(small: LiveRouter) -> None:
    with small.client() as client:
        overview = client.get("/v1/overview").json()
        assert overview["gpus"]["gpus"] == 8 * SMALL.nodes
        assert sum(overview["gpus"]["states"].values()) == 8 * SMALL.nodes
        assert overview["jobs_live"] == SMALL.jobs
        assert overview["conditions"] == []
        lanes = client.get("/v1/lanes", params={"seconds": 7200}).json()
        assert len({job["tenant"] for job in lanes["jobs"]}) == SMALL.tenants
        assert len(client.get("/v1/shares").json()["tenants"]) == SMALL.tenants + 1


@pytest.mark.parametrize("tenant", [ADA, GRACE])
def test_a_tenant_sees_its_own_jobs_only(small: LiveRouter, tenant: str) -> None:
    others = {tenant_name(at) for at in range(SMALL.tenants)} - {tenant}
    with small.client() as operator, small.client(tenant) as client:
        of_others = {
            row["job"] for row in operator.get("/v1/jobs").json()["jobs"] if row["tenant"] in others
        }
        for path in VIEWS:
            text = client.get(path).raise_for_status().text
            assert not [name for name in (*others, *of_others) if f'"{name}' in text], path
        (foreign, *_) = sorted(of_others)
        assert client.get(f"/v1/jobs/{foreign}/times").status_code == 404
        assert "switches" not in client.get("/v1/overview").json()


def test_nobody_sees_anything_without_a_key(small: LiveRouter) -> None:
    for path in (*VIEWS, "/v1/overview/stream", "/v1/jobs/job-00001/times"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.get(small.url + path, headers=headers).status_code == 401, path


def test_pages_of_the_queue_join_without_gap_or_repeat(small: LiveRouter) -> None:
    with small.client() as client:
        whole = client.get("/v1/queue", params={"which": "turns", "limit": 100}).json()
        assert whole["total"] == len(whole["rows"]) > 3
        found = []
        for first in range(0, whole["total"], 2):
            page = client.get("/v1/queue", params={"which": "turns", "first": first, "limit": 2})
            found += page.json()["rows"]
        assert [row["deployment"] for row in found] == [row["deployment"] for row in whole["rows"]]
        assert [row["position"] for row in found] == list(range(1, len(found) + 1))


def test_bad_windows_and_lists_are_refused(small: LiveRouter) -> None:
    with small.client() as client:
        for query in ("lanes?seconds=0", "lanes?seconds=nan", "lanes?until_s=-1", "lanes?first=-1"):
            assert client.get(f"/v1/{query}").status_code == 400, query
        assert client.get("/v1/queue?which=everything").status_code == 400
        assert client.get("/v1/queue?first=1000000").json()["rows"] == []


def test_the_stream_repeats_the_overview(small: LiveRouter) -> None:
    with small.client() as client:
        (first, before), (second, after) = read_events(client, 2)
    assert (first, second) == ("overview", "overview")
    assert after["now"] > before["now"]
    assert before.keys() == after.keys()


def test_a_stream_ends_when_its_key_is_revoked(small: LiveRouter) -> None:
    with small.client() as operator:
        made = operator.post(f"/v1/tenants/{ADA}/keys").json()
        with small.client(made["api_key"]) as client:
            events = read_events(client, 1000)
            assert next(events)[0] == "overview"
            operator.delete(f"/v1/tenants/{ADA}/keys/{made['key']}").raise_for_status()
            last = next(events)
            while last[0] == "overview":
                last = next(events)
            assert last[0] == "error"
            assert last[1]["code"] == "unauthenticated"
            with pytest.raises(StopIteration):
                next(events)


def follow(stack: ExitStack, router: LiveRouter, key: str, count: int) -> None:
    """Open so many streams until `stack` ends."""
    request = (
        "GET /v1/overview/stream HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {key}\r\n\r\n"
    )
    for _ in range(count):
        reader = stack.enter_context(socket.create_connection(("127.0.0.1", router.port)))
        reader.sendall(request.encode())
        received = b""
        while b"event: overview" not in received:
            received += reader.recv(65536)


def refused(client: httpx.Client) -> bool:
    """Whether the router serves no further stream."""
    with client.stream("GET", "/v1/overview/stream") as reply:
        if reply.status_code == 200:
            return False
        assert reply.status_code == 429
        assert json.loads(reply.read())["error"]["code"] == "overloaded"
        return True


def test_no_more_streams_are_open_than_the_bound(small: LiveRouter) -> None:
    with ExitStack() as stack, small.client() as client, small.client(ADA) as tenant:
        follow(stack, small, OPERATOR_KEY, STREAMS_MAX)
        assert refused(client)
        assert not refused(tenant)
        assert client.get("/v1/overview").status_code == 200


def test_a_tenant_keeps_nobody_out(small: LiveRouter) -> None:
    with ExitStack() as stack:
        follow(stack, small, ADA, OF_TENANT_MAX)
        clients = [stack.enter_context(small.client(key)) for key in (ADA, GRACE, OPERATOR_KEY)]
        assert [refused(each) for each in clients] == [True, False, False]
