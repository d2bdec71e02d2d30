"""Rows of the fusion rules compile for a TPU: a few for every change, all of them in `make test-tpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fused_eager.targets import topology

from .rows import Row, as_markdown

# One of each kind: elementwise, a product, a convolution, a norm, attention, a sort, a scan, a scatter, a loss.
FEW = ("nn.functional.gelu", "addmm", "nn.functional.conv2d", "nn.functional.layer_norm", "sort", "cumsum")


@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
def test_a_row_of_each_kind_compiles() -> None:
    command = [sys.executable, "-m", "tests.targets.rows", "--samples", "1", "--jobs", "1", "--shard", "0/2", *FEW]
    environ = {**os.environ, "FUSED_EAGER_CACHE": "off"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(rows) > 5, done.stderr[-3000:]
    assert all(row["calls"] and not row["refused"] for row in rows), rows


def test_the_page_tells_what_was_refused_and_what_was_not_tried() -> None:
    why = dict.fromkeys(("float32", "int32"), "no | such")
    rows = [Row("aten.a.default", 2, 1.5), Row("aten.b.default", 1, 1.0, why)]
    page = as_markdown(rows, "v5e:2x2", ["aten.a.default", "aten.b.default", "aten.c.default"])
    assert "2 rows, 3 calls compiled in 2 s" in page and "2 calls of 1 rows were refused; 1 rows of 3" in page
    assert "| aten.b.default | float32, int32 | no / such |" in page and "`c.default`" in page
