"""A headless Chromium, spoken to through its debugging pipe: what a person would see of a page and do with it. Nothing but the browser is needed."""
from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
MISSING = "no Chromium or Chrome is installed (Debian: apt-get install chromium)"
PATIENCE = 60.0         # seconds for an answer of the browser


def found() -> str | None:
    """The path of a browser."""
    return next((p for n in NAMES if (p := shutil.which(n))), None)


class Browser:
    """One page. `errors`: what its scripts raised or wrote as errors."""

    def __init__(self, width: int = 1280, height: int = 800, scale: float = 1, dark: bool = False):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, ours = os.pipe(), os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage",
                 "--remote-debugging-pipe", f"--user-data-dir={self.folder.name}", "--hide-scrollbars", "about:blank"]
        reads, writes = os.dup(theirs[0]), os.dup(ours[1])

        def as_3_and_4() -> None:
            high = [os.dup2(fd, n) for fd, n in ((reads, 100), (writes, 101))]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)
        self.process = subprocess.Popen([found(), *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        close_fds=False, preexec_fn=as_3_and_4)
        for fd in (theirs[0], ours[1], reads, writes):
            os.close(fd)
        self.to, self.back, self.rest = theirs[1], ours[0], b""
        self.number, self.session, self.errors, self.requests = 0, None, [], []
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height, scale)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for fd in (self.to, self.back):
            os.close(fd)
        self.folder.cleanup()

    # -- the pipe
    def call(self, method: str, **params) -> dict:
        """The answer to a command of the DevTools protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **({"sessionId": self.session} if self.session else {})}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        wanted, end = self.number, time.monotonic() + PATIENCE
        while True:
            answer = self._next(end)
            if answer.get("id") == wanted:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _next(self, end: float) -> dict:
        while b"\0" not in self.rest:
            if not select.select([self.back], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self.back, 1 << 20)
            if not more:
                raise RuntimeError("the browser has gone")
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description") or params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if method:
            self.events.append(message)
        return message

    def _wait(self, method: str) -> None:
        end = time.monotonic() + PATIENCE
        while not any(e.get("method") == method for e in self.events):
            self._next(end)

    # -- the page
    def resize(self, width: int, height: int, scale: float = 1, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)

    def open(self, path: str | os.PathLike) -> float:
        """Opens a file; returns the seconds until its script had run and it was painted."""
        self.events.clear()
        start = time.perf_counter()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        self._wait("Page.loadEventFired")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.perf_counter() - start

    def run(self, script: str) -> Any:
        """The value of an expression of the page, awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description") or found["exceptionDetails"]["text"])
        return found["result"].get("value")

    def settle(self) -> None:
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(() => requestAnimationFrame(done), 60)))")

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def click_on(self, selector: str, n: int = 0) -> None:
        """A click on the middle of the element number `n` that `selector` finds, scrolled into sight."""
        x, y = self.run(f"""(() => {{ const e = document.querySelectorAll({selector!r})[{n}];
            e.scrollIntoView({{block: 'center', behavior: 'instant'}});
            const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()""")
        self.click(x, y)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def wheel(self, x: float, y: float, by: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)
        self.settle()

    def screenshot(self, path: str | os.PathLike, whole: bool = False) -> bytes:
        """The page as a PNG, also written to `path`."""
        self.settle()
        content = base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
        Path(path).write_bytes(content)
        return content
