"""The page in a browser: it sorts, searches and folds, no script fails, and all of it can be seen and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fused_eager.reporting.report import Report
from tests.services.chromium import Browser, Page

from .logs import Log

pytestmark = pytest.mark.services
WIDTHS = [400, 1400]


def everything(folder: Path) -> Report:
    """A report with each section of the page: lines of a real file, one of them too long, and values not known."""
    program = folder / "a_program_with_quite_a_long_name_for_a_narrow_window.py"
    lines = [f"value_{i} = compute(value_{i - 1}, {i})" for i in range(1, 40)]
    lines[9] = "    result = model(" + ", ".join(f"argument_number_{i}=batch[{i}]" for i in range(20)) + ")"
    program.write_text("\n".join(lines) + "\n")
    at = [f"{program}:{i}" for i in range(len(lines) + 1)]
    log = Log()
    for i in range(1, 13):
        for cause in ("first", "shape") if i % 3 == 0 else ("first",):
            log.tell("compiling", region=f"region {i}")
            log.compile(i, cause, site=at[i], seconds=0.013 * (i % 5) + 0.2, ops=3 * i, why=f"because-of-{i} <{cause}>")
        rows = [(at[i], f"blocks.{i}.attention.projection", i % 2 == 0, {"aten.add.Tensor": i, "aten.mul.Tensor": 2})]
        log.plan(i, *rows, *([(at[i + 20], "", False, {"aten.relu.default": 1})] if i < 9 else []),
                 how="aten" if i == 5 else "xla", inner_bytes=2**i * 99)  # fmt: skip
        for _ in range(i):
            log.flush("cut.optimizer" if i % 2 else "sync.value", at[i], plan=i)
            log.sync(site=at[i], seconds=1e-3 * (13 - i), detail=f"detail-{i}.")
        if i % 2:
            log.tell("run", plan=i, region=0, seconds=1e-4 * i)
        log.island(op=f"aten.{'sort' if i < 9 else 'a_very_long_name_of_an_operator_' * 3}.default", site=at[i])
        log.tell("choice", site=at[i], native=i % 2 == 0, fused_s=1e-3 * i, native_s=2e-3, remembered=i == 4)
        log.tell("op-choice", op="aten.convolution.default", site=at[i], native=True, fused_s=1e-3 * i, native_s=1e-3)
    return log.report


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "page.html"
    path.write_text(everything(folder).html())
    return path.as_uri()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    page = browser.open(url)
    yield page
    assert page.errors() == []
    asked = {e["request"]["url"] for e in page.told("Network.requestWillBeSent")}
    assert asked == {url}, "the page needs nothing else"


SECTIONS = {
    "advice": "What to change, most time to gain first",
    "timeline": "The run over time",
    "source": "The program, by region",
    "plans": "What runs after one another",
    "compilations": "Compilations",
    "waits": "Waits",
    "cuts": "Where work was cut",
    "choices": "The faster way, measured",
    "op-choices": "Calls that ATen runs between regions, as it is faster there",
    "islands": "Ops that ran natively",
    "regions": "Regions",
    "modules": "Modules",
}


def column(page: Page, section: str, index: int) -> list[str]:
    rows = f"document.querySelectorAll('#{section} tbody tr')"
    return page.run(f"[...{rows}].filter(r => !r.hidden).map(r => r.cells[{index}].textContent.trim())")


def head(section: str, index: int) -> str:
    return f"#{section} th:nth-child({index + 1}) button"


def visible(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('main details')].filter(d => !d.hidden).map(d => d.id)")


def test_each_section_is_there_and_told_to_screen_readers(page: Page) -> None:
    assert visible(page) == list(SECTIONS)
    tree = page.tree()
    headings = [name for role, name in tree if role == "heading"]
    assert [name for name in headings if name in SECTIONS.values()] == list(SECTIONS.values())
    assert ("searchbox", "Search") in tree and ("button", "Fold all") in tree
    assert sum(role == "table" for role, _ in tree) >= 8
    assert all(name for role, name in tree if role in ("button", "searchbox", "image", "columnheader"))


TABLES = [(s, i) for s, n in [("compilations", 7), ("waits", 6), ("cuts", 6), ("choices", 5), ("op-choices", 4),
                              ("islands", 4), ("regions", 10), ("modules", 3)] for i in range(n)]  # fmt: skip


def in_order(cells: list[dict[str, Any]], up: bool) -> bool:
    """Whether numbers are in order, or texts with the numbers in them, and what is not known comes last."""
    known = [c for c in cells if c["text"] not in ("", "\u2013")]
    if cells[: len(known)] != known:
        return False
    keys: list[Any] = [c["number"] if c["number"] is not None else c["line"] for c in known]
    keys = [k for k in keys if k is not None]
    return keys == sorted(keys, reverse=not up)


def test_every_column_sorts_both_ways(page: Page) -> None:
    for section, index in TABLES:
        seen = []
        for _ in range(2):
            page.click(head(section, index))
            rows = f"[...document.querySelectorAll('#{section} tbody tr')]"
            cells = page.run(f"""{rows}.map(r => r.cells[{index}]).map(c => ({{
              text: c.textContent.trim(),
              number: c.classList.contains("n") ? parseFloat(c.dataset.v ?? c.textContent) : null,
              line: /^\\S+:\\d+$/.test(c.textContent.trim()) ? +c.textContent.trim().split(":").pop() : null}}))""")
            said = page.run(f"document.querySelectorAll('#{section} th')[{index}].getAttribute('aria-sort')")
            assert page.run(f"document.querySelectorAll('#{section} th[aria-sort]').length") == 1
            assert in_order(cells, said == "ascending"), (section, index, said, cells)
            seen.append((said, [c["text"] for c in cells]))
        number = page.run(f"document.querySelectorAll('#{section} th')[{index}].classList.contains('n')")
        assert [said for said, _ in seen] == (["descending", "ascending"] if number else ["ascending", "descending"])
        if len(set(seen[0][1])) > 1:
            assert seen[0][1] != seen[1][1], (section, index)
        assert sorted(seen[0][1]) == sorted(seen[1][1]), "no row is lost"


def test_a_table_sorts_from_the_keyboard(page: Page) -> None:
    page.run(f"document.querySelector('{head('waits', 1)}').focus()")
    page.press("Enter", "\r")
    down = column(page, "waits", 1)
    page.press("Enter", "\r")
    assert column(page, "waits", 1) == down[::-1] == [str(i) for i in range(1, 13)]


def search(page: Page, words: str) -> str:
    page.run("document.getElementById('search').focus(), document.getElementById('search').select()")
    page.type(words)
    return page.run("document.getElementById('found').textContent")


def clear(page: Page) -> None:
    """The key that empties a search box."""
    page.run("document.getElementById('search').focus()")
    page.press("Escape")
    assert page.run("document.getElementById('search').value") == ""


def test_the_search_leaves_what_has_all_of_the_words(page: Page) -> None:
    assert search(page, "BECAUSE-OF-12") == "2 found"
    assert visible(page) == ["compilations"] and set(column(page, "compilations", 1)) == {"first", "shape"}
    assert search(page, "<shape> because-of-12") == "1 found"
    assert search(page, "a_very_long_name") == "8 found" and visible(page) == ["source", "islands"]
    assert search(page, "nothing has this") == "Nothing found" and visible(page) == []
    tall = page.run("document.querySelector('main').scrollHeight")
    clear(page)
    assert visible(page) == list(SECTIONS) and page.run("document.querySelectorAll('main [hidden]').length") == 0
    assert page.run("document.querySelector('main').scrollHeight") > 3 * tall
    assert page.run("document.getElementById('found').textContent") == ""


def test_the_search_finds_what_only_the_mouse_would_show(page: Page) -> None:
    assert search(page, "mul.tensor blocks.7.").endswith("found")
    assert visible(page) == ["source"]
    shown = "[...document.querySelectorAll('#source tr')].filter(r => r.offsetHeight > 0)"
    assert page.run(f"{shown}.map(r => r.cells[1].textContent)") == ["7"], "one line, and no gaps"


def test_a_search_ends_with_the_sections_as_they_were(page: Page) -> None:
    page.click("#waits summary")
    assert search(page, "detail-3.") and page.run("document.getElementById('waits').open")
    assert column(page, "waits", 5) == ["detail-3."]
    clear(page)
    assert not page.run("document.getElementById('waits').open") and page.run("document.getElementById('cuts').open")


def test_sections_fold_one_by_one_and_all_together(page: Page) -> None:
    opened = "[...document.querySelectorAll('main details')].filter(d => d.open).length"
    button = "document.getElementById('fold').textContent"
    page.click("#cuts summary")
    assert page.run(opened) == len(SECTIONS) - 1
    assert page.run("document.querySelector('#cuts table').checkVisibility()") is False
    page.run("document.querySelector('#cuts summary').focus()")
    page.press("Enter", "\r")
    assert page.run(opened) == len(SECTIONS)
    page.click("#fold")
    assert page.run(opened) == 0 and page.run(button) == "Unfold all"
    assert page.run("document.querySelector('main').scrollHeight") < 1300, "folded, the page is its headings"
    page.click("#modules summary")
    assert page.run(opened) == 1 and page.run(f"new Promise(f => setTimeout(() => f({button}), 50))") == "Fold all"
    page.click("#fold")
    page.click("#fold")
    assert page.run(opened) == len(SECTIONS)


BOXES = """[...document.querySelectorAll("h1, .bar, .tools, details, .scroll, .src, .card, svg, footer")].map(e => {
  const b = e.getBoundingClientRect();
  return {name: e.id || e.className.baseVal || e.className || e.tagName, tag: e.tagName, left: b.left, right: b.right,
          top: b.top + scrollY, bottom: b.bottom + scrollY}; })"""
CUT = """[...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll, .src, pre, svg") &&
  e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"""
# The lines of code: as wide as what they hold, or in a box that scrolls to their end.
HIDDEN = """[...document.querySelectorAll(".src td.tx, .scroll td")].filter(e => e.scrollWidth > e.clientWidth + 1 &&
  !["visible", "auto"].includes(getComputedStyle(e).overflowX)).map(e => e.textContent.slice(0, 80))"""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_layout_at_each_width(page: Page, width: int, tmp_path: Path) -> None:
    page.resize(width)
    assert page.run("innerWidth") == width and page.run("document.documentElement.scrollWidth") <= width
    assert page.run(CUT) == [], "nothing sticks out of the page"
    assert page.run(HIDDEN) == [], "no text is cut off where it cannot be scrolled to"
    boxes = page.run(BOXES)
    sections = [b for b in boxes if b["tag"] == "DETAILS"]
    assert [b["name"] for b in sections] == list(SECTIONS)
    for one, next in zip(sections, sections[1:], strict=False):
        assert one["bottom"] <= next["top"] + 1, "sections lie below one another"
    for b in boxes:
        assert b["bottom"] - b["top"] >= 10 or b["tag"] == "FOOTER", b
        assert 0 <= b["left"] < b["right"] <= width, b
    room = 1180 if width > 1180 else width
    assert all(b["right"] - b["left"] >= 0.9 * room - 10 for b in sections), "they take the room there is"
    (tmp_path / "page.png").write_bytes(page.screenshot())


CONTRAST = """(() => {
  const parse = c => { const n = c.match(/[\\d.]+/g).map(Number); return c.startsWith("color(") ?
    [n[0] * 255, n[1] * 255, n[2] * 255, n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = c => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
    const x = c[i] / 255; return sum + w * (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4); }, 0);
  const behind = e => { let c = [0, 0, 0, 0]; for (; e; e = e.parentElement) {
    const own = parse(getComputedStyle(e).backgroundColor); if (own[3]) c = c[3] ? over(c, own) : own;
    if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const worst = {}, walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || e.closest("svg")) continue;
    const a = light(over(parse(getComputedStyle(e).color), behind(e))), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) worst[e.tagName + "." + e.className + " in ." + e.parentElement.className] = ratio;
  }
  return worst; })()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_stands_out(browser: Browser, url: str, dark: bool) -> None:
    """A ratio of 4.5, what WCAG asks of text of this size."""
    page = browser.open(url, dark=dark)
    assert page.run("matchMedia('(prefers-color-scheme: dark)').matches") == dark
    assert page.run(CONTRAST) == {}


def test_what_is_left_out_is_said(browser: Browser, tmp_path: Path) -> None:
    log = Log()
    for i in range(230):
        log.island(op=f"aten.op{i}.default")
    (tmp_path / "page.html").write_text(log.report.html())
    page = browser.open((tmp_path / "page.html").as_uri())
    assert len(column(page, "islands", 0)) == 200
    assert "30 more are left out here" in page.run("document.getElementById('islands').textContent")


@pytest.mark.parametrize("report", [Report.of([]), Log().report], ids=["nothing", "empty"])
def test_a_page_of_nothing_works_too(browser: Browser, report: Report, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(report.html())
    page = browser.open((tmp_path / "page.html").as_uri(), width=400)
    assert visible(page) == ["advice"] and page.errors() == []
    assert search(page, "nothing to change") == "1 found"


def test_a_program_cannot_put_script_into_its_page(browser: Browser, tmp_path: Path) -> None:
    log = Log()
    evil = '"><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
    log.plan(1, (f"{evil}.py:1", evil, False, {evil: 1}))
    log.compile(1, why=evil, site=f"{evil}.py:1")
    log.flush("sync.value", f"{evil}.py:1", detail=evil)
    log.sync(site=f"{evil}.py:1", detail=evil)
    log.island(op=evil, site=evil, reason=evil)
    (tmp_path / "page.html").write_text(log.report.html())
    page = browser.open((tmp_path / "page.html").as_uri())
    assert search(page, "owned").endswith("found")
    assert page.run("document.title") == "fused_eager: this process" and page.errors() == []
    assert page.run("document.querySelectorAll('main img, main script').length") == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_notebook_shows_fits(browser: Browser, tmp_path: Path, width: int) -> None:
    part = everything(tmp_path)._repr_html_()
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta name=viewport content='width=device-width'>{part}")
    page = browser.open((tmp_path / "cell.html").as_uri(), width=width)
    assert page.run("document.documentElement.scrollWidth") <= width and page.errors() == []
    assert page.run("document.querySelectorAll('.card').length") >= 1, json.dumps(page.tree())[:500]
