"""A browser without a window, spoken to over a pipe in the Chrome DevTools Protocol.

Needs nothing but a Chromium: no driver, no port, no package. On Debian it is
``apt-get install chromium-headless-shell``.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
    "chrome",
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
LIMIT_S = 60


def find_browser():
    """A Chromium's path, or None. RRFP_TEST_BROWSER names one that is somewhere else."""
    return os.environ.get("RRFP_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser of its own.

    Attributes:
      console: What the page has printed, and its uncaught errors.
      requests: What it has asked for, but for files.
    """

    def __init__(self, executable, profile):
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        # The browser takes commands from descriptor 3 and answers on 4.
        script = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session = None
        self._events = []
        self.console, self.requests = [], []
        pages = self._call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in pages if info["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._session = None
            self._call("Browser.close")  # its own processes end with it, and leave their files
            self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, path, *, width=1280, height=900, dark=False):
        """Loads a file and waits until it has been loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._events.clear()
        self._call("Page.navigate", url=Path(path).resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def evaluate(self, expression):
        """The value of a JavaScript expression."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def box(self, selector):
        """Left, top, width and height of the first element that fits."""
        return self.evaluate(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )

    def move_mouse(self, x, y):
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path):
        """The whole page as a PNG."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self):
        deadline_s = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, *_ = select.select([self._read], [], [], max(0, deadline_s - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, f"the browser said nothing for {LIMIT_S} s, or has ended"
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, params):
        self._events.append(method)
        if method == "Runtime.consoleAPICalled":
            self.console.append(f"{params['type']}: {params['args']}")
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.requests.append(url)
