"""What a controller orders: the settings of one asynchronous rollout."""

from dataclasses import asdict, dataclass, field, replace
from math import ceil

from plexrl.client.data.decode_profile import DecodeProfile
from plexrl.client.data.rollout_policy import check_modes
from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.instances.cost_model import QWEN3_30B_A3B_ON_H20
from plexrl.rollout.policies.adaptive_tp.settings import AdaptiveTpSettings
from plexrl.rollout.policies.streaming.elastic import Bounds
from plexrl.rollout.policies.streaming.scale_down import ScaleDownSettings
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import InstanceId
from plexrl.wire.operations import SamplingParams
from plexrl.wire.parameter_checks import check_name, check_parameters, differing_settings

FAILED_PROMPTS_MIN = 8
NUMBERS = (
    *("staleness", "prompts", "samples", "first_batch", "eta_prompts", "eta_responses"),
    *("instances_min", "instances_max", "failed_prompts_max"),
)
"""Fields that are in the table of limits."""
POLICY = (
    "staleness",
    "eta_prompts",
    "eta_responses",
    "plans_parallelism",
    "length_aware",
    "scale_down",
    "instances_min",
    "instances_max",
    "adaptive_tp",
)
"""Fields that may change while the rollout exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOrder:
    """An asynchronous rollout of a job. Names are those of deployments of that job. Which parts of
    its policy combine says `rollout_policy.EXCLUSIONS`."""

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
    eta_prompts: float = 1.0
    """Prompts that a short round starts, as a multiple of `prompts` (Flexes §3)."""
    eta_responses: float = 1.0
    """Samples of a prompt that a short round starts, as a multiple of `samples`."""
    plans_parallelism: bool = False
    """The instances' GPUs are divided anew between rounds (Flexes §4.2)."""
    scale_down: bool = False
    """Half of the instances are freed before a round is complete, if the rest of it fits on the
    others (Flexes Alg. 1)."""
    adaptive_tp: DecodeProfile | None = None
    """The tensor-parallel groups of the instances' engines change while the last samples of a batch
    end (PAT §4), by this profile of the engines."""
    length_aware: bool = False
    """Prompts whose samples are expected to be long are generated on instances of their own
    (StreamRL §5)."""
    instances_min: int = 0
    """Least number of instances, if their number follows the times of generation and training
    (StreamRL §4.2)."""
    instances_max: int = 0
    """Greatest number of them; 0: their number does not change."""
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
        check_numbers("rollout", {name: getattr(self, name) for name in NUMBERS})
        if self.instances_max or self.instances_min:
            Bounds(least=self.instances_min, most=self.instances_max)
        check_modes({name: getattr(self, name) for name in POLICY})
        # Its checks are those of the other numbers.
        self.settings()

    @property
    def bounds(self) -> Bounds | None:
        """Those of the number of instances; None: it does not change."""
        if not self.instances_max:
            return None
        return Bounds(least=self.instances_min, most=self.instances_max)

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
                extra_groups=_extra(self.eta_prompts, self.prompts),
                extra_samples=_extra(self.eta_responses, self.samples),
                group_ids=self.group_ids,
                first_version=self.first_batch,
            ),
            cost_model=QWEN3_30B_A3B_ON_H20,
            routing="length-aware" if self.length_aware else "throughput",
            scale_down=ScaleDownSettings(response_tokens_max=self.sampling.max_tokens)
            if self.scale_down
            else None,
            adaptive_tp=None
            if self.adaptive_tp is None
            else AdaptiveTpSettings(
                profile=self.adaptive_tp, response_tokens_max=self.sampling.max_tokens
            ),
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


def _extra(eta: float, count: int) -> int:
    """How many more than `count` are started; without what the product's last bits add."""
    return ceil(round(eta * count, 6)) - count


def instance_id(deployment: str, times: int) -> InstanceId:
    """The id of a deployment's instance that has joined so often before."""
    return InstanceId(f"{deployment}:{times}" if times else deployment)


def deployment_of(instance: InstanceId) -> str:
    """The name of an instance's deployment."""
    return instance.partition(":")[0]
