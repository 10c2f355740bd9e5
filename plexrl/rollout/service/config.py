"""Configuration of the rollout service."""

from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.wire.links.credentials import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Settings of the rollout service of one cluster."""

    listen: tuple[str, ...]
    """Addresses for the routers, such as `unix:/path` or `tls://HOST:PORT`."""
    routers: tuple[str, ...]
    """URLs of the routers, by which it submits operations."""
    data_dir: str
    """Directory of the cluster on this machine: has the operator's key, and the stores of
    rollouts in `rollout/`."""
    ca: str = ""
    """PEM file of the authority of the routers' certificates; empty: the public ones."""
    tls: TlsFiles | None = None
    """This service's certificate; absent: all parts are on one machine."""
    cycle_s: float = 0.2
    """Interval of the snapshots on which trajectories are routed."""

    def __post_init__(self) -> None:
        if not self.listen or not self.routers:
            raise InvalidRequestError("listen and routers need at least one address each")
        if not 0.01 <= self.cycle_s <= 60:
            raise InvalidRequestError(f"cycle_s is {self.cycle_s}: set it from 0.01 to 60 seconds")
