"""The help and the docs page of `plexrl simulate` list all names."""

from pathlib import Path
from typing import Any

import typer

from plexrl.cli.app import app
from plexrl.sim.search.axes import AXES
from plexrl.sim.search.what_if import CHANGES
from plexrl.sim.state.node_types import NODE_TYPES
from plexrl.sim.workload.policies import POLICY_NAMES

DOCS = Path(__file__).parents[3] / "docs"


def test_the_pages_name_every_policy_axis_node_type_and_option() -> None:
    page = (DOCS / "simulating.md").read_text() + (DOCS / "simulating_answers.md").read_text()
    options = {
        option
        for parameter in _simulate().params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    }
    words = {*POLICY_NAMES, *NODE_TYPES, *AXES, *CHANGES, *options - {"--help"}}
    assert not {word for word in words if word not in page}


def test_every_option_is_helped_with_in_a_panel_and_says_its_default() -> None:
    for option in _simulate().params:
        assert option.help, option.name
        if option.name == "trace" or option.name == "as_json":
            continue
        assert option.rich_help_panel, option.name
        said = option.show_default is not False and option.default is not None
        assert said or "default: " in option.help or "may be repeated" in option.help, option.name


def _simulate() -> Any:
    return typer.main.get_command(app).commands["simulate"]  # type: ignore[attr-defined]
