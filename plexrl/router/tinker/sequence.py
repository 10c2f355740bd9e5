"""The order of a model's requests. Pure.

The SDK numbers a model's requests from 1, sends the first part of a large batch last, and sends a
request again whose answer it has lost. Requests leave in the order of their numbers, each once. A
refused request has used its number.
"""

from typing import Generic, TypeVar

from plexrl.errors import InvalidRequestError, OverloadedError

Item = TypeVar("Item")

WAITING_MAX = 1024
"""Requests of one model that may wait for an earlier one."""


class RequestSequence(Generic[Item]):
    """Requests that arrive in any order. `next_seq` is the number of the one that leaves next."""

    def __init__(self, next_seq: int = 1) -> None:
        self.next_seq = next_seq
        self._waiting: dict[int, Item | None] = {}

    def is_known(self, seq: int) -> bool:
        """Whether this number has arrived before."""
        return seq < self.next_seq or seq in self._waiting

    def add(self, seq: int, item: Item | None) -> bool:
        """Add a request; None: it was refused. False: its number has arrived before.

        Raises:
            InvalidRequestError: the number is below 1.
            OverloadedError: too many requests wait for an earlier one.
        """
        if seq < 1:
            raise InvalidRequestError(f"seq_id is {seq}: number a model's requests from 1")
        if self.is_known(seq):
            return False
        if len(self._waiting) >= WAITING_MAX and seq != self.next_seq:
            raise OverloadedError(
                f"{WAITING_MAX} requests of this model wait for request {self.next_seq}",
                retry_after_s=1.0,
            )
        self._waiting[seq] = item
        return True

    def take(self) -> Item | None:
        """Remove and return the next request; None: it has not arrived."""
        while self.next_seq in self._waiting:
            item = self._waiting.pop(self.next_seq)
            self.next_seq += 1
            if item is not None:
                return item
        return None
