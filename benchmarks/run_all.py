"""Runs every benchmark and writes the output to `benchmarks/RESULTS.md`.

    python -m benchmarks.run_all [--quick]

A benchmark is a module whose docstring has a command line with `[--quick]`. A failure does not stop
the other benchmarks. With `--quick` the output goes to the terminal and no file is written.
"""

import ast
import datetime
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.report import ROOT
from benchmarks.sizes import QUICK

HERE = Path(__file__).parent
USAGE = re.compile(r"^ *python (.*?)( ?\[--quick\].*)$", re.MULTILINE)
NOT_RUN = {
    "simulating/drain.py": "takes hours; run it by name",
    "simulating/fidelity.py": "a part of benchmarks/simulator.py",
}
"""Benchmarks that `make bench` leaves out, and why."""


def commands() -> dict[str, list[str]]:
    """The arguments that Python needs for each benchmark, by its path under `benchmarks/`."""
    found: dict[str, list[str]] = {}
    for path in sorted(HERE.rglob("*.py")):
        usage = USAGE.search(ast.get_docstring(ast.parse(path.read_text())) or "")
        if usage is not None and path != Path(__file__):
            found[str(path.relative_to(HERE))] = usage[1].split()
    return found


def main() -> None:
    """Run them one after the other; exit 1 if one failed."""
    today = datetime.datetime.now(tz=datetime.UTC).date()
    parts = [f"# Results\n\nLast run on {today}. All but `benchmarks/gpu` uses CPUs alone.\n"]
    failed = []
    for name, words in commands().items():
        if name in NOT_RUN:
            continue
        sys.stderr.write(f"{name} …\n")
        command = [sys.executable, *words, *(["--quick"] if QUICK else [])]
        found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode:
            failed.append(name)
            found.stdout += f"failed with exit status {found.returncode}"
        parts.append(f"## `benchmarks/{name}`\n\n```\n{found.stdout.rstrip()}\n```\n")
    if QUICK:
        sys.stdout.write("\n".join(parts[1:]))
    else:
        (HERE / "RESULTS.md").write_text("\n".join(parts))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
