"""Collectives of CPU tensors in a context: what runs before them, and what the event log, the report and the trace say
of them. A group of one rank is enough; what several do is in `tests/distributed`."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from fused_eager import fused_eager, report
from fused_eager.log.events import LOG
from fused_eager.reporting import perfetto
from fused_eager.reporting.reading import Process
from tests.streams import events, open_stream, stable_shapes

MODES: list[dict[str, Any]] = [{}, {"mode": "strict"}, {"mode": "debug"}]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with stable_shapes():
        yield
    dist.destroy_process_group()


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = (x @ x).tanh()
    return x


def test_what_it_reads_runs_first_and_the_rest_in_a_region_of_its_own() -> None:
    m = torch.eye(8)
    with fused_eager(), events("flush") as seen:
        rest, x = chain(m), torch.ones(6) * 3
        dist.all_reduce(x)
        assert [(e.data["reason"], e.data["regions"]) for e in seen] == [("sync.collective", 2)]
        assert x.tolist() == [3.0] * 6 and torch.equal(rest, chain(m))


def test_what_does_not_concern_it_stays_pending() -> None:
    m, x = torch.eye(8), torch.ones(2000)
    with fused_eager(), events("flush") as seen:
        rest = chain(m)
        dist.all_reduce(x)  # finished long ago
        assert not seen and len(open_stream().nodes) >= 12
        late = x + 1
        dist.all_reduce(x)  # which `late` reads, and so is computed before
        assert len(seen) == 1 and not open_stream().nodes
        assert late.sum().item() == 4000 and torch.equal(rest, chain(m))


@pytest.mark.parametrize("options", MODES, ids=str)
def test_each_leaves_an_event(options: dict[str, Any]) -> None:
    x = torch.ones(6)
    with fused_eager(**options), events("collective") as seen, events("island") as islands:
        dist.all_reduce(x * 2)
        parts = [torch.empty(6)]
        work = dist.all_gather(parts, x + 1, async_op=True)
        assert work is not None and work.wait() and work.is_completed()
        total = functional.all_reduce(x * 3, "sum", dist.group.WORLD)
        found: list[Any] = [None]
        dist.all_gather_object(found, {"rank": 0})
        dist.barrier()
        assert parts[0].tolist() == [2.0] * 6 and total.tolist() == [3.0] * 6 and found == [{"rank": 0}]
    by_op = {e.data["op"]: e.data for e in seen}
    assert set(by_op) == {"allreduce_", "allgather_", "barrier"} and len(seen) == 6
    assert [e.data["sequence"] for e in sorted(seen, key=lambda e: e.data["sequence"])] == list(range(6))
    for data in by_op.values():
        assert data["ranks"] == 1 and data["seconds"] >= data["wait_s"] >= 0 and data["fetch_s"] >= 0
        assert "test_collectives.py:" in data["site"]
    assert by_op["allreduce_"]["bytes"] == 24
    assert not [e for e in islands if e.data["op"].startswith("c10d.")]


def test_the_report_and_the_trace_have_them() -> None:
    with fused_eager():
        LOG.clear()
        dist.all_reduce(torch.ones(6) * 2)
        assert "1 x allreduce_ at" in str(report())
        process = Process(start={"rank": 3}, events=LOG.events)
    rows = [row for row in perfetto.trace([process])["traceEvents"] if row.get("cat") == "collective"]
    assert [row["ph"] for row in rows] == ["b", "e"] and rows[0]["id"] == rows[1]["id"]
    assert rows[0]["args"]["bytes"] == 24 and "allreduce at" in rows[0]["name"]


def test_a_future_has_what_the_group_has_put_there() -> None:
    with fused_eager():
        x = torch.ones(6) * 2
        future = dist.all_reduce(x, async_op=True).get_future()
        assert future.wait()[0].data_ptr() == x.data_ptr() and x.tolist() == [2.0] * 6


def test_a_functional_collective_is_fused_with_what_is_before_it() -> None:
    x = torch.ones(6, requires_grad=True)
    with fused_eager(), events("flush") as seen:
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD) * 3
        y.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [6.0] * 6
    assert seen[0].data["reason"] == "sync.collective" and seen[0].data["ops"] >= 2


def test_works_are_let_go() -> None:
    def one() -> weakref.ref[Any]:
        x = torch.ones(6) * 2
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        return weakref.ref(work)

    with fused_eager():
        ref = one()
        gc.collect()
        assert ref() is None


def test_other_threads_go_on_meanwhile() -> None:
    def there() -> None:
        with fused_eager():
            assert (torch.ones(3) * 2).tolist() == [2.0] * 3

    with fused_eager():
        x = torch.ones(6) * 2
        work = dist.all_reduce(x, async_op=True)
        thread = threading.Thread(target=there)
        thread.start()
        thread.join(20)
        assert work is not None and work.wait() and not thread.is_alive()


