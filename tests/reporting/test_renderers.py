"""The renderers: page, trace, metrics, JSON, comparison and the live view, over one log."""

from __future__ import annotations

import html.parser
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn

from fused_eager import fused_eager
from fused_eager.commands import cli
from fused_eager.commands.report import as_json
from fused_eager.executing import load
from fused_eager.reporting import compare, perfetto, prometheus, top
from fused_eager.reporting.report import Report
from tests.streams import stable_shapes

from .logs import Log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real run: it waits in every round, and the last batch is odd."""
    path = tmp_path_factory.mktemp("run") / "log.jsonl"
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load.forget()
    with stable_shapes(), fused_eager(report=str(path), cache="off"):
        for n in [8] * 9 + [3]:
            loss = model(torch.randn(n, 5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    yield path


@pytest.fixture(scope="module")
def report(log: Path) -> Report:
    return Report.read(log)


class Checker(html.parser.HTMLParser):
    """Whether tags are closed in order, and what the page would fetch."""

    VOID = frozenset({"meta", "br", "rect", "link", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert not checker.open, checker.open
    return checker


def test_the_page_is_whole_and_needs_no_network(report: Report) -> None:
    page = report.html()
    found = checked(page)
    assert not found.fetched and "http" not in page and "@import" not in page and "url(" not in page
    for heading in ("What to change", "The run over time", "The program, by region", "Compilations", "Waits"):
        assert heading in found.text
    assert found.text.index("What to change") < found.text.index("Compilations")
    assert "loss.item()" in found.text and "8 -> 3" in found.text
    assert "prefers-color-scheme: dark" in page


def test_the_page_escapes_what_it_is_given() -> None:
    log = Log()
    log.plan(1)
    log.compile(1, why="<script>alert(1)</script>")
    log.flush("sync.value", "<b>.py:1", detail="<img src=x>")
    log.sync("sync.value", "<b>.py:1", detail="<img src=x>")
    page = log.report.html()
    assert "<script>alert" not in page and "<img" not in page and not checked(page).fetched


def test_a_page_of_nothing() -> None:
    assert "Nothing to change" in checked(Report.of([]).html()).text
    checked(Report.of([])._repr_html_())


def test_a_notebook_gets_a_part_with_the_advice(report: Report) -> None:
    part = report._repr_html_()
    assert "<html" not in part and "Cure:" in checked(part).text


def test_the_trace_has_every_slice_with_its_line(report: Report) -> None:
    found = perfetto.trace(report.processes)
    events = json.loads(json.dumps(found))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and {"pid", "tid", "name"} <= set(e) for e in slices)
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    names = [e["name"] for e in slices]
    assert sum(name.startswith("flush: ") for name in names) == report.facts.flushes
    compiles = [e for e in slices if e["cat"] == "compile"]
    assert len(compiles) == report.compilations and all("why" in e["args"] for e in compiles)
    assert any(re.match(r"\d+ ops from .*test_renderers.py:\d+", e["name"]) for e in slices if e["cat"] == "run")
    waits = [e for e in slices if e["cat"] == "sync"]
    assert any("test_renderers.py" in e["args"]["line"] for e in waits)


def test_slices_of_a_track_nest(report: Report) -> None:
    tracks: dict[int, list[tuple[float, float]]] = {}
    for e in perfetto.trace(report.processes)["traceEvents"]:
        if e["ph"] == "X":
            tracks.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in tracks.values():
        open_: list[float] = []
        for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ and open_[-1] <= begin + 2.0:  # microseconds: two clocks are read one after the other
                open_.pop()
            assert not open_ or end <= open_[-1] + 2.0
            open_.append(end)


LINE = re.compile(r'^[a-z_]+(\{([a-z]+="([^"\\]|\\.)*"(,|(?=\})))*\})? -?[0-9.e+-]+$')


def test_the_metrics_are_in_prometheus_format(report: Report) -> None:
    text = prometheus.metrics(report.facts)
    names = []
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            names.append(line.split()[2])
        elif not line.startswith("# HELP"):
            assert LINE.match(line), line
            assert line.startswith(names[-1])
    assert len(names) == len(set(names)) and all(name.startswith("fused_eager_") for name in names)
    assert "fused_eager_rounds_total 10" in text
    assert re.search(r'waits_total\{reason="sync.value",line="[^"]*test_renderers.py:\d+",what="[^"]*"\} 10', text)


def test_metrics_escape_labels() -> None:
    log = Log()
    log.sync(detail='a "quoted"\nback\\slash')
    assert 'what="a \\"quoted\\"\\nback\\\\slash"' in prometheus.metrics(log.report.facts)


def test_json_has_all_rows(log: Path, report: Report) -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        assert cli.main(["report", str(log), "--json"]) == 0
    data = json.loads(out.getvalue())
    assert data["facts"]["ops"] == report.ops and len(data["facts"]["compiles"]) == report.compilations
    assert data["advice"][0]["cure"] == report.advice[0].cure


def test_json_is_json_whatever_is_in_it() -> None:
    log = Log()
    log.tell("mismatch", op="aten.foo.default", site="a.py:9", difference="d", alone=True, script="")
    data = json.loads(as_json(log.report), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["advice"][0]["kind"] == "mismatch"


@pytest.mark.parametrize("form", ["--html", "--perfetto", "--prometheus", "--json", ""])
def test_the_command_writes_each_form_to_a_file(log: Path, tmp_path: Path, form: str) -> None:
    path = tmp_path / "out"
    assert cli.main(["report", str(log), *([form] if form else []), "-o", str(path)]) == 0
    assert path.stat().st_size > 500


@pytest.mark.parametrize(("form", "refused"), [("--html", True), ("--perfetto", True), ("--json", False)])
def test_what_is_not_for_eyes_is_not_written_to_a_terminal(
    form: str, refused: bool, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(log), form]) == 0 and len(capsys.readouterr().out) > 500  # to a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["report", str(log), form]) == (2 if refused else 0)
    out, error = capsys.readouterr()
    assert (out == "" and error.count("\n") == 1 and "-o FILE" in error) if refused else (out and not error)
    assert cli.main(["report", str(log), form, "-o", os.devnull]) == 0


@pytest.mark.parametrize(
    "arguments", [["report", "no_such"], ["diff", "no_such", "no_such"], ["top", "no_such", "--once"]]
)
def test_a_missing_file_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert "no_such" in capsys.readouterr().err


def test_a_reader_who_has_seen_enough_is_no_error(log: Path) -> None:
    command = f"{sys.executable} -m fused_eager report {log} --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert "{" in done.stdout and "Broken" not in done.stderr


def test_a_run_does_not_differ_from_itself(report: Report) -> None:
    text = compare.difference(report, report)
    assert "Waits" not in text and "Compilations (" not in text and "1.00x" in text


def test_a_difference_names_what_came_and_went(report: Report) -> None:
    log = Log()
    log.compile(1, why="these ops are compiled for the first time")
    log.plan(1)
    for _ in range(20):
        log.flush("cut.optimizer")
        log.sync(site="b.py:7")
        log.island()
    text = compare.difference(report, log.report)
    assert "+         0 -> 1         b.py:7 sync.value" in text
    assert "-         1 -> 0         " in text and "Advice that is new in B" in text and "Gone:" in text
    assert "a.py:3 aten.sort.default: no lowering" in text


def test_the_live_view_follows_a_file_as_it_grows(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    path = tmp_path / "log"
    follower = top.Follower(str(path))
    half = len(lines) // 2
    path.write_text("".join(lines[:half]) + lines[half][:10])  # a line that is being written
    early = follower.update().flushes
    assert not follower.ended
    with path.open("a") as file:
        file.write(lines[half][10:] + "".join(lines[half + 1 :]))
        file.write('{"kind": "end", "t": 99.0, "thread": 0}\n')
    final = follower.update()
    assert 0 < early < final.flushes == Report.read(log).facts.flushes
    assert follower.ended
    assert "10 rounds" in top.screen(final, None, 0.0, 0.0)


def test_the_live_view_says_what_is_being_compiled(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        '{"kind": "start", "t": 0, "thread": 0, "v": 1, "job": "j", "pid": 1}\n'
        '{"kind": "compiling", "t": 1.0, "thread": 0, "region": "77 ops from a.py:1"}\n'
    )
    text = next(top.frames(str(path), 1.0))
    assert "compiling now" in text and "77 ops from a.py:1" in text
