"""Starts a supervisor's processes, restarts them when they end, and stops them."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import IO

from plexrl.errors import PlexRLError, UnavailableError, from_wire
from plexrl.process.children.part import Part, write_config
from plexrl.process.children.restart_log import PartRecord
from plexrl.process.children.stalls import is_at_work
from plexrl.process.folders.folders import Folders
from plexrl.process.lifeline import PARENT
from plexrl.process.memory.tuning import tuned

LOG = logging.getLogger(__name__)

MOVES_MEMORY = ("plexrl.statemanager", "plexrl.worker")
"""Parts that copy much memory, or whose children do: workers pull weights themselves."""
START_SLEEP_S_MAX = 60.0
"""A start fails after the part has slept for this long in total. Time in which the part works, or
waits for a core or a disk, does not count."""
LOOK_S = 0.25
"""Interval of checks whether a part that starts or stops is at work."""
STOP_SLEEP_S_MAX = 20.0
"""As `START_SLEEP_S_MAX`, for a part that stops: a StateManager writes its host tier to disk
first."""
ENDED = "it ended"
"""Failure of a part that ended before it reported; otherwise it was idle for too long."""
RESTART_S = 0.2
RESTART_S_MAX = 5.0
STABLE_S = 10.0
"""After a part has run for this long, the restart backoff begins at `RESTART_S` again."""


class PartProcesses:
    """Owns the processes of some parts."""

    def __init__(
        self,
        folders: Folders,
        record: PartRecord | None = None,
        *,
        start_sleep_s_max: float = START_SLEEP_S_MAX,
        stop_sleep_s_max: float = STOP_SLEEP_S_MAX,
    ) -> None:
        """`record` logs the parts that end and restart."""
        self._folders = folders
        self._record = record
        self._start_sleep_s_max = start_sleep_s_max
        self._stop_sleep_s_max = stop_sleep_s_max
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._outputs: dict[str, asyncio.BaseTransport] = {}
        """The reading ends of the parts' standard output."""
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, part: Part) -> None:
        """Start a part and wait until it reports that it serves.

        Raises:
            UnavailableError: it did not report; its log has the reason.
            PlexRLError: the error that the part reported.
        """
        log_path = self._folders.data / "logs" / f"{part.name}.log"
        environment, options = {**os.environ, PARENT: str(os.getpid())}, []
        if part.module in MOVES_MEMORY:
            environment = tuned(environment)
        if part.module == "plexrl.statemanager":
            # A StateManager started by hand or by systemd outlives the process that started it.
            options = ["--end-with-parent"]
        config = write_config(part, self._folders)
        self._close_output(part)
        reader, self._outputs[part.name], output = await _pipe()
        with log_path.open("ab") as log, output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                part.module,
                "--config",
                str(config),
                *options,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=environment,
                # Only the supervisor gets Ctrl-C; it stops the parts in order.
                start_new_session=True,
            )
        self._processes[part.name] = process
        line, failure = await self._first_line(process, reader)
        if b'"ready"' not in line:
            if process.returncode is None:
                process.kill()
            self._close_output(part)
            if line.startswith(b'{"error"'):
                raise from_wire(json.loads(line)["error"])
            raise UnavailableError(
                f"{part.name} did not start ({failure}): see {log_path}", failure=failure
            )
        LOG.info("%s runs as process %d", part.name, process.pid)

    def watch(self, parts: Sequence[Part]) -> None:
        """Restart these parts from now on whenever they end."""
        self._watchers += [asyncio.create_task(self._watch(part)) for part in parts]

    async def unwatch(self) -> None:
        """Stop restarting parts."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()

    async def end(self, part: Part) -> None:
        """Stop a part that is not watched any more, if it runs."""
        process = self._processes.get(part.name)
        if process is not None and process.returncode is None:
            process.terminate()
            if not await self._ends(process):
                LOG.error("%s did not stop and was idle: killed", part.name)
                process.kill()
                await process.wait()
        self._close_output(part)

    async def _ends(self, process: asyncio.subprocess.Process) -> bool:
        ended = asyncio.ensure_future(process.wait())
        slept_s = 0.0
        while slept_s < self._stop_sleep_s_max:
            done, _ = await asyncio.wait({ended}, timeout=LOOK_S)
            if done:
                return True
            # Its children may compute for ever: a part that waits for them must still end.
            if not await asyncio.to_thread(is_at_work, process.pid, with_children=False):
                slept_s += LOOK_S
        ended.cancel()
        return False

    async def _first_line(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader
    ) -> tuple[bytes, str]:
        """(first output line of a part that starts, empty if it ends or hangs; reason if empty)."""
        line = asyncio.ensure_future(reader.readline())
        ended = asyncio.ensure_future(process.wait())
        slept_s = 0.0
        try:
            while slept_s < self._start_sleep_s_max:
                done, _ = await asyncio.wait(
                    {line, ended}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if line in done:
                    return line.result(), ENDED
                if ended in done:
                    # Its last output may still be in the pipe.
                    await asyncio.wait({line}, timeout=LOOK_S)
                    return line.result() if line.done() else b"", ENDED
                if not await asyncio.to_thread(is_at_work, process.pid, with_children=True):
                    slept_s += LOOK_S
            return b"", f"it did nothing for {slept_s:g} s"
        finally:
            line.cancel()
            ended.cancel()

    def _close_output(self, part: Part) -> None:
        output = self._outputs.pop(part.name, None)
        if output is not None:
            output.close()

    async def _watch(self, part: Part) -> None:
        pause_s = RESTART_S
        while True:
            began = asyncio.get_running_loop().time()
            code = await self._processes[part.name].wait()
            LOG.warning("%s ended with %s; starting it again", part.name, code)
            if self._record is not None:
                self._record.ended(part.name)
            # Its children must not interfere with the children of its successor.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[part.name].pid, signal.SIGKILL)
            if asyncio.get_running_loop().time() - began > STABLE_S:
                pause_s = RESTART_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_S_MAX)
            try:
                await self.start(part)
            except (PlexRLError, OSError) as error:
                LOG.error("%s: %s", part.name, error)
                continue
            if self._record is not None:
                self._record.restarted(part.name)


async def _pipe() -> tuple[asyncio.StreamReader, asyncio.BaseTransport, IO[bytes]]:
    """A reader, its transport, and the file that a part writes to.

    With asyncio's own pipe a process would not count as ended until all its descendants have closed
    the inherited descriptor.
    """
    ours, theirs = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", buffering=0)
    )
    return reader, transport, os.fdopen(theirs, "wb", buffering=0)
