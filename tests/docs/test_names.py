"""Commands, options, targets, files and anchors in the documentation exist."""

import ast
import pkgutil
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import plexrl
from benchmarks.run_all import HERE
from tests.docs.command_line import all_options, options_of, parse, resolve
from tests.docs.exceptions import OPTIONS_OF_OTHERS, PARSED, substituted
from tests.docs.pages import ROOT, Block, Command, anchors, blocks, commands, inline, pages, tokens

TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
PLACEHOLDER = re.compile(r"\[[^\]]*\]")
FILE = re.compile(r"(?:python )?((?:benchmarks|deploy|examples|plexrl|scripts|tests)/[\w/.]+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def options_of_scripts() -> set[str]:
    """Options in the source of examples, benchmarks and scripts."""
    files = [*(ROOT / "examples").glob("*.py"), *HERE.rglob("*.py"), ROOT / "tests" / "conftest.py"]
    return {option for path in files for option in OPTION.findall(path.read_text())}


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_a_command_is_accepted(command: Command) -> None:
    program, *words = command.text.split()
    if program == "plexrl":
        parse(substituted(command.first))
    elif program == "make":
        assert {word for word in words if "=" not in word} <= TARGETS
    elif program == "pip":
        for extras in re.findall(r"plexrl\[([\w,]+)\]", command.text):
            assert set(extras.split(",")) <= EXTRAS
    elif program == "python" and words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[2:] if not word.startswith("-"))
    elif program == "python":
        assert (ROOT / words[0]).exists() or _is_module(words), words
    else:
        assert any(command.text.startswith(text) for text in PARSED), "not in PARSED"


def _is_module(words: list[str]) -> bool:
    path = ROOT / words[1].replace(".", "/") if words[0] == "-m" else ROOT / "-"
    return path.with_suffix(".py").exists()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_names_in_running_text_exist(page: Path) -> None:
    known = all_options() | options_of_scripts() | OPTIONS_OF_OTHERS
    wrong = []
    for line, token in inline(page):
        if token.type != "code_inline":
            continue
        text = token.content.removeprefix(".venv/bin/")
        where = f"{page.name}:{line}: `{text}`"
        if text.startswith("plexrl ") and not _command_exists(text):
            wrong.append(f"{where} is not a command, or has no such option")
        elif text.startswith("make ") and text.split()[1] not in TARGETS:
            wrong.append(f"{where} is not a target")
        elif text.startswith("--") and not set(OPTION.findall(text)) <= known:
            wrong.append(f"{where} is not an option")
        elif found := FILE.match(text):
            path = found[1].rstrip("/.")
            if not (ROOT / path).exists():
                wrong.append(f"{where} does not exist")
        elif (found := re.match(r"plexrl(?:\.\w+)+", text)) and not _resolves(found[0]):
            wrong.append(f"{where} is not a name")
        elif (found := re.match(r"python (-m [\w.]+)", text)) and not _is_module(found[1].split()):
            wrong.append(f"{where} is not a module")
    assert not wrong, "\n".join(wrong)


def _resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _command_exists(text: str) -> bool:
    words = shlex.split(PLACEHOLDER.sub("", text.replace("…", "")))
    try:
        command, _ = resolve(words)
    except KeyError:
        return False
    return set(OPTION.findall(text)) <= set(options_of(command))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    broken = []
    for line, token in inline(page):
        target = str(token.attrs.get("href" if token.type == "link_open" else "src", ""))
        if not target or re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        leads_to = (page.parent / path).resolve() if path else page
        if not leads_to.exists() or (anchor and anchor not in anchors(leads_to)):
            broken.append(f"{page.name}:{line}: {target}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_code_is_fenced(page: Path) -> None:
    """What wraps text joins the lines of an indented block: two commands become one."""
    indented = [token.content for token in tokens(page) if token.type == "code_block"]
    assert not indented


def test_the_index_leads_to_every_page() -> None:
    folder = ROOT / "docs"
    links = {str(token.attrs.get("href", "")) for _, token in inline(folder / "index.md")}
    assert {page.name for page in folder.glob("*.md")} - links == {"index.md"}


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_a_snippet_compiles_and_its_plexrl_names_exist(block: Block) -> None:
    code = compile(
        block.text,
        block.name,
        "exec",
        ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
    )
    for node in ast.walk(code):
        match node:
            case ast.Attribute(value=ast.Name(id="plexrl"), attr=name):
                assert hasattr(plexrl, name), f"plexrl.{name}"
