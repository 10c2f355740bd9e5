"""SIGTERM with waiting jobs: routers and clusters end in order, and controllers continue."""

import signal
import socket
import threading
from pathlib import Path

import httpx
import psutil
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    process_of,
    train,
    wait_until,
    weights_after,
)

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=6)
STEPS = 6


class Waiter(threading.Thread):
    """A controller's thread that waits for results and stores them in `outcomes`."""

    def __init__(self, futures: list[plexrl.Future[plexrl.StepResult]]) -> None:
        super().__init__(daemon=True)
        self._futures = futures
        self.outcomes: list[object] = []
        self.start()

    def run(self) -> None:
        for future in self._futures:
            try:
                self.outcomes.append(future.result())
            except plexrl.errors.PlexRLError as error:
                self.outcomes.append(error)

    def finish(self) -> list[object]:
        self.join(120)
        assert not self.is_alive(), "a result never came"
        return self.outcomes


def connections(process: psutil.Process) -> int:
    return sum(each.status == "ESTABLISHED" for each in process.net_connections("tcp"))


@pytest.mark.slow
@pytest.mark.parametrize("routers", [1, 2])
def test_an_open_poll_gets_retry_after_when_its_router_stops(tmp_path: Path, routers: int) -> None:
    embedded = start_embedded(tmp_path / "data", virtual_gpus=1, routers=routers)
    try:
        urls = embedded.url.split(",")
        with plexrl.connect(urls, embedded.api_key) as cluster:
            first, second = cluster.create_job("first"), cluster.create_job("second")
            first.rollout_deployment("holder", MODEL)
            waiting = second.rollout_deployment("waiting", MODEL).generate([[3, 4]])
            answers: list[httpx.Response] = []

            def poll(url: str) -> None:
                answers.append(
                    httpx.get(
                        f"{url}/v1/operations/{waiting.operation}",
                        params={"wait_s": 60},
                        headers={"Authorization": f"Bearer {embedded.api_key}"},
                        timeout=90,
                    )
                )

            named = [
                p
                for p in psutil.Process(embedded.pid).children()
                if "plexrl.router" in str(p.cmdline())
            ]
            assert len(named) == routers
            before = {process.pid: connections(process) for process in named}
            threads = [threading.Thread(target=poll, args=(url,), daemon=True) for url in urls]
            for thread in threads:
                thread.start()
            wait_until(
                lambda: all(connections(each) > before[each.pid] for each in named), "no poll came"
            )
            for url in urls:
                # After the polls that are being forwarded.
                httpx.get(f"{url}/v1/health").raise_for_status()
            for process in named:
                process.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join(60)
            assert [answer.status_code for answer in answers] == [202] * routers
            assert all(answer.json()["state"] == "pending" for answer in answers)
            first.finish()
            assert waiting.result(120).samples
            second.finish()
    finally:
        embedded.close()


@pytest.fixture(scope="module")
def undisturbed(embedded: EmbeddedCluster) -> bytes:
    return weights_after(embedded, MODEL, STEPS)


def test_a_waiting_job_continues_when_its_router_stops(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, undisturbed: bytes
) -> None:
    with cluster.create_job("patient") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        waiter = Waiter([train(actor, step) for step in range(STEPS)])
        process_of(embedded, "plexrl.router").send_signal(signal.SIGTERM)
        assert all(isinstance(each, plexrl.StepResult) for each in waiter.finish())
        weights = checkpoint_weights(actor)
    assert weights == undisturbed


@pytest.mark.slow
def test_a_restarted_cluster_keeps_its_url_and_its_jobs_continue(
    tmp_path: Path, undisturbed: bytes
) -> None:
    running = start_embedded(tmp_path / "data", virtual_gpus=2, routers=2)
    url = running.url
    try:
        with (
            plexrl.connect(url, running.api_key) as cluster,
            cluster.create_job("patient") as job,
        ):
            actor = job.train_deployment("actor", MODEL, workers=2)
            train(actor, 0).result(120)
            waiter = Waiter([train(actor, step) for step in range(1, STEPS)])
            running.close()
            running = start_embedded(tmp_path / "data", virtual_gpus=2, routers=2)
            assert running.url == url
            assert all(isinstance(each, plexrl.StepResult) for each in waiter.finish())
            weights = checkpoint_weights(actor)
    finally:
        running.close()
    assert weights == undisturbed


@pytest.mark.slow
def test_a_port_in_use_is_replaced_with_a_warning(tmp_path: Path) -> None:
    running = start_embedded(tmp_path / "data", virtual_gpus=1)
    port = int(running.url.rpartition(":")[2])
    running.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        running = start_embedded(tmp_path / "data", virtual_gpus=1)
        try:
            assert running.url.rpartition(":")[2] != str(port)
        finally:
            running.close()
    # What `plexrl up` writes to standard error.
    assert f"port {port}" in (tmp_path / "data" / "logs" / "embedded.log").read_text()
