"""Routes about asynchronous rollouts, which the rollout service answers."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from plexrl.router.http.schemas import BatchRequest, ExchangeRequest, Limited, RolloutRequest
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.services.services import RESPONSE_MARGIN_S, RouterServices, Services
from plexrl.wire.messages.rollout_views import (
    MeasuredRollout,
    RolloutBody,
    Rollouts,
    RolloutStatus,
)
from plexrl.wire.tensors import MEDIA_TYPE

WAIT_S_MAX = 60.0

ROUTES = APIRouter(prefix="/v1/jobs/{job}/rollouts", tags=["rollouts"], route_class=ViewRoute)


@ROUTES.post("", summary="Create an asynchronous rollout")
async def create(
    request: Request,
    services: Services,
    job: str,
    body: RolloutRequest,
    wait_s: Annotated[float, Limited("page", "wait_s", in_query=True)] = 25.0,
) -> RolloutStatus:
    """A request with the name of an existing rollout returns that rollout. `joined` tells whether
    all instances have the trainer's weights; the same request waits for that."""
    order = {**body.model_dump(exclude_none=True), "job": job}
    status: RolloutStatus = await _ask(request, services, job, "create", wait_s, order=order)
    return status


@ROUTES.get("", summary="The asynchronous rollouts of a job")
async def index(request: Request, services: Services, job: str) -> Rollouts:
    """`rollouts`: each as below."""
    found: Rollouts = await _ask(request, services, job, "list", 0.0)
    return found


@ROUTES.get("/{name}", summary="One asynchronous rollout")
async def get(request: Request, services: Services, job: str, name: str) -> RolloutStatus:
    """Its versions, buffers and latest batches, counts of samples, and the load of its instances.
    Also of a rollout that has failed, with its error as `failure`."""
    status: RolloutStatus = await _ask(request, services, job, "status", 0.0, name=name)
    return status


@ROUTES.get("/{name}/profile", summary="What a rollout generates, and what decode steps take")
async def profile(request: Request, services: Services, job: str, name: str) -> MeasuredRollout:
    """`lengths`: tokens of each of the latest trained prompts, and of its responses. `decode`: the
    fitted coefficients of a decode step, by token in the KV cache. `job.rollout_profile` of the SDK
    adds the times of training and of new weights."""
    measured: MeasuredRollout = await _ask(request, services, job, "profile", 0.0, name=name)
    return measured


@ROUTES.post("/{name}/exchange", summary="Give prompts and rewards, take generated samples")
async def exchange(
    request: Request,
    services: Services,
    job: str,
    name: str,
    body: ExchangeRequest,
    wait_s: Annotated[float, Limited("page", "wait_s", in_query=True)] = 25.0,
) -> Response:
    """Prompts and rewards that are known have no effect, so a request may be repeated. Samples are
    those that lack a reward and came after the cursor `after`."""
    key = await services.job_key(request, job)
    found: RolloutBody = await _call(
        services, job, "exchange", wait_s, name=name, body=body.model_dump()
    )
    failed = sum(graded[2] is None for graded in body.rewards)
    services.run_watch.rewarded(key, total=len(body.rewards), failed=failed)
    return Response(found["body"], media_type=MEDIA_TYPE)


@ROUTES.post("/{name}/batches/{version}", summary="Take the batch of a version")
async def batch(
    request: Request,
    services: Services,
    job: str,
    name: str,
    version: Annotated[int, Limited("exchange", "version", in_query=True)],
    body: BatchRequest,
    wait_s: Annotated[float, Limited("page", "wait_s", in_query=True)] = 25.0,
) -> Response:
    """The request tells that the model has trained all earlier batches. 202: the batch is not
    complete, or there is no more of it than `seen`; send the request again. `rows` of the answer is
    the number of samples of the batch: if the answers so far have fewer, the next request has their
    number as `first`, or the trajectories as `seen`."""
    found: RolloutBody = await _ask(
        request,
        services,
        job,
        "batch",
        wait_s,
        name=name,
        version=version,
        trainer_step=body.trainer_step,
        first=body.first,
        seen=body.seen,
    )
    if found["body"] is None:
        return Response(status_code=202)
    return Response(found["body"], media_type=MEDIA_TYPE)


async def _ask(
    request: Request, services: RouterServices, job: str, method: str, wait_s: float, **fields: Any
) -> Any:
    # Only who may see the job gets further.
    await services.job_key(request, job)
    return await _call(services, job, method, wait_s, **fields)


async def _call(
    services: RouterServices, job: str, method: str, wait_s: float, **fields: Any
) -> Any:
    wait_s = min(wait_s, WAIT_S_MAX)
    params = {"job": job, "wait_s": wait_s, **fields}
    return await services.rollouts.call(method, params, timeout_s=wait_s + RESPONSE_MARGIN_S)
