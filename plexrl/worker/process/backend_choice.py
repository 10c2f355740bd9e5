"""Which backend a deployment's specification asks for."""

from importlib.util import find_spec
from pathlib import Path

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.worker.process.backend import Backend


def make_backend(spec: DeploymentSpec, rank: int, world_size: int, checkpoint_dir: Path) -> Backend:
    """The backend of one rank; heavy libraries are imported here.

    Raises:
        InvalidRequestError: there is no such backend for this kind of deployment, or its library is
            not installed.
        LayoutError: the deployment's layout has not as many ranks as were started.
    """
    if spec.layout.world_size != world_size:
        raise LayoutError(
            f"{world_size} workers were started for a layout of {spec.layout.describe()}, which "
            f"needs {spec.layout.world_size}: deploy it anew",
            field="workers",
        )
    if (spec.kind, spec.backend) == ("train", "fsdp"):
        from plexrl.worker.training.backend import TrainingBackend
        from plexrl.worker.training.fsdp.model import FsdpModel
        from plexrl.worker.training.model import TrainingRank

        place = TrainingRank(spec=spec, rank=rank)
        return TrainingBackend(place, FsdpModel(place), checkpoint_dir)
    if (spec.kind, spec.backend) == ("train", "deepspeed"):
        return _deepspeed(spec, rank, checkpoint_dir)
    if (spec.kind, spec.backend) == ("train", "megatron"):
        return _megatron(spec, rank, checkpoint_dir)
    if (spec.kind, spec.backend) == ("rollout", "torch"):
        from plexrl.worker.rollout.engine import TorchRolloutBackend
        from plexrl.worker.rollout.engine.tensor_parallel import rank_group

        return TorchRolloutBackend(spec, checkpoint_dir, rank_group(spec.layout, rank))
    if (spec.kind, spec.backend) == ("rollout", "vllm"):
        from plexrl.worker.rollout.vllm.installation import require_vllm

        require_vllm()
        from plexrl.worker.rollout.vllm.backend import VllmRolloutBackend

        return VllmRolloutBackend(spec, checkpoint_dir)
    if (spec.kind, spec.backend) == ("forward", "torch"):
        from plexrl.worker.forward.backend import ForwardBackend

        return ForwardBackend(spec, rank, world_size, checkpoint_dir)
    raise InvalidRequestError(
        f"there is no backend {spec.backend!r} for a {spec.kind} deployment: use fsdp, "
        "deepspeed or megatron for train, torch for forward, torch or vllm for rollout"
    )


def _megatron(spec: DeploymentSpec, rank: int, checkpoint_dir: Path) -> Backend:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise InvalidRequestError(
            "backend 'megatron' needs megatron-core, which this node does not have: "
            "pip install 'plexrl[megatron]' there, or use backend fsdp"
        )
    from plexrl.worker.training.backend import TrainingBackend
    from plexrl.worker.training.megatron.model import MegatronModel
    from plexrl.worker.training.model import TrainingRank

    place = TrainingRank(spec=spec, rank=rank)
    return TrainingBackend(place, MegatronModel(place), checkpoint_dir)


def _deepspeed(spec: DeploymentSpec, rank: int, checkpoint_dir: Path) -> Backend:
    from plexrl.worker.training.backend import TrainingBackend
    from plexrl.worker.training.deepspeed import DeepSpeedModel
    from plexrl.worker.training.model import TrainingRank

    place = TrainingRank(spec=spec, rank=rank)
    return TrainingBackend(place, DeepSpeedModel(place), checkpoint_dir)
