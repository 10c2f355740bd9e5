"""Routes that pause and resume the generations of a rollout deployment, change the size of its
tensor-parallel groups, and tell its load.

The router sends these requests straight to the engines; the scheduler does not admit them.
"""

from fastapi import APIRouter, Request

from plexrl.errors import LayoutError
from plexrl.model.deployment_spec import deployment_spec_from_json
from plexrl.router.http.schemas import PauseRequest, TpRequest
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.services.services import Services
from plexrl.wire.messages import Pause, Resume, SetTp
from plexrl.wire.messages.views import EngineLoads, EngineStates

ROUTES = APIRouter(prefix="/v1/jobs", tags=["deployments"], route_class=ViewRoute)


@ROUTES.post(
    "/{job}/deployments/{name}/pause",
    summary="Pause a rollout's generations between two tokens",
)
async def pause(
    request: Request, services: Services, job: str, name: str, body: PauseRequest
) -> EngineStates:
    """The generations continue on `resume`, or by themselves after `for_s`.

    Running samples keep their slots; new generations wait. A worker that is lost loses its pause.
    """
    caller = await services.caller(request)
    view = await services.deployment(caller, f"{job}/{name}")
    return {"engines": await services.engines.command(view, Pause(for_s=body.for_s))}


@ROUTES.get("/{job}/deployments/{name}/engines", summary="Load of a rollout's engines")
async def engines(request: Request, services: Services, job: str, name: str) -> EngineLoads:
    """One entry for each replica, as in the deployment's status, and two lists. `rows`: operation,
    row, tokens (prompt included) and whether it runs, of each unfinished row; the others wait for
    a slot. `steps`: number, rows, tokens in the KV cache and seconds, means of some decode steps
    each; the latest ones, numbered from 1 since the engine began.

    A replica without weights on its device, or without a reply in time, is left out.
    """
    caller = await services.caller(request)
    view = await services.deployment(caller, f"{job}/{name}")
    return {"engines": await services.engines.loads(view)}


@ROUTES.post(
    "/{job}/deployments/{name}/resume",
    summary="Resume paused generations",
)
async def resume(request: Request, services: Services, job: str, name: str) -> EngineStates:
    """Does nothing if the generations are not paused."""
    caller = await services.caller(request)
    view = await services.deployment(caller, f"{job}/{name}")
    return {"engines": await services.engines.command(view, Resume())}


@ROUTES.post(
    "/{job}/deployments/{name}/tp",
    summary="Change the size of a rollout's tensor-parallel groups while it generates",
)
async def switch_tp(
    request: Request, services: Services, job: str, name: str, body: TpRequest
) -> EngineStates:
    """Unfinished samples go on in the new groups, with the same tokens. The next generation after
    all have ended begins in the smallest groups."""
    caller = await services.caller(request)
    view = await services.deployment(caller, f"{job}/{name}")
    sizes = deployment_spec_from_json(view["spec_json"]).tp_sizes
    if body.tp not in sizes:
        raise LayoutError(
            f"{view['deployment']!r} has no tensor-parallel groups of {body.tp} ranks: "
            + (
                f"choose one of its tp_sizes, {', '.join(map(str, sizes))}"
                if sizes
                else "create it with tp_sizes, whose sizes it can switch between"
            ),
            field="tp",
        )
    engines = await services.engines.command(view, SetTp(tp=body.tp, kv=body.kv))
    return {"engines": engines}
