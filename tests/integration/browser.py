"""A headless Chromium, driven over its DevTools pipe: no driver, no port, nothing to install beside it."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import WAIT_SECS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root in a container has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


class BrowserError(Exception):
    """The browser refused a command, or did not answer."""


class Page:
    """One tab. ``requests`` are the URLs that it asked for, ``complaints`` what its console said."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._buffer = b""
        self._num_commands = 0
        self._session = ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self._command("Target.createTarget", url="about:blank")["targetId"]
        attached = self._command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._command(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._command("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def show_as(self, *, width: int, height: int, dark: bool = False) -> None:
        """Set the window's size, in CSS pixels, and the colour scheme that the user prefers."""
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression. Raises BrowserError when it throws."""
        answer = self._command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_secs: float = WAIT_SECS) -> None:
        deadline = time.monotonic() + timeout_secs
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")
                raise TimeoutError(f"{expression}: not within {timeout_secs} s; the page shows:\n{shown}")
            time.sleep(0.05)

    def text(self, element_id: str) -> str:
        return str(self.evaluate(f"document.getElementById({json.dumps(element_id)}).textContent"))

    def type(self, element_id: str, text: str) -> None:
        """Replace the text of a field and leave the field, as a user would."""
        field = f"document.getElementById({json.dumps(element_id)})"
        self.evaluate(f"{field}.focus(); {field}.select()")
        self._command("Input.insertText", text=text)
        self.evaluate(f"{field}.blur()")

    def click(self, element_id: str) -> None:
        self.evaluate(f"document.getElementById({json.dumps(element_id)}).click()")

    def screenshot(self, path: Path) -> None:
        picture = self._command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _command(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_commands += 1
        number = self._num_commands
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_SECS
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from_browser], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._from_browser, 1 << 16) if ready else b""
            if not data:
                raise BrowserError(f"{method}: the browser {'is gone' if ready else 'does not answer'}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(line)
        return decoded

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(f"{params['entry']['source']}: {params['entry']['text']}")
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(params["args"]))


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile in the directory ``profile``; it ends with the block."""
    assert CHROMIUM is not None
    with contextlib.ExitStack() as stack:
        for_browser, to_browser = _pipe(stack)
        from_browser, of_browser = _pipe(stack)
        # The browser reads descriptor 3 and writes 4.
        redirected = f'exec "$@" 3<&{for_browser} 4>&{of_browser}'
        process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(for_browser, of_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.terminate()
            try:
                process.wait(WAIT_SECS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe's reading and writing end, above the descriptors that the browser knows by number."""
    ends = []
    for low in os.pipe():
        ends.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(low)
        stack.callback(os.close, ends[-1])
    return ends[0], ends[1]
