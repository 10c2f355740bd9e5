"""A rollout's weights, brought to what its trainer published."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from plexrl.errors import ExecutionError, PlexRLError
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.layout.state_digest import digest_of_slices
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.transport.choice import transport_of
from plexrl.wire.operations import SyncWeightsParams
from plexrl.worker.process.backend import Backend, RolloutBackend
from plexrl.worker.state.arena_tensors import whole

if TYPE_CHECKING:
    from plexrl.statemanager.layout.keys import StateSlice

Plain = dict[str, Any]

_PULLED, _REFUSED, _TORN = "pulled", "refused", "torn"
"""What the ranks of an engine tell each other of a sync in flight."""


class SplitVersionError(ExecutionError):
    """The ranks of one engine have weights of two versions. No refusal: the state is lost."""


def sync_weights(backend: Backend, client: StateManagerClient, command: Plain) -> Plain:
    """Carry out a `sync_weights`; returns what was measured.

    Raises:
        PlexRLError: as `StateManagerClient.pull`.
        SplitVersionError: in flight, and not all ranks of the engine have pulled.
    """
    params = msgspec.json.decode(command["params_json"], type=SyncWeightsParams)
    # Of a rollout with adapters, these alone; the rest is made of them.
    pulled = getattr(backend, "pulled_slices", backend.slices)
    slices: tuple[StateSlice, ...] = pulled()
    with _standing_still(backend, client, params):
        report = client.pull(
            sources=command["sources"],
            source=command["source"],
            seq=int(command["source_seq"]),
            wants=slices,
            delta=policy_of(params),
        )
        trainer_step = int(command.get("trainer_step", 0))
        backend.after_pull(seq=int(command["seq"]), trainer_step=trainer_step)
    sources: dict[str, int] = {}
    for address, nbytes in report.bytes_by_source.items():
        # Addresses are the cluster's own affair.
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
        "weights_seq": int(command["source_seq"]),
        "trainer_step": trainer_step,
    }
    if params.digest:
        memory = whole(backend.arena).cpu().numpy()
        result["digest"] = digest_of_slices(slices, memory)
    return result


@contextmanager
def _standing_still(
    backend: Backend, client: StateManagerClient, params: SyncWeightsParams
) -> Iterator[None]:
    """Where generations may be under way: they are paused, and go on afterwards if they did
    before. They do not where the weights are of no version, on this rank or over all of them."""
    generator: RolloutBackend | None = None
    if params.in_flight and hasattr(backend, "step"):
        generator = backend  # type: ignore[assignment]
    if generator is None:
        yield
        return
    was_paused = generator.stats().paused
    generator.pause(recompute_kv=params.recompute_kv)
    try:
        yield
    except PlexRLError as error:
        outcomes = set(generator.gather(_TORN if client.is_torn else _REFUSED))
        if len(outcomes) > 1:
            raise SplitVersionError(_split(f"this rank did not: {error}")) from error
        if outcomes == {_REFUSED} and not was_paused:
            generator.resume()
        raise
    if set(generator.gather(_PULLED)) != {_PULLED}:
        raise SplitVersionError(_split("this rank did"))
    if not was_paused:
        generator.resume()


def _split(how: str) -> str:
    return (
        f"not all ranks of the engine got the weights ({how}): its workers are restarted from "
        "their last complete state; sync again"
    )


def policy_of(params: SyncWeightsParams) -> DeltaPolicy | None:
    """What a pull is told of deltas."""
    if params.delta is False:
        return None
    return DeltaPolicy(only_where_quicker=params.delta is not True)
