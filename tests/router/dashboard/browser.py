"""Chromium without a window, driven over a pipe by the DevTools protocol."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium")
WAIT_S = 60
FIRST_DESCRIPTOR = 100
LAUNCH = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--remote-debugging-pipe"),
    *("--force-color-profile=srgb", "--hide-scrollbars"),
)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")

Plain = dict[str, Any]


class Browser:
    """The pipe to a browser."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._ids = count(1)
        self._rest = b""

    def call(
        self,
        method: str,
        session: str | None,
        params: Mapping[str, object],
        note: Callable[[Plain], None],
    ) -> Plain:
        """Call a method of the protocol and return its result; `note` gets the events before it."""
        number = next(self._ids)
        message: Plain = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: Plain = answer["result"]
                return result
            if answer.get("sessionId") == session:
                note(answer)

    def _next(self) -> Plain:
        while b"\0" not in self._rest:
            chunk = os.read(self._reader, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message: Plain = json.loads(line)
        return message


class Tab:
    """One tab without cookies or storage. What the page logs as an error, or throws, is in
    `errors`."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._session: str | None = None
        self.errors: list[str] = []
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Performance"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Page.bringToFront")

    def call(self, method: str, **params: object) -> Plain:
        """Call a method of the protocol and return its result."""
        return self._browser.call(method, self._session, params, self._note)

    def close(self) -> None:
        """Close the tab."""
        self._session = None
        self.call("Target.disposeBrowserContext", browserContextId=self._context)

    def open(self, url: str) -> None:
        """Go to a page; returns when it has begun to load."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true; returns its value."""
        text = json.dumps(f"not true: {condition}: ")
        return self.evaluate(
            f"""new Promise((done, failed) => {{
              const end = setTimeout(
                () => failed(new Error({text} + document.body.innerText)), {1000 * WAIT_S});
              const look = () => {{
                let found = null;
                try {{ found = ({condition}); }} catch (error) {{ found = null; }}
                if (found) {{ clearTimeout(end); done(found); }} else setTimeout(look, 10);
              }};
              look();
            }})"""
        )

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        if key == "Enter":
            text = {"text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {})
            )

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window in pixels, and the system's colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def heap_bytes(self) -> int:
        """Memory of the page's objects that are in use."""
        self.call("HeapProfiler.collectGarbage")
        metrics = self.call("Performance.getMetrics")["metrics"]
        return int(next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize"))

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _note(self, event: Plain) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {params['message']}")


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser without a profile."""
    assert BROWSER is not None, "the test has the mark `needs_browser`"
    # High numbers, so that none is 3 or 4 itself.
    (reader, writer), (own_reader, own_writer) = _pipe(), _pipe()
    with tempfile.TemporaryDirectory(prefix="plexrl-browser-", dir="/tmp") as profile:
        script = f'exec "$@" 3<&{reader} 4>&{own_writer}'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", BROWSER, *LAUNCH, f"--user-data-dir={profile}"],
            pass_fds=(reader, own_writer),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reader)
        os.close(own_writer)
        try:
            yield Browser(own_reader, writer)
        finally:
            os.close(writer)
            os.close(own_reader)
            process.terminate()
            process.wait(WAIT_S)


def _pipe() -> tuple[int, int]:
    """A pipe: the end to read from, and the end to write to."""
    ends = os.pipe()
    found = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR) for end in ends]
    for end in ends:
        os.close(end)
    return found[0], found[1]
