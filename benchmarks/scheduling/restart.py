"""(e) From the start of a scheduler to its first decision: 20 000 jobs, a million events."""

import tempfile
import time
from pathlib import Path

from benchmarks.scheduling.cluster import config
from benchmarks.scheduling.dispatch import Drive, submit_job
from benchmarks.sizes import sized
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.journal.recovery import restore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.state.messages import events as ev

JOBS = sized(20_000, quick=64)
EVENTS = sized(1_000_000, quick=4000)
SNAPSHOT_EVENTS = sized(50_000, quick=1000)
BATCH = 512
GPUS = 8
RESIDENTS = 8


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures). The tail behind the snapshot is as long as it gets."""
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        path = str(Path(folder) / "journal.sqlite")
        settings, written = _write(path)
        began = time.perf_counter()
        journal = SqlJournal(path)
        restored = restore(settings, journal)
        restored.core.handle(ev.SchedulerStarted(), restored.at)
        restored.core.handle(ev.RouterJoined(router="r2"), restored.at)  # type: ignore[arg-type]
        restart_s = time.perf_counter() - began
        assert restored.position == written
        replayed = written - restored.snapshot_position
        journal.close()
        jobs = int(restored.core.status(restored.at)["jobs_total"])
        full_s = _replay_s(path, settings) * written
    figures = {
        "restart_s": restart_s,
        "restart_jobs": jobs,
        "restart_events_replayed": replayed,
        "restart_full_replay_ratio": full_s / restart_s,
    }
    label = f"restart to first decision, {jobs} jobs, {written:,} events ({replayed:,} replayed)"
    return [(label, f"{restart_s:.2f} s", "", f"{full_s / restart_s:,.0f}x")], figures


def _write(path: str) -> tuple[SchedulerConfig, int]:
    """A journal of a million events, with snapshots on the way, the last one just not due."""
    # The jobs submit more than the cluster works off.
    settings = config(policy="pack", residents_max=RESIDENTS, tenant_operations_max=4 * JOBS)
    drive = Drive(SchedulerCore(settings))
    journal = SqlJournal(path)
    journal.acquire("benchmark", 3600.0)
    entries: list[tuple[ev.Event, float]] = []
    handle = drive.core.handle
    position = snapshot_at = 0

    def recorded(event: ev.Event, now: float) -> list[object]:
        nonlocal position, snapshot_at
        entries.append((event, now))
        commands = handle(event, now)
        if len(entries) == BATCH:
            position = journal.append(entries)
            entries.clear()
            if position - snapshot_at >= SNAPSHOT_EVENTS and position < EVENTS - BATCH:
                journal.write_snapshot(position, now, drive.core.dump())
                journal.compact()
                snapshot_at = position
        return list(commands)

    drive.core.handle = recorded  # type: ignore[method-assign,assignment]
    for index in range(JOBS // (GPUS * RESIDENTS) + 1):
        joined = ev.NodeJoined(
            node=f"n{index}",  # type: ignore[arg-type]
            gpus=GPUS,
            gpu_memory_bytes=80 << 30,
            host_memory_bytes=2048 << 30,
            statemanager="sm",
        )
        drive.send(joined)
    drive.send(ev.RouterJoined(router="r"))  # type: ignore[arg-type]
    for index in range(JOBS):
        submit_job(drive, index)
    drive.run(len(drive.heap))
    for index in range(JOBS):
        drive.plan_cycle(f"j{index}/actor", drive.rng.uniform(0, 600.0))
    drive.run(EVENTS - position - len(entries))
    position = journal.append(entries)
    journal.release()
    journal.close()
    return settings, position


def _replay_s(path: str, settings: SchedulerConfig) -> float:
    """Seconds to read and replay one event, by those behind the snapshot."""
    journal = SqlJournal(path)
    newest = journal.snapshot()
    assert newest is not None
    core, count = SchedulerCore.restore(settings, newest[2]), 0
    began = time.perf_counter()
    for _, event, at in journal.read(after=newest[0]):
        core.handle(event, at)
        count += 1
    replay_s = (time.perf_counter() - began) / count
    journal.close()
    return replay_s
