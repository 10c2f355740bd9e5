"""(d) Accepted operations per second through the shell: journalled, then decided, then answered."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import percentile
from benchmarks.scheduling.cluster import config, node
from benchmarks.sizes import sized
from plexrl.process.garbage_collection import freeze_existing_objects
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.service.shell import Clock, Shell
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.operations import OperationKind

CLIENTS = sized(64, quick=4)
ACCEPTS = sized(60_000, quick=60)
ALONE_ACCEPTS = sized(2_000, quick=10)


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        path = str(Path(folder) / "journal.sqlite")
        rate, samples = asyncio.run(_accept(path, CLIENTS, ACCEPTS))
        alone, _ = asyncio.run(_accept(str(Path(folder) / "alone.sqlite"), 1, ALONE_ACCEPTS))
    p50, p99 = percentile(samples, 50) * 1e3, percentile(samples, 99) * 1e3
    figures |= {
        "journal_accepts_per_s": rate,
        "journal_accept_p50_ms": p50,
        "journal_accept_p99_ms": p99,
        "journal_group_commit_ratio": rate / alone,
    }
    label = f"journalled accepts, SQLite FULL, {CLIENTS} clients"
    rows.append((label, f"{rate:,.0f}/s", f"p99 {p99:.1f} ms", f"{rate / alone:,.0f}x"))
    with _postgres() as url:
        if url is None:
            rows.append(("journalled accepts, PostgreSQL", "no server here", "", ""))
            return rows, figures
        rate, samples = asyncio.run(_accept(url, CLIENTS, ACCEPTS // 3))
    p99 = percentile(samples, 99) * 1e3
    figures |= {"journal_postgres_accepts_per_s": rate, "journal_postgres_p99_ms": p99}
    label = f"journalled accepts, PostgreSQL, {CLIENTS} clients"
    rows.append((label, f"{rate:,.0f}/s", f"p99 {p99:.1f} ms", ""))
    return rows, figures


async def _accept(journal_url: str, clients: int, accepts: int) -> tuple[float, list[float]]:
    """(accepts per second, seconds of each); a client has one request at a time."""
    journal = SqlJournal(journal_url)
    journal.acquire("benchmark", 3600.0)
    core = SchedulerCore(config(policy="isolated", pending_operations_max=1 << 30))
    shell = Shell(core, journal, Clock(0.0), snapshot_events=1 << 30)
    running = asyncio.create_task(shell.run())
    await shell.request(node(0))
    for client in range(clients):
        await shell.request(
            ev.JobSubmitted(
                job=f"j{client}",  # type: ignore[arg-type]
                tenant="t",  # type: ignore[arg-type]
                name="job",
                controller_timeout_s=1e9,
                reattach_timeout_s=1e9,
            )
        )
        await shell.request(
            ev.DeploymentCreated(
                deployment=f"j{client}/actor",  # type: ignore[arg-type]
                job=f"j{client}",  # type: ignore[arg-type]
                kind="train",
                workers=1,
                state_bytes=1,
                exclusive=False,
                spec_json="{}",
            )
        )
    samples: list[float] = []
    freeze_existing_objects()

    async def ask(index: int) -> None:
        for number in range(accepts // clients):
            began = time.perf_counter()
            await shell.request(
                ev.OperationSubmitted(
                    operation=f"j{index}:{number}",  # type: ignore[arg-type]
                    deployment=f"j{index}/actor",  # type: ignore[arg-type]
                    kind=OperationKind.FORWARD_BACKWARD,
                    params_json='{"loss":{"name":"grpo"},"grad_clip_norm":1.0}',
                    payload=f"blob-{index}-{number}",  # type: ignore[arg-type]
                    tokens=4096,
                )
            )
            samples.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index in range(clients):
            tasks.create_task(ask(index))
    took_s = time.perf_counter() - began
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    journal.release()
    journal.close()
    return len(samples) / took_s, samples


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
