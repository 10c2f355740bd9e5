"""Where a cluster is found again, as lines for people to use."""

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster is found again, in another process."""

    url: str
    """Of all routers, with commas between."""
    data_dir: Path | None = None
    """Of a cluster that was found by its data directory."""
    is_embedded: bool = False

    def attach(self, job: str) -> str:
        """The Python line that resumes a job."""
        where = repr(self.url) if self.data_dir is None else f"data_dir={str(self.data_dir)!r}"
        return f"plexrl.connect({where}).attach_job({job!r})"

    def cancel(self, job: str) -> str:
        """What cancels a job: a command, or a Python line where that must start the cluster."""
        if self.is_embedded:
            return f"{self.attach(job)}.cancel()"
        if self.data_dir is None:
            return f"plexrl cancel {shlex.quote(job)} --url {shlex.quote(self.url)}"
        return f"plexrl cancel {shlex.quote(job)} --data-dir {shlex.quote(str(self.data_dir))}"
