"""Every Python snippet of the documentation runs (`make docs-check`)."""

import ast
import asyncio
import gc
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import plexrl
from tests.docs.conftest import Docs
from tests.docs.exceptions import TYPED
from tests.docs.pages import ROOT, Block, blocks
from tests.docs.snippets import TYPES, Prepared, needed, tree

# A snippet that connects again leaves its first connection to the garbage collector.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]


def exceptions(block: Block) -> set[str]:
    """The entries of `TYPED` that exclude the snippet from running."""
    return {text for text in TYPED if text in block.text}


@pytest.fixture
def prepared(
    docs: Docs, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Prepared]:
    monkeypatch.setenv("PLEXRL_URL", docs.url)
    monkeypatch.setenv("PLEXRL_API_KEY", docs.api_key)
    monkeypatch.chdir(tmp_path)
    with plexrl.connect(docs.url, docs.api_key) as cluster:
        made = Prepared(docs, cluster, re.sub("[/:]", "-", block.name))
        yield made
        made.close()


@pytest.mark.parametrize(
    "block",
    [block for block in blocks("python") if not exceptions(block)],
    ids=lambda block: block.name,
)
def test_a_snippet_runs(prepared: Prepared, block: Block) -> None:
    for name in needed(block):
        prepared.get(name)
    code = compile(tree(block), block.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    run(code, prepared)
    assert prepared.failed() == []
    gc.collect()


def run(code: CodeType, prepared: Prepared) -> None:
    """Run the snippet, which may await, and wait for its operations."""
    if code.co_flags & inspect.CO_COROUTINE:

        async def awaited() -> None:
            await eval(code, prepared.names)

        asyncio.run(awaited())
    else:
        exec(code, prepared.names)
    prepared.finish()


def test_snippets_fit_the_types_of_plexrl(tmp_path: Path) -> None:
    parts = ["from typing import Any", "import numpy as np", "import plexrl"]
    for number, block in enumerate(blocks("python")):
        given = "".join(f"{name}: {TYPES[name]}, " for name in needed(block))
        parts.append(f"async def of_{number}({given}) -> None:  # {block.name}")
        parts.append(textwrap.indent(block.text, "    "))
    file = tmp_path / "snippets.py"
    file.write_text("\n".join(parts))
    command = [*(sys.executable, "-m", "mypy", "--config-file", ""), "--allow-redefinition"]
    command += ["--explicit-package-bases", "--ignore-missing-imports", "--follow-imports=silent"]
    command += ["--cache-dir", str(tmp_path / "cache"), str(file)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_every_exception_matches_a_snippet() -> None:
    used = {text for block in blocks("python") for text in exceptions(block)}
    assert used == set(TYPED)
