"""The operator's requests to PlexRL: a job's state, its end, and draining of nodes."""

from typing import TYPE_CHECKING, Protocol

from plexrl.cluster.kubernetes.operator.status import SeenJob
from plexrl.errors import ConflictError, NotFoundError

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster

FINAL = ("COMPLETED", "FAILED", "CANCELLED")


class JobsOfCluster(Protocol):
    """The PlexRL cluster, as the operator sees it. Every method raises `PlexRLError` if the cluster
    cannot be asked."""

    def view(self, job: str) -> SeenJob | None:
        """A job; None: unknown."""
        ...

    def cancel(self, job: str, reason: str) -> None:
        """End a job that is live."""
        ...

    def nodes(self) -> dict[str, bool]:
        """Whether each node is being drained."""
        ...

    def set_drained(self, node: str, is_drained: bool) -> None:
        """Drain a node, or take it back."""
        ...


class ClusterJobs:
    """Asks a cluster through its API, as operator."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster

    def view(self, job: str) -> SeenJob | None:
        try:
            found = self._cluster.attach_job(job, heartbeat=False).explain()
        except NotFoundError:
            return None
        state = found["state"]
        return SeenJob(state, found["summary"], state not in FINAL)

    def cancel(self, job: str, reason: str) -> None:
        try:
            self._cluster.attach_job(job, heartbeat=False).finish("cancelled", reason)
        except (NotFoundError, ConflictError):
            # It is unknown or has ended, which is what is wanted.
            return

    def nodes(self) -> dict[str, bool]:
        return {node["node"]: node["is_draining"] for node in self._cluster.nodes()}

    def set_drained(self, node: str, is_drained: bool) -> None:
        if is_drained:
            self._cluster.drain(node)
        else:
            self._cluster.undrain(node)
