"""Device memory: allocated to a rank's arena, or shared as frozen weights."""

from collections.abc import Sequence

from plexrl.errors import ConflictError, DeviceMemoryFullError
from plexrl.statemanager.daemon.handlers.caller import WORKERS, DaemonCaller, DaemonReply, handles
from plexrl.statemanager.daemon.memory.holders import DeviceHolder, DeviceNeed, held_error
from plexrl.statemanager.daemon.registry.registry import Registration
from plexrl.statemanager.device.backend import DeviceAllocation
from plexrl.statemanager.device.filled_allocation import Fill, allocate_filled
from plexrl.statemanager.device.frozen_weights import WeightsKey
from plexrl.statemanager.protocol.messages import (
    Answer,
    Attach,
    BaseIsWhole,
    BorrowBase,
    Detach,
    DeviceUse,
    MakeRoom,
    ReturnBase,
)


def check_free_memory(caller: DaemonCaller, registration: Registration, use: DeviceUse) -> None:
    """Measure the device's free memory before the rank is let in.

    Idle frozen weights and other ranks' prefetched states are evicted if it is too little, but not
    weights that the rank borrows next. `use`: as in `Load`.

    Raises:
        DeviceMemoryFullError: the arena, the frozen weights and the rank's work do not fit; the
            holders are named.
    """
    base = _base_key(caller, registration, use)
    _make_room(caller, _need(caller, registration, use, base), base, registration)


def _make_room(
    caller: DaemonCaller,
    need: DeviceNeed,
    keep: WeightsKey | None = None,
    registration: Registration | None = None,
) -> None:
    """Evict what nobody uses until there is free memory for `need`, but not `keep` and what is
    prefetched for `registration`, which counts as free."""
    prefetched = None if registration is None else registration.prefetched
    own_bytes = 0 if prefetched is None else prefetched.allocation.nbytes
    while True:
        usage = caller.services.devices.usage(need.device)
        free_bytes = usage.free_bytes
        if free_bytes is None or free_bytes + usage.idle_bytes + own_bytes >= need.nbytes:
            return
        if not _evict(caller, need.device, keep, registration):
            if registration is not None:
                # The numbers are those of the device without the rank's state.
                registration.recycle_prefetched()
            raise _held_error(caller, need)


def _evict(
    caller: DaemonCaller, device: int, keep: WeightsKey | None, registration: Registration | None
) -> bool:
    """Evict frozen weights or a prefetched state that nobody uses; false: there are none. `keep`
    and `registration`: as for `_make_room`."""
    services = caller.services
    return services.frozen_weights.evict_idle(device, keep) or services.arena_prefetcher.evict(
        device, registration
    )


def _base_key(
    caller: DaemonCaller, registration: Registration, use: DeviceUse
) -> WeightsKey | None:
    """The frozen weights that the rank borrows next; None: none."""
    if not use.base_bytes:
        return None
    return _weights_key(caller, registration, use.base_content, use.base_bytes)


def _need(
    caller: DaemonCaller, registration: Registration, use: DeviceUse, base: WeightsKey | None
) -> DeviceNeed:
    state_bytes = registration.arena_bytes
    if base is not None and not caller.services.frozen_weights.has_memory(base):
        state_bytes += base.nbytes
    return DeviceNeed(
        registration.description,
        registration.rank,
        registration.device,
        state_bytes,
        use.working_bytes,
    )


def _held_error(caller: DaemonCaller, need: DeviceNeed) -> DeviceMemoryFullError:
    """The refusal for want of memory on a device."""
    devices = caller.services.devices
    usage = devices.usage(need.device)
    residents = [
        DeviceHolder(
            each.deployment,
            each.rank,
            each.pid,
            0 if (own := each.allocation) is None else own.nbytes,
        )
        for each in caller.services.registry.on_device(need.device)
    ]
    return held_error(
        need,
        (usage.free_bytes or 0) + usage.idle_bytes,
        residents,
        devices.process_bytes(need.device),
        max(0, usage.lent_bytes - sum(resident.lent_bytes for resident in residents)),
    )


def allocate_arena(
    caller: DaemonCaller,
    registration: Registration,
    use: DeviceUse,
    fill: Fill | None = None,
    part: DeviceAllocation | None = None,
) -> DaemonReply:
    """Allocate and fill memory for the rank's arena; return what the worker needs to map it.

    What nobody uses is evicted as for `check_free_memory`. `use`: as in `Load`. `part`: the arena's
    first segments, which were prefetched; they are freed if this fails.

    Raises:
        DeviceMemoryFullError: others use the memory; nothing is allocated.
    """
    base = _base_key(caller, registration, use)
    while True:
        try:
            allocation = allocate_filled(
                registration.devices,
                registration.arena_bytes,
                device=registration.device,
                uid=registration.uid,
                fill=fill,
                part=part,
            )
            break
        except DeviceMemoryFullError as error:
            # Raised before anything is filled.
            if _evict(caller, registration.device, base, registration):
                continue
            if part is not None:
                registration.devices.recycle(part)
            raise _held_error(caller, _need(caller, registration, use, base)) from error
    try:
        fds = allocation.descriptors()
    except BaseException:
        registration.devices.recycle(allocation)
        raise
    registration.allocation = allocation
    return DaemonReply(_segments_answer(allocation), fds)


def prefault_for_offload(caller: DaemonCaller) -> None:
    """Prefault host pages for the state of all arenas, which moves to the host tier later."""
    services = caller.services
    services.store.expect_writes(services.registry.state_bytes())


def _free_unused(caller: DaemonCaller, request: MakeRoom, _: Sequence[int]) -> DaemonReply:
    caller.check_group(request.group)
    services = caller.services
    device = services.devices.index_of(request.device_uuid)
    services.fencing.admit(request.group, request.token)
    claims = caller.claims
    services.arena_prefetcher.drop_others(device, request.group, claims.deployment)
    _make_room(caller, DeviceNeed(claims.holder, claims.rank, device, 0, request.nbytes))
    services.devices.release_idle(device)
    return DaemonReply({})


def _attach(caller: DaemonCaller, request: Attach, _: Sequence[int]) -> DaemonReply:
    registration = caller.registered()
    caller.services.fencing.admit(registration.group, request.token)
    caller.services.arena_prefetcher.drop_others(
        registration.device, registration.group, registration.deployment
    )
    with registration.exclusive():
        if registration.allocation is not None:
            raise ConflictError(f"{registration.description} already has device memory: detach it")
        caller.services.fencing.admit(registration.group, request.token)
        # The arena keeps its worker's contents, which are not those of a version.
        registration.recycle_prefetched()
        check_free_memory(caller, registration, request.use)
        reply = allocate_arena(caller, registration, request.use)
    prefault_for_offload(caller)
    return reply


def _detach(caller: DaemonCaller, _: Detach, __: Sequence[int]) -> DaemonReply:
    registration = caller.registered()
    with registration.exclusive():
        allocation, registration.allocation = registration.allocation, None
        if allocation is not None:
            registration.devices.recycle(allocation)
        return DaemonReply({})


def _borrow_weights(caller: DaemonCaller, request: BorrowBase, _: Sequence[int]) -> DaemonReply:
    registration = caller.registered()
    key = _weights_key(caller, registration, request.content, request.nbytes)
    cache = caller.services.frozen_weights
    while True:
        # Another rank may take minutes to fill the weights. This rank can be released meanwhile, so
        # the wait is outside the registration's lock.
        cache.wait_until_filled(key, caller.weights_user)
        with registration.exclusive():
            caller.services.fencing.admit(registration.group, request.token)
            mapping = cache.borrow(key, caller.weights_user)
        if mapping is not None:
            answer = {**_segments_answer(mapping.allocation), "is_whole": mapping.is_whole}
            return DaemonReply(answer, mapping.fds)


def _weights_are_filled(
    caller: DaemonCaller, request: BaseIsWhole, _: Sequence[int]
) -> DaemonReply:
    key = _weights_key(caller, caller.registered(), request.content, request.nbytes)
    if not caller.services.frozen_weights.mark_filled(key, caller.weights_user):
        raise ConflictError("this connection is not the one that fills these weights: borrow again")
    return DaemonReply({})


def _return_weights(caller: DaemonCaller, _: ReturnBase, __: Sequence[int]) -> DaemonReply:
    caller.services.frozen_weights.give_back(caller.weights_user)
    return DaemonReply({})


def _weights_key(
    caller: DaemonCaller, registration: Registration, content: str, nbytes: int
) -> WeightsKey:
    return WeightsKey(caller.claims.tenant, registration.uid, registration.device, content, nbytes)


def _segments_answer(allocation: DeviceAllocation) -> Answer:
    return {"segment_bytes": allocation.segment_bytes}


ENTRIES = (
    handles(MakeRoom, _free_unused, WORKERS),
    handles(Attach, _attach, WORKERS),
    handles(Detach, _detach, WORKERS),
    handles(BorrowBase, _borrow_weights, WORKERS),
    handles(BaseIsWhole, _weights_are_filled, WORKERS),
    handles(ReturnBase, _return_weights, WORKERS),
)
