"""Forks: their settings on the command line, and the family of a job."""

from typing import cast

import pytest
import typer

from plexrl.cli.jobs.metrics import family_of
from plexrl.cli.starter.time_machine import values_of
from plexrl.wire.messages.views import JobView


def view(job: str, parent: str | None) -> JobView:
    fork = None if parent is None else {"job": parent, "step": 1, "settings": {}}
    return cast("JobView", {"job": job, "fork": fork})


def test_a_family_has_all_generations_and_no_others() -> None:
    jobs = [view("a", "forgotten"), view("b", "a"), view("c", "forgotten"), view("d", None)]
    assert [each["job"] for each in family_of(jobs, "b")] == ["a", "b", "c"]


def test_a_circle_of_reused_ids_is_one_family() -> None:
    jobs = [view("a", "b"), view("b", "a"), view("c", "a"), view("d", None)]
    assert [each["job"] for each in family_of(jobs, "c")] == ["a", "b", "c"]


def test_settings_are_one_value_or_one_for_each_fork() -> None:
    assert values_of("rate=1e-3,0.5", 2) == ("rate", [0.001, 0.5])
    assert values_of("on=true", 2) == ("on", [True, True])
    # They travel as JSON, which has no such numbers.
    assert values_of("x=nan,inf", 2) == ("x", ["nan", "inf"])
    for text in ("rate", "=1", "rate=1,2,3"):
        with pytest.raises(typer.BadParameter):
            values_of(text, 2)
