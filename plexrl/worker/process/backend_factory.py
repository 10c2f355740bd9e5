"""Creates the backend that a deployment's specification names."""

from dataclasses import replace
from importlib.util import find_spec
from typing import NoReturn

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.checkpoint.places.choice import Location
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.storage.location import is_url
from plexrl.storage.model_folder import model_folder
from plexrl.worker.interface.backend import Backend, BackendCall
from plexrl.worker.state.device import CPU, WorkerDevice


def make_backend(
    spec: DeploymentSpec,
    rank: int,
    world_size: int,
    checkpoint_url: Location,
    device: WorkerDevice = CPU,
) -> Backend:
    """The backend of one rank on that device. Heavy libraries are imported here.

    Raises:
        InvalidRequestError: this kind of deployment has no such backend, or the backend's library
            is not installed.
        StoreUnavailableError: the model's URL cannot be read.
        LayoutError: the number of started workers differs from the layout's number of ranks.
    """
    if spec.layout.world_size != world_size:
        raise LayoutError(
            f"{world_size} workers were started for a layout of {spec.layout.describe()}, which "
            f"needs {spec.layout.world_size}: create the deployment again",
            field="workers",
        )
    if spec.model.path is not None and is_url(spec.model.path):
        # The libraries read models from directories.
        folder = model_folder(spec.model.path, weights=True)
        spec = replace(spec, model=replace(spec.model, path=str(folder)))
    match spec.kind, spec.backend:
        case "train", _:
            return _training_backend(spec, rank, checkpoint_url, device)
        case "rollout", "torch":
            from plexrl.worker.rollout.engine import TorchRolloutBackend
            from plexrl.worker.rollout.engine.tensor_parallel import rank_group
            from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import switch_groups

            if spec.tp_sizes:
                groups = switch_groups(spec.layout, spec.tp_sizes, rank)
                return TorchRolloutBackend(spec, checkpoint_url, groups=groups, device=device)
            ranks = rank_group(spec.layout, rank)
            return TorchRolloutBackend(spec, checkpoint_url, ranks, device=device)
        case "rollout", "vllm":
            from plexrl.worker.rollout.vllm.installation import require_vllm

            require_vllm(device.torch_device.type)
            from plexrl.worker.rollout.engine.tensor_parallel import rank_group
            from plexrl.worker.rollout.vllm.backend import VllmRolloutBackend

            ranks = rank_group(spec.layout, rank)
            return VllmRolloutBackend(spec, checkpoint_url, ranks, device)
        case "forward", "torch":
            from plexrl.worker.forward.backend import ForwardBackend

            return ForwardBackend(spec, rank, world_size, checkpoint_url, device)
        case "forward", "megatron":
            _require_megatron("torch")
            from plexrl.worker.forward.megatron_backend import MegatronForwardBackend

            return MegatronForwardBackend(spec, rank, world_size, checkpoint_url, device)
    raise _unknown_backend(spec)


def make_or_refuse(
    spec: DeploymentSpec,
    rank: int,
    world_size: int,
    checkpoint_url: Location,
    device: WorkerDevice = CPU,
) -> Backend:
    """As `make_backend`, but an error of that function is raised by the backend's `lay_out`."""
    try:
        return make_backend(spec, rank, world_size, checkpoint_url, device)
    except InvalidRequestError as error:
        return RefusedBackend(error)


class RefusedBackend(Backend):
    """A placeholder for a backend that this node cannot run.

    The worker starts with it, so that the first load fails with the reason: the scheduler would
    restart a process that ends before it is ready. A worker calls no other method before
    `lay_out` succeeds.
    """

    def __init__(self, reason: InvalidRequestError) -> None:
        self._reason = reason

    def lay_out(self) -> NoReturn:
        raise self._reason

    def slices(self) -> tuple[StateSlice, ...]:
        raise self._reason

    def gather(self, value: str) -> list[str]:
        del value
        raise self._reason

    def run(self, call: BackendCall) -> NoReturn:
        del call
        raise self._reason


def _training_backend(
    spec: DeploymentSpec, rank: int, checkpoint_url: Location, device: WorkerDevice
) -> Backend:
    from plexrl.worker.training.backend import TrainingBackend
    from plexrl.worker.training.model import TrainingModel, TrainingRank

    own = TrainingRank(spec=spec, rank=rank, device=device)
    model: TrainingModel
    match spec.backend:
        case "fsdp":
            from plexrl.worker.training.fsdp.model import FsdpModel
            from plexrl.worker.training.fsdp.sharded_parameter import check_torch

            check_torch()
            model = FsdpModel(own)
        case "deepspeed":
            from plexrl.worker.training.deepspeed import DeepSpeedModel

            model = DeepSpeedModel(own)
        case "megatron":
            _require_megatron("fsdp")
            from plexrl.worker.training.megatron.model import MegatronModel

            model = MegatronModel(own)
        case _:
            raise _unknown_backend(spec)
    return TrainingBackend(own, model, checkpoint_url)


def _require_megatron(other: str) -> None:
    """Raises `InvalidRequestError` if megatron-core is not installed; `other` is a backend that
    needs it not."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise InvalidRequestError(
            "backend 'megatron' needs megatron-core, which is not installed on this node: "
            f"run pip install 'plexrl[megatron]' there, or use backend {other}"
        )


def _unknown_backend(spec: DeploymentSpec) -> InvalidRequestError:
    return InvalidRequestError(
        f"there is no backend {spec.backend!r} for a {spec.kind} deployment: use fsdp, "
        "deepspeed or megatron for train, torch or megatron for forward, torch or vllm for rollout"
    )
