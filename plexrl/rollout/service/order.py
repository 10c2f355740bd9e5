"""The order of a controller: the settings of one asynchronous rollout."""

from dataclasses import asdict, dataclass, field, fields, replace

from plexrl.client.data.rollout_policy import PolicyFields
from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.rollout.coordinator.policy_settings import coordinator_settings
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.instances.cost_model import QWEN3_30B_A3B_ON_H20
from plexrl.rollout.policies.elastic import InstanceBounds
from plexrl.rollout.trajectories.record import InstanceId
from plexrl.wire.operations import SamplingParams
from plexrl.wire.parameter_checks import (
    check_name,
    check_rollout_sampling,
    differing_settings,
)

FAILED_PROMPTS_MIN = 8
NUMBERS = ("prompts", "samples", "first_batch", "failed_prompts_max")
"""Fields besides the policy's that are in the table of limits."""
POLICY = tuple(each.name for each in fields(PolicyFields))
"""Fields that may change while the rollout exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOrder(PolicyFields):
    """An asynchronous rollout of a job, with its policy. Names are those of deployments of that
    job."""

    job: str
    name: str
    source: str
    """The train deployment whose weights are pulled."""
    instances: tuple[str, ...]
    """The rollout deployments that generate."""
    prompts: int
    """Prompts of one batch."""
    samples: int = 1
    """Samples of a prompt."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """`first_sample` and `drawn_tokens` are 0: the service sets them for each trajectory."""
    first_batch: int = 0
    """Number of the first batch: of those that the model was trained on before."""
    dynamic_sampling: bool = False
    """A prompt whose rewards are all equal is dropped, and another one is trained."""
    group_ids: int = 0
    """As in `StalenessSettings`. The service sets it when the policy changes."""
    failed_prompts_max: int = 0
    """Prompts that may be dropped one after another because their generations, or their rewards,
    failed, without one that succeeded between them; then the rollout fails. 0: as many as a batch
    has, and at least `FAILED_PROMPTS_MIN`."""

    def __post_init__(self) -> None:
        for what, name in (
            ("rollout", self.name),
            ("deployment", self.source),
            *(("deployment", instance) for instance in self.instances),
        ):
            check_name(what, name)
        check_rollout_sampling(self.sampling)
        if not self.instances or len(set(self.instances)) != len(self.instances):
            raise InvalidRequestError("instances: give the names of one or more deployments")
        check_numbers("rollout", {name: getattr(self, name) for name in NUMBERS})
        # Slots: `super()` would name the class before its decoration.
        PolicyFields.__post_init__(self)
        if self.instances_max or self.instances_min:
            InstanceBounds(least=self.instances_min, most=self.instances_max)
        # Its checks are those of the other numbers.
        self.settings()

    @property
    def bounds(self) -> InstanceBounds | None:
        """Bounds of the number of instances; None: it does not change."""
        if not self.instances_max:
            return None
        return InstanceBounds(least=self.instances_min, most=self.instances_max)

    @property
    def failed_prompts_limit(self) -> int:
        """The number that `failed_prompts_max` stands for."""
        return self.failed_prompts_max or max(self.prompts, FAILED_PROMPTS_MIN)

    def settings(self) -> CoordinatorSettings:
        """The settings of its coordinator. Raises `InvalidRequestError`."""
        return coordinator_settings(
            self,
            batch_groups=self.prompts,
            group_size=self.samples,
            response_tokens_max=self.sampling.max_tokens,
            cost_model=QWEN3_30B_A3B_ON_H20,
            group_ids=self.group_ids,
            first_version=self.first_batch,
            dynamic_sampling=self.dynamic_sampling,
        )

    def with_policy(self, other: "RolloutOrder") -> "RolloutOrder | None":
        """This order with the policy of another one, or itself if the policy is the same; None:
        they differ in more."""
        policy = {name: getattr(other, name) for name in POLICY}
        if replace(self, **policy, group_ids=other.group_ids) != other:
            return None
        if replace(self, **policy) == self:
            return self
        return replace(self, **policy, group_ids=self.settings().staleness.ids_per_group)

    def differences(self, other: "RolloutOrder") -> str:
        """The settings besides the policy that differ from those of another order."""
        known, asked = (
            {name: value for name, value in asdict(order).items() if name not in POLICY}
            for order in (self, replace(other, group_ids=self.group_ids))
        )
        return differing_settings(known, asked)


def instance_id(deployment: str, times: int) -> InstanceId:
    """The id of a deployment's instance that has joined so often before."""
    return InstanceId(f"{deployment}:{times}" if times else deployment)


def deployment_of(instance: InstanceId) -> str:
    """The name of an instance's deployment."""
    return instance.partition(":")[0]
