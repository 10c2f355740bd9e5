"""What a controller orders: the settings of one asynchronous rollout."""

from dataclasses import dataclass, field

from plexrl.errors import InvalidRequestError
from plexrl.rollout.coordinator.cost_model import QWEN3_30B_A3B_ON_H20
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import InstanceId
from plexrl.wire.operations import SamplingParams
from plexrl.wire.parameter_checks import check_name, check_parameters

FAILED_PROMPTS_MIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOrder:
    """An asynchronous rollout of a job. Names are those of deployments of that job."""

    job: str
    name: str
    source: str
    """The train deployment whose weights are pulled."""
    instances: tuple[str, ...]
    """The rollout deployments that generate."""
    staleness: int
    """η."""
    prompts: int
    """Prompts of one batch."""
    samples: int = 1
    """Samples of a prompt."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """`first_sample` and `drawn_tokens` are 0: the service sets them for each trajectory."""
    first_batch: int = 0
    """Number of the first batch: of those that the model was trained on before."""
    failed_prompts_max: int = 0
    """Prompts that may be dropped one after another because their generations, or their rewards,
    failed, without one that succeeded between them; then the rollout fails. 0: as many as a batch
    has, and at least `FAILED_PROMPTS_MIN`."""

    def __post_init__(self) -> None:
        for what, name in (
            ("rollout", self.name),
            ("deployment", self.source),
            *(("deployment", each) for each in self.instances),
        ):
            check_name(what, name)
        check_parameters(self.sampling)
        if not self.instances or len(set(self.instances)) != len(self.instances):
            raise InvalidRequestError("instances: give the names of one or more deployments")
        if self.sampling.seed is None:
            raise InvalidRequestError("sampling.seed is missing: a trajectory's samples need one")
        if any(len(each) > 1 for each in self.sampling.stop_sequences):
            raise InvalidRequestError(
                "sampling.stop_sequences: a sample may be cut between the tokens of a sequence and "
                "continued elsewhere; use stop_token_ids"
            )
        for name in ("first_batch", "failed_prompts_max"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}: set it to 0 or more")
        # Its checks are those of the other numbers.
        self.settings()

    @property
    def failed_prompts_limit(self) -> int:
        """The number that `failed_prompts_max` stands for."""
        return self.failed_prompts_max or max(self.prompts, FAILED_PROMPTS_MIN)

    def settings(self) -> CoordinatorSettings:
        """The settings of its coordinator. Raises `InvalidRequestError`."""
        return CoordinatorSettings(
            staleness=StalenessSettings(
                staleness=self.staleness,
                batch_groups=self.prompts,
                group_size=self.samples,
                first_version=self.first_batch,
            ),
            cost_model=QWEN3_30B_A3B_ON_H20,
        )


def instance_id(deployment: str, times: int) -> InstanceId:
    """The id of a deployment's instance that has joined so often before."""
    return InstanceId(f"{deployment}:{times}" if times else deployment)


def deployment_of(instance: InstanceId) -> str:
    """The name of an instance's deployment."""
    return instance.partition(":")[0]
