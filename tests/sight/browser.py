"""A real browser for tests: headless Chromium by its driver, in the standard protocol, without another library.

W3C WebDriver, https://www.w3.org/TR/webdriver2/; `goog/cdp/execute` is Chromium's own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

KEYS = {"Tab": "\ue004", "Right": "\ue014", "Left": "\ue012", "Down": "\ue015", "Up": "\ue013", "End": "\ue010"}


class Browser:
    """One window. What goes wrong raises."""

    def __init__(self, address: str) -> None:
        self._address = address
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
        ]
        wanted = {
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._address + path, data, {"Content-Type": "application/json"}, method=method)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(
        self, page: Path, width: int = 1280, height: int = 900, *, dark: bool = False, script: bool = True
    ) -> None:
        """Show a file in a window of this size."""
        self.devtools("Emulation.setScriptExecutionDisabled", value=not script)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", features=features, media="")
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self._ask("POST", f"{self._session}/url", {"url": page.as_uri()})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Keys go to what has the focus."""
        actions = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        body = {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        self._ask("POST", f"{self._session}/actions", body)

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        moves = [{"type": "pointerMove", "x": int(x), "y": int(y), "duration": 0}]
        self._ask(
            "POST", f"{self._session}/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]}
        )

    def said(self) -> list[str]:
        """What the console said since it was asked last."""
        return [line["message"] for line in self._ask("POST", f"{self._session}/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """What was asked for since this was asked last."""
        lines = self._ask("POST", f"{self._session}/se/log", {"type": "performance"})
        messages = [json.loads(line["message"])["message"] for line in lines]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path) -> None:
        from base64 import b64decode

        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(b64decode(shot["data"]))

    def close(self) -> None:
        self._ask("DELETE", self._session)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser while the block runs; the test is skipped where there is none."""
    driver = shutil.which("chromedriver")
    if driver is None or not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))):
        pytest.skip("there is no Chromium with its driver (on Debian: apt install chromium chromium-driver)")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        port = next(
            result[1] for line in process.stdout if (result := re.search(r"started successfully on port (\d+)", line))
        )
        window = Browser(f"http://127.0.0.1:{port}")
        try:
            yield window
        finally:
            window.close()
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
