"""Modes of a policy that combine run together, and the others are refused with the reason."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from plexrl.client.data.rollout_policy import EXCLUSIONS, MODES
from plexrl.errors import InvalidRequestError
from plexrl.rollout.service.order import RolloutOrder
from plexrl.wire.operations import SamplingParams
from tests.docs.pages import ROOT
from tests.rollout.adaptive_tp.oracle import profile
from tests.rollout.fleet import Fleet

ON: dict[str, dict[str, Any]] = {
    "staleness": {"staleness": 1},
    "over_launch": {"over_launch_prompts": 1.5},
    "scale_down": {"scale_down": True},
    "plans_parallelism": {"plans_parallelism": True},
    "length_aware": {"length_aware": True},
    "adaptive_tp": {"adaptive_tp": profile()},
    "elastic": {"instances_min": 1, "instances_max": 2},
}
"""What turns each mode on."""
PAIRS = list(combinations(MODES, 2))


def order_with(*modes: str) -> RolloutOrder:
    fields: dict[str, Any] = {"staleness": 0}
    for each in modes:
        fields |= ON[each]
    return RolloutOrder(
        job="job",
        name="rollout",
        source="actor",
        instances=("rollout-0", "rollout-1"),
        prompts=4,
        samples=2,
        sampling=SamplingParams(seed=3, max_tokens=9),
        **fields,
    )


def table() -> Iterator[str]:
    """The rows of the table of the page."""
    names = list(MODES)
    reasons = list(dict.fromkeys(EXCLUSIONS.values()))
    for row, one in enumerate(names[1:], 1):
        cells = []
        for column, other in enumerate(names):
            reason = EXCLUSIONS.get((other, one))
            number = "" if reason is None else f"no ({reasons.index(reason) + 1})"
            cells.append("" if column >= row else number or "yes")
        yield f"| `{one}` | " + " | ".join(cells) + " |"
    yield ""
    for place, reason in enumerate(reasons, 1):
        yield f"{place}. {reason[0].upper()}{reason[1:]}."


def test_the_page_shows_which_modes_combine_and_why_others_do_not() -> None:
    assert "\n".join(table()) in (ROOT / "docs" / "rollout_policies.md").read_text()


def test_every_exclusion_is_of_two_modes_in_their_order() -> None:
    assert set(EXCLUSIONS) <= set(PAIRS)
    assert ON.keys() == MODES.keys()
    for mode in MODES:
        order = order_with(mode)
        assert [name for name, is_on in MODES.items() if is_on(order)] == [mode]


@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if pair not in EXCLUSIONS])
def test_modes_that_combine_train_batches(one: str, other: str) -> None:
    fleet = Fleet(order_with(one, other).settings())
    for _ in range(2):
        fleet.join(budget=200)
    for _ in range(400):
        fleet.round()
        if len(fleet.trained) >= 3:
            return
    pytest.fail(f"{len(fleet.trained)} batches were trained")


@pytest.mark.parametrize(("one", "other"), EXCLUSIONS)
def test_modes_that_exclude_each_other_are_refused_with_the_reason(one: str, other: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        order_with(one, other)
    assert f"{one} and {other}: {EXCLUSIONS[one, other]}" in str(caught.value)
