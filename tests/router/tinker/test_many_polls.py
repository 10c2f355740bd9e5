"""Thousands of samples that wait outlive the router without a storm of polls."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.router.tinker.completions import CLONE
from tests.cluster.tools import process_of
from tests.router.tinker.clients import Tenant

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
SAMPLERS, CLONES, EACH = 2, 100, 10
"""Two deployments hold 1000 samples each, of 100 clones of a sampler with 10 samples each."""
WATCHED_S = 25.0
PACE = '{"pace": "h800:qwen2.5-7b@1", "max_concurrent_samples": 1}'
"""One sample at a time, each as slow as on a real GPU: few of them end in the test."""


async def make_samplers(http: httpx.AsyncClient, models: Sequence[str]) -> list[str]:
    metadata = {"user_metadata": {"plexrl_rollout": PACE}}
    session = (await http.post("/create_session", json=metadata)).json()["session_id"]
    samplers = []
    for number, model in enumerate(models):
        asked = {"session_id": session, "sampling_session_seq_id": number, "base_model": model}
        made = (await http.post("/create_sampling_session", json=asked)).json()
        samplers.append(str(made["sampling_session_id"]))
    return samplers


async def submit(http: httpx.AsyncClient, sampler: str, number: int) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    body = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": prompt,
        "num_samples": 1,
        # Without an end token, so that few samples end while polls are counted.
        "sampling_params": {"max_tokens": 3000, "stop": []},
    }
    (await http.post("/asample", json=body)).raise_for_status()


async def beat(http: httpx.AsyncClient, session: str) -> None:
    """Heartbeats, as the SDK sends them."""
    while True:
        with suppress(httpx.TransportError):
            await http.post("/session_heartbeat", json={"session_id": session})
        await asyncio.sleep(10.0)


async def finish(http: httpx.AsyncClient, session: str) -> None:
    """Ends the session, again while the cluster is busy with it, as the SDK does."""
    reason = {"reason": {"type": "interrupted"}}
    for _ in range(60):
        response = await http.post(f"/sessions/{session}/finish", json=reason)
        if response.status_code != 503:
            break
        await asyncio.sleep(1.0)
    response.raise_for_status()


async def poll(http: httpx.AsyncClient, sampler: str, clone: int, answers: list[int]) -> None:
    """Polls as the SDK does: at once after an answer, a second later after an error. Notes the
    statuses of answers that tell of no sample that has ended."""
    target = {"sampling_session_id": sampler, "cloned_sampler_id": clone}
    cursor = 0
    while True:
        asked = {"target": target, "prev_cursor": cursor}
        try:
            response = await http.post("/retrieve_futures", json=asked)
        except httpx.TransportError:
            await asyncio.sleep(1.0)
            continue
        if response.status_code != 200:
            answers.append(response.status_code)
            await asyncio.sleep(1.0)
            continue
        told = response.json()
        cursor = told["cursor"]
        if not any(each.get("response_payload_uncompressed_size") for each in told["completions"]):
            answers.append(200)


async def lost(http: httpx.AsyncClient, sampler: str) -> int:
    """Samples of a sampler that no router knows."""
    names = [
        f"{sampler}:{clone * CLONE + number}" for clone in range(CLONES) for number in range(EACH)
    ]
    gate = asyncio.Semaphore(50)

    async def is_lost(name: str) -> bool:
        async with gate:
            answer = await http.post("/cancel_future", json={"request_id": name})
            return answer.status_code == 404

    return sum(await asyncio.gather(*map(is_lost, names)))


@pytest.fixture(params=["one router", "two routers"])
def served(request: pytest.FixtureRequest) -> tuple[EmbeddedCluster, Tenant]:
    """A cluster, and a tenant of it; two routers have a load balancer before them."""
    names = ("cluster", "tenant") if request.param == "one router" else ("routers", "lab")
    cluster, tenant = (request.getfixturevalue(name) for name in names)
    return cluster, tenant


def test_2000_open_samples_outlive_a_killed_router_with_a_poll_for_each_sampler(
    served: tuple[EmbeddedCluster, Tenant], roots: Path
) -> None:
    cluster, tenant = served
    shutil.copytree(roots / "tiny", roots / "second", dirs_exist_ok=True)

    async def main() -> dict[tuple[str, int], list[int]]:
        limits = httpx.Limits(max_connections=None)
        headers = {"X-API-Key": tenant.key}
        async with httpx.AsyncClient(
            base_url=f"{tenant.url}/api/v1", headers=headers, timeout=60, limits=limits
        ) as http:
            samplers = await make_samplers(http, ("tiny", "second"))
            session = samplers[0].partition(":")[0]
            beating = asyncio.create_task(beat(http, session))
            for sampler in samplers:
                for clone in range(CLONES):
                    first = clone * CLONE
                    await asyncio.gather(
                        *(submit(http, sampler, first + number) for number in range(EACH))
                    )
            answers: dict[tuple[str, int], list[int]] = {
                (sampler, clone): [] for sampler in samplers for clone in range(CLONES)
            }
            polls = [asyncio.create_task(poll(http, *who, answers[who])) for who in answers]
            await asyncio.sleep(1.0)
            process_of(cluster, "plexrl.router").kill()
            for known in answers.values():
                known.clear()
            began = time.monotonic()
            await asyncio.sleep(WATCHED_S)
            seen: dict[tuple[str, int], list[int]] = {who: [*answers[who]] for who in answers}
            assert not any(each.done() for each in polls), time.monotonic() - began
            for each in (beating, *polls):
                each.cancel()
            await asyncio.gather(beating, *polls, return_exceptions=True)
            assert [await lost(http, sampler) for sampler in samplers] == [0, 0]
            await finish(http, session)
            return seen

    seen = asyncio.run(main())
    assert len(seen) == SAMPLERS * CLONES
    statuses = Counter(status for answers in seen.values() for status in answers)
    assert set(statuses) <= {200}, statuses
    assert max(map(len, seen.values())) <= 1, Counter(map(len, seen.values()))
