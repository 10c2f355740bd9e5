"""Output of all benchmarks: a table for people, one JSON object for programs.

Figures that have a bar (`bars.toml`) are listed with it and a verdict under the table. With the
environment variable `BENCHMARK_JSON`, tables and figures are also written to that file, which
`make bench` collects.

A benchmark that imports this prints its docstring with `--help`, and does not run.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.bars import bars_of

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a benchmark: a table of its own, and figures by name."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Mapping[str, float],
) -> None:
    """Print the table, or with `--json` on the command line the figures. A benchmark may report
    several times; its figures add up."""
    _record(title, columns, rows, figures)
    if "--json" in sys.argv:
        body = {"figures": dict(figures), "machine": machine(), "commit": commit()}
        sys.stdout.write(json.dumps(body) + "\n")
        return
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=132)
    console.print(f"{title}\n{machine()}, commit {commit()}", highlight=False)
    console.print(table)
    for each in bars_of(_benchmark()):
        if (value := figures.get(each.figure)) is not None:
            aim = f", aim {each.aim}" if each.aim else ""
            verdict = f"{each.figure} {value:,.4g}: bar {each.bar}{aim}: {each.verdict(value)}"
            console.print(verdict, highlight=False)


def _record(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Mapping[str, float],
) -> None:
    if not (name := os.environ.get("BENCHMARK_JSON")):
        return
    path = Path(name)
    found = json.loads(path.read_text()) if path.exists() else {"tables": [], "figures": {}}
    found["tables"].append(
        {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
    )
    found["figures"] |= figures
    path.write_text(json.dumps({**found, "machine": machine(), "commit": commit()}, indent=1))


def _benchmark() -> str:
    """Path of the running benchmark under `benchmarks/`."""
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    folder = ROOT / "benchmarks"
    return str(path.relative_to(folder)) if folder in path.parents else ""


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample below which `percent` % of them lie, by nearest rank."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def machine() -> str:
    """Processor kind, cores and Python of this machine."""
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"


def commit() -> str:
    """The commit checked out, with a mark where files have changed since."""
    if shutil.which("git") is None:
        return "unknown"
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def _print_help_if_asked() -> None:
    """Benchmarks with a parser of their own have their own help."""
    main = sys.modules["__main__"]
    path = Path(getattr(main, "__file__", None) or "")
    is_benchmark = ROOT / "benchmarks" in path.parents and not hasattr(main, "argparse")
    if is_benchmark and {"--help", "-h"} & set(sys.argv[1:]):
        sys.stdout.write(f"{main.__doc__}\n")
        sys.exit()


_print_help_if_asked()
