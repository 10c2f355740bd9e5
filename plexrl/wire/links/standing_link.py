"""A connection to the leading scheduler that is made again whenever it ends.

Several addresses are tried in turn: the leader's and those of its standbys. A scheduler that cannot
use its journal says so in its answer to `hello`; another one may lead then, so the others are tried
first.

Over the network a connection can be dead although neither end sees it: a cut cable, a process that
is stopped. So this end sends heartbeats and ends a connection without answers; the scheduler ends
one without heartbeats. The scheduler's answer to `hello` sets both times. On a Unix socket it sets
none, because the kernel reports the end of every process there.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    PlexRLError,
    StorageError,
    UnavailableError,
)
from plexrl.wire.links.address import Address, TlsAddress, UnixAddress, parse_address
from plexrl.wire.links.credentials import Credentials, Role, TlsFiles
from plexrl.wire.links.dial import Link, connect
from plexrl.wire.messages.reports import Beat, Heartbeat, Hello, hello_fields
from plexrl.wire.rpc import Handler, Peer

LOG = logging.getLogger(__name__)

RECONNECT_S = 0.2
CONNECT_TIMEOUTS_S = (10.0, 20.0, 30.0)
"""In turn while nothing answers: a server to which hundreds of nodes connect answers late, while
after a cut of the network a new attempt succeeds sooner than an old one."""
RECONNECT_S_MAX = 3.0
"""Pauses between attempts over the network double up to this while nothing answers, and vary at
random, so that hundreds of nodes do not connect in step again and again."""
HOLDING_S = 5.0
"""How long to stay with a scheduler that cannot use its journal before the others are tried."""


def check_scheduler(addresses: Sequence[str], tls: TlsFiles | None) -> None:
    """Refuse a configuration with which no scheduler can be reached.

    Raises:
        InvalidRequestError: there is no address, an invalid one, or one without a certificate.
    """
    if not addresses:
        raise InvalidRequestError("scheduler is empty: give the scheduler's address")
    for text in addresses:
        if isinstance(parse_address(text), TlsAddress) and tls is None:
            raise InvalidRequestError(
                f"scheduler has {text}, which needs a certificate: set tls (ca, certificate, key)"
            )


class StandingLink:
    """Keeps one connection to a scheduler."""

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials | None,
        handlers: Mapping[str, Handler],
        *,
        hello: Callable[[], Awaitable[Hello]],
        session: Callable[[Peer], Awaitable[None]],
        on_end: Callable[[], None] | None = None,
        on_heartbeat: Callable[[float, Heartbeat], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hello` makes the first message. `session` is called once it is answered,
        before the scheduler's calls are handled; what it returns runs until the connection ends.
        Then `on_end` is called. `on_heartbeat` gets the time at which
        `hello` or a heartbeat was sent, by `clock`, and the scheduler's answer.

        Raises:
            InvalidRequestError: one of `addresses` is not an address.
        """
        self._addresses = [parse_address(text) for text in addresses]
        self._credentials = credentials
        self._handlers = handlers
        self._hello = hello
        self._session = session
        self._on_end = on_end
        self._on_heartbeat = on_heartbeat
        self._clock = clock
        self._refusals: dict[Address, str] = {}
        """Why no connection could be made the last time, to log each reason once."""

    async def run(self) -> None:
        """Stay connected until cancelled.

        Raises:
            PlexRLError: the scheduler refused `hello` for good.
        """
        settles, failures = len(self._addresses) == 1, 0
        while True:
            is_held = is_served = False
            for address in tuple(self._addresses):
                timeout_s = CONNECT_TIMEOUTS_S[failures % len(CONNECT_TIMEOUTS_S)]
                link = await self._connect(address, timeout_s)
                if link is None:
                    continue
                is_served = True
                is_held |= await self._serve(address, link, settles=settles)
            # All that answered cannot use their journals: stay with one, which says why.
            settles = is_held or len(self._addresses) == 1
            failures = 0 if is_served else failures + 1
            await asyncio.sleep(self._pause_s(failures))

    def _pause_s(self, failures: int) -> float:
        """Pause after `failures` rounds in a row without a connection."""
        is_local = all(isinstance(address, UnixAddress) for address in self._addresses)
        if is_local or not failures:
            return RECONNECT_S
        pause_s: float = min(RECONNECT_S * 2.0 ** min(failures, 8), RECONNECT_S_MAX)
        return float(pause_s * random.uniform(0.5, 1.0))

    async def _connect(self, address: Address, timeout_s: float) -> Link | None:
        try:
            link = await connect(
                address, self._credentials, role=Role.SCHEDULER, timeout_s=timeout_s
            )
        except (OSError, PlexRLError) as error:
            is_refusal = isinstance(error, PlexRLError | ConnectionResetError)
            if is_refusal and self._refusals.get(address) != str(error):
                LOG.error("no connection to the scheduler at %s: %s", address, error)
            self._refusals[address] = str(error)
            return None
        self._refusals.pop(address, None)
        return link

    async def _serve(self, address: Address, link: Link, *, settles: bool) -> bool:
        """Serve one connection until its end. Returns whether the scheduler cannot use its journal
        and `settles` is false, in which case nothing was served."""
        peer = Peer(link.reader, link.writer, self._handlers)
        running = asyncio.create_task(peer.run())
        serving: list[asyncio.Future[None]] = []
        has_begun = False
        try:
            fields = hello_fields(await self._hello())
            sent_at = self._clock()
            answer = _heartbeat(await peer.call("hello", fields))
            if answer.get("is_holding") and not settles:
                return True
            if answer.get("is_holding") and len(self._addresses) > 1:
                asyncio.get_running_loop().call_later(HOLDING_S, peer.close)
            self._first(address)
            if self._on_heartbeat is not None:
                self._on_heartbeat(sent_at, answer)
            has_begun = True
            session = asyncio.ensure_future(self._session(peer))
            session.add_done_callback(lambda ended: _end_if_failed(ended, peer))
            serving.append(session)
            if "heartbeat_s" in answer:
                times = answer["heartbeat_s"], answer["silence_s"]
                serving.append(asyncio.create_task(self._beat(peer, address, *times)))
            await running
        except (ConnectionLostError, UnavailableError, StorageError) as error:
            LOG.info("lost the connection to the scheduler (%s); connecting again", error)
        finally:
            if has_begun and self._on_end is not None:
                self._on_end()
            for task in (running, *serving):
                task.cancel()
            await asyncio.gather(running, *serving, return_exceptions=True)
        return False

    def _first(self, address: Address) -> None:
        """Try this address first the next time."""
        self._addresses.remove(address)
        self._addresses.insert(0, address)

    async def _beat(
        self, peer: Peer, address: Address, heartbeat_s: float, silence_s: float
    ) -> None:
        while True:
            await asyncio.sleep(heartbeat_s)
            sent_at = self._clock()
            try:
                beat = Beat(crl_number=self._crl_number())
                answer = _heartbeat(await peer.ask(beat, timeout_s=silence_s))
            except ConnectionLostError:
                return
            except PlexRLError as error:
                LOG.warning("the scheduler at %s is silent (%s); connecting again", address, error)
                peer.abort()
                return
            if self._on_heartbeat is not None:
                self._on_heartbeat(sent_at, answer)
            await asyncio.to_thread(self._learn, answer)

    def _crl_number(self) -> int | None:
        """The number of this process's list of revoked certificates; None: it keeps none."""
        known = self._credentials
        return known.revoked.number if known is not None and known.keeps_revoked else None

    def _learn(self, answer: Heartbeat) -> None:
        """Take the list of revoked certificates in an answer, if there is a newer one."""
        if "crl" not in answer or self._credentials is None:
            return
        try:
            self._credentials.learn(answer["crl"])
        except (InvalidRequestError, OSError) as error:
            LOG.error("a new list of revoked certificates cannot be used: %s", error)


def _heartbeat(answer: object) -> Heartbeat:
    """The scheduler's answer, once its fields are known to have their types.

    Raises:
        UnavailableError: they have not.
    """
    try:
        return msgspec.convert(answer, Heartbeat)
    except msgspec.ValidationError as error:
        raise UnavailableError(f"the scheduler's answer is malformed: {error}") from error


def _end_if_failed(session: asyncio.Future[None], peer: Peer) -> None:
    if not session.cancelled() and (error := session.exception()) is not None:
        LOG.error("a bug has ended the connection to the scheduler", exc_info=error)
        peer.close()
