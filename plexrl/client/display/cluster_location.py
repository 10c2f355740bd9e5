"""How another process finds a cluster, as lines to copy."""

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClusterLocation:
    """How another process finds a cluster."""

    url: str
    """URLs of all routers, separated by commas."""
    data_dir: Path | None = None
    """Data directory; absent: the cluster was connected by URL."""
    is_embedded: bool = False

    def attach_line(self, job: str) -> str:
        """The Python line that attaches a job."""
        where = repr(self.url) if self.data_dir is None else f"data_dir={str(self.data_dir)!r}"
        return f"plexrl.connect({where}).attach_job({job!r})"

    def cancel_line(self, job: str) -> str:
        """The command that cancels a job; a Python line if the cluster must be started for it."""
        if self.is_embedded:
            return f"{self.attach_line(job)}.cancel()"
        if self.data_dir is None:
            return f"plexrl cancel {shlex.quote(job)} --url {shlex.quote(self.url)}"
        return f"plexrl cancel {shlex.quote(job)} --data-dir {shlex.quote(str(self.data_dir))}"
