"""Runs commands of the command line one after the other, each behind a line of its own."""

import json
import sys

from plexrl.cli.app import app, run_command

MARK = "$ plexrl "


def main() -> None:
    """Each of the commands, given as a JSON list of lists of words, and then its exit code."""
    for words in json.loads(sys.argv[1]):
        sys.stdout.write(f"{MARK}{' '.join(words)}\n")
        sys.stdout.flush()
        try:
            code = run_command(lambda words=words: app(words, prog_name="plexrl"))
        except SystemExit as ended:
            code = ended.code
        sys.stdout.write(f"{MARK}ended {code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
