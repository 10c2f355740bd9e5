"""Compares the round trip of an empty operation with a bare FastAPI no-op.

    python benchmarks/roundtrip.py [--quick] [--json]

The operation is a `barrier`: the SDK posts it, the router submits it, the scheduler journals and
admits it, the worker answers, the outcome is journalled and the SDK's long poll returns. The
baseline is one empty POST to a FastAPI application under uvicorn, from the same client library.
"""

import subprocess
import sys
import time
from collections.abc import Callable

import httpx

import plexrl
from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from plexrl.cluster.embedded.start import start_embedded

WARM_UP = sized(30, quick=1)
ROUNDS = sized(300, quick=3)

NOOP_SERVER = """
import socket, uvicorn
from fastapi import FastAPI
app = FastAPI()
@app.post("/noop")
async def noop() -> dict[str, bool]:
    return {"ok": True}
sock = socket.socket(proto=socket.IPPROTO_TCP); sock.bind(("127.0.0.1", 0)); sock.listen()
print(sock.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[sock])
"""


def timed_ms(call: Callable[[], object]) -> list[float]:
    """Milliseconds of each of `ROUNDS` calls, after a warm-up."""
    for _ in range(WARM_UP):
        call()
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - start))
    return samples


def bare_fastapi_ms() -> list[float]:
    """An empty POST to a FastAPI application that does nothing."""
    server = subprocess.Popen(
        [sys.executable, "-c", NOOP_SERVER], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/noop"
        with httpx.Client(timeout=10) as client:
            while True:
                try:
                    client.post(url)
                    break
                except httpx.ConnectError:
                    time.sleep(0.05)
            return timed_ms(lambda: client.post(url).raise_for_status())
    finally:
        server.kill()
        server.wait()


def barrier_ms() -> list[float]:
    """A barrier on a rollout deployment of one worker, alone on the cluster."""
    embedded = start_embedded(virtual_gpus=1)
    try:
        with (
            plexrl.connect(embedded.url, embedded.api_key) as cluster,
            cluster.create_job("roundtrip") as job,
        ):
            rollout = job.rollout_deployment("rollout", plexrl.tiny_qwen2("01"))
            return timed_ms(lambda: rollout.barrier().result())
    finally:
        embedded.close()


def main() -> None:
    """Measure both and print the figures."""
    bare, barrier = bare_fastapi_ms(), barrier_ms()
    rows = [
        (name, f"{percentile(samples, 50):.2f}", f"{percentile(samples, 99):.2f}")
        for name, samples in (("bare FastAPI no-op", bare), ("admitted barrier", barrier))
    ]
    figures = {
        "bare_p50_ms": percentile(bare, 50),
        "bare_p99_ms": percentile(bare, 99),
        "barrier_p50_ms": percentile(barrier, 50),
        "barrier_p99_ms": percentile(barrier, 99),
        "barrier_over_bare_p50": percentile(barrier, 50) / percentile(bare, 50),
    }
    report("Round trip of an empty operation", ("what", "p50 ms", "p99 ms"), rows, figures)


if __name__ == "__main__":
    main()
