"""Starts a supervisor's processes, restarts them when they end or are stuck, and stops them."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from plexrl.errors import PlexRLError, UnavailableError, from_wire
from plexrl.process.children.lifeline import PARENT
from plexrl.process.children.part import Part, write_config
from plexrl.process.children.pulse import BEAT, LOOK_S, PULSE, STUCK_S, Pulse
from plexrl.process.children.restart_log import PartRecord
from plexrl.process.children.stalls import is_at_work
from plexrl.process.folders.folders import Folders
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.process.memory.tuning import tune

LOG = logging.getLogger(__name__)

MOVES_MEMORY = ("plexrl.statemanager", "plexrl.worker")
"""Parts that copy much memory, or whose children do: workers pull weights themselves."""
START_SLEEP_S_MAX = 60.0
"""A start fails after the part has slept for this long in total. Time in which the part works, or
waits for a core or a disk, does not count."""
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
        stuck_s: float = STUCK_S,
    ) -> None:
        """`record` logs the parts that end and restart. `stuck_s`: silence after which a part that
        has sent beats is replaced; 0: never."""
        self._folders = folders
        self._record = record
        self._start_sleep_s_max = start_sleep_s_max
        self._stop_sleep_s_max = stop_sleep_s_max
        self._stuck_s = stuck_s
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._readers: dict[str, asyncio.StreamReader] = {}
        self._pulses: dict[str, Pulse] = {}
        self._identities: dict[str, list[tuple[int, int] | None]] = {}
        """Which folders the parts were started in."""
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
        environment, options = {**os.environ, PARENT: str(os.getpid()), PULSE: "1"}, []
        if part.module in MOVES_MEMORY:
            environment = tune(environment)
        if part.module == "plexrl.statemanager":
            # A StateManager started by hand or by systemd outlives the process that started it.
            options = ["--end-with-parent"]
        for folder in part.folders:
            make_private_folder(folder)
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
        self._processes[part.name], self._readers[part.name] = process, reader
        pulse = self._pulses[part.name] = Pulse(self._stuck_s)
        line, failure = await self._first_line(process, reader, pulse)
        if b'"ready"' not in line:
            if process.returncode is None:
                process.kill()
            self._close_output(part)
            if line.startswith(b'{"error"'):
                raise from_wire(json.loads(line)["error"])
            raise UnavailableError(
                f"{part.name} did not start ({failure}): see {log_path}", failure=failure
            )
        self._identities[part.name] = [*map(_identity, part.folders)]
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
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, pulse: Pulse
    ) -> tuple[bytes, str]:
        """(first output line of a part that starts, empty if it ends or hangs; reason if empty)."""
        line = asyncio.ensure_future(_first_text(reader, pulse))
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

    async def _end_or_silence(self, part: Part) -> None:
        """Return once the part has ended, or was killed: it was stuck, or lost one of its
        folders."""
        process, pulse = self._processes[part.name], self._pulses[part.name]
        listening = asyncio.create_task(_listen(self._readers[part.name], pulse))
        ended = asyncio.ensure_future(process.wait())
        loop = asyncio.get_running_loop()
        was_late = False
        try:
            while not (await asyncio.wait({ended}, timeout=LOOK_S))[0]:
                pulse.look(loop.time())
                if pulse.is_stuck:
                    LOG.error("%s has not answered for %.0f s: killed", part.name, pulse.silent_s)
                    process.kill()
                    return
                found = [*map(_identity, part.folders)]
                if found != self._identities[part.name]:
                    gone = part.folders[_first_difference(found, self._identities[part.name])]
                    LOG.error("%s is gone, which %s needs: both are replaced", gone, part.name)
                    process.kill()
                    return
                if self._record is not None and pulse.is_late != was_late:
                    if pulse.is_late:
                        self._record.silent(part.name, pulse.silent_s)
                    else:
                        self._record.answers(part.name)
                was_late = pulse.is_late
        finally:
            listening.cancel()
            ended.cancel()

    def _close_output(self, part: Part) -> None:
        output = self._outputs.pop(part.name, None)
        if output is not None:
            output.close()

    async def _watch(self, part: Part) -> None:
        pause_s = RESTART_S
        while True:
            began = asyncio.get_running_loop().time()
            await self._end_or_silence(part)
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


def _identity(folder: Path) -> tuple[int, int] | None:
    """Tells a folder from another one of the same path; None: there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _first_difference(found: Sequence[object], known: Sequence[object]) -> int:
    return next(
        at for at, (one, other) in enumerate(zip(found, known, strict=True)) if one != other
    )


async def _first_text(reader: asyncio.StreamReader, pulse: Pulse) -> bytes:
    """The first line that is no beat."""
    while (line := await reader.readline()) == BEAT:
        pulse.beat()
    return line


async def _listen(reader: asyncio.StreamReader, pulse: Pulse) -> None:
    """Read a part's beats until it closes its output."""
    while await reader.readline():
        pulse.beat()


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
