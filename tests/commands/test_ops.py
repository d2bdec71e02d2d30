"""The table of ops is measured, and docs/ops.md says what the command measures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fused_eager.commands import ops

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ops.md").read_text()
PINNED = (ROOT / "constraints.txt").read_text()
# One entry of each kind, and a few that must stay lowered.
SOME = {
    "add": "xla", "sum": "xla", "mm": "xla", "nn.functional.conv2d": "xla", "index_put": "xla",
    "nn.functional.layer_norm": "xla", "nn.functional.pixel_shuffle": "xla",
    "transpose": "view", "empty": "view",
    "randn": "random", "nn.functional.dropout": "random",
    "nonzero": "values", "unique": "values",
    "linalg.svd": "island",
}  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> dict[str, ops.Row]:
    return {row.op: row for row in ops.rows(SOME, samples=6) if row.op in SOME}


@pytest.mark.parametrize(("name", "how"), SOME.items())
def test_entries_run_as_they_should(measured: dict[str, ops.Row], name: str, how: str) -> None:
    assert measured[name].how == how, measured[name].why


def _section(how: str) -> str:
    return PAGE.partition(f"\n## {how}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", SOME)
def test_the_page_agrees_with_the_measurement(measured: dict[str, ops.Row], name: str) -> None:
    row = measured[name]
    shown = f"`{name}`" if row.how in ops.LOWERED else f"| {name} | {ops._cell(row.why)} |"
    assert shown in _section(row.how)


def _page_rows() -> list[ops.Row]:
    table = [ops.Row(name, how, "") for how in ops.LOWERED for name in re.findall(r"`([^`]+)`", _section(how))]
    for how in ("island", "values", "random", "none"):
        table += [ops.Row(name, how, why) for name, why in re.findall(r"^\| (\S+) \| (.*) \|$", _section(how), re.M)
                  if name not in ("entry",) and not name.startswith("---")]
    return table


@pytest.mark.skipif(
    f"torch=={torch.__version__.partition('+')[0]}\n" not in PINNED,
    reason="the page is about the torch of constraints.txt, and each has its own corpus",
)
def test_the_page_has_each_entry_of_the_corpus_once() -> None:
    found = ops.corpus()
    assert found is not None
    names = [row.op for row in _page_rows()]
    assert sorted(names) == sorted(ops.entry_name(info) for info in found)


def test_the_page_counts_what_it_lists() -> None:
    table = _page_rows()
    assert ops.summary(table) in PAGE
    assert sum(ops.counts(table)[how] for how in ops.LOWERED) >= 520


def test_each_reason_is_told() -> None:
    assert all(row.why for row in _page_rows() if row.how not in ops.LOWERED)


def test_an_op_that_raises_is_no_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sample:
        input, args, kwargs = torch.ones(3), (), {}

    class Info:
        name, variant_test_name = "broken", ""

        @staticmethod
        def op(x: torch.Tensor) -> torch.Tensor:
            return x.view(7)

        @staticmethod
        def supported_dtypes(device: str) -> list[torch.dtype]:
            return [torch.float32]

        @staticmethod
        def sample_inputs(device: str, dtype: torch.dtype) -> list[type]:
            return [Sample]

    row = ops.measure(Info)
    assert row.how == "island" and "raises" in row.why


def test_samples_are_spread_evenly() -> None:
    assert ops._spread(list(range(100)), 4) == [0, 33, 66, 99]
    assert ops._spread([1, 2], 4) == [1, 2]


def test_without_op_db_the_rules_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "corpus", lambda: None)
    assert ops.main([], "ops") == 0
    out, err = capsys.readouterr()
    assert "aten.add.Tensor" in out and "expecttest" in err


def test_json_and_a_name_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main(["nonzero", "--samples", "2", "--json"], "ops") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == {"values": 1} and told["rows"][0]["op"] == "nonzero"
    assert ops.main(["no_such_op"], "ops") == 2
    assert "no_such_op" in capsys.readouterr().err
