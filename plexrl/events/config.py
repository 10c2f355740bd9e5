"""Configuration of the connection to an MQTT broker."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from plexrl.errors import InvalidRequestError
from plexrl.secret_arguments import exposed

if TYPE_CHECKING:
    import ssl

PORTS = {"mqtt": 1883, "mqtts": 8883}
"""Schemes, and their ports. `mqtts` is TLS."""
PREFIX = "plexrl"
PASSWORD_VARIABLE = "PLEXRL_MQTT_PASSWORD"
"""Environment variable with the password."""
FORMS = "write mqtt://HOST[:PORT][/PREFIX] or mqtts://[USER@]HOST[:PORT][/PREFIX]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """The broker, and how much is kept for it."""

    url: str
    """`mqtt://[USER@]HOST[:PORT][/PREFIX]`, or `mqtts://…` for TLS. All topics begin with the
    prefix, `plexrl` by default; clusters that share a broker need different prefixes."""
    password: str = ""
    """Password of the user; empty: that of `password_file`."""
    password_file: str = ""
    """File whose content, without white space around it, is the password; read at each connection.
    Empty: no password."""
    ca: str = ""
    """PEM file with the certificates that sign the broker's; empty: those of the system."""
    certificate: str = ""
    """PEM file with this client's certificate; empty: the client has none."""
    key: str = ""
    """PEM file with the key of `certificate`."""
    queue_max: int = 10_000
    """Messages kept while the broker is away or slow; beyond it the oldest are dropped."""
    interval_s: float = 0.1
    """Least time between two looks for changes; changes within it are one message."""
    timeout_s: float = 10.0
    """Time limit for each answer of the broker."""
    keepalive_s: int = 10
    """Interval of keep-alive messages. A broker publishes the last will after one and a half times
    as long without a message."""
    ended_job_s: float = 86_400.0
    """How long the broker keeps the last state of a job that has ended."""

    def __post_init__(self) -> None:
        self._check_url()
        for name, (least, most) in {
            "queue_max": (10, 10_000_000),
            "interval_s": (0.01, 3600.0),
            "timeout_s": (0.1, 3600.0),
            "keepalive_s": (1, 65_535),
            "ended_job_s": (1.0, 4e9),
        }.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidRequestError(
                    f"{name} of the event broker is {getattr(self, name)}: it must be at least "
                    f"{least:g} and at most {most:g}"
                )
        files = (self.ca, self.certificate, self.key)
        if any(files) and not self.is_tls:
            raise InvalidRequestError(
                "the event broker has certificates, but its URL begins with mqtt://: "
                "write mqtts://, which is TLS"
            )
        if bool(self.certificate) != bool(self.key):
            raise InvalidRequestError(
                "the event broker has a client certificate or its key: name both files"
            )
        if self.password and self.password_file:
            raise InvalidRequestError(
                "the event broker has a password and a password file: give one of them"
            )
        if (self.password or self.password_file) and not self.user:
            raise InvalidRequestError(
                f"the event broker has a password, but its URL names no user: {FORMS}"
            )

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise InvalidRequestError(f"the event broker's URL: {error}; {FORMS}") from error
        if parts.password is not None:
            raise exposed(
                "the event broker's URL holds a password",
                f"give it in {PASSWORD_VARIABLE} or in a password file",
            )
        if parts.scheme not in PORTS or not parts.hostname or port == 0:
            raise InvalidRequestError(f"the event broker's URL is {self.url!r}: {FORMS}")
        if parts.query or parts.fragment:
            raise InvalidRequestError(
                f"the event broker's URL {self.url!r} has a query or a fragment: {FORMS}"
            )
        if any(not level for level in self.prefix.split("/")) or set(self.prefix) & set("+#\0"):
            raise InvalidRequestError(
                f"the prefix {self.prefix!r} of the event broker's URL is no topic: use levels "
                "that are not empty and contain no + and no #"
            )
        if self.prefix.startswith("$"):
            raise InvalidRequestError(
                f"the prefix {self.prefix!r} begins with $, which is the broker's own: rename it"
            )

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or PORTS[parts.scheme]

    @property
    def user(self) -> str:
        """Empty: none."""
        return unquote(urlsplit(self.url).username or "")

    @property
    def is_tls(self) -> bool:
        return urlsplit(self.url).scheme == "mqtts"

    @property
    def prefix(self) -> str:
        """The first levels of all topics."""
        return unquote(urlsplit(self.url).path.strip("/")) or PREFIX

    def read_password(self) -> str | None:
        """The password. Raises `InvalidRequestError`: the file cannot be read."""
        if not self.password_file:
            return self.password or None
        try:
            return Path(self.password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"the event broker's password file: {error}") from error

    def tls_context(self) -> "ssl.SSLContext | None":
        """TLS 1.2 or newer, with the certificates of the files; None without TLS.

        Raises:
            InvalidRequestError: a file cannot be read, or is no certificate or key.
        """
        if not self.is_tls:
            return None
        # The command line imports this module for its options, and does not connect.
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            # `ssl.SSLError` is an `OSError`. Neither message names the file.
            files = ", ".join(filter(None, (self.ca, self.certificate, self.key)))
            raise InvalidRequestError(
                f"the event broker's certificates ({files}): {error}"
            ) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


def check_installed() -> None:
    """Raises `InvalidRequestError`: the MQTT client is not installed."""
    if find_spec("aiomqtt") is None:
        raise InvalidRequestError(
            "an event broker needs the package aiomqtt, which is not installed: "
            "pip install 'plexrl[mqtt]', or configure no event broker"
        )


def usable_broker(broker: BrokerConfig, password: str = "") -> BrokerConfig:
    """The broker as this machine can use it, with absolute paths and this password of its user. A
    password file goes before a password.

    Raises:
        InvalidRequestError: the client is not installed, or a file cannot be used.
    """
    check_installed()
    broker = replace(
        broker,
        password="" if broker.password_file else password,
        password_file=absolute(broker.password_file),
        ca=absolute(broker.ca),
        certificate=absolute(broker.certificate),
        key=absolute(broker.key),
    )
    broker.read_password()
    broker.tls_context()
    return broker


def absolute(path: str) -> str:
    """The path as a process with another working directory needs it; empty stays empty."""
    return str(Path(path).expanduser().resolve()) if path else ""
