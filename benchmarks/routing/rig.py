"""Starts the measured processes: scheduler, router and a node of echo workers; a bare server."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

import plexrl
from benchmarks.routing.clients import Load, Outcome

KEY = "bench"
GPUS = 16
Process = subprocess.Popen[str]


@contextmanager
def process(*words: str) -> Iterator[Process]:
    """A Python process, killed at the end."""
    running = subprocess.Popen(
        # What the processes have to say beside their first line is of no interest.
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        assert running.stdout is not None
        running.stdout.close()


def first_line(running: Process) -> str:
    """What it says once it serves."""
    assert running.stdout is not None
    line = running.stdout.readline()
    assert line, "a process of the rig did not start"
    return line


@contextmanager
def bare_server(flushed_in: str = "") -> Iterator[int]:
    """The port of a bare uvicorn endpoint; with a folder, it flushes there what it gets."""
    words = (flushed_in,) if flushed_in else ()
    with process("-m", "benchmarks.routing.bare_server", *words) as running:
        yield int(first_line(running))


@contextmanager
def routed(**router: Any) -> Iterator[int]:
    """The port of a router before a scheduler and a node of echo workers."""
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as name:
        folder = Path(name)
        socket = str(folder / "scheduler.sock")
        scheduler = {
            "listen": [f"unix:{socket}"],
            "journal": str(folder / "journal.sqlite"),
            "operator_key_digest": hashlib.sha256(KEY.encode()).hexdigest(),
            "residents_max": 1,
        }
        routing = {
            "router": "bench",
            "scheduler": [f"unix:{socket}"],
            "host": "127.0.0.1",
            "port": 0,
            "data_dir": name,
            **router,
        }
        with process("-m", "plexrl.scheduler", "--config", _write(folder, scheduler)) as running:
            first_line(running)
            node = ("-m", "benchmarks.routing.echo_node", socket, name, str(GPUS))
            with process(*node) as echo:
                first_line(echo)
                with process("-m", "plexrl.router", "--config", _write(folder, routing)) as router_:
                    yield int(json.loads(first_line(router_))["port"])


def _write(folder: Path, config: dict[str, Any]) -> str:
    path = folder / f"{len(list(folder.glob('*.json')))}.json"
    path.write_text(json.dumps(config))
    return str(path)


def deployments(job: plexrl.Job, count: int) -> tuple[str, ...]:
    """Names of train deployments of one echo worker each, ready to work."""
    model = plexrl.tiny_qwen2("".join(chr(code) for code in range(33, 126)))
    made = [
        job.train_deployment(f"actor{index}", model, exclusive=True, max_sequence_tokens=512)
        for index in range(count)
    ]
    for each in made:
        each.barrier().result(60)
    return tuple(each.deployment for each in made)


def measure(load: Load) -> Outcome:
    """Run a load from a process of its own."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.routing.clients"],
        input=json.dumps(asdict(load)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return msgspec.json.decode(found.stdout, type=Outcome)
