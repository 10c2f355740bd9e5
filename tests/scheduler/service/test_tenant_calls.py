"""API keys: a tenant may have several, and no router accepts a revoked one."""

from pathlib import Path
from typing import Any

import pytest

from plexrl import errors
from plexrl.access import OPERATORS, AccessRole, KeyScope
from plexrl.scheduler.accounting.tenants import KEYS_MAX, key_id
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.jobs.controllers import JOB_KEYS_MAX
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.tenant import KeyOwner
from plexrl.wire.rpc import Peer
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.live_service import OPERATOR, Plain, digest, live, run_live
from tests.scheduler.service.test_service import refusal

OLD, NEW = digest("old"), digest("new")


def cluster_with_a_tenant() -> FakeCluster:
    cluster = FakeCluster()
    cluster.send(ev.TenantCreated(tenant="operator", key_digest=digest("root"), is_operator=True))
    cluster.send(ev.TenantCreated(tenant="t", key_digest=OLD))
    return cluster


def is_valid(cluster: FakeCluster, key: str) -> bool:
    try:
        cluster.core.authenticate(key, cluster.now)
    except errors.AuthenticationError:
        return False
    return True


def grant(cluster: FakeCluster, key: str, role: AccessRole, **fields: Any) -> None:
    tenant = "operator" if role in OPERATORS else "t"
    fields = {"tenant": tenant, "key_digest": digest(key), "role": role, **fields}
    cluster.send(ev.ApiKeyGranted(**fields))


def test_a_key_has_its_role_user_and_scope_until_it_expires() -> None:
    cluster = cluster_with_a_tenant()
    ends = cluster.now + 60.0
    fields: Plain = {"user": "ada", "scope": KeyScope.READ, "expires_at": ends}
    for role in (AccessRole.VIEWER, AccessRole.ADMIN):
        grant(cluster, role, role, name="ci", **fields)
        owner = KeyOwner(tenant="operator" if role in OPERATORS else "t", role=role, **fields)
        assert cluster.core.authenticate(digest(role), cluster.now) == owner
    (_, shown) = keys_of(cluster, "t")
    assert shown == {
        "key": key_id(digest("admin")),
        "created_at": cluster.now,
        "role": "admin",
        "name": "ci",
        **fields,
    }
    cluster.now = ends
    assert not is_valid(cluster, digest("admin"))
    grant(cluster, "next", AccessRole.MEMBER)
    assert [key["role"] for key in keys_of(cluster, "t")] == ["member"] * 2, "the expired one goes"


def test_a_key_of_another_kind_of_tenant_or_of_the_past_is_refused() -> None:
    cluster = cluster_with_a_tenant()
    before = cluster.core.dump()
    for tenant, role in (("t", AccessRole.OPERATOR), ("t", AccessRole.VIEWER), ("t", "job")):
        with pytest.raises(errors.InvalidRequestError, match="admin or member"):
            grant(cluster, "x", AccessRole(role), tenant=tenant)
    with pytest.raises(errors.InvalidRequestError, match="operator or viewer"):
        grant(cluster, "x", AccessRole.ADMIN, tenant="operator")
    with pytest.raises(errors.InvalidRequestError, match="expired already"):
        grant(cluster, "x", AccessRole.MEMBER, expires_at=cluster.now)
    with pytest.raises(errors.NotFoundError):
        grant(cluster, "x", AccessRole.MEMBER, tenant="nobody")
    assert cluster.core.dump() == before


def test_the_last_key_of_an_operator_that_does_not_expire_is_kept() -> None:
    cluster = cluster_with_a_tenant()
    grant(cluster, "seen", AccessRole.VIEWER)
    grant(cluster, "for now", AccessRole.OPERATOR, expires_at=cluster.now + 5.0)
    grant(cluster, "reads", AccessRole.OPERATOR, scope=KeyScope.READ)
    root = ev.ApiKeyRevoked(tenant="operator", key=key_id(digest("root")))
    with pytest.raises(errors.ConflictError, match="rotate it first"):
        cluster.send(root)
    grant(cluster, "next", AccessRole.OPERATOR)
    cluster.send(root)
    assert not is_valid(cluster, digest("root"))


def keys_of(cluster: FakeCluster, name: str) -> list[Plain]:
    (view,) = [view for view in cluster.core.list_tenants(cluster.now) if view["tenant"] == name]
    return list(view["keys"])


def test_a_new_key_is_valid_at_once_and_the_old_one_until_it_is_revoked() -> None:
    cluster = cluster_with_a_tenant()
    cluster.now += 5.0
    cluster.send(ev.ApiKeyAdded(tenant="t", key_digest=NEW))
    for key in (OLD, NEW):
        assert cluster.core.authenticate(key, cluster.now) == KeyOwner(tenant="t")
    assert [each["key"] for each in keys_of(cluster, "t")] == [key_id(OLD), key_id(NEW)]
    assert [each["created_at"] for each in keys_of(cluster, "t")] == [1000.0, 1005.0]
    for _ in range(2):
        cluster.send(ev.ApiKeyRevoked(tenant="t", key=key_id(OLD)))
        assert not is_valid(cluster, OLD), "a repeated request is answered as the first one"
        assert is_valid(cluster, NEW)
    with pytest.raises(errors.ConflictError, match="was revoked"):
        cluster.send(ev.ApiKeyAdded(tenant="t", key_digest=OLD))
    cluster.send(ev.ApiKeyRevoked(tenant="t", key=key_id(NEW)))
    assert keys_of(cluster, "t") == []


def test_the_operators_last_key_and_a_tenants_seventeenth_are_refused() -> None:
    cluster = cluster_with_a_tenant()
    before = cluster.core.dump()
    with pytest.raises(errors.ConflictError, match="rotate it first"):
        cluster.send(ev.ApiKeyRevoked(tenant="operator", key=key_id(digest("root"))))
    for tenant, key in (("t", "000000000000"), ("nobody", key_id(OLD)), ("t", "")):
        with pytest.raises(errors.NotFoundError):
            cluster.send(ev.ApiKeyRevoked(tenant=tenant, key=key))
    with pytest.raises(errors.ConflictError, match="in use"):
        cluster.send(ev.ApiKeyAdded(tenant="operator", key_digest=OLD))
    assert cluster.core.dump() == before
    for number in range(1, KEYS_MAX):
        cluster.send(ev.ApiKeyAdded(tenant="t", key_digest=digest(str(number))))
    with pytest.raises(errors.ConflictError, match="revoke one first"):
        cluster.send(ev.ApiKeyAdded(tenant="t", key_digest=digest("one more")))


def test_keys_survive_a_snapshot() -> None:
    cluster = cluster_with_a_tenant()
    cluster.send(ev.ApiKeyAdded(tenant="t", key_digest=NEW))
    cluster.send(ev.ApiKeyRevoked(tenant="t", key=key_id(NEW)))
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    assert restored.authenticate(OLD, cluster.now) == KeyOwner(tenant="t")
    with pytest.raises(errors.AuthenticationError):
        restored.authenticate(NEW, cluster.now)


def test_a_jobs_newest_keys_are_valid_until_it_ends() -> None:
    cluster = cluster_with_a_tenant()
    cluster.job("j")
    cluster.job("other")
    for key in (OLD, NEW):
        cluster.send(ev.JobKeyAdded(job="j", key_digest=digest(f"job-{key}")))
    cluster.send(ev.JobKeyAdded(job="j", key_digest=digest(f"job-{NEW}")))
    owner = KeyOwner(tenant="t", role=AccessRole.JOB, job="j")
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    for core in (cluster.core, restored):
        for key in (OLD, NEW):
            assert core.authenticate(digest(f"job-{key}"), cluster.now) == owner
    for number in range(JOB_KEYS_MAX - 1):
        cluster.send(ev.JobKeyAdded(job="j", key_digest=digest(str(number))))
    assert not is_valid(cluster, digest(f"job-{OLD}"))
    assert is_valid(cluster, digest(f"job-{NEW}"))
    cluster.send(ev.JobFinished(job="j", outcome="completed"))
    assert not is_valid(cluster, digest(f"job-{NEW}"))
    before = cluster.core.dump()
    with pytest.raises(errors.JobEndedError):
        cluster.send(ev.JobKeyAdded(job="j", key_digest=NEW))
    with pytest.raises(errors.UnknownJobError):
        cluster.send(ev.JobKeyAdded(job="none", key_digest=NEW))
    with pytest.raises(errors.ControllerReplacedError):
        cluster.send(ev.JobKeyAdded(job="other", key_digest=NEW, controller="former"))
    assert cluster.core.dump() == before


def test_a_jobs_keys_are_revoked_together() -> None:
    cluster = cluster_with_a_tenant()
    cluster.job("j", controller="first")
    cluster.send(ev.JobKeyAdded(job="j", key_digest=NEW, controller="first"))
    with pytest.raises(errors.ControllerReplacedError):
        cluster.send(ev.JobKeysRevoked(job="j", controller="former"))
    assert is_valid(cluster, NEW)
    for _ in range(2):
        cluster.send(ev.JobKeysRevoked(job="j", controller="first"))
        assert not is_valid(cluster, NEW)
    assert is_valid(cluster, OLD), "the tenant's keys stay"


def test_a_later_controller_makes_keys_of_its_own() -> None:
    cluster = cluster_with_a_tenant()
    cluster.job("j", controller="first")
    cluster.send(ev.JobKeyAdded(job="j", key_digest=NEW, controller="first"))
    cluster.send(ev.ControllerAttached(job="j", controller="first"))
    assert is_valid(cluster, NEW)
    cluster.send(ev.ControllerAttached(job="j", controller="second"))
    assert not is_valid(cluster, NEW)


def test_a_revocation_is_answered_once_every_router_has_dropped_the_key(tmp_path: Path) -> None:
    async def talk() -> None:
        forgotten: list[str] = []

        async def forget(_: Peer, __: Plain) -> Plain:
            forgotten.append("other")
            return {}

        async def refuse(_: Peer, __: Plain) -> Plain:
            raise errors.UnavailableError("not now")

        async with live(tmp_path) as cluster:
            router = await cluster.router("asking", {"forget_callers": forget})
            await cluster.router("other", {"forget_callers": forget})
            refusing = await cluster.router("refusing", {"forget_callers": refuse})
            (key,) = await keys_of_a(router)
            assert key["key"] == key_id(digest("a"))
            assert key["last_used_at"] is None
            await router.call("authenticate", {"key_digest": digest("a")})
            (key,) = await keys_of_a(router)
            assert key["last_used_at"] >= key["created_at"]
            assert digest("a") not in str(key)
            for forbidden in (
                ("list_keys", {"name": "a"}),
                ("add_key", {"name": "a", "key_digest": NEW}),
                ("revoke_key", {"name": "a", "key": key["key"]}),
            ):
                method, params = forbidden
                error = await refusal(router, method, {"tenant": "a", **params})
                assert isinstance(error, errors.PermissionDeniedError), method
            fields = {**OPERATOR, "name": "a", "key": key["key"]}
            await router.call("revoke_key", fields)
            assert len(forgotten) == 2
            with pytest.raises(errors.ConnectionLostError):
                await refusing.call("status", OPERATOR)
            error = await refusal(router, "authenticate", {"key_digest": digest("a")})
            assert isinstance(error, errors.AuthenticationError)

    run_live(talk)


async def keys_of_a(router: Peer) -> list[Plain]:
    return list((await router.call("list_keys", {**OPERATOR, "name": "a"}))["keys"])


def test_the_configured_operator_key_is_valid_unless_revoked(tmp_path: Path) -> None:
    async def talk() -> None:
        async with live(tmp_path) as cluster:
            await cluster.router()
        async with live(tmp_path, operator_key_digest=NEW) as cluster:
            router = await cluster.router()
            for key in (digest("operator"), NEW):
                answer = await router.call("authenticate", {"key_digest": key})
                assert answer["is_operator"], "a new key file does not end the former key"
            fields = {**OPERATOR, "name": "operator", "key": key_id(digest("operator"))}
            await router.call("revoke_key", fields)
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            error = await refusal(router, "authenticate", {"key_digest": digest("operator")})
            assert isinstance(error, errors.AuthenticationError), "a restart revived a revoked key"

    run_live(talk)
