"""Asynchronous rollouts as the router shows them."""

import asyncio
from pathlib import Path
from typing import Any

from plexrl.router.execution.rollout_link import RolloutLink
from plexrl.router.observe.metrics import metrics_text
from plexrl.router.observe.rollouts import RolloutViews
from plexrl.wire.links.address import UnixAddress
from plexrl.wire.links.credentials import Role
from plexrl.wire.links.dial import Link, serve
from plexrl.wire.rpc import Peer

Plain = dict[str, Any]


def view(job: str, state: str, tokens_per_s: float, seen: dict[str, int]) -> Plain:
    return {
        "job": job,
        "name": "secret-name",
        "state": state,
        "waits_for": f"{job} waits",
        "batches_ready": 1,
        "in_flight": 6,
        "tokens_per_s": tokens_per_s,
        "staleness_seen": seen,
        "instances_added": 2,
        "instances_removed": 1,
        "instances": {
            "rollout-0": {"state": "joined", "pause_s": 0.5, "transfer_s": 4.0},
            "rollout-1": {"state": "lost", "pause_s": 0.25, "transfer_s": 0.0},
        },
    }


def metrics(link: RolloutLink) -> str:
    async def ask() -> str:
        return metrics_text(await RolloutViews(link).metrics()).decode()

    return asyncio.run(ask())


def test_many_requests_share_one_question_and_metrics_have_sums_without_names(
    tmp_path: Path,
) -> None:
    found = [
        view("a", "running", 10.0, {"0": 3, "1": 1}),
        view("b", "running", 2.5, {"1": 4}),
        view("c", "failed", 0.0, {}),
    ]
    asked: list[Plain] = []

    async def listing(_: Peer, params: Plain) -> Plain:
        asked.append(params)
        return {"rollouts": found}

    async def on_link(link: Link) -> None:
        await Peer(link.reader, link.writer, {"list": listing}).run()

    async def ask() -> str:
        address = UnixAddress(str(tmp_path / "r.sock"))
        server = await serve(address, None, on_link, roles=(Role.ROUTER,))
        link = RolloutLink(str(address), None)
        views = RolloutViews(link)
        answers = await asyncio.gather(*(views.views() for _ in range(50)))
        assert all(each == found for each in answers)
        text = metrics_text(await views.metrics()).decode()
        assert await views.waits("b") == [{"rollout": "secret-name", "waits_for": "b waits"}]
        assert asked == [{"job": None}]
        await link.close()
        server.close()
        return text

    text = asyncio.run(ask())
    for line in (
        "plexrl_rollout_service_connected 1.0",
        'plexrl_rollouts{state="failed"} 1.0',
        'plexrl_rollouts{state="running"} 2.0',
        "plexrl_rollout_batches_ready 3.0",
        "plexrl_rollout_trajectories 18.0",
        "plexrl_rollout_tokens_per_second 12.5",
        'plexrl_rollout_instances{state="lost"} 3.0',
        'plexrl_rollout_instance_changes{change="added"} 6.0',
        'plexrl_rollout_instance_changes{change="removed"} 3.0',
        "plexrl_rollout_pull_pause_seconds 2.25",
        "plexrl_rollout_pull_transfer_seconds 12.0",
        'plexrl_rollout_trained_trajectories{staleness="1"} 5.0',
    ):
        assert line in text.splitlines()
    assert "secret" not in text


def test_a_service_that_does_not_answer_is_told_from_none(tmp_path: Path) -> None:
    text = metrics(RolloutLink(f"unix:{tmp_path}/nobody.sock", None))
    assert "plexrl_rollout_service_connected 0.0" in text
    assert "plexrl_rollouts" not in text
    assert metrics(RolloutLink("", None)) == ""
