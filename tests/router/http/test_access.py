"""The table of access is what a live router does, for each route, each role, and another tenant."""

import hashlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

import plexrl
from plexrl.access import AccessRole
from plexrl.client.calls import requests
from plexrl.router.http.app import make_app
from plexrl.router.server.config import RouterConfig
from plexrl.router.services.access_table import ROWS, Reach, Rule
from plexrl.router.services.guarded_route import GuardedRoute, include_guarded
from tests.router.dashboard.agents import connected
from tests.router.live_router import OPERATOR_KEY, LiveRouter, live_router
from tests.scheduler.live_service import greeting

OWN, OTHER, UNKNOWN = "alpha-secret", "beta", "alpha-nobody"
"""A tenant, another one, and the name of none; jobs and users of the first have its name in theirs.
"""
OWN_ROLES = (AccessRole.OPERATOR, AccessRole.VIEWER, AccessRole.ADMIN, AccessRole.MEMBER)
MODEL = plexrl.tiny_qwen2("0123456789sr=")
TINKER = "/api/v1/"
UNPLACED = ("/pause", "/resume", "/tp", "/engines", "/rollouts", "/stream", "/chat/completions")
"""Parts of paths of what needs workers or the rollout service, which this router has not."""

UNDESCRIBED = ("POST /v1/runs", "POST /v1/jobs/quote")
"""What is refused for its body, once its sender is known to be allowed."""

BODIES: Mapping[str, Any] = {
    "POST /v1/tenants/{name}/keys": {"user": f"{OWN}-user"},
    "POST /v1/jobs/{job}/finish": {"outcome": "completed"},
    "POST /v1/jobs/{job}/metrics": {"step": 1, "values": {"loss": 1.0}},
    "POST /v1/jobs/{job}/samples": {"step": 1, "total": 0, "failed": 0, "samples": []},
    "POST /v1/jobs/{job}/deployments": requests.create_deployment(
        "", "new", "train", MODEL, {}
    ).json,
    "POST /v1/jobs/{job}/deployments/{name}/copies": {"name": "copy"},
    "POST /v1/jobs/{job}/checkpoints/{name}/share": {"job": "fork", "name": "base"},
    "PUT /v1/jobs/{job}/deployments/{name}/parallelism": {},
    "POST /v1/jobs/{job}/deployments/{name}/pause": {},
    "POST /v1/jobs/{job}/deployments/{name}/tp": {"tp": 1},
    "POST /v1/operations/{operation:path}/stop-rows": {"rows": [0]},
    "POST /v1/runs": {"script": "a.py", "files": {"a.py": ""}},
    "PATCH /v1/tenants/{name}": {"weight": 1.0},
    "POST /v1/jobs/{job}/rollouts": {
        "name": "r",
        "source": "actor",
        "instances": ["rollout"],
        "staleness": 1,
        "prompts": 1,
    },
    "POST /v1/jobs/{job}/rollouts/{name}/exchange": {},
    "POST /v1/jobs/{job}/rollouts/{name}/batches/{version}": {"trainer_step": 0},
    **{
        f"POST /v1/jobs/{{job}}/deployments/{{name}}/openai{middle}/v1/completions": {
            "model": "rollout",
            "prompt": "1",
            "max_tokens": 1,
            "stream": True,
        }
        for middle in ("", "/trajectories/{trajectory}")
    },
    **{
        f"POST /v1/jobs/{{job}}/deployments/{{name}}/openai{middle}/v1/chat/completions": {
            "model": "rollout",
            "messages": [{"role": "user", "content": "1"}],
            "stream": True,
        }
        for middle in ("", "/trajectories/{trajectory}")
    },
}
"""Valid bodies of routes that need one."""
NEW_NAMES = {"POST /v1/tenants": "name", "POST /v1/jobs": "job"}
"""Routes whose body has a name that must be new."""


@dataclass
class Walk:
    """A router with objects of one tenant, and keys of all roles and of another tenant."""

    router: LiveRouter
    operator: httpx.Client
    keys: dict[tuple[str, AccessRole], str] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    """(method, path, status) of each request so far."""

    def client(self, key: str | None) -> httpx.Client:
        headers = {}
        if key is not None:
            headers = {"Authorization": f"Bearer {key}", "X-API-Key": f"tml-{key}"}
        return httpx.Client(base_url=self.router.url, headers=headers, timeout=60)

    def key(self, tenant: str, role: AccessRole) -> str:
        return self.keys[tenant, role]

    def make_job(self) -> str:
        job = f"{OWN}-{next(self.numbers):04}"
        with self.client(self.key(OWN, AccessRole.MEMBER)) as member:
            # The walk is long, and no controller sends heartbeats.
            waits = {"controller_timeout_s": 1e6, "reattach_timeout_s": 1e6}
            send(member, "POST", "/v1/jobs", {"job": job, "name": job, **waits})
            for name, kind in (("actor", "train"), ("rollout", "rollout")):
                call = requests.create_deployment(job, name, kind, MODEL, {})
                send(member, "POST", call.path, call.json)
            path = f"/v1/jobs/{job}/deployments/actor/operations/barrier"
            send(member, "POST", path, {}, operation=f"{job}/o")
        return job

    def job_key(self, job: str) -> str:
        with self.client(self.key(OWN, AccessRole.MEMBER)) as member:
            return str(send(member, "POST", f"/v1/jobs/{job}/keys").json()["api_key"])

    def spare_key(self) -> str:
        found = send(self.operator, "POST", f"/v1/tenants/{OWN}/keys", {})
        return str(found.json()["key"])

    def run(self) -> str:
        with self.client(self.key(OWN, AccessRole.MEMBER)) as member:
            return str(send(member, "POST", "/v1/runs", BODIES["POST /v1/runs"]).json()["run"])

    def ask(self, row: str, key: str | None, names: Mapping[str, str]) -> tuple[int, str]:
        """Send the request of a row; returns status and text, of a stream its first bytes."""
        method, path = row.split(" ")
        body = BODIES.get(row, {} if method in ("POST", "PUT", "PATCH") else None)
        if (name := NEW_NAMES.get(row)) is not None:
            body = {"name": "new", name: f"{names['new']}-{next(self.numbers):04}"}
        query = {"operation": names["new"]} if row.endswith("/operations/{kind}") else {}
        query |= {"wait_s": "0"} if "operation:path" in path or "rollouts" in path else {}
        headers = {"PlexRL-Controller": "c"} if path.endswith("/attach") else {}
        options: Any = {"json": body, "params": query, "headers": headers}
        with (
            self.client(key) as client,
            client.stream(method, filled(path, names), **options) as reply,
        ):
            is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
            text = "" if is_stream else reply.read().decode("utf-8", "replace")
        self.asked.append((method, filled(path, names), reply.status_code))
        return reply.status_code, text


def send(client: httpx.Client, method: str, path: str, body: Any = None, **query: str) -> Any:
    return client.request(method, path, json=body, params=query).raise_for_status()


def filled(path: str, names: Mapping[str, str]) -> str:
    """A path of the table with the names of objects."""
    for name, value in names.items():
        path = path.replace(f"{{{name}}}", value).replace(f"{{{name}:path}}", value)
    return path


def names_for(row: str, tenant: str, job: str, run: str, key: str) -> dict[str, str]:
    """The objects that a request of the row is about."""
    of = {"job": job, "operation": f"{job}/o", "run": run, "key": key, "node": "n", "new": tenant}
    named = "actor" if "operations/{kind}" in row else "rollout"
    for part, value in (("/tenants/", tenant), ("/checkpoints/", "c"), ("/rollouts/{name}", "r")):
        named = value if part in row else named
    rest = {"kind": "barrier", "step": "1", "version": "0", "path": "x", "trajectory": "t"}
    tinker = dict.fromkeys(("session", "sampler"), job)
    return {**of, "name": named, **rest, **tinker}


@pytest.fixture(scope="module")
def walk() -> Iterator[Walk]:
    with ExitStack() as stack:
        agent = greeting("n", gpus=64)
        router = stack.enter_context(
            live_router(
                beside=lambda scheduler: connected(scheduler, [agent]),
                scheduler_config={"tenant_live_jobs_max": 10_000},
                runs_max=1000,
                refused_keys_burst=10_000,
            )
        )
        operator = stack.enter_context(router.client())
        found = Walk(router, operator)
        for tenant in (OWN, OTHER):
            key = send(operator, "POST", "/v1/tenants", {"name": tenant}).json()["api_key"]
            found.keys[tenant, AccessRole.ADMIN] = key
        for tenant, role in ((OWN, "member"), (OTHER, "member"), ("operator", "viewer")):
            body = {"role": role, "user": f"{tenant}-user"}
            made = send(operator, "POST", f"/v1/tenants/{tenant}/keys", body).json()
            found.keys[tenant, AccessRole(role)] = made["api_key"]
        found.keys[OWN, AccessRole.OPERATOR] = OPERATOR_KEY
        found.keys[OWN, AccessRole.VIEWER] = found.keys.pop(("operator", AccessRole.VIEWER))
        yield found


def objects(
    walk: Walk, row: str, shared: dict[str, dict[str, str]], *, is_new: bool = False
) -> dict[str, str]:
    """Objects of the row's request; `is_new` makes new ones if it changes any."""
    if OWN in shared and not (is_new and ROWS[row].changes and TINKER not in row):
        job, run, key = shared[OWN]["job"], shared[OWN]["run"], shared[OWN]["key"]
    else:
        job = walk.make_job()
        run = walk.run() if "/runs/" in row or OWN not in shared else shared[OWN]["run"]
        key = walk.spare_key() if "{key}" in row or OWN not in shared else shared[OWN]["key"]
    found = names_for(row, OWN, job, run, key)
    shared.setdefault(OWN, found)
    return found


SHARED: dict[str, dict[str, str]] = {}


@pytest.mark.parametrize("row", ROWS)
def test_a_route_does_for_each_role_what_its_row_says(walk: Walk, row: str) -> None:
    rule = ROWS[row]
    assert (walk.ask(row, None, objects(walk, row, SHARED))[0] == 401) == rule.needs_key
    for role in OWN_ROLES:
        names = objects(walk, row, SHARED, is_new=rule.of(role) is not Reach.NONE)
        status, text = walk.ask(row, walk.key(OWN, role), names)
        check(row, rule, role, status, text)
    names = objects(walk, row, SHARED, is_new=rule.of(AccessRole.JOB) is not Reach.NONE)
    status, text = walk.ask(row, walk.job_key(names["job"]), names)
    check(row, rule, AccessRole.JOB, status, text)


def check(row: str, rule: Rule, role: AccessRole, status: int, text: str) -> None:
    where = f"{row} by {role}: {status} {text[:300]}"
    if rule.of(role) is Reach.NONE:
        assert status == 403, where
        assert json.loads(text).get("code") or json.loads(text)["error"], where
        return
    assert status not in (401, 403, 500), where
    if TINKER not in row and not any(part in row for part in UNPLACED):
        assert status != 422, where
        assert status != 400 or row in UNDESCRIBED, where


@pytest.mark.parametrize("row", [row for row, rule in ROWS.items() if rule.needs_key])
def test_the_objects_of_another_tenant_are_as_if_they_were_not_there(walk: Walk, row: str) -> None:
    there = objects(walk, row, SHARED)
    nowhere = names_for(row, UNKNOWN, f"{UNKNOWN}-0000", "run-0000000000", "0" * 12)
    for role in (AccessRole.ADMIN, AccessRole.MEMBER):
        if ROWS[row].of(role) is Reach.NONE:
            continue
        key = walk.key(OTHER, role)
        status, text = walk.ask(row, key, there)
        if row == "GET /v1/audit":
            assert {line["tenant"] for line in json.loads(text)["lines"]} <= {OTHER}
        elif "{" not in row or "{node}" in row:
            assert OWN not in text.replace(there["new"], "", 2 if row in NEW_NAMES else 0), text
        else:
            for name, value in nowhere.items():
                text = text.replace(there[name], value)
            assert (status, text) == walk.ask(row, key, nowhere), row
            assert status >= 400 or TINKER in row, row


def test_operators_and_the_tenant_itself_see_what_others_do_not(walk: Walk) -> None:
    objects(walk, "POST /v1/jobs", SHARED)
    for row in ("GET /v1/jobs", "GET /v1/runs", "GET /v1/audit", "GET /v1/queue"):
        for role in OWN_ROLES:
            if ROWS[row].of(role) is not Reach.NONE:
                assert OWN in walk.ask(row, walk.key(OWN, role), {})[1], (row, role)


def test_a_key_of_a_job_opens_no_other_job(walk: Walk) -> None:
    mine, other = walk.make_job(), walk.make_job()
    key = walk.job_key(mine)
    for row, rule in ROWS.items():
        if rule.of(AccessRole.JOB) is Reach.OWN:
            for job in (other, f"{UNKNOWN}-0000"):
                status, _ = walk.ask(row, key, names_for(row, OWN, job, "", ""))
                assert status == 403, row


def test_a_scope_narrows_a_key(walk: Walk) -> None:
    names = objects(walk, "GET /v1/jobs", SHARED)
    for scope, opens in (("read", {"GET /v1/jobs"}), ("openai", set())):
        body = {"role": "admin", "scope": scope, "name": "ci"}
        key = send(walk.operator, "POST", f"/v1/tenants/{OWN}/keys", body).json()["api_key"]
        for row in ("GET /v1/jobs", "POST /v1/jobs", "POST /v1/tenants/{name}/keys"):
            status, text = walk.ask(row, key, {**names, "name": OWN})
            assert (status == 403) == (row not in opens), (scope, row)
            assert status != 403 or f"scope {scope}" in text
        status, _ = walk.ask("GET /v1/jobs/{job}/deployments/{name}/openai/v1/models", key, names)
        assert status == 200, "both scopes include it"


def test_who_may_not_cancel_an_operation_does_not_do_so_by_leaving_its_stream(walk: Walk) -> None:
    body = {"role": "member", "scope": "read", "name": "reads"}
    reads = send(walk.operator, "POST", f"/v1/tenants/{OWN}/keys", body).json()["api_key"]
    for key in (reads, walk.key(OWN, AccessRole.VIEWER)):
        with walk.client(key) as client:
            for choice, status in (("cancel", 403), ("continue", 404)):
                query = {"on_disconnect": choice}
                found = client.get("/v1/operations/none/stream", params=query)
                assert found.status_code == status


def test_a_viewer_gets_quotes_for_all_tenants_and_a_member_for_its_own(walk: Walk) -> None:
    for key, status in (
        (walk.key(OWN, AccessRole.VIEWER), 400),
        (walk.key(OWN, AccessRole.MEMBER), 400),
        (walk.key(OTHER, AccessRole.MEMBER), 403),
    ):
        with walk.client(key) as client:
            body = {"name": "n", "tenant": OWN}
            asked = client.post("/v1/jobs/quote", json=body)
            while asked.status_code == 429:
                time.sleep(0.1)
                asked = client.post("/v1/jobs/quote", json=body)
            assert asked.status_code == status, asked.text


def test_an_admin_of_a_tenant_makes_keys_for_it_and_none_for_operators(walk: Walk) -> None:
    with walk.client(walk.key(OWN, AccessRole.ADMIN)) as admin:
        path = f"/v1/tenants/{OWN}/keys"
        for role, status in (("member", 201), ("admin", 201), ("operator", 400), ("viewer", 400)):
            assert admin.post(path, json={"role": role}).status_code == status, role
        for text in ("x y", "\n", "x" * 201):
            assert admin.post(path, json={"user": text}).status_code == 400
        made = admin.post(path, json={}).json()
        assert admin.delete(f"{path}/{made['key']}").status_code == 204
    data = walk.router.log.parent / "data"
    assert not (data / "operator.key").exists()


def test_each_change_and_each_refusal_of_the_walk_is_in_the_audit_log(walk: Walk) -> None:
    names = objects(walk, "POST /v1/jobs", SHARED)
    walk.ask("POST /v1/jobs", walk.key(OWN, AccessRole.MEMBER), names)
    walk.ask("GET /v1/groups", walk.key(OWN, AccessRole.MEMBER), names)
    lines = audit_lines(walk.router)
    written = Counter((each["method"], each["path"], each["status"]) for each in lines)
    for method, path, status in walk.asked:
        if status in (401, 403) or _is_change(method, path):
            written[method, path, status] -= 1
    missing = [request for request, count in written.items() if count < 0]
    assert missing == []
    for line in lines:
        assert line["from"] == "127.0.0.1"
        is_open = line["status"] == 401 or line["path"].startswith("/v1/login")
        assert (line["tenant"] is None) == is_open, line
    text = json.dumps(lines)
    secrets = [*walk.keys.values(), "Bearer"]
    secrets += [hashlib.sha256(key.encode()).hexdigest() for key in walk.keys.values()]
    assert [secret for secret in secrets if secret in text] == []


def audit_lines(router: LiveRouter) -> list[dict[str, Any]]:
    files = sorted((router.log.parent / "data" / "audit").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _is_change(method: str, path: str) -> bool:
    rules = [rule for row, rule in ROWS.items() if re.fullmatch(_pattern(row), f"{method} {path}")]
    assert rules, path
    return TINKER not in path and all(rule.changes and rule.is_logged for rule in rules)


def _pattern(row: str) -> str:
    return re.sub(r"\{\w+\}", "[^/]+", re.sub(r"\{\w+:path\}", ".+", row))


def test_a_route_without_a_row_or_without_a_guard_is_refused_when_the_router_starts() -> None:
    async def handler() -> None:
        """Nothing."""

    guarded = APIRouter(route_class=GuardedRoute)
    with pytest.raises(LookupError, match="GET /v1/new has no row"):
        guarded.add_api_route("/v1/new", handler, methods=["GET"])
    with pytest.raises(LookupError, match="POST /v1/health has no row"):
        guarded.add_api_route("/v1/health", handler, methods=["GET", "POST"])
    bare = APIRouter()
    bare.add_api_route("/v1/new", handler, methods=["GET"])
    with pytest.raises(LookupError, match="is no GuardedRoute"):
        include_guarded(FastAPI(), bare)


def test_each_row_is_of_a_route_and_no_route_stands_beside_the_table(tmp_path: Path) -> None:
    from plexrl.router.tinker import app as tinker

    config = RouterConfig(
        router="r", scheduler=("unix:/nowhere",), host="127.0.0.1", port=0, data_dir=str(tmp_path)
    )
    app, services = make_app(config)
    rows, others = set(), []
    for each in (app, tinker._make_app(services, 1.0)):
        for included in each.routes:
            routes = getattr(getattr(included, "original_router", None), "routes", [included])
            others += [route for route in routes if not isinstance(route, GuardedRoute)]
            guarded = [route for route in routes if isinstance(route, GuardedRoute)]
            rows |= {route.row(method) for route in guarded for method in route.methods or ()}
    assert others == []
    assert rows == set(ROWS)
