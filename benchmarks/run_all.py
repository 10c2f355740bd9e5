"""Runs benchmarks on one commit, and writes what they found and whether it reaches the bars.

    python -m benchmarks.run_all [--quick] [BENCHMARK …]

Without names, such as `faults.py`, it runs all. It writes `benchmarks/results/`: output, tables and
figures of each as JSON, with the commit; and from all of these `benchmarks/RESULTS.md`: a table of
the bars with figure, commit and verdict, then the output of each benchmark. A tree with changes
that are not committed is refused. A benchmark is a module whose docstring has a command line with
`[--quick]`. One that fails does not stop the others, and keeps its earlier results. A run that was
interrupted goes on where it stood, if the commit is still the same: what has ended lies in
`out/bench/COMMIT/`. With `--quick` the output goes to the terminal and no file is written.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.bars import bars
from benchmarks.report import ROOT, commit
from benchmarks.sizes import QUICK

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ENDED = ROOT / "out" / "bench"
USAGE = re.compile(r"^ *python (.*?)( ?\[--quick\].*)$", re.MULTILINE)
NOT_RUN = {
    "simulating/drain.py": "takes hours; run it by name",
    **dict.fromkeys(
        (
            f"simulating/{name}.py"
            for name in (
                *("fidelity", "eta", "cluster", "pareto", "rollout_gpus", "mixed_sizes"),
                "valleys",
            )
        ),
        "a part of benchmarks/simulator.py",
    ),
}
"""Benchmarks that `make bench` leaves out, and why."""
GUESS_S = 60.0
"""Expected time of a benchmark that was never recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one benchmark gave."""

    printed: str
    found: Mapping[str, Any]
    """As `benchmarks.report` records it, with `seconds`."""
    failed: bool


def commands() -> dict[str, list[str]]:
    """The arguments that Python needs for each benchmark, by its path under `benchmarks/`."""
    found: dict[str, list[str]] = {}
    for path in sorted(HERE.rglob("*.py")):
        usage = USAGE.search(ast.get_docstring(ast.parse(path.read_text())) or "")
        if usage is not None and path != Path(__file__):
            found[str(path.relative_to(HERE))] = usage[1].split()
    return found


def file_name(name: str) -> str:
    """Of the JSON of a benchmark."""
    return f"{name.removesuffix('.py').replace('/', '-')}.json"


def results_file(name: str) -> Path:
    """Where the last results of a benchmark are kept."""
    return RESULTS / file_name(name)


def expected_s(name: str) -> float:
    """Seconds that it took when it was last recorded."""
    path = results_file(name)
    return float(json.loads(path.read_text())["seconds"]) if path.exists() else GUESS_S


def run(words: Sequence[str]) -> Output:
    """Run one benchmark."""
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        record = Path(folder) / "found.json"
        ran = subprocess.run(
            [sys.executable, *words, *(["--quick"] if QUICK else [])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "BENCHMARK_JSON": str(record)},
        )
        found = json.loads(record.read_text()) if record.exists() else {"figures": {}}
    printed = ran.stdout.rstrip()
    if ran.returncode:
        printed += f"\nfailed with exit status {ran.returncode}"
    seconds = round(time.monotonic() - began_at, 1)
    return Output(printed=printed, found={**found, "seconds": seconds}, failed=bool(ran.returncode))


def run_once(name: str, words: Sequence[str], ended: Path) -> Output:
    """Run one benchmark, or read what it gave in the folder `ended` when it last succeeded."""
    path = ended / file_name(name)
    if path.exists():
        stored = json.loads(path.read_text())
        return Output(printed=stored["printed"], found=stored["found"], failed=False)
    output = run(words)
    if not output.failed:
        ended.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"printed": output.printed, "found": output.found}))
        partial.rename(path)
    return output


def run_all(names: Sequence[str], run_one: Callable[[str], Output]) -> dict[str, Output]:
    """Run them one after the other, with a progress bar in expected seconds."""
    outputs: dict[str, Output] = {}
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        left_s = sum(map(expected_s, names))
        task = progress.add_task("", total=left_s)
        for number, name in enumerate(names, 1):
            left = f"about {left_s / 60:.0f} min left"
            progress.update(task, description=f"{number} of {len(names)}, {left}: {name}")
            outputs[name] = run_one(name)
            left_s -= expected_s(name)
            progress.advance(task, expected_s(name))
    return outputs


def verdicts(outputs: Mapping[str, Output]) -> list[tuple[str, ...]]:
    """A row for each bar: benchmark, figure, value, bar, aim, verdict, commit."""
    rows: list[tuple[str, ...]] = []
    for name, wanted in bars().items():
        found = outputs[name].found if name in outputs else {"figures": {}}
        for each in wanted:
            value = found["figures"].get(each.figure)
            verdict = each.verdict(value)
            rows.append(
                (
                    name,
                    each.figure,
                    "" if value is None else f"{value:,.4g}",
                    each.bar,
                    each.aim,
                    verdict if verdict == "met" else f"**{verdict}**",
                    "" if value is None else found.get("commit", ""),
                )
            )
    return rows


def results_page(outputs: Mapping[str, Output]) -> str:
    """The text of RESULTS.md."""
    lines = [
        "# Results\n\nAll but `benchmarks/gpu` uses CPUs alone. Tables and figures as JSON: "
        "[results](results). Each figure names the commit that it was measured at.\n",
        "| benchmark | figure | value | bar | aim | verdict | commit |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in verdicts(outputs)),
    ]
    lines += [
        f"\n## `benchmarks/{name}`\n\n```\n{each.printed}\n```" for name, each in outputs.items()
    ]
    return "\n".join(lines) + "\n"


def recorded() -> dict[str, Output]:
    """The last results of every benchmark of `make bench` that has any."""
    outputs: dict[str, Output] = {}
    for name in chosen(()):
        if (path := results_file(name)).exists():
            found = json.loads(path.read_text())
            printed = found.pop("printed")
            outputs[name] = Output(printed=printed, found=found, failed=False)
    return outputs


def chosen(names: Sequence[str]) -> dict[str, list[str]]:
    """Commands of the benchmarks to run: those named, or all but `NOT_RUN`."""
    known = commands()
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(known)}")
    if names:
        return {name: known[name] for name in names}
    return {name: words for name, words in known.items() if name not in NOT_RUN}


def main() -> None:
    """Run all, or those named; exit 1 if the tree is dirty, or if one failed."""
    wanted = chosen([word for word in sys.argv[1:] if word != "--quick"])
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed and not QUICK:
        sys.exit(
            f"commit these changes first, so that the results are those of a commit:\n{changed}"
        )
    ended = ENDED / commit()
    outputs = run_all(
        list(wanted),
        lambda name: run(wanted[name]) if QUICK else run_once(name, wanted[name], ended),
    )
    if QUICK:
        sys.stdout.write(results_page(outputs))
    else:
        RESULTS.mkdir(exist_ok=True)
        for name, output in outputs.items():
            if not output.failed:
                found = {**output.found, "printed": output.printed}
                results_file(name).write_text(json.dumps(found, indent=1) + "\n")
        (HERE / "RESULTS.md").write_text(results_page(recorded()))
    failed = [name for name, output in outputs.items() if output.failed]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
