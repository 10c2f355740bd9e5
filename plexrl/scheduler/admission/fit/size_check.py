"""Refuses deployments that not even the empty cluster could hold."""

from collections.abc import Mapping, Sequence

from plexrl.errors import CapacityError, ModelDoesNotFitError, UnavailableError
from plexrl.model.memory.device_memory import DeviceMemory
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.needs import Need, need_of, suits
from plexrl.scheduler.placement.capacity.node_pool import NodeKind, fabric_note
from plexrl.scheduler.placement.fit.feasibility import fits, least_needs
from plexrl.scheduler.placement.fit.sharing_search import fit_in_groups
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.records import Deployment, Job

GIB = 1 << 30


def check_it_can_fit(capacity: Capacity, job: Job, deployment: Deployment) -> None:
    """Refuse a new deployment that the empty cluster could not hold, alone or together with the
    other deployments of its job.

    Raises:
        UnavailableError: no node has joined yet.
        CapacityError: no node has the requested type, or they have too few GPUs in all, or only
            real ones for a paced deployment.
        ModelDoesNotFitError: the state of a rank is larger than the memory of a GPU, or the whole
            state is larger than the host and NVMe tiers.
    """
    sizes = _sizes_of_type(capacity, deployment)
    kind = _kind_with_gpus(deployment, sizes)
    _check_gpu_memory(deployment, kind)
    tiers = sum(tier_bytes for _, tier_bytes in sizes.values())
    if deployment.spec.shares and deployment.spec.state_bytes > tiers:
        raise ModelDoesNotFitError(
            f"deployment {deployment.deployment!r} has {deployment.spec.state_bytes} bytes of "
            f"state; the host tiers and NVMe tiers hold {tiers}: raise them or ask for an "
            "exclusive group",
            state_bytes=deployment.spec.state_bytes,
            host_memory_bytes=tiers,
        )
    if not deployment.spec.preemptible:
        _check_together(capacity, job, deployment)


def _sizes_of_type(capacity: Capacity, deployment: Deployment) -> dict[NodeKind, tuple[int, int]]:
    """(GPUs, bytes of the tiers) of the kinds of nodes that the deployment may use.

    Raises:
        UnavailableError: no node has joined yet.
        CapacityError: there is no such kind.
    """
    sizes = capacity.inventory.sizes()
    if not sizes:
        raise UnavailableError("no node has joined the cluster yet: try again in a moment")
    name, wanted = deployment.deployment, deployment.spec.node_type
    typed = {kind: size for kind, size in sizes.items() if wanted in ("", kind.node_type)}
    if not typed:
        there = sorted({kind.node_type for kind in sizes} - {""})
        raise CapacityError(
            f"deployment {name!r} asks for nodes of type {wanted!r}; the cluster has "
            f"{', '.join(there) or 'nodes without a type only'}: name one it has, or none",
            workers=deployment.spec.workers,
            gpus=0,
        )
    if deployment.spec.pace and all(kind.gpu_kind for kind in typed):
        raise CapacityError(
            f"deployment {name!r} is paced and computes nothing, and all nodes"
            f"{_of_type(deployment)} have real GPUs, which it would hold while it sleeps: use a "
            "cluster of virtual GPUs, or leave pace out",
            workers=deployment.spec.workers,
            gpus=0,
        )
    return typed


def _kind_with_gpus(deployment: Deployment, sizes: dict[NodeKind, tuple[int, int]]) -> NodeKind:
    """The kind of nodes that suits the deployment best, of those with enough GPUs.

    Raises:
        CapacityError: all have too few.
    """
    gpus = max(gpus for gpus, _ in sizes.values())
    if deployment.spec.workers > gpus:
        raise CapacityError(
            f"deployment {deployment.deployment!r} asks for {deployment.spec.workers} GPUs"
            f"{_of_type(deployment)}; the cluster has {gpus} of one kind{fabric_note(sizes)}: ask "
            "for fewer workers or add nodes",
            workers=deployment.spec.workers,
            gpus=gpus,
        )
    need = need_of(deployment)
    large = [kind for kind, (count, _) in sizes.items() if count >= deployment.spec.workers]
    return max(large, key=lambda kind: (suits(kind, need), kind.gpu_memory_bytes, kind.gpu_kind))


def _check_gpu_memory(deployment: Deployment, kind: NodeKind) -> None:
    """Raises `ModelDoesNotFitError` if a rank needs more memory than a GPU of this kind has."""
    need = need_of(deployment)
    if suits(kind, need):
        return
    if kind.gpu_kind and deployment.demand.memory is not None:
        raise _too_large(deployment, deployment.demand.memory, kind)
    per_rank, memory = need.gpu_memory_bytes, kind.gpu_memory_bytes
    needed = -(-deployment.spec.state_bytes // memory)
    raise ModelDoesNotFitError(
        f"deployment {deployment.deployment!r} needs {per_rank} bytes on each of its "
        f"{deployment.spec.workers} GPUs; a GPU{_of_type(deployment)} has {memory}: ask for at "
        f"least {needed} workers or a smaller model",
        bytes_per_gpu=per_rank,
        gpu_memory_bytes=memory,
    )


def _of_type(deployment: Deployment) -> str:
    wanted = deployment.spec.node_type
    return f" of type {wanted!r}" if wanted else ""


def _too_large(
    deployment: Deployment, memory: DeviceMemory, kind: NodeKind
) -> ModelDoesNotFitError:
    """The refusal, with the sum as a table."""
    have, need = kind.gpu_memory_bytes, memory.need_bytes
    rows = [(term.name, term.nbytes) for term in memory.terms] + [("sum", need)]
    table = "\n".join(f"  {name:<20}{nbytes / GIB:>10.2f} GiB" for name, nbytes in rows)
    return ModelDoesNotFitError(
        f"deployment {deployment.deployment!r} needs {need / GIB:.2f} GiB on each of its "
        f"{deployment.spec.workers} GPUs; a {kind.gpu_kind} has {have / GIB:.2f} GiB:\n{table}\n"
        "Use more GPUs, a larger tp, optimizer='host', activation_checkpointing=True, a smaller "
        "max_sequence_tokens or a smaller kv_cache_bytes",
        bytes_per_gpu=need,
        gpu_memory_bytes=have,
        gpu_kind=kind.gpu_kind,
        terms={term.name: term.nbytes for term in memory.terms},
    )


def _check_together(capacity: Capacity, job: Job, deployment: Deployment) -> None:
    """Check all deployments of the job at once, because each keeps its GPUs until it ends."""
    if not job.deployments:
        return
    others = map(capacity.state.deployment, job.deployments)
    everything = [*(other for other in others if not other.spec.preemptible), deployment]
    free = {kind: gpus for kind, (gpus, _) in capacity.inventory.sizes().items()}
    gpus = sum(free.values())
    needs = least_needs(capacity.settings, everything)
    are_fit = fits(free, needs)
    if are_fit and fit_in_groups(capacity.settings, free, everything):
        return
    if _fit_in_parts(capacity.settings, free, everything):
        return
    if are_fit:
        workers = sum(each.spec.workers for each in everything)
        raise CapacityError(
            f"deployment {deployment.deployment!r} does not fit beside the others of job "
            f"{job.job!r}: with GPUs of their own they take {workers}, the cluster has {gpus}, and "
            "too few of them can take turns on GPUs of one kind, because one has to fit beside "
            f"what the others keep there{fabric_note(free)}: ask for fewer workers, a larger tp, "
            "or add nodes",
            workers=workers,
            gpus=gpus,
        )
    workers = sum(need.workers for need in needs)
    raise CapacityError(
        f"deployment {deployment.deployment!r} asks for {deployment.spec.workers} GPUs, and so job "
        f"{job.job!r} for {workers} GPUs at once in {len(needs)} groups; the cluster has {gpus}, "
        f"and each group takes GPUs of one kind{fabric_note(free)}: ask for fewer workers or add "
        "nodes",
        workers=workers,
        gpus=gpus,
    )


def _fit_in_parts(
    settings: Settings, free: Mapping[NodeKind, int], deployments: Sequence[Deployment]
) -> bool:
    """Whether these may fit if those of known demand may be on the GPUs of larger and of smaller
    ones; rollouts never on each other's. Those of unknown demand join only groups of their size."""
    if not settings.divides_groups:
        return False
    known = [
        deployment
        for deployment in deployments
        if deployment.spec.shares and deployment.demand.trace is not None
    ]
    sizes = {each.spec.workers for each in known}
    others = [
        deployment
        for deployment in deployments
        if not deployment.spec.shares
        or (deployment.demand.trace is None and deployment.spec.workers not in sizes)
    ]
    rollouts = [each for each in known if each.spec.kind == "rollout"]
    needs = [Need(rollout.spec.workers, rollout.spec.node_type, 0) for rollout in rollouts]
    for node_type in sorted({each.spec.node_type for each in known} - {""}):
        largest = max(each.spec.workers for each in known if each.spec.node_type == node_type)
        there = sum(
            rollout.spec.workers
            for rollout in rollouts
            if rollout.spec.node_type in ("", node_type)
        )
        if largest > there:
            needs.append(Need(largest - there, node_type, 0))
    beyond = max(sizes, default=0) - sum(need.workers for need in needs)
    if beyond > 0:
        needs.append(Need(beyond, "", 0))
    return fits(free, [*least_needs(settings, others), *needs])
