"""Runs every benchmark and keeps what it printed in `benchmarks/RESULTS.md`.

python -m benchmarks.run_all
"""

import datetime
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"report.py", "run_all.py"}


def main() -> None:
    """Run them one after the other."""
    today = datetime.datetime.now(tz=datetime.UTC).date()
    parts = [f"# Results\n\nLast run on {today}. Nothing here was run on a GPU.\n"]
    for path in sorted(HERE.glob("*.py")):
        if path.name in NOT_BENCHMARKS:
            continue
        sys.stderr.write(f"{path.name} …\n")
        found = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, check=True
        )
        parts.append(f"## `benchmarks/{path.name}`\n\n```\n{found.stdout.rstrip()}\n```\n")
    (HERE / "RESULTS.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
