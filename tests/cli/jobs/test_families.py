"""The family of a job: those that it is related to by forks."""

from typing import cast

from plexrl.cli.jobs.metrics import family_of
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
