"""Configuration of the rollout service."""

from dataclasses import dataclass
from pathlib import Path

from plexrl.errors import InvalidRequestError
from plexrl.process.folders.operator_key import NAME
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import TlsFiles

FOLDER = "rollout"
"""Folder of a data directory that has a folder for each job."""
SUFFIX = ".sqlite"
"""Ending of a rollout's store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Settings of the rollout service of one cluster."""

    listen: tuple[str, ...]
    """Addresses for the routers: `unix:/path` on the same machine, `tls://HOST:PORT` from others.
    The launcher adds a Unix socket."""
    routers: tuple[str, ...]
    """URLs of the routers, by which it submits operations."""
    data_dir: str
    """Directory of the cluster on this machine, with the stores of rollouts in `rollout/`."""
    operator_key_file: str = ""
    """File with the operator's key, with which it acts on every tenant's jobs; empty: that of
    `data_dir`."""
    ca: str = ""
    """PEM file of the authority of the routers' certificates; empty: the public ones."""
    tls: TlsFiles | None = None
    """This service's certificate; absent: all parts are on one machine."""
    job_rollouts_max: int = 8
    """Asynchronous rollouts that a job may have."""
    cycle_s: float = 0.2
    """Interval of the snapshots on which trajectories are routed."""
    instance_lost_s: float = 60.0
    """How long an instance may be out of service before its work goes to the others. Its worker
    is started again meanwhile, so shorter than a start only makes it lose what it has."""

    def __post_init__(self) -> None:
        if not self.listen or not self.routers:
            raise InvalidRequestError("listen and routers need at least one address each")
        for address in self.listen:
            parse_address(address)
        if not 1 <= self.job_rollouts_max <= 10_000:
            raise InvalidRequestError(
                f"job_rollouts_max is {self.job_rollouts_max}: set it from 1 to 10000"
            )
        if not 0.01 <= self.cycle_s <= 60:
            raise InvalidRequestError(f"cycle_s is {self.cycle_s}: set it from 0.01 to 60 seconds")
        if not 1 <= self.instance_lost_s <= 86_400:
            raise InvalidRequestError(
                f"instance_lost_s is {self.instance_lost_s}: set it from 1 to 86400 seconds"
            )

    def operator_key(self) -> str:
        """The operator's key.

        Raises:
            InvalidRequestError: its file is missing or empty.
        """
        path = Path(self.operator_key_file or Path(self.data_dir, NAME))
        try:
            key = path.read_text().strip()
        except OSError as error:
            raise InvalidRequestError(f"the operator's key cannot be read: {error}") from error
        if not key:
            raise InvalidRequestError(f"{path} is empty: write the operator's key into it")
        return key
