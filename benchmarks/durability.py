"""Compares the cost of a flush of every payload and result with that of a bare server's flush.

    python benchmarks/durability.py [--quick] [--json]

An operation is a `forward_backward` on an echo worker, as in `benchmarks/execution.py`: a payload
and a result a quarter as large. Four servers take turns, with the same clients:

* a router whose blobs lie on this machine's disk, and survive a power cut;
* the same router whose blobs lie in memory, where a flush costs nothing: what it was without;
* a bare uvicorn endpoint that writes the same bytes to that disk and flushes them;
* the bare endpoint that keeps nothing.

The scheduler's journal lies on the disk for both routers and commits with `synchronous=FULL`.
`flush_added_p50_ms` and `bare_flush_added_p50_ms` are for one client with 1 MB, flushed less
unflushed, and `flush_added_over_bare` their ratio. `throughput_ratio` is operations per second of
16 clients with 1 MB, flushed over unflushed, `bare_throughput_ratio` the bare endpoint's, and
`router_vs_bare_flush` the router's operations per second over the bare endpoint's, both flushed.
"""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import plexrl
from benchmarks.execution import payload
from benchmarks.report import percentile, report
from benchmarks.routing.clients import Load, Outcome
from benchmarks.routing.rig import KEY, bare_server, deployments, measure, routed
from benchmarks.sizes import sized

MEGABYTES = 1
MANY = sized(16, quick=2)
CLIENTS = (1, MANY)
DEPLOYMENTS = sized(16, quick=2)
ROUNDS = sized(5, quick=1)
SECONDS = sized(2.0, quick=0.1)
MEMORY = "/dev/shm"


def measure_all(loads: dict[str, dict[str, Any]]) -> dict[int, dict[str, Outcome]]:
    """Rounds of each server in turn, by clients and server."""
    found = {clients: {name: Outcome() for name in loads} for clients in CLIENTS}
    for _ in range(ROUNDS):
        for clients, line in found.items():
            sys.stderr.write(f"{clients} clients …\n")
            for name, where in loads.items():
                part = measure(Load(clients=clients, at_once=clients, seconds=SECONDS, **where))
                line[name].seconds += part.seconds
                line[name].latencies_s += part.latencies_s
    return found


def run_all() -> dict[int, dict[str, Outcome]]:
    """Start all servers, and measure them."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        folder = enter(tempfile.TemporaryDirectory(prefix="plexrl-bench-"))
        memory = enter(tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir=MEMORY))
        body = Path(folder) / "body"
        body.write_bytes(payload(MEGABYTES))
        loads: dict[str, dict[str, Any]] = {
            "bare": {"port": enter(bare_server()), "body_file": str(body)},
            "bare, flushed": {"port": enter(bare_server(folder)), "body_file": str(body)},
        }
        for name, where in (("router, in memory", {"data_dir": memory}), ("router, flushed", {})):
            port = enter(routed(**where))
            cluster = enter(plexrl.connect(f"http://127.0.0.1:{port}", KEY))
            job = enter(cluster.create_job("bench"))
            loads[name] = {
                "port": port,
                "key": KEY,
                "deployments": deployments(job, DEPLOYMENTS),
                "kind": "forward_backward",
                "body_file": str(body),
            }
        return measure_all(loads)


def main() -> None:
    """Measure and print the figures."""
    found = run_all()
    rows = []
    rates: dict[tuple[int, str], float] = {}
    for clients, line in found.items():
        for name, outcome in line.items():
            rate = rates[clients, name] = len(outcome.latencies_s) / outcome.seconds
            p50, p99 = (1e3 * percentile(outcome.latencies_s, percent) for percent in (50, 99))
            rows.append(
                (f"{clients} x {MEGABYTES} MB", name, f"{rate:.1f}", f"{p50:.1f}", f"{p99:.1f}")
            )
    alone = {name: 1e3 * percentile(each.latencies_s, 50) for name, each in found[1].items()}
    many = {name: rates[MANY, name] for name in found[MANY]}
    added = alone["router, flushed"] - alone["router, in memory"]
    bare_added = alone["bare, flushed"] - alone["bare"]
    figures = {
        "flush_added_p50_ms": added,
        "bare_flush_added_p50_ms": bare_added,
        "flush_added_over_bare": added / bare_added,
        "throughput_ratio": many["router, flushed"] / many["router, in memory"],
        "bare_throughput_ratio": many["bare, flushed"] / many["bare"],
        "router_vs_bare_flush": many["router, flushed"] / many["bare, flushed"],
    }
    report(
        "The cost of flushing payloads and results",
        ("clients x payload", "server", "operations/s", "p50 ms", "p99 ms"),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
