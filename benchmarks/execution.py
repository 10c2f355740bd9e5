"""Compares throughput and latency of the router with a bare uvicorn endpoint.

    python benchmarks/execution.py [--quick] [--json]

An operation is a `forward_backward` with a batch of 1 or 64 MB: a client uploads it, the router
checks it, keeps it in the blob store and has it admitted by the scheduler, which journals it; a
worker gets it whole (on this machine a large one as a mapped file, each page of which it touches)
and answers at once with a quarter of its bytes, which the client then fetches.
All parts are real processes but for the model. The bare endpoint does the same work with the bytes:
it takes the same body, answers with the same number of bytes, and flushes both to the same disk, as
any service does that promises not to lose them. What the flushes alone cost is the measurement of
`benchmarks/durability.py`. Both have the same clients, in a process of their own. Both, and the
numbers of clients, take turns: the router keeps what its workers may have to repeat, and the first
use of a virtual machine's memory may cost more than all else, so that what is measured later is
slower. Of many clients with 64 MB, 16 are served at a time, so that the bare endpoint, which holds
whole bodies in memory, does not fill the machine.

`added_p50_ms` is for one client with 1 MB; `payload_ratio` compares bytes per second of 16 clients
with 64 MB; `many_clients_ratio` operations per second of 256 and of 16 clients with 1 MB, and
`many_clients_vs_bare` that ratio divided by the bare endpoint's, which falls with clients too.
`empty_op_p50_ms` is a barrier of one client from its submission to its result; the scheduler
commits its acceptance and its end to SQLite (synchronous FULL) on the way.
`engine_vs_transformers` is the measurement of `benchmarks/engine.py`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import plexrl
from benchmarks import engine
from benchmarks.report import percentile, report
from benchmarks.routing.clients import Load, Outcome
from benchmarks.routing.rig import GPUS, KEY, bare_server, deployments, measure, routed
from benchmarks.sizes import sized
from plexrl.client.calls import requests
from plexrl.wire.tensors import encode_body

SMALL_MB, LARGE_MB = 1, sized(64, quick=4)
MANY = sized(16, quick=2)
CLIENTS = sized((1, MANY, 256), quick=(1, MANY))
ROUNDS = sized(3, quick=1)
SECONDS = {SMALL_MB: sized(2.0, quick=0.1), LARGE_MB: sized(3.0, quick=0.1)}
"""Seconds of a round, by megabytes of a payload."""
AT_ONCE = {SMALL_MB: 256, LARGE_MB: 16}
EMPTY_SECONDS = sized(6.0, quick=0.1)
ROW_TOKENS = 512
TOKEN_BYTES = 16
"""Tokens, mask, logprobs and advantages."""


def payload(megabytes: int) -> bytes:
    """The body of an operation with as large a batch."""
    rows = megabytes * (1 << 20) // TOKEN_BYTES // ROW_TOKENS
    chance = np.random.default_rng(0)
    tokens = chance.integers(3, 90, (rows, ROW_TOKENS)).tolist()
    ones = [np.ones(ROW_TOKENS, dtype=np.float32)] * rows
    batch = plexrl.Batch(tokens, dict.fromkeys(("mask", "logprobs", "advantages"), ones))
    call = requests.forward_backward("job/actor", batch, plexrl.losses.grpo(), 16_384).call
    assert call.content is not None
    return call.content


def add(total: Outcome, part: Outcome) -> None:
    """Add a round."""
    total.seconds += part.seconds
    total.latencies_s += part.latencies_s
    total.refused += part.refused


def lines(loads: dict[str, dict[str, Any]], megabytes: int) -> dict[int, dict[str, Outcome]]:
    """The lines of a payload, by clients: rounds of each, of the bare endpoint and of the router,
    in turn."""
    found = {clients: {name: Outcome() for name in loads} for clients in CLIENTS}
    for _ in range(ROUNDS):
        for clients, line in found.items():
            sys.stderr.write(f"{clients} clients, {megabytes} MB …\n")
            for name, where in loads.items():
                load = Load(
                    clients=clients,
                    at_once=min(clients, AT_ONCE[megabytes]),
                    seconds=SECONDS[megabytes],
                    **where,
                )
                add(line[name], measure(load))
    return found


def run_all(rows: list[tuple[str, ...]], figures: dict[str, float]) -> None:
    """Measure every line."""
    with (
        tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder,
        bare_server(folder) as bare_port,
        routed() as router_port,
        plexrl.connect(f"http://127.0.0.1:{router_port}", KEY) as cluster,
        cluster.create_job("bench") as job,
    ):
        routed_load = {
            "port": router_port,
            "key": KEY,
            "deployments": deployments(job, GPUS),
            "kind": "forward_backward",
        }
        rows.append(_empty_operations(Path(folder), routed_load, figures))
        for megabytes in SECONDS:
            body = Path(folder) / f"{megabytes}.body"
            body.write_bytes(payload(megabytes))
            loads: dict[str, dict[str, Any]] = {
                "bare": {"port": bare_port, "body_file": str(body)},
                "router": {**routed_load, "body_file": str(body)},
            }
            for clients, line in lines(loads, megabytes).items():
                tell(rows, figures, line, f"{clients} x {megabytes} MB", f"{clients}x{megabytes}mb")


def _empty_operations(
    folder: Path, where: dict[str, Any], figures: dict[str, float]
) -> tuple[str, ...]:
    """The line of barriers."""
    sys.stderr.write("empty operations …\n")
    body = folder / "empty.body"
    body.write_bytes(encode_body({}, {}))
    load = Load(
        clients=1,
        at_once=1,
        seconds=EMPTY_SECONDS,
        body_file=str(body),
        **{**where, "kind": "barrier"},
    )
    found = measure(load)
    p50, p99 = (1e3 * percentile(found.latencies_s, percent) for percent in (50, 99))
    figures["empty_op_p50_ms"], figures["empty_op_p99_ms"] = p50, p99
    rate = len(found.latencies_s) / found.seconds
    return ("1 x empty", "", f"{rate:.1f}", "", "", f"{p50:.1f}", "", f"{p99:.1f}")


def tell(
    rows: list[tuple[str, ...]],
    figures: dict[str, float],
    found: dict[str, Outcome],
    name: str,
    key: str,
) -> None:
    """Enter one line."""
    bare, router = found["bare"], found["router"]
    rates = [len(each.latencies_s) / each.seconds for each in (bare, router)]
    cells = [name, *(f"{rate:.1f}" for rate in rates), f"{rates[1] / rates[0]:.2f}"]
    for percent in (50, 99):
        theirs, ours = (1e3 * percentile(each.latencies_s, percent) for each in (bare, router))
        cells += [f"{theirs:.1f}", f"{ours - theirs:.1f}"]
        figures[f"{key}_bare_p{percent}_ms"] = theirs
        figures[f"{key}_added_p{percent}_ms"] = ours - theirs
    figures[f"{key}_operations_per_s"] = rates[1]
    figures[f"{key}_ratio"] = rates[1] / rates[0]
    rows.append(tuple(cells))


def main() -> None:
    """Measure and print the figures."""
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    run_all(rows, figures)
    figures["added_p50_ms"] = figures["1x1mb_added_p50_ms"]
    figures["payload_ratio"] = figures[f"{MANY}x{LARGE_MB}mb_ratio"]
    few, many = (f"{each}x{SMALL_MB}mb" for each in (MANY, CLIENTS[-1]))
    for figure, each in (("ratio", "operations_per_s"), ("vs_bare", "ratio")):
        figures[f"many_clients_{figure}"] = figures[f"{many}_{each}"] / figures[f"{few}_{each}"]
    sys.stderr.write("engine …\n")
    theirs, ours = engine.compare(engine.ragged(engine.BAR), engine.BAR)
    figures["engine_vs_transformers"] = ours / theirs
    report(
        f"Operations through the router; the engine is {ours / theirs:.2f} times transformers",
        (
            *("clients x payload", "bare/s", "router/s", "ratio"),
            *("bare p50 ms", "added p50", "bare p99 ms", "added p99"),
        ),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
