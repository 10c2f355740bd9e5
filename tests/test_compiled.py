"""Modules that `make compiled` builds avoid what mypyc cannot compile; a build takes minutes."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def mypyc_hook() -> dict[str, list[str]]:
    """The patterns of modules that are compiled, and of those that are not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: dict[str, list[str]] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"][
        "mypyc"
    ]
    return found


def compiled_modules() -> dict[str, ast.Module]:
    """Syntax trees of the modules that become C extensions, by path."""
    hook = mypyc_hook()
    included = {path for each in hook["include"] for path in ROOT.glob(each.lstrip("/"))}
    excluded = {ROOT / each.lstrip("/") for each in hook["exclude"] if "/" in each}
    paths = {path for path in included - excluded if path.name not in hook["exclude"]}
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(paths)}


def test_the_list_of_compiled_modules_names_files_that_exist() -> None:
    hook = mypyc_hook()
    patterns = [each for each in (*hook["include"], *hook["exclude"]) if "/" in each]
    assert [each for each in patterns if not any(ROOT.glob(each.lstrip("/")))] == []


def test_no_compiled_module_has_what_mypyc_refuses() -> None:
    found = []
    for path, tree in compiled_modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and any(map(is_starred, node.comparators)):
                found.append(f"{path}:{node.lineno}: membership in a tuple with a star")
            if isinstance(node, ast.ClassDef):
                found += lost_annotations(path, node)
                found += [
                    f"{path}:{each.lineno}: a default that is no value of the field's type"
                    for each in node.body
                    if isinstance(each, ast.AnnAssign)
                    and each.value is not None
                    and ast.unparse(each.value).startswith("msgspec.field(")
                ]
    assert found == []


def lost_annotations(path: str, node: ast.ClassDef) -> list[str]:
    """Fields of a `msgspec.Struct` that it cannot decode: mypyc keeps only the class of a type, as
    `tuple` of `tuple[int, ...]`."""
    if "msgspec.Struct" not in map(ast.unparse, node.bases):
        return []
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return [
        f"{path}:{each.lineno}: a type of more than one name in a Struct"
        for each in fields
        if not isinstance(each.annotation, ast.Name)
    ]


def is_starred(node: ast.expr) -> bool:
    """Whether it is a tuple or list display with a star in it."""
    return isinstance(node, ast.Tuple | ast.List) and any(
        isinstance(each, ast.Starred) for each in node.elts
    )
