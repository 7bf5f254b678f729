# SPDX-License-Identifier: Apache-2.0
"""A real headless browser for tests of HTML pages: found on the machine, or unpacked from Debian's packages.

`find` takes ``VERL_EXT_BROWSER``, then a Chromium on the PATH, then one that it unpacks into ``build/browser``: it asks
apt for ``chromium-headless-shell`` and what it needs beside the packages that are there, and unpacks them in that
folder. Nothing is installed and no special rights are needed; it costs about 100 MB of download and 300 MB of disk,
once. The browser is spoken to in its DevTools protocol, over a pair of pipes.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PACKAGE = "chromium-headless-shell"
HOW = "Install Chromium, or name one in VERL_EXT_BROWSER."


def find(folder: Path) -> tuple[str, dict[str, str]]:
    """A Chromium: its executable and the environment that it needs.

    Args:
        folder: where one is unpacked if the machine has none.

    Raises:
        RuntimeError: there is none and none can be fetched; the message says what to do.
    """
    named = os.environ.get("VERL_EXT_BROWSER")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found:
        return found, dict(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            _unpack(folder)
            (folder / "ready").touch()
    root = folder / "root"
    executable = next(path for path in root.rglob(PACKAGE) if path.parent.name == "chromium")
    libraries = sorted({str(path.parent) for path in root.rglob("*.so*")})
    return str(executable), {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}


def _unpack(folder: Path) -> None:
    """Have apt resolve and download the packages with lists and a cache of our own, and unpack them."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise RuntimeError(f"no Chromium on this machine, and no Debian packages to unpack one from. {HOW}")
    for name in ("lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    apt = ["apt-get", "-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"]
    apt += ["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]
    _run([*apt, "update"])
    _run([*apt, "install", "--yes", "--download-only", "--no-install-recommends", PACKAGE])
    for archive in sorted((folder / "cache" / "archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(archive), str(folder / "root")])
    shutil.rmtree(folder / "cache")
    shutil.rmtree(folder / "lists")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(
            f"no Chromium on this machine, and {' '.join(command[-3:])} failed. {HOW}\n{done.stderr[-2000:]}"
        )


class Browser:
    """One browser process and its tabs."""

    def __init__(self, executable: str, environment: dict[str, str], profile: str) -> None:
        theirs, ours = os.pipe()
        back, answer = os.pipe()
        # Chromium reads commands from 3 and answers on 4: the ends must not be in the way of each other.
        theirs_high, answer_high = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs, answer))

        def place() -> None:
            os.dup2(theirs_high, 3)
            os.dup2(answer_high, 4)

        self.process = subprocess.Popen(
            [
                executable,
                "--headless",
                "--no-sandbox",  # as root, in a container
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "--window-size=1200,800",
                "about:blank",
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=place,
        )
        for fd in (theirs, answer, theirs_high, answer_high):
            os.close(fd)
        self._to, self._from = ours, back
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._front: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 120
        while True:
            answer = self._receive(until - time.monotonic())
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def to_front(self, session: str) -> None:
        """Have a tab seen: of one in the background a whole Chromium draws no frames, and its scripts wait for one."""
        if self._front != session:
            self._front = session
            self.call("Page.bringToFront", session=session)

    def _receive(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._from, 1 << 16)
            if not part:
                raise RuntimeError(f"the browser ended with code {self.process.wait(timeout=10)}")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def open(self, url: str, **viewport: int) -> Page:
        """A new tab at a URL, loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        if viewport:
            page.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, mobile=False, **viewport)
        page.call("Page.navigate", url=url)
        page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    def close(self) -> None:
        """End the process."""
        os.close(self._to)
        os.close(self._from)
        self.process.kill()
        self.process.wait()


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.browser.to_front(self.session)
        return self.browser.call(method, session=self.session, **parameters)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", "exception"))
        return result["result"].get("value")

    def until(self, condition: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression holds."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise AssertionError(f"{condition} does not come to hold")
            time.sleep(0.05)

    def texts(self, selector: str) -> list[str]:
        """The visible text of each element."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.innerText)")

    def click(self, selector: str, which: int = 0) -> None:
        """A click of the mouse in the middle of an element."""
        spot = self.run(
            f"(() => {{ const node = document.querySelectorAll({json.dumps(selector)})[{which}];"
            " node.scrollIntoView({ block: 'nearest' }); const box = node.getBoundingClientRect();"
            " return { x: box.x + box.width / 2, y: box.y + box.height / 2 }; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **spot)

    def key(self, key: str) -> None:
        """A key, pressed and released."""
        codes = {"ArrowDown": 40, "ArrowUp": 38}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes.get(key, 0))

    def type(self, selector: str, text: str) -> None:
        """Text typed into a field that is clicked first."""
        self.click(selector)
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """A value chosen in a select element."""
        self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.value = {json.dumps(value)};"
            " node.dispatchEvent(new Event('change', { bubbles: true })); })()"
        )

    def screenshot(self, path: Path) -> None:
        """Write a picture of the tab."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def events(self, method: str) -> list[dict[str, Any]]:
        """What the tab has reported under a name of the protocol."""
        self.run("0")
        own = (event for event in self.browser.events if event.get("sessionId") == self.session)
        return [event["params"] for event in own if event["method"] == method]

    def requests(self) -> list[str]:
        """Every URL that the tab has asked for."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Exceptions of scripts, and what the browser has logged as an error (refused by the policy, for one)."""
        thrown = [str(event["exceptionDetails"]) for event in self.events("Runtime.exceptionThrown")]
        logged = [
            event["entry"]["text"] for event in self.events("Log.entryAdded") if event["entry"]["level"] == "error"
        ]
        return thrown + logged


@contextmanager
def running(folder: Path) -> Iterator[Browser]:
    """A browser, for as long as the block."""
    executable, environment = find(folder)
    with tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True) as profile:
        browser = Browser(executable, environment, profile)
        try:
            yield browser
        finally:
            browser.close()
