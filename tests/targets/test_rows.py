"""Rows of the fusion rules compile for a TPU: a few for every change, all of them in `make test-tpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fused_eager.fusion_rules import RULES

from fused_eager.targets import topology

from .calls import BY_HAND
from .rows import Row, as_markdown, merged, newly_refused

# One of each kind: elementwise, a product, a convolution, a norm, a sort, a scan. The last
# ones are called by hand.
FEW = ("nn.functional.gelu", "addmm", "nn.functional.conv2d", "nn.functional.layer_norm", "sort", "cumsum")
FEW += ("_fused_sgd.default", "hann_window.default", "mm.dtype", "fused_eager.random_normal.default")


@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
def test_a_row_of_each_kind_compiles() -> None:
    command = [sys.executable, "-m", "tests.targets.rows", "--samples", "1", "--jobs", "1", "--shard", "0/2", *FEW]
    environ = {**os.environ, "FUSED_EAGER_CACHE": "off"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(rows) > 5, done.stderr[-3000:]
    assert all(row["compiled"] and not row["refused"] for row in rows), rows


def test_what_is_called_by_hand_is_a_row_and_is_recorded() -> None:
    assert {op if op.startswith("fused_eager.") else f"aten.{op}" for op in BY_HAND} <= set(RULES)
    program = """
from tests.targets.rows import recorded
print(*sorted(recorded(["_fused_sgd.default", "mm.dtype", "linear.default"], ["bfloat16"], 1)))
"""  # ATen has the second for no CPU, and the last arrives whole in inference mode alone
    environ = {**os.environ, "FUSED_EAGER_CACHE": "off", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300)
    assert {"aten._fused_sgd.default", "aten.mm.dtype", "aten.linear.default"} <= set(done.stdout.split()), done.stderr


def test_the_page_tells_what_was_refused_and_what_was_not_tried() -> None:
    why = dict.fromkeys(("float32", "int32"), "no | such")
    rows = [Row("aten.a.default", "v5e:2x2", {"float32": 1.5}), Row("aten.b.default", "v5e:2x2", {"bool": 1.0}, why)]
    rows.append(Row("aten.a.default", "v5e:2x2", {"int32": 0.5}))
    rows.append(Row("aten.a.default", "v4:2x2x1", {}, {"bool": "not here"}))
    page = as_markdown(rows, ["aten.a.default", "aten.b.default", "aten.c.default"])
    assert "| v5e:2x2 | 2 | 3 | 2 | 3 |" in page and "| v4:2x2x1, a sample | 1 | 0 | 1 | 0 |" in page
    assert "| float32 | 1 | 1 | 2 |" in page and "`a.default` in float32 2 s" in page
    assert "| b.default | float32, int32 | no / such |" in page and "| a.default (v4:2x2x1) | bool | not here |" in page
    assert "1 of 3 rows have no call" in page and "`c.default`" in page


def test_the_last_run_has_the_last_word_on_a_dtype() -> None:
    (row,) = merged([Row("a", "t", {"bool": 1.0}, {"int8": "no"}), Row("a", "t", {"int8": 2.0}, {"bool": "no"})])
    assert row.compiled == {"int8": 2.0} and row.refused == {"bool": "no"}


def test_a_row_that_the_page_does_not_list_as_refused_is_told_of() -> None:
    refused = dict.fromkeys(("float32", "bool"), "why | so")
    rows = [Row("aten.a.default", "v5e:2x2", {}, refused), Row("aten.b.default", "v5e:2x2", {"bool": 1.0})]
    page = as_markdown(rows, [])
    assert newly_refused(rows, page) == []
    rows.append(Row("aten.b.default", "v5e:2x2", {}, {"int8": "it broke"}))
    assert newly_refused(rows, page) == ["b.default in int8: it broke"]
    most = [Row(f"aten.{i}.default", "v5e:2x2", {}, {"complex128": "none at all"}) for i in range(50)]
    assert newly_refused(most, as_markdown(most, [])) == [] and len(newly_refused(most, page)) == 50


def test_a_reason_that_most_rows_have_is_one_line() -> None:
    rows = [Row(f"aten.{i}.default", "v5e:2x2", {}, {"complex128": "none at all"}) for i in range(50)]
    page = as_markdown(rows, [])
    assert page.count("none at all") == 1 and "| all | complex128 | none at all |" in page
