"""Compares the duration of `import plexrl` with an empty Python start.

python benchmarks/import_time.py [--quick] [--json]
"""

import subprocess
import sys
import time

from benchmarks.report import percentile, report
from benchmarks.sizes import sized

ROUNDS = sized(15, quick=1)


def seconds_of(code: str) -> float:
    """Median seconds of a new interpreter that runs `code`."""
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        samples.append(time.perf_counter() - start)
    return percentile(samples, 50)


def main() -> None:
    """Measure both and print the figures."""
    bare, imported = seconds_of("pass"), seconds_of("import plexrl")
    rows = [
        ("python -c pass", f"{bare:.3f}"),
        ("python -c 'import plexrl'", f"{imported:.3f}"),
        ("import plexrl itself", f"{imported - bare:.3f}"),
    ]
    figures = {"import_seconds": imported - bare, "bare_python_seconds": bare}
    report("Import of the SDK", ("what", "median s"), rows, figures)


if __name__ == "__main__":
    main()
