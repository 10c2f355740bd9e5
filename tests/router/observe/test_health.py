"""Health as a probe without a key sees it, and as an operator sees it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from plexrl.process.children.restart_log import PartRecord, read_parts
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.observe.health import UNREACHABLE_S, ClusterHealth
from plexrl.router.observe.metrics import HealthCollector, metrics_text
from plexrl.wire.messages import WorkerName
from plexrl.wire.rpc import Peer

Plain = dict[str, Any]
FULL = {"code": "journal_full", "message": "no room in /secret/journal.sqlite", "since": 5.0}


def with_scheduler(
    folder: Path, found: list[Plain], test: Callable[[SchedulerLink], Coroutine[Any, Any, int]]
) -> None:
    """Run `test` with a scheduler with these conditions; `test` returns the expected queries."""

    async def talk() -> None:
        requests: list[Plain] = []

        async def answer(_: Peer, params: Plain) -> Plain:
            requests.append(params)
            return {"conditions": found}

        async def hello(_: Peer, __: Plain) -> Plain:
            return {}

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await Peer(reader, writer, {"hello": hello, "conditions": answer}).run()

        link = SchedulerLink([f"unix:{folder}/s"], "r", {})
        server = await asyncio.start_unix_server(serve, folder / "s")
        running = asyncio.create_task(link.run())
        await link.connected.wait()
        try:
            assert await test(link) == len(requests)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            server.close()

    asyncio.run(talk())


def test_many_probes_share_one_check_and_see_only_codes(tmp_path: Path) -> None:
    async def test(link: SchedulerLink) -> int:
        health = ClusterHealth(link, tmp_path, None, free_bytes_min=0)
        answers = await asyncio.gather(*(health.public() for _ in range(100)))
        assert (
            answers[0]
            == answers[-1]
            == {
                "ok": False,
                "scheduler": True,
                "conditions": [{"code": "journal_full", "since": 5.0}],
                "restarts": 0,
                "last_restart_at": None,
            }
        )
        assert await health.conditions() == [FULL]
        return 1

    with_scheduler(tmp_path, [FULL], test)


def test_a_cluster_without_conditions_is_ok(tmp_path: Path) -> None:
    async def test(link: SchedulerLink) -> int:
        public = await ClusterHealth(link, tmp_path, tmp_path / "none").public()
        assert public["ok"]
        assert public["conditions"] == []
        return 1

    with_scheduler(tmp_path, [], test)


def test_a_full_disk_and_a_part_that_ended_are_conditions(tmp_path: Path) -> None:
    record = PartRecord(tmp_path / "parts.json")
    record.ended("scheduler")
    record.restarted("scheduler")
    record.ended("agent-node0")

    async def test(link: SchedulerLink) -> int:
        health = ClusterHealth(link, tmp_path, tmp_path / "parts.json", free_bytes_min=1 << 60)
        part, disk = await health.conditions()
        assert (part["code"], disk["code"]) == ("part_down", "storage_full")
        assert "agent-node0" in part["message"]
        assert str(tmp_path) in disk["message"]
        public = await health.public()
        assert public["restarts"] == 1
        assert (
            public["last_restart_at"]
            == read_parts(tmp_path / "parts.json")["scheduler"].last_restart_at
        )
        assert str(tmp_path) not in str(public)
        assert "agent" not in str(public)
        return 1

    with_scheduler(tmp_path, [], test)


def test_an_unreachable_scheduler_is_a_condition_since_its_first_failure(tmp_path: Path) -> None:
    async def test() -> None:
        health = ClusterHealth(SchedulerLink([f"unix:{tmp_path}/s"], "r", {}), tmp_path, None)
        (first,) = await health.conditions()
        assert first["code"] == "unavailable"
        public = await health.public()
        assert public["scheduler"] is False
        assert public["conditions"] == [{"code": "unavailable", "since": first["since"]}]

    asyncio.run(test())


def test_prometheus_metrics_have_the_age_of_a_condition(tmp_path: Path) -> None:
    async def test(link: SchedulerLink) -> int:
        health = ClusterHealth(link, tmp_path, None, free_bytes_min=0)
        text = metrics_text(HealthCollector(await health.public(), now=12.0)).decode()
        assert 'plexrl_condition_seconds{code="journal_full"} 7.0' in text
        assert "plexrl_scheduler_connected 1.0" in text
        assert "plexrl_part_restarts_total 0.0" in text
        assert "secret" not in text
        return 1

    with_scheduler(tmp_path, [FULL], test)


def test_a_silent_part_is_a_condition_until_it_answers_or_ends(tmp_path: Path) -> None:
    record = PartRecord(tmp_path / "parts.json")
    record.silent("statemanager-node0", 20.0)

    async def test(link: SchedulerLink) -> int:
        def health() -> ClusterHealth:
            return ClusterHealth(link, tmp_path, tmp_path / "parts.json", free_bytes_min=0)

        (stuck,) = await health().conditions()
        assert stuck["code"] == "part_stuck"
        assert "statemanager-node0" in stuck["message"]
        record.answers("statemanager-node0")
        assert await health().conditions() == []
        record.silent("statemanager-node0", 20.0)
        record.ended("statemanager-node0")
        (down,) = await health().conditions()
        assert down["code"] == "part_down"
        return 3

    with_scheduler(tmp_path, [], test)


def test_workers_without_a_connection_are_a_condition_after_a_while(tmp_path: Path) -> None:
    now = time.time()
    lost = [
        (WorkerName("j/actor", 0, 1), now - UNREACHABLE_S - 5.0),
        (WorkerName("j/actor", 1, 1), now),
    ]

    async def test(link: SchedulerLink) -> int:
        health = ClusterHealth(link, tmp_path, None, free_bytes_min=0, unreachable=lambda: lost)
        (found,) = await health.conditions()
        assert (found["code"], found["since"]) == ("workers_unreachable", lost[0][1])
        assert "1 workers, whose operations wait: j/actor rank 0:" in found["message"]
        return 1

    with_scheduler(tmp_path, [], test)


def test_a_missing_data_directory_is_a_condition(tmp_path: Path) -> None:
    async def test(link: SchedulerLink) -> int:
        (found,) = await ClusterHealth(link, tmp_path / "gone", None).conditions()
        assert found["code"] == "folder_missing"
        assert str(tmp_path / "gone") in found["message"]
        return 1

    with_scheduler(tmp_path, [], test)
