"""The demo's controllers: one process of `examples/grpo_digits.py` per job."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from plexrl.errors import ExecutionError, NotFoundError

EXAMPLE = "grpo_digits.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerPlan:
    """One job to run."""

    task: str
    tenant: str
    api_key: str


def example_path() -> Path:
    """The controller's script, in the clone's `examples/` or in the installed package.

    Raises:
        NotFoundError: the package was installed without its examples.
    """
    clone = Path(__file__).parents[3]
    for folder in (clone / "examples", Path(sys.prefix) / "share" / "plexrl" / "examples"):
        if (folder / EXAMPLE).is_file():
            return folder / EXAMPLE
    raise NotFoundError(f"{EXAMPLE} is not installed: run the demo from a clone of the repository")


class DemoController:
    """A running controller process; its output goes to a log file."""

    def __init__(
        self, plan: ControllerPlan, *, url: str, arguments: list[str], log_path: Path
    ) -> None:
        self.plan = plan
        self.log_path = log_path
        self._log: IO[bytes] = log_path.open("wb")
        environment = {**os.environ, "PLEXRL_URL": url, "PLEXRL_API_KEY": plan.api_key}
        self._process = subprocess.Popen(
            [sys.executable, str(example_path()), "--task", plan.task, *arguments],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def is_running(self) -> bool:
        """Whether the process still runs.

        Raises:
            ExecutionError: the process failed; the message has the end of its log.
        """
        code = self._process.poll()
        if code is None:
            return True
        self._log.close()
        if code != 0:
            tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])
            raise ExecutionError(f"the {self.plan.task!r} controller ended with {code}:\n{tail}")
        return False

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
