"""`plexrl explain` shows the jobs that hold the GPUs."""

import pytest

from plexrl.cli.jobs.explain import print_holders, print_rollouts
from plexrl.ids import JobId, TenantId
from plexrl.wire.messages.views import HolderView

WAITS = "1 sample waits for a reward"
LEFT_OPEN: HolderView = {
    "job": JobId("left-open"),
    "tenant": TenantId("team"),
    "name": "left-open",
    "gpus": 2,
    "condition": "silent",
    "silent_s": 90.0,
    "idle_s": 90.0,
    "cancelled_in_s": 270.0,
}


def test_a_job_that_was_left_open_is_named_with_the_command_that_ends_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_holders([LEFT_OPEN])
    told = capsys.readouterr().out
    assert "left-open has not ended, and its controller has been silent for" in told
    assert "To end it now: plexrl cancel left-open" in told


def test_a_job_of_another_tenant_has_no_name_and_no_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_holders([{**LEFT_OPEN, "job": None, "tenant": None, "name": None}])
    told = capsys.readouterr().out
    assert "A job of another tenant has not ended" in told
    assert "plexrl cancel" not in told


def test_a_rollout_that_waits_for_rewards_says_so_and_one_that_generates_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_rollouts([{"rollout": "r", "waits_for": WAITS}, {"rollout": "busy", "waits_for": ""}])
    assert capsys.readouterr().out == f"r: {WAITS}.\n"
    print_rollouts([])
    assert not capsys.readouterr().out
    print_rollouts(None)
    assert "their service is away" in capsys.readouterr().out
