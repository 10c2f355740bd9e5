"""Parallel runs give the same bytes as sequential ones, even if some fail."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.sim.results.result import SimResult
from plexrl.sim.results.result_json import dumps, result_values
from plexrl.sim.search.axes import axis, scenarios_along
from plexrl.sim.search.one_run import FailedRun, Outcome, label
from plexrl.sim.search.sweep import run_all
from plexrl.sim.workload.scenario import Behaviour, Pool, Scenario
from plexrl.sim.workload.source.trace_source import TraceSource
from plexrl.traces import TraceJob, TraceSegment, read_jobs, write_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class FewJobs:
    """Short jobs, so that a run takes less than a second."""

    jobs_count: int = 6
    cycles: int = 12
    dies: bool = False
    """Its process is killed on the way, as for want of memory."""

    def jobs(self) -> Iterator[TraceJob]:
        """All jobs in order of submission."""
        for index in range(self.jobs_count):
            if self.dies and index == self.jobs_count // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield TraceJob(
                job_id=f"job-{index}",
                tenant=f"tenant{index % 2}",
                submit_s=40.0 * index,
                gpus=8,
                rollout_gpus=4,
                cycles=self.cycles,
                period_s=100.0,
                jitter_s=15.0,
                state_bytes=1 << 34,
                segments=(TraceSegment(function="update", offset_s=70.0, duration_s=30.0),),
            )


BASE = Scenario(
    source=FewJobs(), pools=(Pool(nodes=2),), behaviour=Behaviour(jitter=0.15), switch_s=4.0
)
SWEEP = scenarios_along(BASE, [axis("nodes=1:2:1"), axis("policy=isolated,pack")])


def documents(outcomes: tuple[Outcome, ...]) -> list[str]:
    """Each run as the bytes that are compared."""
    found = []
    for outcome in outcomes:
        assert isinstance(outcome, SimResult), outcome
        found.append(dumps(result_values(outcome)))
    return found


@pytest.fixture(scope="module")
def serial() -> list[str]:
    return documents(run_all(SWEEP, workers=1))


def test_processes_give_the_bytes_of_one_run_after_another_in_order(serial: list[str]) -> None:
    seen: dict[int, int] = {}
    ended: list[int] = []
    outcomes = run_all(
        SWEEP,
        workers=2,
        on_progress=lambda index, progress: seen.update({index: progress.jobs_done}),
        on_end=lambda index, _: ended.append(index),
    )
    assert documents(outcomes) == serial
    assert [(each.policy, each.gpus) for each in outcomes if isinstance(each, SimResult)] == [
        (each.policy, each.gpus) for each in SWEEP
    ]
    assert sorted(ended) == list(range(len(SWEEP)))
    assert seen == dict.fromkeys(range(len(SWEEP)), 6), "a run's last word comes through"
    assert not multiprocessing.active_children()


def test_runs_of_one_sweep_differ(serial: list[str]) -> None:
    """Else the comparison above would compare nothing."""
    assert len(set(serial)) == len(serial)


def test_a_run_that_fails_is_named_and_the_others_have_results(serial: list[str]) -> None:
    wrong = replace(BASE, policy="no-such-policy")
    killed = replace(BASE, source=FewJobs(dies=True))
    outcomes = run_all((SWEEP[0], wrong, killed, SWEEP[1]), workers=2)
    assert documents((outcomes[0], outcomes[3])) == serial[:2]
    assert isinstance(outcomes[1], FailedRun)
    assert outcomes[1].scenario == wrong
    assert isinstance(outcomes[1].error, InvalidRequestError)
    assert outcomes[1].error.message.startswith(f"{label(wrong)}: policy 'no-such-policy'")
    assert isinstance(outcomes[2], FailedRun)
    assert outcomes[2].error.message.startswith(label(killed))
    assert "exit code -9" in outcomes[2].error.message
    here = run_all((wrong, SWEEP[0]), workers=1)
    assert isinstance(here[0], FailedRun)
    assert documents(here[1:]) == serial[:1]


class Stop(Exception):
    pass


def test_an_interrupt_ends_every_process() -> None:
    def stop(index: int, _: object) -> None:
        raise Stop(index)

    long = replace(BASE, source=FewJobs(cycles=10_000_000))
    with pytest.raises(Stop):
        run_all((SWEEP[0], long, long), workers=3, on_end=stop)
    assert not multiprocessing.active_children()


ORPHANS = """
import sys
from dataclasses import replace
from plexrl.sim.search.sweep import run_all
from tests.sim.search.test_sweep import BASE, FewJobs

if __name__ == "__main__":
    long = replace(BASE, source=FewJobs(cycles=10_000_000))
    told = set()

    def tell(index, progress):
        told.add(index)
        if len(told) == 2:
            print("running", flush=True)

    run_all((long, long), workers=2, on_progress=tell)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of others does not tell children")
def test_runs_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "running\n"
        children = [os.pidfd_open(pid) for pid in _children_of(parent.pid)]
        assert len(children) >= 2
    finally:
        parent.kill()
        parent.communicate()
    for child in children:
        ended, _, _ = select.select([child], [], [], 60.0)
        assert ended, "a run outlived its parent"
        os.close(child)


def _children_of(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def test_a_trace_is_read_the_same_wherever_the_run_is(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    write_jobs(path, FewJobs().jobs())
    assert list(read_jobs(path)) == list(FewJobs().jobs())
    of_file = replace(BASE, source=TraceSource.at(str(path)))
    outcomes = run_all((of_file, BASE), workers=2)
    assert len(set(documents(outcomes))) == 1
