"""Writes the documentation as a site, into out/site: `python -m scripts.site` (`make site`).

The pages of docs/ are its source. As a hook of MkDocs (`mkdocs.yml`) this module adds what is kept
elsewhere: results, examples, commands and the API, each read from what it describes.
"""

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from posixpath import normpath, relpath
from types import ModuleType
from typing import Any

import typer
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from plexrl.cli.app import app
from plexrl.client import public

ROOT = Path(__file__).parent.parent
COPIED = {
    "benchmarks/RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
}
"""Files outside docs/ that are pages of the site, with their names there."""
MERMAID = "mermaid@11.17.2"
"""The npm package that draws state machines; the theme would fetch it from the internet."""
MERMAID_SHA256 = "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8"
"""Of its `mermaid.min.js`, which runs in each reader's browser."""
_LINK = re.compile(r"\[([^][]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path, name in COPIED.items():
        text = relinked((ROOT / path).read_text(), path, name)
        files.append(File.generated(config, name, content=text))
    for example in sorted((ROOT / "examples").glob("*.py")):
        files.append(
            File.generated(config, f"examples/{example.stem}.md", content=example_page(example))
        )
    for notebook in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, name, content=notebook_page(notebook)))
    files.append(File.generated(config, "command_line.md", content="\n".join(commands_page())))
    files.append(File.generated(config, "api.md", content="\n".join(api_page())))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Let links that leave docs/ lead to the site's own pages."""
    if page.file.generated_by is not None:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def relinked(text: str, source: str, name: str) -> str:
    """The text of the file `source` of the repository as the page `name` of the site.

    A link to a file that the site does not have becomes its text and the file's path.
    """

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = normpath(f"{source}/../{target}")
        page = page_of(path)
        if page is None:
            return words if words.strip("`") == path else f"{words} (`{path}`)"
        return f"[{words}]({relpath(page, normpath(f'{name}/..'))}{anchor})"

    return _LINK.sub(link, text)


def page_of(path: str) -> str | None:
    """The page of the site that has a file of the repository; None if there is none."""
    if path in COPIED:
        return COPIED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/notebooks/"):
        return path.removeprefix("examples/").replace(".ipynb", ".md")
    if path.startswith("examples/") and path.endswith(".py"):
        return f"{path.removesuffix('.py')}.md"
    return None


def example_page(example: Path) -> str:
    """An example's source, with its docstring, under the name of its file."""
    title = example.stem.replace("_", " ").capitalize()
    return f"# {title}\n\n`examples/{example.name}`\n\n```python\n{example.read_text()}```\n"


def notebook_page(notebook: Path) -> str:
    """A notebook's cells: text as it is, code in blocks."""
    cells = json.loads(notebook.read_text())["cells"]
    parts = [f"`examples/notebooks/{notebook.name}`"]
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    # The title is the first cell's; the file's name comes after that cell.
    return "\n\n".join((parts[1], parts[0], *parts[2:]))


def api_page() -> Iterator[str]:
    """Directives for the classes, functions and modules that `import plexrl` has."""
    yield "# API\n\nWhat a controller imports by `import plexrl`. "
    yield "The async twin of a class (`AsyncJob` of `Job`) has the same calls, which are awaited.\n"
    for name in sorted(public.__all__, key=str.lower):
        value = getattr(public, name)
        where = getattr(value, "__qualname__", None)
        if isinstance(value, ModuleType):
            yield f"::: {value.__name__}\n    options: {{show_root_full_path: true}}\n"
        elif where is not None and not _is_twin(name):
            yield f"::: {value.__module__}.{where}\n"


def _is_twin(name: str) -> bool:
    return name.startswith("Async") and name.removeprefix("Async") in public.__all__


def commands_page() -> Iterator[str]:
    """Each command with its help and its options, by panel, as `--help` has them."""
    root: Any = typer.main.get_command(app)
    context = typer.Context(root, info_name="plexrl")
    yield "# Commands\n\nEvery command has `--help`, and most have `--json`.\n"
    for panel, rows in root.PANELS.items():
        yield f"## {panel}\n"
        for name in rows:
            yield from _command(f"plexrl {name}", root.commands[name], context)


def _command(words: str, command: Any, parent: typer.Context) -> Iterator[str]:
    if command.hidden:
        return
    context = type(parent)(command, info_name=words, parent=parent)
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _command(f"{words} {name}", child, context)
    if getattr(command, "commands", None):
        return
    yield f"### `{words}`\n\n{(command.help or '').replace(chr(8), '')}\n"
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in filter(None, records)]
    yield "\n".join(["| option | |", "|---|---|", *rows]) + "\n" if rows else ""


def _cell(text: str) -> str:
    return re.sub(r"([|<[])", r"\\\1", " ".join(text.split()))


def add_mermaid(config: MkDocsConfig) -> None:
    """Put the library that draws diagrams beside the pages."""
    path = Path(config.site_dir, *config.extra_javascript)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", MERMAID]
        run = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        with tarfile.open(Path(folder, run.stdout.strip())) as package:
            file = package.extractfile("package/dist/mermaid.min.js")
            assert file is not None, f"{MERMAID} has no mermaid.min.js"
            text = file.read()
            if sha256(text).hexdigest() != MERMAID_SHA256:
                raise ValueError(f"{MERMAID} is not the file whose digest this script has")
            path.write_bytes(text)


def main() -> None:
    """Write the site.

    Raises:
        FileNotFoundError, subprocess.CalledProcessError: npm is missing or does not have the
            library that draws diagrams.
        ValueError: it is another file.
    """
    config = load_config(str(ROOT / "mkdocs.yml"))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    add_mermaid(config)
    sys.stdout.write(f"{config.site_dir}/index.html\n")


if __name__ == "__main__":
    main()
