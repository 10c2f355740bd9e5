"""A function of the scheduler takes one pass object; it does not thread its parts."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plexrl.scheduler.placement.cluster import Context
from tests.scheduler.fake_cluster import config

if TYPE_CHECKING:
    from plexrl.scheduler.rules.settings import Situation

ROOT = Path(__file__).parents[3]
PASSED = {"State", "Settings", "Effects", "Cluster", "Context", "Situation", "Step"}
"""Each of them holds all that a function of its layer needs."""
MAKES_IT = {("plexrl/scheduler/rules/settings.py", "__init__")}
"""A step is made of its parts."""


def threads(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """(line, name, types) of each function that takes two or more of `PASSED`."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        texts = [ast.unparse(each.annotation) for each in arguments if each.annotation]
        taken = sorted(text.strip("'") for text in texts if text.strip("'") in PASSED)
        if len(taken) > 1:
            yield node.lineno, node.name, taken


def test_a_function_takes_one_pass_object() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name} takes {', '.join(taken)}"
        for path in sorted((ROOT / "plexrl" / "scheduler").rglob("*.py"))
        for line, name, taken in threads(ast.parse(path.read_text()))
        if (str(path.relative_to(ROOT)), name) not in MAKES_IT
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "def enqueue(state: State, effects: Effects, now: float): ...",
        "def prior_of(state: 'State', settings: 'Settings', shape: str): ...",
        "async def admit(context: Context, *, step: Step): ...",
        "class Walk:\n    def run(self, cluster: Cluster, effects: Effects): ...",
    ],
)
def test_threaded_parts_are_found(text: str) -> None:
    assert len(list(threads(ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def enqueue(step: Step, deployment: Deployment): ...",
        "def prior_of(situation: Situation, states: list[State]): ...",
    ],
)
def test_one_pass_object_is_no_threading(text: str) -> None:
    assert not list(threads(ast.parse(text)))


def test_all_that_happens_at_one_time_is_one_step() -> None:
    context = Context(config())
    step = context.step(1.0)
    assert context.step(1.0) is step
    later = context.step(2.0)
    assert (step.now, later.now) == (1.0, 2.0)
    assert (later.state, later.effects) == (context.state, context.effects)


def test_settings_that_change_are_seen_by_a_step() -> None:
    context = Context(config())
    situations: list[Situation] = [context.step(1.0), context.cluster, context]
    assert len({id(each.settings) for each in situations}) == 1
    assert len({id(each.state) for each in situations}) == 1
