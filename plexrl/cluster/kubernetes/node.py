"""A node's pod: runs its StateManager and its agent, which share the pod's devices and memory.

A device plugin gives a GPU to one container, so both run in one. If either ends, this process ends
too, and the kubelet starts the container again; the host tier in memory is found by the next run.

Both write their logs to standard error, which the kubelet rotates. Workers, also those in pods,
have files of their own for `plexrl logs`, which this process bounds.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError, UnavailableError
from plexrl.process.children.lifeline import PARENT
from plexrl.process.folders.operator_key import write_private
from plexrl.process.folders.rotated_log import keep_logs_bounded
from plexrl.process.memory.tuning import tune

LOG = logging.getLogger(__name__)

READY = "ready"
"""File in the run directory that says that the scheduler has accepted the node."""
START_TIMEOUT_S = 600.0
"""For the StateManager to recover its tiers, and for the agent to reach the scheduler."""
STOP_TIMEOUT_S = 240.0
PARTS = (("statemanager", "plexrl.statemanager"), ("agent", "plexrl.worker"))
WORKERS = "plexrl.cluster.kubernetes.workers"
"""The agent whose workers are pods."""


async def run_node(settings: dict[str, Any], stop: asyncio.Event) -> int:
    """Run both until one ends or until `stop`; returns the exit status.

    Raises:
        InvalidRequestError: the settings lack a part.
        UnavailableError: a part did not start.
    """
    missing = [name for name, _ in PARTS if not isinstance(settings.get(name), dict)]
    if missing:
        raise InvalidRequestError(f"the node's settings have no {', '.join(missing)}")
    run_dir = Path(settings["agent"]["run_dir"])
    logs = Path(settings["agent"]["data_dir"]) / "logs"
    for folder in (run_dir, logs):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ready = run_dir / READY
    ready.unlink(missing_ok=True)
    running: list[asyncio.subprocess.Process] = []
    stopping = asyncio.create_task(stop.wait())
    trimming = asyncio.create_task(keep_logs_bounded(logs))
    try:
        for name, module in PARTS:
            content = settings[name]
            if name == "agent" and "pods" in settings:
                module, content = WORKERS, {"agent": content, "pods": settings["pods"]}
            config = run_dir / f"{name}.json"
            write_private(config, json.dumps(content))
            process = await _spawn(module, config)
            running.append(process)
            if not await _is_ready(process, stopping):
                if stop.is_set():
                    return 0
                raise UnavailableError(f"the {name} did not start: see the log above")
        ready.touch()
        ends = [asyncio.create_task(process.wait()) for process in running]
        await asyncio.wait({*ends, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for (name, _), end in zip(PARTS, ends, strict=True):
            if end.done():
                LOG.error("the %s ended with status %d", name, end.result())
        return 0 if stop.is_set() else 1
    finally:
        ready.unlink(missing_ok=True)
        stopping.cancel()
        trimming.cancel()
        # The agent first: its workers use the StateManager.
        for process in reversed(running):
            await _end(process)


async def _spawn(module: str, config: Path) -> asyncio.subprocess.Process:
    environment = tune({**os.environ, PARENT: str(os.getpid())})
    options = ("--end-with-parent",) if module == "plexrl.statemanager" else ()
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        "--config",
        str(config),
        *options,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )


async def _is_ready(process: asyncio.subprocess.Process, stopping: "asyncio.Task[bool]") -> bool:
    """Whether the part reported that it serves, before it ended and before the node stops."""
    assert process.stdout is not None
    reading = asyncio.create_task(process.stdout.readline())
    await asyncio.wait(
        {reading, stopping}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
    )
    if not reading.done():
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return False
    try:
        return bool(json.loads(reading.result()).get("ready"))
    except ValueError:
        return False


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
