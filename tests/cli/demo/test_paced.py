"""The paced demo: what its tenants wait for, and what is refused."""

import threading

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.cli.demo.measure import measure_phase
from plexrl.cli.demo.paced import Start, check_shared, rows_since, run_together
from plexrl.errors import CapacityError, DeadlineExceededError, ExecutionError
from tests.cli.demo.test_report import job, row, shared_phase


def test_a_tenant_that_fails_before_all_are_ready_ends_the_wait_of_the_others() -> None:
    def work(tenant: int, start: Start) -> int:
        if tenant == 2:
            raise CapacityError("no GPUs")
        return start.ready.wait()

    with pytest.raises(CapacityError, match="no GPUs"):
        run_together(range(4), work)


def test_tenants_that_are_never_ready_are_not_awaited_for_ever() -> None:
    never = threading.Event()

    def work(tenant: int, start: Start) -> int:
        if tenant == 1:
            never.wait(5.0)
        try:
            return start.ready.wait()
        finally:
            never.set()

    with pytest.raises(DeadlineExceededError, match="were ready within"):
        run_together(range(2), work, ready_s=0.01)


def test_tenants_that_are_ready_run_together() -> None:
    def work(tenant: int, start: Start) -> int:
        start.ready.wait()
        return tenant

    assert run_together(range(3), work) == [0, 1, 2]


@pytest.mark.parametrize(
    "given", [["--workers", "2"], ["--backend", "fsdp"], ["--layout", "dp=2"], ["--no-isolated"]]
)
def test_options_that_a_paced_demo_does_not_use_are_refused(given: list[str]) -> None:
    found = CliRunner().invoke(app, ["demo", "--paced", *given])
    assert found.exit_code == 2
    assert "no effect with --paced" in " ".join(found.output.split())


def test_what_ran_before_all_were_ready_is_not_counted() -> None:
    first, second = job("a", 10.0, 20.0), job("b", 10.5, 20.0)
    rows = [
        row("a-1/actor", "offload", 5.0, 9.0),
        row("b-1/actor", "load", 9.9, 10.1),
        row("a-1/actor", "forward", 10.0, 11.0),
        row("b-1/actor", "forward", None, None),
        row("b-1/actor", "offload", 12.0, 13.0),
    ]
    kept = rows_since(rows, 10.0)
    assert kept == [rows[2], rows[4]]
    phase = measure_phase("shared", [first, second], kept)
    assert phase.context_switches == 1
    check_shared(phase)


def test_tenants_that_did_not_share_a_group_are_no_measurement() -> None:
    check_shared(shared_phase())
    apart = [
        row("a-1/actor", "forward", 10.0, 11.0),
        row("b-1/actor", "forward", 10.0, 11.0, group="g2"),
    ]
    phase = measure_phase("shared", [job("a", 9, 12), job("b", 9, 12)], apart)
    with pytest.raises(ExecutionError, match="on 2 groups of GPUs, not on one"):
        check_shared(phase)
