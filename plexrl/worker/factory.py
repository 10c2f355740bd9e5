"""Which backend a deployment's specification asks for."""

from pathlib import Path

from plexrl.deployment_spec import DeploymentSpec
from plexrl.errors import InvalidRequestError
from plexrl.worker.backend import Backend


def make_backend(spec: DeploymentSpec, rank: int, world_size: int, checkpoint_dir: Path) -> Backend:
    """The backend of one rank; heavy libraries are imported here.

    Raises:
        InvalidRequestError: there is no such backend for this kind of deployment.
    """
    if (spec.kind, spec.backend) == ("train", "fsdp"):
        from plexrl.worker.fsdp import FsdpBackend

        return FsdpBackend(spec, rank, world_size, checkpoint_dir)
    if (spec.kind, spec.backend) == ("rollout", "torch"):
        from plexrl.worker.engine import TorchRolloutBackend

        return TorchRolloutBackend(spec, checkpoint_dir)
    if (spec.kind, spec.backend) == ("forward", "torch"):
        from plexrl.worker.forward_backend import ForwardBackend

        return ForwardBackend(spec, rank, world_size, checkpoint_dir)
    raise InvalidRequestError(
        f"there is no backend {spec.backend!r} for a {spec.kind} deployment: use fsdp for train, "
        "torch for forward and rollout"
    )
