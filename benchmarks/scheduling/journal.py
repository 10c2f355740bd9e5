"""(d) Operations through a scheduler process: journalled and accepted, run, reported finished.

The clients are connections from a process of their own. Each operation is two events, and each is
committed before it is answered; snapshots of the state are written meanwhile.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import percentile
from benchmarks.routing.rig import first_line, process
from benchmarks.sizes import sized

CLIENTS = sized(64, quick=4)
OPERATIONS = sized(12_000, quick=60)
ALONE_OPERATIONS = sized(1_000, quick=10)
SNAPSHOT_EVENTS = sized(5_000, quick=50)


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        path = str(Path(folder) / "journal.sqlite")
        rate, samples = _operate(path, CLIENTS, OPERATIONS)
        alone, _ = _operate(str(Path(folder) / "alone.sqlite"), 1, ALONE_OPERATIONS)
    p50, p99 = percentile(samples, 50) * 1e3, percentile(samples, 99) * 1e3
    figures |= {
        "journal_operations_per_s": rate,
        "journal_accept_p50_ms": p50,
        "journal_accept_p99_ms": p99,
        "journal_group_commit_ratio": rate / alone,
    }
    label = f"operations journalled twice, SQLite FULL, {CLIENTS} connections; p99 to accept"
    rows.append((label, f"{rate:,.0f}/s", f"p99 {p99:.1f} ms", f"{rate / alone:,.0f}x"))
    with _postgres() as url:
        if url is None:
            rows.append(("operations journalled twice, PostgreSQL", "no server here", "", ""))
            return rows, figures
        rate, samples = _operate(url, CLIENTS, OPERATIONS // 3)
    p99 = percentile(samples, 99) * 1e3
    figures |= {"journal_postgres_operations_per_s": rate, "journal_postgres_p99_ms": p99}
    label = f"operations journalled twice, PostgreSQL, {CLIENTS} connections; p99 to accept"
    rows.append((label, f"{rate:,.0f}/s", f"p99 {p99:.1f} ms", ""))
    return rows, figures


def _operate(journal_url: str, clients: int, operations: int) -> tuple[float, list[float]]:
    """(operations per second, seconds to accept each), by clients in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        socket = f"{folder}/s"
        config = {
            "listen": [f"unix:{socket}"],
            "journal": journal_url,
            "operator_key_digest": "0" * 64,
            "policy": "isolated",
            "snapshot_events": SNAPSHOT_EVENTS,
        }
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        with process("-m", "plexrl.scheduler", "--config", str(path)) as scheduler:
            first_line(scheduler)
            node = ("-m", "benchmarks.routing.echo_node", socket, folder, str(clients))
            with process(*node) as echo:
                first_line(echo)
                words = ("benchmarks.scheduling.journal_clients", socket, clients, operations)
                done = subprocess.run(
                    [sys.executable, "-m", *map(str, words)],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
    found = json.loads(done.stdout)
    return operations / found["seconds"], found["accepted_s"]


@contextmanager
def _postgres() -> Iterator[str | None]:
    """A PostgreSQL server of our own with its usual durability; None where no program is found."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        yield None
        return
    bin_dir = found[-1].parent
    folder = Path(tempfile.mkdtemp(prefix="plexrl-bench-"))
    folder.chmod(0o755)
    as_user = []
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    cluster = folder / "db"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
    options = f"-c listen_addresses= -c unix_socket_directories={folder}"
    control = [*as_user, str(bin_dir / "pg_ctl"), "-D", str(cluster), "-w"]
    try:
        subprocess.run(
            [*as_user, str(bin_dir / "initdb"), "-D", str(cluster), "-A", "trust", "-U", "bench"],
            **quiet,  # type: ignore[call-overload]
        )
        subprocess.run([*control, "-o", options, "start"], **quiet)  # type: ignore[call-overload]
        yield f"postgresql://bench@/postgres?host={folder}"
        subprocess.run([*control, "-m", "fast", "stop"], **quiet)  # type: ignore[call-overload]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
