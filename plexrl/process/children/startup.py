"""Start-up of a cluster's processes: read the configuration, report readiness, handle signals."""

import argparse
import asyncio
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.process.children.lifeline import die_with_named_parent
from plexrl.process.children.pulse import beat, must_beat
from plexrl.process.plain_text import PlainFormatter

ConfigT = TypeVar("ConfigT")

LOG = logging.getLogger(__name__)

EXIT_REFUSED = 1
"""The process did not serve, and reported why."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def show_only_gpu(uuid: str) -> None:
    """Hide all other GPUs from this process, or all if `uuid` is empty; effective if it has made no
    CUDA call yet."""
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid


def visible_parts() -> tuple[str, ...]:
    """The parts of GPUs (MIG) that `CUDA_VISIBLE_DEVICES` names. If there are any, the driver shows
    no whole GPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not named[0].startswith("MIG-"):
        return ()
    return tuple([each.strip() for each in named])


def load_config(path: Path, kind: type[ConfigT]) -> ConfigT:
    """The configuration of type `kind` in the JSON file at `path`; unknown fields are refused.

    Raises:
        InvalidRequestError: the file cannot be read, or is not a valid `kind`.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{path} is no valid {kind.__name__}: {error}") from error
    return parse_config(text, kind, str(path))


def parse_config(text: bytes | str, kind: type[ConfigT], source: str) -> ConfigT:
    """The configuration of type `kind` in a JSON text; error messages name `source`.

    Raises:
        InvalidRequestError: the text is not a valid `kind`.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, object])
        known = set(getattr(kind, "__dataclass_fields__", ()))
        unknown = sorted(set(raw) - known)
        if unknown:
            raise InvalidRequestError(f"{source}: remove the unknown fields {', '.join(unknown)}")
        return msgspec.convert(raw, kind)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"{source} is no valid {kind.__name__}: {error}") from error


def raise_descriptor_limit() -> int:
    """Allow this process as many open files as the system lets it have; returns their number, or
    `resource.RLIM_INFINITY`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def print_ready(**details: object) -> None:
    """Report to the parent process that this process serves: a JSON line on standard output."""
    sys.stdout.write(json.dumps({"ready": True, **details}) + "\n")
    sys.stdout.flush()


def print_refused(error: PlexRLError) -> None:
    """Report to the parent process why this process does not serve: a JSON line on standard
    output."""
    sys.stdout.write(json.dumps({"error": error.to_wire()}) + "\n")
    sys.stdout.flush()


def remove_socket(path: str) -> None:
    """Remove the Unix socket that an earlier process may have left at `path`."""
    Path(path).unlink(missing_ok=True)


def set_up_process(*, ends_with_parent: bool = True) -> None:
    """Log to standard error, and if `ends_with_parent`, end when the parent process ends."""
    if ends_with_parent:
        die_with_named_parent(os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to end in order: SIGTERM, SIGINT, and SIGHUP of a closed
    terminal, unless the process ignores it, as under `nohup`."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_part(
    module: str,
    purpose: str | None,
    kind: type[ConfigT],
    serve: Callable[[ConfigT, asyncio.Event], Awaitable[None]],
) -> None:
    """Run `python -m MODULE --config FILE` until a signal: `serve` gets the configuration of type
    `kind`, and the event that `run_until_signal` sets.

    Errors are as for `refusals_reported`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=purpose)
    parser.add_argument("--config", type=Path, required=True)
    path = parser.parse_args().config
    with refusals_reported(module):
        run_until_signal(partial(serve, load_config(path, kind)))


@contextmanager
def refusals_reported(module: str) -> Iterator[None]:
    """An error of PlexRL is reported to the parent process, and ends this one with
    `EXIT_REFUSED`."""
    try:
        yield
    except PlexRLError as error:
        LOG.critical("%s cannot run: %s", module, error)
        print_refused(error)
        sys.exit(EXIT_REFUSED)


def run_until_signal(
    serve: Callable[[asyncio.Event], Awaitable[None]],
    *,
    ends_with_parent: bool = True,
    works: Callable[[], object] | None = None,
) -> None:
    """Run `serve` in an event loop. `ending_signals` set the event that is passed to `serve`.
    `works` is as for `plexrl.process.children.pulse.beat`."""
    set_up_process(ends_with_parent=ends_with_parent)
    beats = must_beat(os.environ)

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in ending_signals():
            loop.add_signal_handler(sig, stop.set)
        beating = asyncio.create_task(beat(works)) if beats else None
        # The first beat comes before the report that this process serves.
        await asyncio.sleep(0)
        try:
            await serve(stop)
        finally:
            if beating is not None:
                beating.cancel()

    asyncio.run(run())
