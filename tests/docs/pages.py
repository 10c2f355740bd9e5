"""Parsed pages of the documentation: code blocks, commands, links, headings."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
COMMANDS = (
    *("plexrl", ".venv/bin/plexrl", "make", "python", "pip"),
    *("curl", "cp", "install", "ray", "scripts/gpu_check.sh", "systemctl"),
)
"""First words of commands. A code block without a language contains commands if its first line
begins with one of these."""
ASSIGNMENT = re.compile(r"[A-Z_]+=")
"""An assignment of a variable before a command."""
SESSION = re.compile(r"\w+\$ ")
"""The prompt of a session on several hosts, which `tests/hosts/test_operator_page.py` follows."""
PIPE = "|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced code block; `line` is its first line in the page, from 1."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """Name in test ids."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a code block, without its comment and the folder of its program."""

    page: str
    line: int
    words: tuple[str, ...]
    """All words, including those after a pipe."""

    @property
    def text(self) -> str:
        """The command as text."""
        return typed(self.words)

    @property
    def first(self) -> tuple[str, ...]:
        """Words before a pipe."""
        return tuple(takewhile(lambda word: word != PIPE, self.words))

    @property
    def name(self) -> str:
        """Name in test ids."""
        return f"{self.page}:{self.line} {self.text}"


def typed(words: Sequence[str]) -> str:
    """Join words to a command line."""
    return " ".join(word if word == PIPE else shlex.quote(word) for word in words)


def pages() -> list[Path]:
    """All pages, in reading order."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


@cache
def tokens(page: Path) -> list[Token]:
    """The page, parsed like GitHub's markdown."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def inline(page: Path) -> Iterator[tuple[int, Token]]:
    """Inline tokens of running text, each with the first line of its paragraph."""
    for token in tokens(page):
        for child in token.children or ():
            assert token.map is not None
            yield token.map[0] + 1, child


def blocks(language: str | None = None) -> list[Block]:
    """All code blocks, or only those of one language."""
    return [
        Block(
            page=str(page.relative_to(ROOT)),
            line=token.map[0] + 2,
            language=token.info.strip(),
            text=token.content,
        )
        for page in pages()
        for token in tokens(page)
        if token.type == "fence" and token.map is not None
        if language is None or token.info.strip() == language
    ]


def commands() -> list[Command]:
    """All different commands of code blocks. In a block that begins with `$ `, other lines are
    output.

    Raises:
        ValueError: a line of a block of commands is not a command.
    """
    found: dict[tuple[str, ...], Command] = {}
    for block in blocks():
        if block.language not in ("", "sh", "bash", "console") or SESSION.match(block.text):
            continue
        is_session = block.text.startswith("$ ")
        for offset, line in lines_of(block.text):
            if is_session and not line.startswith("$ "):
                continue
            parts = shlex.split(line.removeprefix("$ "), comments=True)
            if parts[:1] == ["export"]:
                parts = parts[1:]
            words = tuple(dropwhile(ASSIGNMENT.match, parts))
            if not words:
                continue
            if words[0] not in COMMANDS:
                if not block.language and not offset:
                    break
                raise ValueError(f"{block.page}:{block.line + offset}: no command: {line}")
            words = (Path(words[0]).name, *words[1:])
            command = Command(page=block.page, line=block.line + offset, words=words)
            found.setdefault(words, command)
    return list(found.values())


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """(number from 0, line); a line that ends in a backslash is joined with the next one."""
    first = 0
    parts: list[str] = []
    for number, line in enumerate(text.splitlines()):
        first = first if parts else number
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield first, " ".join(parts)
            parts = []


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings on GitHub."""
    found: set[str] = set()
    parts = tokens(page)
    for number, token in enumerate(parts):
        if token.type == "heading_open":
            children = parts[number + 1].children or ()
            text = "".join(child.content for child in children)
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(slug if slug not in found else f"{slug}-1")
    return found
