"""Replaces a rollout's weights with a version that its trainer published."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from plexrl.errors import ExecutionError, PlexRLError
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.layout.state_digest import digest_of_slices
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.transport.choice import transport_of
from plexrl.wire.operations import SyncWeightsParams
from plexrl.worker.process.backend import Backend, RolloutBackend
from plexrl.worker.process.command import RunCommand
from plexrl.worker.state.arena_tensors import whole

Plain = dict[str, Any]

_PULLED, _REFUSED, _TORN = "pulled", "refused", "torn"
"""What each rank tells the others after a sync during generation. Torn: a mix of two versions."""


class SplitVersionError(ExecutionError):
    """The ranks of one engine have weights of two versions, so the state is lost."""


def sync_weights(backend: Backend, client: StateManagerClient, command: RunCommand) -> Plain:
    """Carry out a `sync_weights`; returns measurements.

    Raises:
        PlexRLError: as `StateManagerClient.pull`.
        SplitVersionError: a sync in flight, and not all ranks of the engine have pulled.
    """
    params: SyncWeightsParams = command.params()
    assert command.source is not None, "the scheduler names the source of a sync"
    slices = backend.pulled_slices()
    with _generations_paused(backend, client, params):
        report = client.pull(
            sources=command.sources,
            source=command.source,
            seq=command.source_seq,
            wants=slices,
            delta=policy_of(params),
            replicate=params.published,
        )
        backend.after_pull(seq=command.seq, trainer_step=command.trainer_step)
    sources: dict[str, int] = {}
    for address, nbytes in report.bytes_by_source.items():
        # Users see transports; addresses are internal to the cluster.
        transport = transport_of(address)
        sources[transport] = sources.get(transport, 0) + nbytes
    result: Plain = {
        "bytes_moved": report.bytes_moved,
        "bytes_wanted": report.bytes_wanted,
        "fraction": report.fraction,
        "way": report.mode.value,
        "sources": sources,
        "seconds": report.seconds,
        "tier": report.tier,
        "bytes_replicated": report.bytes_replicated,
        "weights_seq": command.source_seq,
        "trainer_step": command.trainer_step,
    }
    if params.digest:
        memory = whole(backend.arena).cpu().numpy()
        result["digest"] = digest_of_slices(slices, memory)
    return result


@contextmanager
def _generations_paused(
    backend: Backend, client: StateManagerClient, params: SyncWeightsParams
) -> Iterator[None]:
    """During a sync in flight: pause generations, and resume them if they were not paused before.

    They stay paused if the weights are a mix of two versions, on this rank or across ranks.
    """
    if not params.in_flight or not isinstance(backend, RolloutBackend):
        yield
        return
    was_paused = backend.stats().paused
    backend.pause(recompute_kv=params.recompute_kv)
    try:
        yield
    except PlexRLError as error:
        outcomes = set(backend.gather(_TORN if client.is_torn else _REFUSED))
        if len(outcomes) > 1:
            raise SplitVersionError(_split_message(f"this rank did not: {error}")) from error
        if outcomes == {_REFUSED} and not was_paused:
            backend.resume()
        raise
    if set(backend.gather(_PULLED)) != {_PULLED}:
        raise SplitVersionError(_split_message("this rank did"))
    if not was_paused:
        backend.resume()


def _split_message(cause: str) -> str:
    return (
        f"not all ranks of the engine received the weights ({cause}): the engine's workers are "
        "restarted from their last complete state; sync the weights again"
    )


def policy_of(params: SyncWeightsParams) -> DeltaPolicy | None:
    """When a pull may transfer a delta; None: never."""
    if params.delta is False:
        return None
    return DeltaPolicy(only_where_quicker=params.delta is not True)
