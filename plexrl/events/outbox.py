"""Messages that wait for the broker: a bounded queue that drops the oldest and counts them."""

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One message. An empty retained one removes what the broker retains for the topic."""

    topic: str
    """Below the prefix."""
    payload: bytes
    is_retained: bool = True
    """Retained messages are states and sent with QoS 1; others are hints and sent with QoS 0."""
    expires_s: int | None = None
    """The broker keeps it no longer; None: without a limit."""


class EventOutbox:
    """A queue of at most `size` messages. No caller of `put` ever waits."""

    def __init__(self, size: int) -> None:
        self._messages: deque[Message] = deque()
        self._size = size
        self._filled = asyncio.Event()
        self.dropped = 0
        """Messages dropped so far."""
        self.is_incomplete = False
        """A message was dropped since `take_all`, so the broker may retain an older state."""

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Add a message; if there are too many, the oldest is dropped."""
        if len(self._messages) >= self._size:
            self._messages.popleft()
            self.dropped += 1
            self.is_incomplete = True
        self._messages.append(message)
        self._filled.set()

    def take(self, most: int) -> list[Message]:
        """The next messages, at most `most`; the caller calls `put_back` if it could not send
        them."""
        taken = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
        if not self._messages:
            self._filled.clear()
        return taken

    def put_back(self, messages: list[Message]) -> None:
        """Add messages again in front of all others, as far as there is room."""
        room = max(0, self._size - len(self._messages))
        kept = messages[len(messages) - min(room, len(messages)) :]
        self.dropped += len(messages) - len(kept)
        self.is_incomplete |= len(kept) < len(messages)
        self._messages.extendleft(reversed(kept))
        if self._messages:
            self._filled.set()

    async def wait(self) -> None:
        """Return once there is a message."""
        await self._filled.wait()
