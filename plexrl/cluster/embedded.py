"""A cluster that belongs to this process: started on demand, gone when it is closed."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from plexrl.cluster.config import JOURNAL_VARIABLE
from plexrl.errors import UnavailableError

STOP_TIMEOUT_S = 60.0


class EmbeddedCluster:
    """A running embedded cluster."""

    def __init__(
        self, process: "subprocess.Popen[str]", endpoint: dict[str, Any], temporary: bool
    ) -> None:
        self._process = process
        self._temporary = temporary
        self.url: str = endpoint["url"]
        self.api_key: str = endpoint["api_key"]
        """The operator's."""
        self.data_dir = Path(endpoint["data_dir"])
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    def close(self) -> None:
        """End the cluster; a temporary data directory is removed."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)


def start_embedded(data_dir: Path | None = None, **options: Any) -> EmbeddedCluster:
    """Start a cluster with the given `ClusterOptions`; without a `data_dir`, a temporary one.

    Raises:
        UnavailableError: it did not start.
    """
    temporary = data_dir is None
    folder = Path(tempfile.mkdtemp(prefix="plexrl-data-")) if data_dir is None else data_dir
    # Not an argument: the URL of a database may hold a password.
    journal = options.pop("journal", None)
    environment = {name: value for name, value in os.environ.items() if name != JOURNAL_VARIABLE}
    if journal is not None:
        environment[JOURNAL_VARIABLE] = journal
    arguments = [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", _word(value))
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "plexrl.cluster", "--data-dir", str(folder), *arguments],
        # Its end is how the cluster learns that this process is gone, however it went.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # A Ctrl-C in the terminal is the controller's; the cluster ends with its connection.
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait()
        process.stdout.close()
        if process.stdin is not None:
            process.stdin.close()
        if temporary:
            logs = "\n".join(
                path.read_text(errors="replace")[-2000:]
                for path in sorted((folder / "logs").glob("*.log"))
            )
            shutil.rmtree(folder, ignore_errors=True)
        else:
            logs = f"see {folder}/logs"
        raise UnavailableError(f"the embedded cluster did not start: {logs}")
    return EmbeddedCluster(process, json.loads(line), temporary)


def _word(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
