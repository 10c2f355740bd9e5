"""`plexrl init`: writes a project with a controller that runs."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from plexrl.cli.terminal.context import Output, print_line, write_json
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import ConflictError, StorageError

NAMES = ("train.py", "README.md", ".gitignore")
"""The files of a project. In the package each has the ending `.txt`."""


@with_option_groups
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    *,
    output: Output,
) -> None:
    """Write a starter project: a controller that trains a tiny model, with tracker and samples."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConflictError(f"{folder} is not empty: name a new folder")
        for name in NAMES:
            text = (files("plexrl.cli.starter") / "templates" / f"{name}.txt").read_text()
            (folder / name).write_text(text)
    except OSError as error:
        raise StorageError(f"the project was not written: {error}") from error
    if output.as_json:
        write_json({"folder": str(folder), "files": list(NAMES)})
        return
    print_line(f"{folder} has {', '.join(NAMES)}. To run it: cd {folder} && python train.py")
