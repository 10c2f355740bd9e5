"""`plexrl rollouts`: what an operator reads of healthy and failed rollouts."""

from typing import TYPE_CHECKING, Any, cast

import pytest

from plexrl.cli.jobs.rollouts import shares, show
from plexrl.cli.terminal.context import Output

if TYPE_CHECKING:
    from plexrl.wire.messages.rollout_views import RolloutStatus


def instance(state: str, reason: str = "", **load: Any) -> dict[str, Any]:
    absent = {"version": None, "running": 0, "waiting": 0, "kv_tokens": None, "kv_budget": None}
    return {**absent, "state": state, "reason": reason, **load}


FIELDS: dict[str, Any] = {
    "job": "math-grpo-caf8d00a",
    "name": "rollout",
    "state": "failed",
    "staleness": 2,
    "round": "short",
    "round_extra_prompts": 2,
    "round_extra_samples": 1,
    "over_launch_gain": 1.25,
    "queued_prompts": 3,
    "unrewarded": 4,
    "oldest_unrewarded": {"prompt": 17, "waiting_s": 93.0},
    "waits_for": "4 samples wait for a reward",
    "newest_version": 117,
    "batches_ready": 1,
    "in_flight": 6144,
    "in_flight_max": 6144,
    "staleness_seen": {"0": 1, "2": 3, "10": 0},
    "tokens_per_s": 12345.6,
    "instances_min": 1,
    "instances_max": 4,
    "instances_wanted": 2,
    "instances_reason": "rollout-1: generation takes 9 s",
    "dropped": 2,
    "dropped_reason": "no\x1b[2Jreward",
    "failure": {"code": "rollout_failed", "message": "no instance is left"},
    "instances": {
        "rollout-0": instance("joined", version=117, running=9, kv_tokens=100, kv_budget=400),
        "rollout-1": instance("lost", "out of service for 60 s"),
    },
}
VIEW = cast("RolloutStatus", FIELDS)


def test_a_narrow_terminal_has_the_figures_the_load_and_what_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show([VIEW], Output())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:4] == ["job", "rollout", "state", "η"], "no table"
    text = "\n".join(lines)
    assert "25 %" in text
    assert "math-grpo-caf8d00a/rollout failed: no instance is left" in text
    assert "2 prompts were dropped" in text
    assert "math-grpo-caf8d00a/rollout: 4 samples wait for a reward" in text
    found = " ".join(text.split())
    assert "math-grpo-caf8d00a/rollout: short round with 2 more prompts and 1 more samples" in found
    assert "gain of the best choice: 1.25); 3 prompts wait for a long one" in found
    change = "2 instances of 1 to 4; rollout-1: generation takes 9 s"
    assert change in " ".join(text.split()), "the change of the number is not shown"
    assert "\x1b" not in text
    assert "math-grpo-caf8d00a/rollout-1 is lost: out of service for 60 s" in text


def test_without_rollouts_there_is_the_head_only(capsys: pytest.CaptureFixture[str]) -> None:
    show([], Output())
    assert capsys.readouterr().out.splitlines()[0].startswith("job")


def test_shares_are_in_the_order_of_age() -> None:
    assert shares({"10": 1, "2": 1, "0": 2}) == "0: 50 %, 2: 25 %, 10: 25 %"
    assert shares({}) == ""
