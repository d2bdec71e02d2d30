"""What the stages tell: with the program's line, times that do not overlap, and each plan once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fused_eager import fused_eager
from tests.log.test_site import line
from tests.streams import events, stable_shapes


@pytest.fixture(autouse=True)
def compiled_at_sight() -> Iterator[None]:
    with stable_shapes():
        yield


def test_a_wait_is_told_with_its_line_and_how_long_it_took() -> None:
    with fused_eager(cache="off"), events("sync") as seen:
        y = torch.ones(7, 3) * 2.0
        y.sum().item(), (at := line())
    value = [e for e in seen if e.data["reason"] == "sync.value"]
    assert len(value) == 1
    data = value[0].data
    assert data["site"] == f"{__file__}:{at}" and data["detail"] == "aten._local_scalar_dense.default"
    assert 0 < data["compiling"] < data["seconds"], "what was compiled on the way is part of the wait"


@pytest.mark.parametrize(
    ("read", "detail"),
    [
        (lambda t: t.numpy(), "Tensor.numpy"),
        (lambda t: t.tolist(), "Tensor.tolist"),
        (lambda t: repr(t), "Tensor.__repr__"),
        (lambda t: f"{t}", "Tensor.__repr__"),
        (lambda t: t.data_ptr(), "Tensor.data_ptr"),
    ],
    ids=["numpy", "tolist", "repr", "format", "data_ptr"],
)
def test_raw_access_is_one_wait_that_names_the_method(read: object, detail: str) -> None:
    with fused_eager(), events("sync") as seen:
        y = torch.ones(4) + 1.0
        read(y)  # type: ignore[operator]
        read(y)  # type: ignore[operator]
    found = [e.data["detail"] for e in seen if e.data["reason"] == "sync.memory"]
    assert found == [detail], "the second time there is nothing to wait for"


def test_leaving_a_context_is_one_wait_however_many_tensors_there_are() -> None:
    with events("sync") as seen, fused_eager():
        kept = [torch.ones(3) * i for i in range(10)]
    assert [e.data["reason"] for e in seen] == ["cut.exit"]
    assert kept[3][0] == 3


def test_an_empty_context_waits_for_nothing() -> None:
    with events("sync") as seen, fused_eager():
        pass
    assert not seen


def test_a_flush_has_the_hosts_time_before_it() -> None:
    import time

    with fused_eager(), events("flush") as seen:
        (torch.ones(3) * 2.0).sum().item()
        time.sleep(0.05)
        (torch.ones(3) * 2.0).sum().item()
    first, second = seen[0].data, seen[1].data
    assert 0.05 <= second["host"] < 0.5
    assert first["plan"] == second["plan"] or second["compiling"] == 0
    assert second["seconds"] < 0.05


def test_a_plan_is_told_once_with_regions_lines_and_bytes() -> None:
    x = torch.ones(8, 4)
    with fused_eager(cache="off"), events("plan", "flush") as seen:
        for _ in range(5):
            ((x * 2.0 + 1.0).sum()).item()
            at = line() - 1
    plans = [e.data for e in seen if e.kind == "plan"]
    flushes = [e.data for e in seen if e.kind == "flush"]
    assert len(plans) <= 2 and len(flushes) == 5
    assert {f["plan"] for f in flushes} == {p["plan"] for p in plans}
    region = plans[0]["regions"][0]
    assert region["how"] == "xla" and region["ops"] == 3
    assert region["lines"] == [
        [f"{__file__}:{at}", "", False, {"aten.mul.Tensor": 1, "aten.add.Tensor": 1, "aten.sum.default": 1}]
    ]
    assert (region["read_bytes"], region["written_bytes"], region["inner_bytes"]) == (128, 4, 256)


def test_a_failed_flush_is_told_too() -> None:
    x, index = torch.ones(4), torch.tensor([9])
    with pytest.raises(IndexError), fused_eager(), events("flush") as seen:
        x[index].sum().item()
    assert len(seen) >= 1


def test_a_module_is_told_by_the_line_that_asked_for_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    with fused_eager(), events("parameter") as seen:
        Net(), (at := line())
    assert {e.data["site"] for e in seen} == {f"{__file__}:{at}"}
    assert [e.data["name"] for e in seen] == ["weight", "bias", "weight", "bias"]
    with events("parameter") as seen:
        Net()
    assert not seen, "outside of contexts nobody watches"
