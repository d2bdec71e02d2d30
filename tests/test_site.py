"""The documentation as a site, in a real browser: built without a warning, read at two widths, searched, made dark."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from .services.chromium import Browser

ROOT = Path(__file__).parents[1]
WIDTHS = (1400, 400)
pytestmark = pytest.mark.services

# What sticks out on the right, unless it lies in something that scrolls.
STICKS_OUT = """
[...document.querySelectorAll('.md-content *')].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1) return false;
  for (let p = e; p && p !== document.body; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== 'visible') return false;
  return true;
}).map(e => e.tagName + ': ' + e.textContent.slice(0, 60))
"""
# Texts of a drawing that are wider than the box behind them.
TOO_WIDE = """
(() => {
  const boxes = [...document.querySelectorAll('rect')].map(e => e.getBoundingClientRect());
  return [...document.querySelectorAll('text')].filter(e => {
    const t = e.getBoundingClientRect(), x = (t.left + t.right) / 2, y = (t.top + t.bottom) / 2;
    const around = boxes.filter(b => b.left < x && x < b.right && b.top < y && y < b.bottom);
    const box = around.reduce((a, b) => a.width < b.width ? a : b);
    return t.left < box.left || t.right > box.right;
  }).map(e => e.textContent);
})()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Where it is served, and its pages."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pages = sorted(str(page.relative_to(folder)) for page in folder.rglob("*.html"))
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_sticks_out_or_raises(site: tuple[str, list[str]], browser: Browser, width: int) -> None:
    base, pages = site
    assert len(pages) > 40
    found = {}
    for name in pages:
        page = browser.open(f"{base}/{name}", width=width)
        wrong = page.run(STICKS_OUT), page.run("document.documentElement.scrollWidth") > width, page.errors()
        if any(wrong):
            found[name] = wrong
        page.close()
    assert not found


def test_the_pictures_texts_fit_into_their_boxes(site: tuple[str, list[str]], browser: Browser) -> None:
    page = browser.open(f"{site[0]}/pipeline.svg")
    assert page.run("document.querySelectorAll('text').length") > 10
    assert page.run(TOO_WIDE) == []
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_search_finds_an_option_and_leads_to_it(site: tuple[str, list[str]], browser: Browser, width: int) -> None:
    page = browser.open(f"{site[0]}/index.html", width=width)
    page.click("label[for=__search].md-header__button" if width < 600 else ".md-search__input")
    page.type("check_nan")
    page.wait("document.querySelector('.md-search-result__link')")
    assert "options.html" in page.run("document.querySelector('.md-search-result__link').href")
    assert not page.errors()
    page.close()


def test_dark_mode_is_the_systems_and_can_be_switched(site: tuple[str, list[str]], browser: Browser) -> None:
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    for dark, other in ((True, "default"), (False, "slate")):
        page = browser.open(f"{site[0]}/semantics.html", dark=dark)
        page.run("localStorage.clear()")  # what was chosen before is kept there
        page.close()
        page = browser.open(f"{site[0]}/semantics.html", dark=dark)
        assert page.run(scheme) == ("slate" if dark else "default")
        page.click(".md-header__option label:not([hidden])")
        page.wait(f"{scheme} === '{other}'")
        page.close()
