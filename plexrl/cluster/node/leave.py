"""Leaving a cluster: the node is drained, ended and forgotten."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from plexrl.cluster.data_dir.folder import is_locked
from plexrl.cluster.join.client import HeadClient
from plexrl.cluster.join.messages import DrainProgress
from plexrl.cluster.node.membership import Kept, NodeFolder
from plexrl.cluster.node.supervisor import head_of
from plexrl.errors import (
    AuthenticationError,
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)

POLL_S = 1.0
STOP_S = 120.0
"""Time for the node's supervisor to end; a StateManager writes its host tier to disk first."""


def leave_cluster(
    data_dir: Path, progress: Callable[[str], None], *, timeout_s: float, is_forced: bool = False
) -> str:
    """Drain the node on a data directory, end it, and remove it from its cluster; returns its name.
    `progress` gets a line for each change. With `is_forced` nothing is drained, and a head that
    does not answer is left without its knowledge.

    Raises:
        ConflictError: this machine has not joined.
        DeadlineExceededError: work was left after `timeout_s` seconds; the node is in use again.
        UnavailableError: the head does not answer, or the node did not end.
    """
    return asyncio.run(_leave(data_dir, progress, timeout_s, is_forced=is_forced))


async def _leave(
    data_dir: Path, progress: Callable[[str], None], timeout_s: float, *, is_forced: bool
) -> str:
    folder = NodeFolder(data_dir)
    kept = folder.read()
    if kept is None:
        raise ConflictError(
            f"no node has joined a cluster from {data_dir}: name its data directory with --data-dir"
        )
    client = HeadClient(head_of(kept), folder.certificates.tls)
    try:
        if not is_forced:
            await _drain(client, kept.node, progress, timeout_s)
        await _end(data_dir, folder, kept, progress)
        await client.leave()
    except (PermissionDeniedError, AuthenticationError) as error:
        progress(f"the head does not know this node any more ({error.message})")
        await _end(data_dir, folder, kept, progress)
    except UnavailableError:
        if not is_forced or is_locked(data_dir):
            raise
        progress(f"{kept.head} does not answer: the head still lists the node")
    folder.forget()
    return kept.node


async def _drain(
    client: HeadClient, node: str, progress: Callable[[str], None], timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    former: DrainProgress | None = None
    while True:
        try:
            left = await client.drain()
        except NotFoundError:
            # It has joined but never served.
            return
        if left != former:
            progress(_text(node, left))
            former = left
        if left.gpus_reserved == 0:
            return
        if time.monotonic() > deadline:
            await client.undrain()
            raise DeadlineExceededError(
                f"{node} still has work after {timeout_s:g} s: {_text(node, left)}; it takes work "
                "again. Give more capacity elsewhere, or leave with --force"
            )
        await asyncio.sleep(POLL_S)


def _text(node: str, left: DrainProgress) -> str:
    if left.gpus_reserved == 0:
        return f"{node} is drained"
    groups = f" by {', '.join(left.groups)}" if left.groups else ""
    return f"{node} is draining: {left.gpus_reserved} GPUs are still reserved{groups}"


async def _end(
    data_dir: Path, folder: NodeFolder, kept: Kept, progress: Callable[[str], None]
) -> None:
    """End the node's supervisor, if it runs."""
    now = folder.read()
    if now is None or not now.pid or not is_locked(data_dir):
        return
    with suppress(ProcessLookupError):
        os.kill(now.pid, signal.SIGTERM)
    progress(f"{kept.node} is ending")
    deadline = time.monotonic() + STOP_S
    while is_locked(data_dir):
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the node's process {now.pid} has not ended after {STOP_S:g} s: see "
                f"{data_dir / 'logs'}"
            )
        await asyncio.sleep(0.1)
