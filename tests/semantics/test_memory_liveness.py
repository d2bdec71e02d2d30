"""Liveness: dying tensors are neither computed nor kept, and what outlives the context is ordinary."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fused_eager import fused_eager, sync
from fused_eager.devices.host.buffers import TABLE
from fused_eager.executing.deferred_checks import AHEAD, DEFERRED


def test_a_weak_reference_dies_at_once(mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.ones(3) * 2
        y = x + 1
        seen = weakref.ref(x)
        del x
        assert seen() is None
        assert y.tolist() == [3.0] * 3


def test_what_died_is_not_computed() -> None:
    with fused_eager(mode="fused"):
        x = torch.ones(3) * 2
        sync()
        from fused_eager.frontends.context.threads import current_door

        door = current_door()
        assert door is not None
        dead = torch.linalg.svdvals(torch.ones(2, 2) * 3)
        del dead
        y = x + 1
        live = [b for b in door.stream.pending.values() if b.is_alive()]
        assert len(live) <= 2
        assert y.tolist() == [3.0] * 3


def test_storages_leave_the_table(mode: str) -> None:
    gc.collect()
    before = set(TABLE)
    with fused_eager(mode=mode):
        x = torch.ones(3)
        for _ in range(30):
            x = x * 1.5
            sync()
        assert len(set(TABLE) - before) <= 2
    assert not set(TABLE) - before


@pytest.mark.parametrize("bounds", [True, False])
def test_a_loop_that_never_syncs_keeps_nothing(bounds: bool, mode: str) -> None:
    table = nn.Embedding(16, 4)
    w = torch.zeros(4)
    with fused_eager(mode=mode, check_bounds=bounds, max_pending=16):
        sizes = []
        for i in range(60):
            batch = torch.from_numpy(torch.full((8,), i % 16).numpy())
            w = w + table.weight.detach()[0] * 0 + torch.nn.functional.embedding(batch, table.weight.detach()).sum(0)
            del batch
            sizes.append((len(DEFERRED.runs), len(TABLE)))
            assert len(DEFERRED.launches) <= AHEAD
        late, early = sizes[-1], sizes[len(sizes) // 2]
        assert all(a <= b + 8 for a, b in zip(late, early, strict=True)), (early, late)
    assert torch.isfinite(w).all()


def test_memory_of_a_dead_input_is_freed(mode: str) -> None:
    with fused_eager(mode=mode):
        freed = []
        total = torch.zeros(())
        for i in range(6):
            x = torch.empty(1000).fill_(float(i))
            sync()
            weakref.finalize(x.untyped_storage(), freed.append, i)
            total = total + (x * 2).sum()
            del x
        assert total.item() == 30000.0
        sync()
        gc.collect()
        assert freed == list(range(6))


def test_intermediates_of_a_long_chain_do_not_pile_up() -> None:
    with fused_eager(mode="fused"):
        x = torch.ones(1000)
        for _ in range(50):
            x = x + 1
        from fused_eager.frontends.context.threads import current_door

        door = current_door()
        assert door is not None
        assert sum(b.is_alive() for b in door.stream.pending.values()) == 1
        assert x[0].item() == 51.0


def test_gradients_and_graphs_die(mode: str) -> None:
    with fused_eager(mode=mode):
        w = torch.ones(3, requires_grad=True)
        y = (w * 2).exp()
        seen = weakref.ref(y)
        node = weakref.ref(y.grad_fn) if hasattr(y.grad_fn, "__weakref__") else None
        y.sum().backward()
        del y
        gc.collect()
        assert seen() is None and (node is None or node() is None)
        g = weakref.ref(w.grad)
        w.grad = None
        assert g() is None


def test_tensors_are_ordinary_afterwards(mode: str) -> None:
    with fused_eager(mode=mode):
        m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        x = torch.ones(8, 4) * torch.arange(8.0).unsqueeze(1)
        y = m(x)
        v = y[2:, 1]
        loss = y.pow(2).sum()
    loss.backward()
    opt = torch.optim.Adam(m.parameters())
    opt.step()
    y.detach().add_(1)
    v.detach().numpy()[0] = 5
    assert y[2, 1].item() == 5.0
    x.resize_(2000, 4)
    x.untyped_storage().resize_(16)
    file = io.BytesIO()
    torch.save(copy.deepcopy(m).state_dict(), file)
    assert type(y) is torch.Tensor and y.data_ptr() % 4 == 0
    x.set_(torch.ones(3).untyped_storage(), 0, (3,))
    y.detach().share_memory_()
    assert torch.isfinite(y).all()


def test_growing_a_result_afterwards(mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.ones(4) * 2
    x.resize_(100)
    assert x[:4].tolist() == [2.0] * 4
    out = torch.add(torch.ones(200), 1, out=x)
    assert out.tolist() == [2.0] * 200


def test_results_are_aligned_and_contiguous_in_their_own_memory(mode: str) -> None:
    with fused_eager(mode=mode):
        ts = [torch.arange(float(n)) + 1 for n in (1, 3, 5, 17, 100)]
    pointers = [t.data_ptr() for t in ts]
    assert len(set(pointers)) == len(ts) and all(t.untyped_storage().nbytes() == t.numel() * 4 for t in ts)
    for t in ts:
        t.zero_()
    assert all(not t.any() for t in ts)


def test_two_results_never_share_memory(mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.ones(2000)
        a, b, c = x * 2, x * 2, x + 0
        d = x.clone()
        e, f = torch.zeros(2000), torch.zeros(2000)
    for t, value in ((a, 1), (b, 2), (c, 3), (d, 4), (e, 5), (f, 6), (x, 7)):
        t.fill_(value)
    assert [t[1999].item() for t in (a, b, c, d, e, f, x)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_clone_of_finished_memory_is_a_copy(mode: str) -> None:
    x = torch.empty(2000).fill_(1.0)
    with fused_eager(mode=mode):
        c = x.clone()
        p = x + 0
        q = x.view(20, 100).t().contiguous()
        r = torch.cat([x])
    x.fill_(9.0)
    assert {t.flatten()[7].item() for t in (c, p, q, r)} == {1.0}


def test_memory_written_after_the_context_by_others(mode: str) -> None:
    x = torch.empty(200_000).fill_(1.0)
    with fused_eager(mode=mode):
        y = x * 2 + 1
    x.fill_(100.0)
    assert y.min().item() == 3.0 and y.max().item() == 3.0


def test_python_attributes_and_identity(mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.ones(3)
        x.mark = "mine"  # type: ignore[attr-defined]
        same: Any = x.add_(1)
        assert same is x and same.mark == "mine" and (x + 1) is not x
        keyed = {x: 1}
        x.mul_(2)
        assert keyed[x] == 1
    assert x.tolist() == [4.0] * 3
