"""Digests of what other ranks of the node hold too, so that one GPU's copy serves them all.

Only on GPUs: on the CPU a comparison reads the bytes of both ranks where they are.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.protocol.messages import (
    PUBLISHED_PARTS,
    ListReplicated,
    ReplicatedSection,
)
from plexrl.worker.interface.backend import Backend
from plexrl.worker.state.device import WorkerDevice

if TYPE_CHECKING:
    from plexrl.statemanager.layout.keys import StatePart
    from plexrl.worker.state.contents.device_digest import DeviceDigests

LOG = logging.getLogger(__name__)


class ReplicaDigests:
    """Digests for the saves of one rank. The state must be on the device, and unused by it."""

    def __init__(self, backend: Backend, client: StateManagerClient, device: WorkerDevice) -> None:
        self._backend = backend
        self._client = client
        self._device = device
        self._digests: DeviceDigests | None = None

    def of_state(self, parts: Iterable["StatePart"], seq: int) -> dict[str, str]:
        """For a version of these parts; none if `seq` is stored already.

        Raises:
            PlexRLError: the StateManager refused, as it would refuse the save.
        """
        return {} if self._client.stamp(seq) else self._of_parts(parts)

    def of_published(self) -> dict[str, str]:
        """For a published version. Raises as `of_state`."""
        return self._of_parts(PUBLISHED_PARTS)

    def _of_parts(self, parts: Iterable["StatePart"]) -> dict[str, str]:
        if not self._device.uuid:
            return {}
        answer = self._client.request(ListReplicated(parts=tuple(sorted(parts))))
        sections = msgspec.convert(answer["sections"], tuple[ReplicatedSection, ...])
        if not sections:
            return {}
        # Workers without a GPU need no torch here, and paced ones have none.
        import torch

        from plexrl.worker.state.arena_tensors import whole
        from plexrl.worker.state.contents.device_digest import DeviceDigests

        if self._digests is None:
            self._digests = DeviceDigests()
        try:
            return self._digests.of_sections(whole(self._backend.arena), sections)
        except torch.OutOfMemoryError as error:
            # The device is full of state. The copies are compared instead.
            LOG.info("no digests of %d replicated sections: %s", len(sections), error)
            return {}
