"""A rank's connection to its StateManager, and the memory that its arena borrows over it.

A lost connection is re-established and the arena registered again: a restarted daemon receives the
segments that the arena still has and adopts them.
"""

from collections.abc import Callable, Sequence

from msgspec import structs

from plexrl.errors import ConflictError, ConnectionLostError, PlexRLError
from plexrl.statemanager.client.host_arena import Borrowed, HostArena
from plexrl.statemanager.device.backend import DeviceSegment, WorkerArena
from plexrl.statemanager.protocol.channel import Channel, close_all
from plexrl.statemanager.protocol.connection import connect, exchange, retry_connect
from plexrl.statemanager.protocol.host_requests import (
    BeginStep,
    BorrowHost,
    Returned,
    ReturnHost,
)
from plexrl.statemanager.protocol.messages import (
    Answer,
    Attach,
    BaseIsWhole,
    BorrowBase,
    Detach,
    DeviceUse,
    Load,
    Publish,
    Register,
    Request,
    ReturnBase,
    Save,
)

_Received = tuple[Answer, list[int]]
_WITH_TOKEN = (Save, Load, Publish, Attach, BorrowBase)


class RankLink:
    """Connection and borrowed memory of a rank; the `Lender` of its host arena. Not thread-safe."""

    def __init__(self, path: str, timeout_s: float, ticket: bytes) -> None:
        """`timeout_s` bounds each call, including the wait for a restarting daemon."""
        self._path = path
        self._timeout_s = timeout_s
        self._ticket = ticket
        self._channel: Channel | None = None
        self._registration: Register | None = None
        self._is_registered = False
        self._lent_here: WorkerArena | None = None
        """Arena whose memory was lent over the present connection; absent: none."""
        self.arena: WorkerArena | None = None
        """Registered arena; absent before the first registration."""
        self.host: HostArena | None = None
        """Registered host arena; absent: all state is on the device."""
        self.use = DeviceUse()
        """As in `Load`."""
        self._base: WorkerArena | None = None
        """Arena with shared frozen weights; absent: none."""

    @property
    def token(self) -> int:
        """Token of the newest grant to this rank."""
        assert self._registration is not None, "only a registered rank has a token"
        return self._registration.token

    def register(
        self, arena: WorkerArena, registration: Register, host: HostArena | None = None
    ) -> None:
        """Register the arena. A new one gets memory at once and keeps its contents; another one
        gets it when it is next needed.

        Raises:
            PlexRLError: the daemon refused; no arena is registered.
        """
        is_new = arena is not self.arena
        self.arena, self._registration, self._is_registered = arena, registration, False
        self.host = host
        try:
            self._exchange(None)
            if is_new:
                self.attach()
        except PlexRLError:
            # A registration that was refused must not be repeated on every new connection.
            self.arena = self._registration = self.host = None
            self.close()
            raise

    def attach(self) -> None:
        """Borrow memory for the arena, if one is registered; its contents stay.

        Raises:
            DeviceMemoryFullError: other allocations leave too little device memory.
        """
        if self._registration is not None and self.arena is not None:
            if self.arena.is_attached:
                return
            request = Attach(token=self._registration.token, use=self.use)
            self.borrow_device(request, keep_contents=True)

    def borrow_device(self, request: Attach | Load, *, keep_contents: bool) -> Answer:
        """Send a request whose answer may lend memory, and attach it; returns the answer."""
        answer, received = self._exchange(request)
        sizes = answer.get("segment_bytes", ())
        fds = received[: len(sizes)]
        if self.host is not None and isinstance(request, Load):
            try:
                self._attach_host(self.host, received[len(sizes) :])
            except BaseException:
                close_all(fds)
                raise
        if "segment_bytes" not in answer:
            return answer
        assert self.arena is not None, "memory is lent only to a registered arena"
        if len(sizes) != len(fds):
            close_all(fds)
            raise ConnectionLostError(f"{len(fds)} segments arrived; {len(sizes)} were announced")
        try:
            segments = [DeviceSegment(fd=fd, nbytes=n) for fd, n in zip(fds, sizes, strict=True)]
            self.arena.attach(segments, keep_contents=keep_contents)
        except BaseException:
            self._return_memory()
            raise
        self._lent_here = self.arena
        return answer

    def borrow_step(self, request: BeginStep, arena: HostArena) -> Answer:
        """Map the memory of a step to `arena` and the host arena; returns the answer. Raises as
        `StoredStep.begin`."""
        host = self.host
        if host is None:
            raise ConflictError("this rank has registered no host memory: load its state first")
        answer, fds = self._exchange(request)
        if len(fds) != 4:
            close_all(fds)
            raise ConnectionLostError(f"{len(fds)} descriptors of host memory arrived, not 4")
        try:
            arena.attach(fds[0], fds[1])
        except BaseException:
            close_all(fds[2:])
            raise
        host.attach(fds[2], fds[3])
        return answer

    def return_step(self) -> None:
        """Unmap the host arena, and return the memory of a step."""
        if self.host is not None:
            self.host.detach()
        if self._channel is not None and self._is_registered:
            try:
                exchange(self._channel, ReturnHost(what=Returned.ALL))
            except ConflictError:
                self._forget_returned()
            except (ConnectionLostError, OSError):
                self.close()

    def borrow(self) -> Borrowed:
        """As `Lender.borrow`.

        Raises:
            StateTierFullError: the host tier has no free space.
            QuotaExceededError: the tenant has reached its quota there.
        """
        answer, fds = self._exchange(BorrowHost(token=self.token))
        if len(fds) != 2:
            close_all(fds)
            raise ConnectionLostError(f"{len(fds)} descriptors of host memory arrived, not 2")
        return Borrowed(reader=fds[0], writer=fds[1], holds=answer["holds"])

    def copied(self) -> None:
        """As `Lender.copied`: the StateManager may move the version."""
        self.call(ReturnHost(what=Returned.BASE))

    def abandoned(self) -> None:
        """As `Lender.abandoned`."""
        self.call(ReturnHost(what=Returned.LOAN))

    def borrow_base(self, base: WorkerArena, request: BorrowBase, fill: Callable[[], None]) -> int:
        """Borrow shared frozen weights into `base`; `fill` writes them if the daemon has none.

        Returns the bytes that were filled. After a failure `base` has no memory.

        Raises:
            DeviceMemoryFullError: other allocations leave too little device memory.
        """
        filled_bytes = 0
        self._base = base
        try:
            while True:
                answer, fds = self._exchange(request)
                sizes, whole = answer["segment_bytes"], bool(answer["is_whole"])
                segments = [
                    DeviceSegment(fd=fd, nbytes=n) for fd, n in zip(fds, sizes, strict=True)
                ]
                base.attach(segments, keep_contents=False, read_only=whole)
                if whole:
                    return filled_bytes
                fill()
                self._exchange(BaseIsWhole(content=request.content, nbytes=request.nbytes))
                filled_bytes = request.nbytes
                # The memory is shared from now on, so this rank maps it again, read-only.
                base.detach()
        except BaseException:
            self._return_base()
            raise

    def give_back(self) -> None:
        """Unmap and return all borrowed memory."""
        self._return_base()
        if self.host is not None:
            self.host.detach()
        if self.arena is not None:
            self.arena.detach()
        self._return_memory()

    def call(self, request: Request, fds: Sequence[int] = ()) -> Answer:
        """The answer to a request; reconnects as needed.

        Raises:
            PlexRLError: the daemon raised it.
            UnavailableError: the daemon did not come back in time.
        """
        answer, received = self._exchange(request, fds)
        if received:
            close_all(received)
        return answer

    def close(self) -> None:
        """Close the connection; the daemon drops the registration and keeps the versions."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._is_registered = False
        self._lent_here = None
        self._forget_returned()

    def _forget_returned(self) -> None:
        """Unmap memory that no daemon will lend again, and whose pages none will free."""
        if self.arena is not None:
            self.arena.forget_returned()

    def _exchange(self, request: Request | None, fds: Sequence[int] = ()) -> _Received:
        if self._registration is not None and isinstance(request, _WITH_TOKEN):
            # A later connection registers with the newest token of this rank.
            token = max(request.token, self._registration.token)
            self._registration = structs.replace(self._registration, token=token)

        if self._channel is not None and self._is_registered and request is not None:
            # The common case, without the cost of a closure and a clock.
            try:
                return exchange(self._channel, request, fds)
            except (ConnectionLostError, OSError):
                self.close()

        def attempt() -> _Received:
            try:
                channel = self._connected()
                return ({}, []) if request is None else exchange(channel, request, fds)
            except (ConnectionLostError, OSError):
                self.close()
                raise

        return retry_connect(self._path, self._timeout_s, attempt)

    def _connected(self) -> Channel:
        """The connection, with the rank registered on it."""
        if self._channel is None:
            self._channel = connect(self._path, self._timeout_s, self._ticket)
        if self._registration is not None and self.arena is not None and not self._is_registered:
            try:
                self._register_on(self._channel, self._registration, self.arena)
            except PlexRLError:
                self.close()
                raise
            self._is_registered = True
        return self._channel

    def _register_on(self, channel: Channel, registration: Register, arena: WorkerArena) -> None:
        held = arena.segments
        if held and self._lent_here is arena:
            try:
                exchange(channel, structs.replace(registration, keeps_memory=True))
                return
            except ConflictError:
                # Another process registered the rank meanwhile, so the daemon released this memory.
                self._lent_here = None
        fds = tuple(segment.fd for segment in held)
        sizes = tuple(segment.nbytes for segment in held)
        host = self.host
        reader = () if host is None or host.reader is None else (host.reader,)
        whole = structs.replace(registration, segment_bytes=sizes, host_held=len(reader))
        answer, _ = exchange(channel, whole, (*fds, *reader))
        if host is not None and not all(answer["host_known"]):
            host.forget_lent()
        self._lent_here = arena if held else None

    def _attach_host(self, host: HostArena, fds: list[int]) -> None:
        if len(fds) not in (1, 2):
            close_all(fds)
            raise ConnectionLostError(f"{len(fds)} descriptors of host memory arrived, not 1 or 2")
        host.attach(fds[0], fds[1] if len(fds) == 2 else None)

    def _return_base(self) -> None:
        """As `_return_memory`, for shared frozen weights."""
        if self._base is None:
            return
        self._base.detach()
        self._base = None
        if self._channel is not None and self._is_registered:
            try:
                exchange(self._channel, ReturnBase())
            except (ConnectionLostError, OSError):
                self.close()

    def _return_memory(self) -> None:
        """Report to the daemon that the memory is unmapped. An unreachable daemon released it when
        the connection or the registration ended."""
        self._lent_here = None
        if self._channel is None or not self._is_registered:
            self._forget_returned()
            return
        try:
            if self.host is not None and self.host.reader is None:
                exchange(self._channel, ReturnHost(what=Returned.ALL))
            exchange(self._channel, Detach())
        except ConflictError:
            self._forget_returned()
        except (ConnectionLostError, OSError):
            self.close()
