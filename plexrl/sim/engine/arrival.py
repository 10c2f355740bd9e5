"""A simulated job that arrives, and the events by which the scheduler learns of it. Pure."""

from plexrl.ids import TenantId
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.shell import FOREVER_S
from plexrl.sim.state.device_state import device_state_bytes
from plexrl.sim.workload.cycles import CycleFactory
from plexrl.sim.workload.job_run import JobRun, RolloutWorkers, behaviour_staleness
from plexrl.sim.workload.scenario import NodeType, RolloutGpus, Scenario
from plexrl.traces import TraceJob


def new_run(
    job: TraceJob, name: str, kind: NodeType, scenario: Scenario, cycles: CycleFactory
) -> JobRun:
    """A job that has not begun, with the state of one on nodes of this kind."""
    behaviour = scenario.behaviour
    run = JobRun(
        job,
        name,
        cycles(job, behaviour, scenario.seed, detail=scenario.detail),
        staleness=behaviour_staleness(job, behaviour),
        state_bytes=device_state_bytes(job, kind),
    )
    if scenario.places_rollouts and job.rollout_gpus:
        run.rollouts = RolloutWorkers(run)
    return run


def submission(run: JobRun, tenant: TenantId, slo: float | None) -> ev.JobSubmitted:
    """The job itself, which declares its length alone; `slo` replaces that of its trace row. Placed
    rollouts and the training get GPUs together or not at all."""
    return ev.JobSubmitted(
        job=run.job,
        tenant=tenant,
        name=run.job,
        controller_timeout_s=FOREVER_S,
        reattach_timeout_s=FOREVER_S,
        priority=run.trace.priority,
        slo=run.trace.slo if slo is None else slo,
        gang=0 if run.rollouts is None else 2,
        expected_s=run.trace.service_s,
    )


def deployments(
    run: JobRun,
    node_type: str,
    demand: DemandTrace | None,
    shared: DemandTrace | None,
    *,
    placed: RolloutGpus,
) -> list[ev.DeploymentCreated]:
    """Its training, which declares `demand`, and its rollouts if they are placed: if they may share
    GPUs, they declare `shared`."""
    trains = ev.DeploymentCreated(
        deployment=run.deployment,
        job=run.job,
        kind="train",
        workers=run.gpus,
        state_bytes=run.state_bytes,
        exclusive=False,
        spec_json="{}",
        node_type=node_type,
        trace=demand,
    )
    if (rollouts := run.rollouts) is None:
        return [trains]
    rolls_out = ev.DeploymentCreated(
        deployment=rollouts.deployment,
        job=run.job,
        kind="rollout",
        workers=rollouts.gpus,
        state_bytes=rollouts.state_bytes,
        exclusive=placed != "shared",
        spec_json="{}",
        node_type=node_type,
        trace=None if placed == "own" else shared,
        shares=placed == "shared",
        shares_if_scarce=placed == "automatic",
    )
    return [trains, rolls_out]
