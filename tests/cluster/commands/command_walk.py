"""Runs commands of the command line one after another, each after a marker line."""

import json
import sys
from collections.abc import Sequence

from plexrl.cli.app import app, run_command

MARK = "$ plexrl "


def run(words: Sequence[str]) -> int | str | None:
    """Run one command in this process, as the console script does; returns its exit code."""
    former = sys.argv
    sys.argv = ["plexrl", *words]
    try:
        return run_command(lambda: app(list(words), prog_name="plexrl"))
    except SystemExit as ended:
        return ended.code
    finally:
        sys.argv = former


def main() -> None:
    """Run the commands, given as a JSON list of lists of words, and print each exit code."""
    for words in json.loads(sys.argv[1]):
        sys.stdout.write(f"{MARK}{' '.join(words)}\n")
        code = run(words)
        sys.stdout.write(f"{MARK}ended {code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
