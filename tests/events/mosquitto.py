"""A Mosquitto broker for the tests, and a client that keeps what it receives."""

import asyncio
import json
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from tests.free_ports import free_port

WAIT_S = 60.0


def mosquitto() -> str | None:
    """The broker's program; None where it is not installed."""
    return shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


class Mosquitto:
    """A broker on 127.0.0.1. Without persistence: a restarted one retains nothing."""

    def __init__(self, folder: Path, *lines: str) -> None:
        """`lines` are added to its configuration; without any, everybody may do everything."""
        self.port = free_port()
        self.url = f"mqtt://127.0.0.1:{self.port}"
        self._config = folder / "mosquitto.conf"
        # As root it would become the user mosquitto, who cannot read the test's files.
        own = [f"listener {self.port} 127.0.0.1", "user root", "max_queued_messages 100000"]
        self._config.write_text("\n".join([*own, *(lines or ("allow_anonymous true",))]) + "\n")
        self._log = folder / "mosquitto.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text()

    def start(self) -> None:
        """Start it; returns when it listens."""
        program = mosquitto()
        assert program is not None
        begun_at = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "-v", "-c", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = threading.Event()
        while "running" not in self.log[begun_at:]:
            assert self._process.poll() is None, self.log
            deadline.wait(0.01)

    def send(self, sig: signal.Signals) -> None:
        """Give it a signal."""
        assert self._process is not None
        self._process.send_signal(sig)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(WAIT_S)


class Subscriber:
    """Keeps every message below a topic, in the order of arrival."""

    def __init__(self, port: int, topic: str = "#", **options: Any) -> None:
        self.messages: list[tuple[str, Any, bool]] = []
        """Topics, decoded payloads (None: empty), and whether they were retained before."""
        self._arrived = threading.Condition()
        self._subscribed = threading.Event()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        if "user" in options:
            self._client.username_pw_set(options["user"], options["password"])
        if "ca" in options:
            self._client.tls_set(ca_certs=options["ca"])
        self._client.on_connect = lambda *_: self._subscribe(topic)
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_message = self._on_message
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert self._subscribed.wait(WAIT_S)

    def _subscribe(self, topic: str) -> None:
        self._client.subscribe(topic, qos=1)

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def publish(self, topic: str, payload: str, *, retain: bool) -> None:
        """Publish something of our own, until the broker has it."""
        self._client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(WAIT_S)

    def state(self, topic: str) -> Any:
        """The newest object of a topic; None: there is none."""
        found = [payload for name, payload, _ in self.messages if name == topic]
        return found[-1] if found else None

    def present(self) -> dict[str, Any]:
        """The newest object of every topic that has one."""
        newest = {topic: payload for topic, payload, _ in list(self.messages)}
        return {topic: payload for topic, payload in newest.items() if payload is not None}

    def topics(self) -> set[str]:
        """All topics of messages so far."""
        return {topic for topic, *_ in self.messages}

    def states(self, topic: str) -> list[str]:
        """The states that a topic went through, without repetitions."""
        seen: list[str] = []
        for name, payload, _ in list(self.messages):
            if name == topic and payload is not None and payload["state"] not in seen[-1:]:
                seen.append(payload["state"])
        return seen

    def wait(self, is_true: Callable[[], bool]) -> None:
        """Return when `is_true`, which is asked after each message."""
        with self._arrived:
            assert self._arrived.wait_for(is_true, WAIT_S), self.messages

    async def until(self, is_true: Callable[[], bool]) -> None:
        """As `wait`, while the test's loop runs on."""
        await asyncio.to_thread(self.wait, is_true)

    def wait_state(self, topic: str, state: str) -> Any:
        """The object of a topic once it has this state."""
        self.wait(lambda: (self.state(topic) or {}).get("state") == state)
        return self.state(topic)

    def _on_message(self, _: object, __: object, message: mqtt.MQTTMessage) -> None:
        with self._arrived:
            text = message.payload.decode()
            payload = json.loads(text) if text.startswith("{") else text or None
            self.messages.append((message.topic, payload, message.retain))
            self._arrived.notify_all()
