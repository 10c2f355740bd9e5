"""Each part of a deployment is written by one module, through functions named for what happens."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STATE = ROOT / "plexrl" / "scheduler" / "state"
OWNERS = [*sorted((STATE / "deployment").rglob("*.py")), STATE / "demand" / "estimates.py"]
RECORDS = STATE / "records.py"
MUTATORS = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "sort", "update"),
}


def _fields(path: Path) -> dict[str, dict[str, str]]:
    """Of each class of a module: its fields, with the text of their types."""
    return {
        node.name: {
            each.target.id: ast.unparse(each.annotation)
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


OWNED = {name: fields for path in OWNERS for name, fields in _fields(path).items()}
LINKS = {
    field: OWNED[kind]
    for fields in (_fields(RECORDS)["Deployment"], *OWNED.values())
    for field, kind in fields.items()
    if kind in OWNED
}
"""Fields that hold an owned record, each with the fields of that record."""


def _bindings(function: ast.AST) -> dict[str, ast.expr]:
    """Local names that stand for an expression."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        if len(names) == len(values):
            pairs = zip(names, values, strict=True)
            found |= {name.id: held for name, held in pairs if isinstance(name, ast.Name)}
    return found


def _resolve(node: ast.expr, bindings: dict[str, ast.expr]) -> ast.expr:
    return bindings.get(node.id, node) if isinstance(node, ast.Name) else node


def _is_owned(node: ast.expr, bindings: dict[str, ast.expr], *, whole: bool) -> bool:
    """Whether the expression is a field of an owned record. `whole`: also one that holds a record,
    which has functions of its own."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Attribute):
        return False
    record = _resolve(node.value, bindings)
    if not isinstance(record, ast.Attribute) or node.attr not in LINKS.get(record.attr, ()):
        return False
    return whole or node.attr not in LINKS


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each write to an owned record."""
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    for function in functions:
        bindings = _bindings(function)
        for node in ast.walk(function):
            if not isinstance(node, (ast.stmt, ast.expr)):
                continue
            targets: list[ast.expr] = []
            if isinstance(node, (ast.Assign, ast.Delete)):
                targets = node.targets
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
                targets = [node.target]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                held = _resolve(node.func.value, bindings)
                if node.func.attr in MUTATORS and _is_owned(held, bindings, whole=False):
                    yield node.lineno, ast.unparse(node)
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    changed = each
                    if isinstance(each, ast.Subscript):
                        changed = _resolve(each.value, bindings)
                    if _is_owned(changed, bindings, whole=True):
                        yield node.lineno, ast.unparse(node)


def test_only_its_own_module_writes_a_part_of_a_deployment() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for package in ("scheduler", "sim")
        for path in sorted((ROOT / "plexrl" / package).rglob("*.py"))
        if path not in OWNERS and "__pycache__" not in path.parts
        for line, text in writes(ast.parse(path.read_text()))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "deployment.spec.exclusive = False",
        "deployment.work.queue.pop(0)",
        "del deployment.work.running[name]",
        "deployment.wpg.processes = other",
        "deployment.wpg.processes.starts += 1",
        "work = deployment.work; work.trainer_step = 3",
        "queue = deployment.work.queue; queue.append(name)",
        "running, queue = deployment.work.running, 1; running[name] = run",
        "deployment.placement.groups, left = (), 1",
    ],
)
def test_a_write_from_elsewhere_is_found(text: str) -> None:
    assert list(writes(ast.parse(f"def step(deployment, name, other):\n    {text}")))


@pytest.mark.parametrize(
    "text",
    [
        "deployment.wpg.backoff.clear()",
        "deployment.work.replay.append(name, 1)",
        "queue = deployment.work.queue; first = queue[0]",
        "operation.state = 1",
    ],
)
def test_calls_and_reads_are_no_writes(text: str) -> None:
    assert not list(writes(ast.parse(f"def step(deployment, operation, name):\n    {text}")))
