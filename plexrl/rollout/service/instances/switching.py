"""Whether the engines of a rollout's instances can do what it asks for: switch their groups by a
profile (PAT §4), and return the logprobs of the policy that drew a token."""

from collections.abc import Iterable, Sequence

from plexrl.client.data.decode_profile import DecodeProfile, ProfileSubject
from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import deployment_spec_from_json
from plexrl.rollout.service.cluster_calls import ClusterCalls
from plexrl.wire.messages.views import DeploymentView
from plexrl.wire.messages.workers import EngineLoadView
from plexrl.wire.operations import SamplingParams


async def check_profile(
    profile: DecodeProfile | None, calls: ClusterCalls, deployments: Iterable[str]
) -> None:
    """Check that a policy's profile is one of these deployments' engines.

    What an engine is gets known when it replies; until then only the deployment is checked.

    Raises:
        InvalidRequestError: an engine's groups do not change, or the profile is of others.
        PlexRLError: a deployment is not known.
    """
    for name in deployments if profile is not None else ():
        view = await calls.deployment(name)
        check_engines(profile, name, view, await calls.engines(name))


async def check_sampling(
    sampling: SamplingParams, calls: ClusterCalls, deployments: Iterable[str]
) -> None:
    """Check that these deployments' engines return the numbers of tokens that are asked for.

    Raises:
        InvalidRequestError: an engine does not.
        PlexRLError: a deployment is not known.
    """
    for name in deployments if sampling.sampling_logprobs else ():
        spec = deployment_spec_from_json((await calls.deployment(name))["spec_json"])
        if spec.backend != "torch" or spec.pace:
            raise InvalidRequestError(
                f"sampling_logprobs is set, and instance {name!r} "
                f"({'paced' if spec.pace else f'backend {spec.backend}'}) returns only logprobs "
                "of the model's own distribution: leave sampling_logprobs out, or use backend "
                "torch without a pace",
                parameter="sampling",
            )


def check_engines(
    profile: DecodeProfile | None,
    name: str,
    view: DeploymentView,
    engines: Sequence[EngineLoadView],
) -> None:
    """Check one deployment, of which `view` is the status and `engines` the load, if it replied.
    Raises as `check_profile`."""
    if profile is None:
        return
    spec = deployment_spec_from_json(view["spec_json"])
    if not spec.tp_sizes:
        raise InvalidRequestError(
            f"adaptive_tp is set, and the tensor-parallel groups of instance {name!r} (backend "
            f"{spec.backend}) do not change: create it with tp_sizes and backend torch, or leave "
            "adaptive_tp out",
            parameter="adaptive_tp",
        )
    if spec.layout.dp > 1:
        raise InvalidRequestError(
            f"adaptive_tp is set, and instance {name!r} has {spec.layout.dp} engines (dp): each "
            "one would drain at a time of its own; use as many instances with dp=1",
            parameter="adaptive_tp",
        )
    if spec.tp_sizes != profile.subject.tp_sizes:
        raise InvalidRequestError(
            f"the profile is of tp_sizes {list(profile.subject.tp_sizes)}, and those of instance "
            f"{name!r} are {list(spec.tp_sizes)}: profile such a deployment",
            parameter="adaptive_tp",
        )
    for engine in engines:
        profile.subject.check_serves(ProfileSubject(**engine["subject"], tp_sizes=spec.tp_sizes))
