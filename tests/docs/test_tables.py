"""Tables of the documentation agree with the tables of the code."""

import re
from collections.abc import Iterator

import pytest

from plexrl.limits import LIMITS
from plexrl.model.architecture.families import EVERY, FAMILIES
from plexrl.model.capabilities import BACKENDS
from plexrl.sim.workload.policies import SIM_POLICIES
from scripts import access_page, troubleshooting_page
from scripts.limits_page import PAGE, filled_in
from tests.docs.pages import ROOT


def rows(page: str, head: str) -> Iterator[list[str]]:
    """The cells of each row of the table with this head."""
    lines = iter((ROOT / "docs" / page).read_text().splitlines())
    assert head in lines, f"{page} has no table {head}"
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_guide_lists_the_axes_of_every_backend() -> None:
    shown = {
        (kind, re.findall(r"`(\w+)`", backend)[0]): re.findall(r"\b(?:dp|tp|pp|cp|ep)\b", axes)
        for kind, backend, axes in rows("layouts.md", "| kind | backend | axes |")
    }
    for key, axes in shown.items():
        shown[key] = list(dict.fromkeys(axes))
    assert shown == {(each.kind, each.backend): list(each.axes) for each in BACKENDS}


def test_the_page_of_models_says_which_backend_runs_which_family() -> None:
    head = "| family | `fsdp` | `megatron` | `deepspeed` | `forward` | `torch` | `vllm` |"
    names = re.findall(r"`(\w+)`", head)
    assert tuple(names) == EVERY
    shown = {
        family.strip("`"): [name for name, cell in zip(names, cells, strict=True) if cell == "yes"]
        for family, *cells in rows("models.md", head)
    }
    assert shown == {name: list(family.backends) for name, family in FAMILIES.items()}


def test_the_guide_lists_the_placement_of_every_simulated_policy() -> None:
    head = "| policy | where jobs go | who goes next | source |"
    shown = {name.strip("`"): placement for name, placement, *_ in rows("simulating.md", head)}
    assert shown.keys() == SIM_POLICIES.keys()
    for name, placement in shown.items():
        for like in re.findall(r"^as `([\w+-]+)`", placement):
            settings = SIM_POLICIES[name].settings
            assert settings["policy"] == SIM_POLICIES[like].settings["policy"], name


def test_the_page_of_limits_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == filled_in(page), "run `python -m scripts.limits_page`"


def test_the_table_of_access_is_up_to_date() -> None:
    page = access_page.PAGE.read_text()
    assert page == access_page.filled_in(page), "run `python -m scripts.access_page`"


def test_the_page_of_errors_and_conditions_is_up_to_date() -> None:
    page = troubleshooting_page.PAGE.read_text()
    found = troubleshooting_page.filled_in(page)
    assert page == found, "run `python -m scripts.troubleshooting_page`"
    assert troubleshooting_page.TO_DO.keys() == troubleshooting_page.classes().keys()


def test_the_page_of_limits_has_every_option_with_its_bounds() -> None:
    head = "| of | option | type | at least | at most | also |"
    page = PAGE.read_text()
    shown = [line for line in page.splitlines() if line.startswith("| `")]
    assert page.count(head) == 2
    assert len(shown) == sum(map(len, LIMITS.values()))
    assert "| `sampling` | `temperature` | number | 1e-06 | 1000000 | 0 |" in shown
    assert "| `plexrl node token` | `uses` | whole number | 1 | 1,000,000 |  |" in shown


def test_the_table_of_tinkers_routes_is_up_to_date() -> None:
    pytest.importorskip("tinker")
    from scripts import tinker_routes

    page = tinker_routes.PAGE.read_text()
    assert page == tinker_routes.filled_in(page), "run `python -m scripts.tinker_routes`"
    assert tinker_routes.answer_of("/sessions/{id}/trace_export", "GET") == "served"
    assert tinker_routes.answer_of("/audit", "GET") == "refused"
