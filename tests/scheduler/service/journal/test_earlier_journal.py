"""A journal that an earlier version of the scheduler wrote is read, and the scheduler goes on."""

import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl.access import AccessRole
from plexrl.errors import AuthenticationError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import with_core_settings
from plexrl.scheduler.service.journal.recovery import restore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.tenant import KeyOwner
from plexrl.wire.messages import Run
from plexrl.wire.operations import (
    AdamParams,
    ForwardBackwardParams,
    GenerateParams,
    LossSpec,
    OperationKind,
    SamplingParams,
)
from tests.scheduler.fake_cluster import config
from tests.scheduler.live_service import digest

FIXTURE = Path(__file__).parent / "earlier_journal.msgpack.zlib"
SNAPSHOT_5 = Path(__file__).parent / "snapshot_5.msgpack.zlib"
"""A snapshot of format 5 after all events of that journal: deployments had no parts."""

KEYS_6 = Path(__file__).parent / "keys_6.sqlite.zlib"
"""A journal with a snapshot of format 6: an operator, tenant `t` with the keys `old`, `revoked` and
`later`, the last one after the snapshot, and job `j` with the key `of-job`. No key had a role."""


class Earlier(msgspec.Struct):
    """The journal of a random history with faults, with a snapshot in its middle."""

    journal: bytes
    """The SQLite database."""
    settings: dict[str, Any]
    now: float
    """Time of the last event."""
    views: str
    """What the version that wrote it showed of jobs and operations after all events, as JSON."""


@pytest.fixture(scope="module")
def earlier() -> Earlier:
    return msgspec.msgpack.decode(zlib.decompress(FIXTURE.read_bytes()), type=Earlier)


@pytest.fixture(params=["with its snapshot", "without", "format 5"])
def core(
    request: pytest.FixtureRequest, earlier: Earlier, tmp_path: Path
) -> Iterator[SchedulerCore]:
    path = tmp_path / "journal.db"
    path.write_bytes(earlier.journal)
    if request.param == "without":
        with closing(sqlite3.connect(path)) as database:
            database.execute("DELETE FROM snapshots")
            database.commit()
    with closing(SqlJournal(str(path))) as journal:
        if request.param == "format 5":
            journal.acquire("b", 60.0)
            events = sum(1 for _ in journal.read())
            journal.write_snapshot(events, earlier.now, zlib.decompress(SNAPSHOT_5.read_bytes()))
        restored = restore(with_core_settings(config(), earlier.settings), journal).core
    restored.check_invariants()
    yield restored
    restored.check_invariants()


def test_jobs_and_operations_are_shown_as_before(earlier: Earlier, core: SchedulerCore) -> None:
    expected = msgspec.json.decode(earlier.views)
    shown = {
        "jobs": core.list_jobs(None, earlier.now),
        "operations": [
            core.operation_view(each["operation"], earlier.now) for each in expected["operations"]
        ],
    }
    found = msgspec.json.decode(msgspec.json.encode(shown))
    for each in (*found["operations"], *expected["operations"]):
        # How it is estimated and told may change; what has happened does not.
        del each["explanation"]
    for job in found["jobs"]:
        # Shown since.
        assert job.pop("controller_timeout_s") > 0
        assert job.pop("user") == ""
        for each in job["deployments"]:
            assert each.pop("pace") == ""
            assert each.pop("tenant") == job["tenant"]
            assert each.pop("checkpoints") is None
            assert each.pop("shares_if_scarce") is False
            groups = each.pop("groups")
            assert groups == ([] if each["group"] is None else [each["group"]])
    assert found == expected


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_keys_of_an_earlier_version_get_the_roles_that_they_had(
    tmp_path: Path, *, has_snapshot: bool
) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(zlib.decompress(KEYS_6.read_bytes()))
    if not has_snapshot:
        with closing(sqlite3.connect(path)) as database:
            database.execute("DELETE FROM snapshots")
            database.commit()
    with closing(SqlJournal(str(path))) as journal:
        core = restore(config(), journal).core
    core.check_invariants()
    owners = {
        "operator": KeyOwner(tenant="operator", role=AccessRole.OPERATOR),
        "old": KeyOwner(tenant="t", role=AccessRole.MEMBER),
        "later": KeyOwner(tenant="t", role=AccessRole.MEMBER),
        "of-job": KeyOwner(tenant="t", role=AccessRole.JOB, job="j"),
    }
    for key, owner in owners.items():
        assert core.authenticate(digest(key), 2e9) == owner
    with pytest.raises(AuthenticationError):
        core.authenticate(digest("revoked"), 2e9)
    (view,) = [each for each in core.list_tenants(2e9) if each["tenant"] == "t"]
    assert [key["created_at"] for key in view["keys"]] == [1001.0, 1006.0]


def test_runs_are_sent_again_with_their_parameters(earlier: Earlier, core: SchedulerCore) -> None:
    now = earlier.now + 1.0
    runs: list[Any] = []
    sampling = SamplingParams(seed=7, stop_sequences=((1, 2),))
    expected: dict[OperationKind, object] = {
        OperationKind.FORWARD_BACKWARD: ForwardBackwardParams(
            loss=LossSpec(name="grpo", kl_coef=0.1, token_range=(0.5, 2.0)),
            micro_batch_tokens=512,
        ),
        OperationKind.OPTIM_STEP: AdamParams(learning_rate=1e-5, grad_clip_norm=1.0),
        OperationKind.GENERATE: GenerateParams(
            samples_per_prompt=2, sampling=sampling, stream="rows"
        ),
    }
    kinds = set()
    commands = core.handle(ev.RouterJoined(router="again"), now)
    for _ in range(200):
        runs += [each for each in commands if isinstance(each, Run)]
        if not runs:
            break
        run = runs.pop()
        kinds.add(run.kind)
        if run.kind in expected:
            assert run.params == expected[run.kind]
        now += 1.0
        commands = core.handle(
            ev.OperationFinished(operation=run.operation, token=run.token, compute_s=0.5), now
        )
    assert {OperationKind.LOAD, *expected} & kinds, f"only {kinds} ran"
