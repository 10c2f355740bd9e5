"""Power cuts of machines whose disks lose what was not flushed: no accepted work is lost.

Controllers run on a host of their own, which keeps its power. What the cluster has accepted of them
it must have after each cut: each accepted operation is in the journal, each payload that may still
be read is whole, and the final weights equal those of an undisturbed run. `-k once` is the short
example; `--fault-cuts` says how many cuts the long runs have.
"""

from pathlib import Path

import pytest

from tests.faults.power_cuts import MACHINES, assert_survived
from tests.hosts.loop_disk import why_no_loop_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(14_400)]


@pytest.fixture(scope="session")
def _loop_disks(_namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_loop_disk(tmp_path_factory.mktemp("loop")):
        pytest.skip(reason)


@pytest.fixture(params=list(MACHINES))
def machines(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.usefixtures("_loop_disks")
def test_two_jobs_survive_power_cut_once(machines: str, seed: int, tmp_path: Path) -> None:
    assert_survived(machines, seed, 1, tmp_path)


@pytest.mark.usefixtures("_loop_disks")
def test_two_jobs_survive_many_power_cuts(
    machines: str, seed: int, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    assert_survived(machines, seed, int(pytestconfig.getoption("--fault-cuts")), tmp_path)
