"""Writes the table of routes in docs/tinker.md: the calls of the installed Tinker SDK, and PlexRL's
answers.

python -m scripts.tinker_routes          (write the page)
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from fastapi import APIRouter
from starlette.routing import Match

from plexrl.router.tinker.app import SUBJECTS
from plexrl.router.tinker.routes import checkpoints
from scripts.limits_page import replace_part

PAGE = Path(__file__).parent.parent / "docs" / "tinker.md"
PREFIX = "/api/v1"
VERBS = {
    name: verb.upper()
    for verb in ("get", "post", "put", "delete", "patch")
    for name in (verb, f"_{verb}")
}
"""HTTP methods by the names of the SDK's functions for them."""


def sdk_version() -> str:
    """Version of the installed SDK."""
    return importlib.metadata.version("tinker")


def sdk_calls() -> list[tuple[str, str]]:
    """(path, HTTP method) of each call in the SDK's source; parts that vary are in braces."""
    spec = importlib.util.find_spec("tinker")
    assert spec is not None, "pip install 'plexrl[tinker]'"
    assert spec.origin is not None
    files = Path(spec.origin).parent.rglob("*.py")
    calls = {
        call
        for file in files
        if not file.stem.endswith("_test")
        for node in ast.walk(ast.parse(file.read_text()))
        for call in _calls(node)
    }
    return sorted(calls)


def _calls(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        path, verb = _path(node.args[0]), VERBS.get(node.func.attr)
        if verb is not None and path.startswith(f"{PREFIX}/"):
            yield path.removeprefix(PREFIX), verb


def _path(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else _path(part)
            for part in node.values
        )
    return ""


def answer_of(path: str, method: str) -> str:
    """What PlexRL answers: `served`, or `refused` with what to use instead."""
    # The id of a checkpoint has two parts.
    asked = path.replace("{checkpoint_id}", "weights/NAME")
    scope = {"type": "http", "path": asked, "method": method}
    if any(_serves(routes, scope) for routes in SUBJECTS):
        return "served"
    instead = checkpoints.REFUSED.get(path.removeprefix("/"))
    return "refused" if instead is None else f"refused: use {instead}"


def _serves(router: APIRouter, scope: dict[str, str]) -> bool:
    routes = (route for route in router.routes if getattr(route, "name", "") != "refuse")
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


def table() -> str:
    """The table, as Markdown."""
    rows = [f"| `{method} {path}` | {answer_of(path, method)} |" for path, method in sdk_calls()]
    return "\n".join([f"| SDK {sdk_version()} calls | PlexRL |", "|---|---|", *rows])


def filled_in(page: str) -> str:
    """The page with its table updated. Raises `ValueError`: the table has no markers."""
    return replace_part(page, "routes", table())


def main() -> None:
    """Write the page again."""
    PAGE.write_text(filled_in(PAGE.read_text()))


if __name__ == "__main__":
    main()
