"""A headless Chromium, controlled by the DevTools protocol over a pipe:
https://chromedevtools.github.io/devtools-protocol/.

Messages are JSON objects, each terminated by a NUL; the browser reads them from descriptor 3 and writes to 4
(--remote-debugging-pipe).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0  # timeout of one command on a busy machine


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A context manager; the browser and its profile are removed at its end."""

    def __init__(self, binary: str, profile: Path) -> None:
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        # bash moves the pipes to the descriptors that the browser expects.
        argv = [
            binary,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-extensions",
            "--disable-component-update",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *argv],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        os.close(self._in)
        os.close(self._out)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command; events that arrive before it are stored."""
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": parameters,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event: str) -> None:
        while not any(one.get("method") == event for one in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._in, 1 << 16)
            assert got, f"the browser ended with {self._process.wait(timeout=10)}"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Page:
    """A tab of ``browser`` with one file open; ``scheme`` is light or dark."""

    def __init__(
        self, browser: Browser, file: Path, scheme: str = "light", width: int = 1400, height: int = 1000
    ) -> None:
        self._browser = browser
        browser.events = []
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        browser.events = []
        self._send("Page.navigate", url=file.absolute().as_uri())
        browser.wait_for("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression and return its value as JSON."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        for kind, (x, y), pressed in (
            ("mousePressed", start, 1),
            ("mouseMoved", end, 1),
            ("mouseReleased", end, 0),
        ):
            self._send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=pressed, clickCount=1
            )

    def move(self, x: float, y: float) -> None:
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=name)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        shot = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def print(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("Page.printToPDF", printBackground=True)["data"]))

    def complaints(self) -> list[str]:
        """Return the errors, warnings and exceptions of the console so far."""
        self.value("1")  # earlier events have arrived when this returns
        found = []
        for event in self._browser.events:
            parameters = event.get("params", {})
            match event.get("method"):
                case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(parameters["args"]))
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(parameters["exceptionDetails"]))
                case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                    found.append(parameters["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)
