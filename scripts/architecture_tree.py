"""The generated parts of docs/architecture.md: package tree, pure folders, import direction.

The tree is the first paragraph of the docstring of each package, in the order of imports. Pure
folders and import direction are the lists of tests/test_tidy.py.

    python -m scripts.architecture_tree    # writes docs/architecture.md
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT
from tests.test_tidy import DIRECTION, LAYERS, PURE_FOLDERS

PAGE = ROOT / "docs/architecture.md"
PACKAGE = ROOT / "plexrl"
DEPTH_MAX = 2
"""Levels of folders below `plexrl/` that the tree shows."""
COLUMN = 20


def generated() -> dict[str, str]:
    """The text of each generated part, by the name in its markers."""
    return {
        "tree": "\n".join(["```text", "plexrl/", *tree(PACKAGE, 1), "```"]),
        "pure": "\n".join(f"- `plexrl/{folder}`" for folder in PURE_FOLDERS),
        "direction": " → ".join(f"`{name}`" for name in DIRECTION[:-1]) + " → the top of `plexrl`",
    }


def tree(folder: Path, depth: int) -> Iterator[str]:
    """One line for each package below `folder`."""
    order = DIRECTION if folder == PACKAGE else LAYERS.get(folder.name, ())
    for child in sorted(folder.iterdir(), key=lambda path: _place(path.name, order)):
        init = child / "__init__.py"
        if not init.exists():
            continue
        name = f"{'  ' * depth}{child.name}/"
        yield f"{name:<{COLUMN - 1}} {summary(init)}".rstrip()
        if depth < DEPTH_MAX:
            yield from tree(child, depth + 1)


def _place(name: str, order: tuple[str, ...]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order)), name


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def filled_in(page: str) -> str:
    """The page with its generated parts updated.

    Raises:
        ValueError: a part has no markers in the page.
    """
    for name, text in generated().items():
        begin, end = f"<!-- {name}: generated -->\n", f"\n<!-- {name}: end -->"
        head, found_begin, rest = page.partition(begin)
        _, found_end, tail = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"docs/architecture.md has no markers for the part {name!r}")
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled_in(PAGE.read_text()))
