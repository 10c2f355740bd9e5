"""Which backend a deployment's specification asks for."""

from pathlib import Path

from plexrl.deployment_spec import DeploymentSpec
from plexrl.errors import InvalidRequestError
from plexrl.worker.backend import Backend


def make_backend(spec: DeploymentSpec, rank: int, world_size: int, checkpoint_dir: Path) -> Backend:
    """The backend of one rank; heavy libraries are imported here.

    Raises:
        InvalidRequestError: there is no such backend for this kind of deployment, or its library
            is not installed.
    """
    if (spec.kind, spec.backend) == ("train", "fsdp"):
        from plexrl.worker.fsdp import FsdpBackend

        return FsdpBackend(spec, rank, world_size, checkpoint_dir)
    if (spec.kind, spec.backend) == ("rollout", "torch"):
        from plexrl.worker.engine import TorchRolloutBackend

        return TorchRolloutBackend(spec, checkpoint_dir)
    if (spec.kind, spec.backend) == ("rollout", "vllm"):
        from plexrl.worker.vllm.installation import require_vllm

        require_vllm()
        from plexrl.worker.vllm.backend import VllmRolloutBackend

        return VllmRolloutBackend(spec, checkpoint_dir)
    raise InvalidRequestError(
        f"there is no backend {spec.backend!r} for a {spec.kind} deployment: use fsdp for train, "
        "torch or vllm for rollout"
    )
