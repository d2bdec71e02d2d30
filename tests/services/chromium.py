"""A browser in the hands of a test: Chromium, spoken to through a pipe in the DevTools protocol.

    with Browser(tmp_path) as browser:
        page = browser.open(url, width=400)
        page.run("document.title")

Messages are JSON ended by a zero byte, on the descriptors 3 and 4 of its process: no port, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from .programs import command

FLAGS = [
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-extensions", "--force-color-profile=srgb",
    "--hide-scrollbars",
]  # fmt: skip
PATIENCE = 60.0  # seconds for an answer; on a busy machine the first takes some


class Browser:
    """One process of Chromium with a profile of its own, ended with the `with` block."""

    def __init__(self, folder: Path) -> None:
        start = command("chromium")
        assert start is not None, "whoever needs a browser skips before"
        # The shell moves its input and output to where the browser looks for the pipes, and is replaced by it.
        shell = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >&2', "sh"]
        flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}"]
        with open(folder / "chromium.log", "wb") as log:
            pipe = subprocess.PIPE
            command_line = [*shell, *start, *flags, "about:blank"]
            self.process = subprocess.Popen(command_line, stdin=pipe, stdout=pipe, stderr=log, bufsize=0)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._out, self._in, self._log = self.process.stdin, self.process.stdout, folder / "chromium.log"
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.close()  # it ends itself when its pipe is closed; whatever it does, it is gone after this
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._in.close()

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The answer to one command; what else is told meanwhile is kept in `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            told = self._next(deadline)
            if told.get("id") != self._number:
                self.events.append(told)
            elif "error" in told:
                raise RuntimeError(f"{method}: {told['error']}")
            else:
                return told["result"]

    def wait_for(self, method: str, session: str) -> None:
        """Until an event has come."""
        deadline = time.monotonic() + PATIENCE
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self._next(deadline))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            got = os.read(self._in.fileno(), 1 << 16) if ready else b""
            if not got:
                state = "says nothing" if not ready else "has ended"
                raise RuntimeError(f"Chromium {state}:\n{self._log.read_text(errors='replace')[-2000:]}")
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int = 1400, height: int = 900, dark: bool = False) -> Page:
        """A page that has loaded."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            page.ask(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[scheme])
        page.ask("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired", session)
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.ask(method, self.session, **parameters)

    def run(self, script: str) -> Any:
        """The value of an expression, as JSON. What the script throws is raised here."""
        done = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"])[:500])
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression holds. Fails where it does not in time."""
        until = f"""(async () => {{
          const end = Date.now() + {1000 * PATIENCE};
          while (!({condition}) && Date.now() < end) await new Promise(go => setTimeout(go, 20));
          return !!({condition});
        }})()"""
        assert self.run(until), f"never came true: {condition}"

    def close(self) -> None:
        self.browser.ask("Target.closeTarget", targetId=self.target)

    def resize(self, width: int, height: int = 900) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def point(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into view. Fails where it has no size, or lies under another one."""
        found = self.run(f"""(() => {{
          const e = document.querySelector({json.dumps(selector)});
          e.scrollIntoView({{block: "center"}});
          const b = e.getBoundingClientRect(), x = b.left + b.width / 2, y = b.top + b.height / 2;
          const hit = document.elementFromPoint(x, y);
          return {{x, y, hit: !!hit && (e.contains(hit) || hit.contains(e))}};
        }})()""")
        assert found["hit"], f"{selector} cannot be clicked"
        return found["x"], found["y"]

    def click(self, selector: str) -> None:
        """As a person does: the mouse goes there."""
        x, y = self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, text: str = "") -> None:
        code = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key,
                windowsVirtualKeyCode=code, **({"text": text} if kind == "keyDown" and text else {}),
            )  # fmt: skip

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def tree(self) -> list[tuple[str, str]]:
        """(role, name) of what a screen reader is told, in order."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        return [
            (n["role"]["value"], n.get("name", {}).get("value", ""))
            for n in nodes if not n.get("ignored") and "role" in n
        ]  # fmt: skip

    def screenshot(self) -> bytes:
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])

    def told(self, method: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        self.run("0")  # whatever was on its way is here then
        found = [e for e in self.browser.events if e.get("sessionId") == self.session and e.get("method") == method]
        return [e["params"] for e in found]

    def errors(self) -> list[str]:
        """What scripts have thrown, and what else the browser's console has complained of."""
        bad = ("error", "warning")
        thrown = [json.dumps(e["exceptionDetails"]) for e in self.told("Runtime.exceptionThrown")]
        logged = [e["entry"]["text"] for e in self.told("Log.entryAdded") if e["entry"]["level"] in bad]
        called = [json.dumps(e["args"]) for e in self.told("Runtime.consoleAPICalled") if e["type"] in bad]
        return thrown + logged + called
