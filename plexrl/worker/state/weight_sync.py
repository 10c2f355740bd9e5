"""Replaces a rollout's weights with a version that its trainer published."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from plexrl.errors import ExecutionError, PlexRLError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.state_digest import digest_of_slices
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.transfer.transport.choice import transport_of
from plexrl.wire.messages import RunName, Sync
from plexrl.wire.messages.workers import RunResult
from plexrl.wire.operations import SyncWeightsParams
from plexrl.wire.tensors import Array
from plexrl.worker.interface.backend import Backend, RolloutBackend

ASK_S = 0.02
"""Interval at which the StateManager is asked whether a version has arrived."""
GIVE_UP_S = 120.0
"""After so long a sync waits for no replica, and pulls from the source."""
_PULLED, _REFUSED, _TORN = "pulled", "refused", "torn"
"""The outcome that each rank tells the others after a sync during generation. Torn: a mix of two
versions."""


class SplitVersionError(ExecutionError):
    """The ranks of one engine have weights of two versions, so the state is lost."""


def sync_weights(backend: Backend, client: StateManagerClient, command: Sync) -> RunResult:
    """Carry out a `sync_weights`; returns measurements.

    Raises:
        PlexRLError: as `StateManagerClient.pull`.
        SplitVersionError: a sync in flight, and not all ranks of the engine have pulled.
    """
    params = _params_of(command)
    slices = backend.pulled_slices()
    started = time.perf_counter()
    with _generations_paused(backend, client, params):
        report = client.pull(
            sources=command.sources,
            source=command.source,
            seq=command.source_seq,
            wants=slices,
            delta=policy_of(params),
            replicate=_takes_replica(params),
        )
        backend.after_pull(seq=command.seq, trainer_step=command.trainer_step)
    pause_s = time.perf_counter() - started
    sources: dict[str, int] = {}
    for address, nbytes in report.bytes_by_source.items():
        # Users see transports; addresses are internal to the cluster.
        transport = transport_of(address)
        sources[transport] = sources.get(transport, 0) + nbytes
    result: RunResult = {
        "bytes_moved": report.bytes_moved,
        "bytes_wanted": report.bytes_wanted,
        "fraction": report.fraction,
        "way": report.mode.value,
        "sources": sources,
        "seconds": report.seconds,
        "pause_s": pause_s,
        "transfer_s": report.transfer_s,
        "tier": report.tier,
        "bytes_replicated": report.bytes_replicated,
        "weights_seq": command.source_seq,
        "trainer_step": command.trainer_step,
    }
    if params.digest:
        result["digest"] = digest_of_slices(slices, _memory_of(backend.arena))
    return result


def _memory_of(arena: WorkerArena) -> Array:
    """A copy of an arena on a GPU, or the arena itself. [nbytes] uint8"""
    if isinstance(arena, Arena):
        return np.frombuffer(arena.buffer, dtype=np.uint8)
    from plexrl.worker.state.arena_tensors import whole

    found: Array = whole(arena).cpu().numpy()
    return found


class Arrival:
    """Fetches the version that a sync will pull to this node, while generations go on."""

    def __init__(self, backend: Backend, client: StateManagerClient) -> None:
        self._backend = backend
        self._client = client
        self._fetching: RunName | None = None
        self._ask_at = self._since = 0.0
        """Times of the next question and of the first one, on the monotonic clock."""
        self.arrived: RunName | None = None
        """The latest sync whose version had arrived."""

    def is_there(self, command: Sync) -> bool:
        """Whether the pull of a sync has nothing to wait for. The fetch begins at the first call;
        returns at once."""
        if self.arrived == command.name:
            return True
        now = time.monotonic()
        if self._fetching != command.name:
            self._fetching, self._since = command.name, now
        elif now < self._ask_at:
            return False
        self._ask_at = now + ASK_S
        params = _params_of(command)
        if (
            _takes_replica(params)
            and now < self._since + GIVE_UP_S
            and not self._client.has_arrived(
                sources=command.sources,
                source=command.source,
                seq=command.source_seq,
                wants=self._backend.pulled_slices(),
            )
        ):
            return False
        self.arrived = command.name
        return True

    def began(self, command: Sync) -> None:
        """A sync runs, also one that nothing asked about because the engine was idle."""
        self.arrived = command.name


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


def _params_of(command: Sync) -> SyncWeightsParams:
    assert command.params is not None, "the router checks that a sync names its source"
    return command.params


def _takes_replica(params: SyncWeightsParams) -> bool:
    """Whether a pull may be from a replica: who wants the difference only gets it from the
    source."""
    return params.published and params.delta is not True


def policy_of(params: SyncWeightsParams) -> DeltaPolicy | None:
    """When a pull may transfer a delta; None: never."""
    if params.delta is False:
        return None
    return DeltaPolicy(only_where_quicker=params.delta is not True)
