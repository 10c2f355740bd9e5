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
PASSED = {
    *("State", "Settings", "Effects", "Cluster", "Context", "Situation", "Step"),
    *("Capacity", "Queues"),
}
"""Each of them holds all that a function of its layer needs."""
MAKES_IT = {
    ("plexrl/scheduler/rules/settings.py", "__init__"),
    ("plexrl/scheduler/placement/cluster.py", "make_cluster"),
}
"""A step and a cluster are made of their parts."""


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


OWNERS = {"capacity", "queues", "holdings", "unmeasured"}
EXEMPT = ROOT / "plexrl" / "scheduler" / "queries" / "overview"
"""Some of its functions still take the cluster for one owner."""


def needs_one_owner(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each function that takes the cluster, hands it to nobody, and uses at most
    one of its owners."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for argument in node.args.args:
            if argument.annotation is None or ast.unparse(argument.annotation) != "Cluster":
                continue
            names = [
                name
                for name in ast.walk(node)
                if isinstance(name, ast.Name) and name.id == argument.arg
            ]
            used = [
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and part.value in names
            ]
            if len(used) == len(names) and len(OWNERS & set(used)) <= 1:
                yield node.lineno, node.name


def test_a_function_that_needs_one_owner_takes_no_cluster() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name} takes the cluster"
        for path in sorted((ROOT / "plexrl" / "scheduler").rglob("*.py"))
        if EXEMPT not in path.parents
        for line, name in needs_one_owner(ast.parse(path.read_text()))
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


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def free(cluster: Cluster): return cluster.capacity.inventory.pool", 1),
        ("def share(cluster: Cluster): return cluster.settings.anybody_shares", 1),
        ("def wait(cluster: Cluster): cluster.queues.wait(cluster.capacity)", 0),
        ("def place(cluster: Cluster): return find(cluster)", 0),
    ],
)
def test_functions_that_need_one_owner_are_found(text: str, count: int) -> None:
    assert len(list(needs_one_owner(ast.parse(text)))) == count
