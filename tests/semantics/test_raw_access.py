"""Raw access: whatever reads a tensor's memory sees finished values, and whatever writes it is seen."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fused_eager import sync

from .programs import check, in_process


def pending(n: int = 4) -> torch.Tensor:
    """0, 2, 4, ... computed in the mode."""
    return torch.arange(float(n)) * 2


def finished(n: int = 4, value: float = 1.0) -> torch.Tensor:
    """A tensor whose memory holds its values already."""
    t = torch.empty(n).fill_(value)
    sync()
    return t


def _const_pointer(t: torch.Tensor) -> int:
    return t.const_data_ptr() if hasattr(t, "const_data_ptr") else t.data_ptr()  # type: ignore[no-any-return]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t[1].item(),
    "tolist": lambda t: t.tolist(),
    "tolist of a view": lambda t: t.view(2, 2).t().tolist(),
    "bool": lambda t: bool(t[1]),
    "int": lambda t: int(t[1]),
    "float": lambda t: float(t[1]),
    "complex": lambda t: complex(t[1]),
    "index": lambda t: [10, 20, 30][t[1].long()],
    "if": lambda t: "yes" if t[1] > 1 else "no",
    "iterate": lambda t: [float(x) for x in t],
    "contains": lambda t: (2.0 in t, 3.0 in t),
    "len and range": lambda t: list(range(int(t.sum()))),
    "numpy": lambda t: t.numpy().tolist(),
    "numpy of a view": lambda t: t[1:].numpy().tolist(),
    "numpy force": lambda t: t.numpy(force=True).tolist(),
    "array": lambda t: t.__array__().tolist(),
    "asarray": lambda t: np.asarray(t).tolist(),
    "np.array with dtype": lambda t: np.array(t, dtype=np.int32).tolist(),
    "numpy function": lambda t: np.add(t, 1).tolist(),
    "np.stack of tensors": lambda t: np.stack([t, t + 1]).tolist(),
    "np.float32": lambda t: float(np.float32(t[1])),
    "data_ptr": lambda t: list((ctypes.c_float * 4).from_address(t.data_ptr())),
    "const_data_ptr": lambda t: list((ctypes.c_float * 4).from_address(_const_pointer(t))),
    "data_ptr of a view": lambda t: list((ctypes.c_float * 2).from_address(t[2:].data_ptr())),
    "untyped_storage": lambda t: list(t.untyped_storage())[4:8],
    "untyped_storage.tolist": lambda t: t.untyped_storage().tolist(),
    "storage": lambda t: t.storage().tolist(),
    "storage of a view": lambda t: t[1:].storage()[0],
    "storage bytes": lambda t: bytes(t.untyped_storage()),
    "dlpack to numpy": lambda t: np.from_dlpack(t).tolist(),
    "dlpack capsule": lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "dlpack to torch": lambda t: torch.from_dlpack(t),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle a view": lambda t: pickle.loads(pickle.dumps(t[1:3])),
    "copy": lambda t: copy.copy(t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "deepcopy of a list": lambda t: copy.deepcopy([t, t[1:], {"a": t}]),
    "share_memory_": lambda t: (t.share_memory_(), t.is_shared()),
    "repr": lambda t: repr(t),
    "repr of a view": lambda t: repr(t.view(2, 2)[0]),
    "str": lambda t: str(t),
    "f-string": lambda t: f"{t}",
    "f-string number": lambda t: f"{t[1]:.3f} {t[1]:6}",
    "format": lambda t: f"{t} {t!r}",
    "torch.tensor of pending": lambda t: torch.tensor([t[0], t[1], 3.0]),
    "as_tensor of a list": lambda t: torch.as_tensor([t[0], t[1]]),
    "new_tensor": lambda t: t.new_tensor([t[1], 2.0]),
    "equal": lambda t: torch.equal(t, t.clone()),
    "allclose": lambda t: torch.allclose(t, t + 1e-9),
    "nonzero": lambda t: torch.nonzero(t),
    "mask": lambda t: t[t > 1],
    "unique": lambda t: torch.unique(t),
    "masked assignment": lambda t: t.masked_fill(t > 1, -1.0),
    "min max": lambda t: (min(t).item(), max(t).item(), sorted(t.tolist())),
    "is_set_to": lambda t: (t.is_set_to(t), t.is_set_to(t.clone()), t.view(4).is_set_to(t)),
    "apply_": lambda t: t.apply_(lambda v: v + 1),
    "map_": lambda t: t.map_(t.clone(), lambda a, b: a + 10 * b),
    "set_rng_state": lambda t: torch.set_rng_state(torch.get_rng_state().clone()),
    "torch.save": lambda t: _saved(t),
    "torch.save of a module": lambda t: _saved(torch.nn.Linear(2, 2).state_dict()),
    "typed storage": lambda t: t._typed_storage().tolist(),
    "storage clone": lambda t: t.untyped_storage().clone().tolist(),
    "ndarray view": lambda t: t.numpy().view(np.int32).tolist(),
    "tensor constructor": lambda t: torch.Tensor(t),
    "numpy index": lambda t: np.arange(10)[t.long()].tolist(),
    "numpy scalar arithmetic": lambda t: t * np.float64(1.5) + np.arange(4.0, dtype=np.float32),
    "memory view": lambda t: memoryview(t.numpy()).tolist(),
    "hash and identity": lambda t: (hash(t) == id(t), t in {t}),
    "item of an empty slice": lambda t: t[4:].tolist(),
    "storage data_ptr": lambda t: t.untyped_storage().data_ptr() == t.data_ptr(),
    "is_pinned": lambda t: t.is_pinned(),
    "element_size": lambda t: (t.element_size(), t.nbytes, t.numel(), t.nelement(), t.ndimension()),
}


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore")
def test_read(name: str, mode: str) -> None:
    check(lambda: READS[name](pending()), mode)


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore")
def test_read_after_inplace(name: str, mode: str) -> None:
    def program() -> Any:
        t = torch.zeros(4)
        t.add_(torch.arange(4.0)).mul_(2)
        return READS[name](t)

    check(program, mode)


@pytest.mark.parametrize("name", ["repr", "numpy", "tolist", "deepcopy", "pickle", "item", "f-string number"])
def test_read_twice_with_a_write_between(name: str, mode: str) -> None:
    def program() -> Any:
        t = pending()
        first = READS[name](t)
        first = first.clone() if isinstance(first, torch.Tensor) else first
        t.add_(1)
        return first, READS[name](t), t

    check(program, mode)


# ---- memory that somebody else writes ----------------------------------------------------------------------------

N = 2000  # more than what is copied rather than waited for


def numpy_mutated_before_the_flush() -> Any:
    a = np.ones(N, np.float32)
    y = torch.from_numpy(a) + 1
    a[:] = 7
    return y


def numpy_mutated_between_two_reads() -> Any:
    a = np.ones(N, np.float32)
    t = torch.from_numpy(a)
    x = t + 1
    a[:] = 5
    return x, t + 1


def numpy_temporaries_in_a_loop() -> Any:
    return [torch.from_numpy(np.full(8, i, np.float32)) * 2 for i in range(6)]


def numpy_refilled_batch() -> Any:
    a = np.zeros(8, np.float32)
    t = torch.from_numpy(a)
    out = []
    for i in range(5):
        a[:] = i
        out.append((t * 2).sum())
    return out


def numpy_view_then_torch_write() -> Any:
    t = pending(N)
    view = t.numpy()
    t.add_(1)
    return view.tolist()


def numpy_view_then_torch_write_through_a_view() -> Any:
    t = pending(N)
    view = t.numpy()
    t.view(2, -1)[1].mul_(3)
    return view.tolist()


def numpy_view_from_before_the_write_of_a_base() -> Any:
    t = torch.zeros(N)
    view = t[10:].numpy()
    t.add_(1)
    return view.tolist()


def numpy_view_written_after_a_pending_read() -> Any:
    x = finished(N)
    y = x + 1
    x.numpy()[:] = 5
    return y, x + 1


def numpy_view_of_a_pending_tensor_written_after_a_pending_read() -> Any:
    x = pending(N)
    y = x + 1
    x.numpy()[:] = 5
    return y, x + 1


def array_written_after_a_pending_read() -> Any:
    x = finished(N)
    y = x + 1
    np.asarray(x)[:] = 5
    return y


def dlpack_written_after_a_pending_read() -> Any:
    x = finished(N)
    y = x + 1
    torch.from_dlpack(x).untyped_storage().fill_(0)
    return y


def dlpack_alias_written_by_torch() -> Any:
    x = finished(N)
    alias = torch.from_dlpack(x)
    y = x + 1
    alias.fill_(5)
    return y, x + 1, alias * 1


def dlpack_original_written_then_alias_read() -> Any:
    x = pending(N)
    alias = torch.from_dlpack(x)
    x.add_(1)
    return alias * 1, alias.tolist()


def numpy_alias_of_torch_memory_as_tensor() -> Any:
    x = pending(N)
    alias = torch.from_numpy(x.numpy())
    x.add_(1)
    first = alias * 1
    alias.mul_(2)
    return first, x * 1, x.tolist()


def storage_filled_after_a_pending_read() -> Any:
    x = finished(N)
    y = x + 1
    x.untyped_storage().fill_(0)
    return y, x + 1


def storage_kept_and_filled() -> Any:
    x = finished(N)
    s = x.untyped_storage()
    y = x + 1
    s.fill_(0)
    return y, x + 1


def storage_item_set() -> Any:
    x = finished(N)
    s = x.storage()
    y = x + 1
    s[0] = 9.0
    return y, x + 1


def storage_copied_into() -> Any:
    x = finished(N)
    y = x + 1
    x.untyped_storage().copy_(torch.full((N,), 3.0).untyped_storage())
    return y, x + 1


def storage_read_after_a_write() -> Any:
    x = finished(4)
    s = x.untyped_storage()
    x.add_(1)
    return s.tolist()


def pointer_written_after_a_pending_read() -> Any:
    x = finished(N)
    y = x + 1
    ctypes.memset(x.data_ptr(), 0, 4 * N)
    return y, x + 1


def pointer_kept_and_written() -> Any:
    x = finished(N)
    p = x.data_ptr()
    y = x + 1
    ctypes.memset(p, 0, 4 * N)
    return y, x + 1


def pointer_read_after_a_write() -> Any:
    x = finished(N)
    p = x.data_ptr()
    x.add_(1)
    return list((ctypes.c_float * N).from_address(p))


def pointer_stays() -> Any:
    x = finished(N)
    p = x.data_ptr()
    x.add_(1)
    return x.data_ptr() == p


def applied_after_a_pending_read() -> Any:
    x = finished(N)
    y = x + 1
    x.apply_(lambda v: 0.0)
    return y, x + 1


def shared_memory_written_by_numpy() -> Any:
    x = torch.ones(N).share_memory_()
    y = x + 1
    x.numpy()[:] = 3
    return y, x + 1


def shared_after_a_pending_read() -> Any:
    x = finished(N)
    y = x + 1
    x.share_memory_()
    z = x + 2
    x.fill_(4)
    return y, z, x


def bytearray_mutated() -> Any:
    b = bytearray(16)
    t = torch.frombuffer(b, dtype=torch.uint8)
    y = t + 1
    b[0] = 100
    return y, t + 1


def bytearray_written_by_torch() -> Any:
    b = bytearray(16)
    t = torch.frombuffer(b, dtype=torch.uint8)
    t.add_(3)
    return list(b)


def from_numpy_written_by_torch() -> Any:
    a = np.zeros(N, np.float32)
    t = torch.from_numpy(a)
    t.add_(1)
    first = a.tolist()
    t[10:].mul_(4)
    return first, a.tolist()


def pickle_shares_then_splits() -> Any:
    t = pending(8)
    a, b = pickle.loads(pickle.dumps((t, t[2:4])))
    a.add_(1)
    return a, b


def copy_shares() -> Any:
    t = pending(8)
    c = copy.copy(t)
    t.add_(1)
    return c, t


def tolist_of_many() -> Any:
    ts = [torch.full((3,), float(i)) + i for i in range(8)]
    return [t.tolist() for t in ts]


def save_and_go_on() -> Any:
    t = pending(8)
    t.add_(1)
    saved = _saved({"t": t, "v": t[2:]})
    t.add_(1)
    saved["t"].mul_(2)
    return saved, t


OTHERS = [
    numpy_mutated_before_the_flush, numpy_mutated_between_two_reads, numpy_temporaries_in_a_loop, numpy_refilled_batch,
    numpy_view_then_torch_write, numpy_view_then_torch_write_through_a_view,
    numpy_view_from_before_the_write_of_a_base, numpy_view_written_after_a_pending_read,
    numpy_view_of_a_pending_tensor_written_after_a_pending_read, array_written_after_a_pending_read,
    dlpack_written_after_a_pending_read, dlpack_alias_written_by_torch, dlpack_original_written_then_alias_read,
    numpy_alias_of_torch_memory_as_tensor, storage_filled_after_a_pending_read, storage_kept_and_filled,
    storage_item_set, storage_copied_into, storage_read_after_a_write,
    pointer_written_after_a_pending_read, pointer_kept_and_written, pointer_read_after_a_write, pointer_stays,
    applied_after_a_pending_read, shared_memory_written_by_numpy, shared_after_a_pending_read, bytearray_mutated,
    bytearray_written_by_torch, from_numpy_written_by_torch, pickle_shares_then_splits, copy_shares, tolist_of_many,
    save_and_go_on,
]


@pytest.mark.parametrize("program", OTHERS, ids=lambda p: p.__name__)
@pytest.mark.filterwarnings("ignore")
def test_memory_that_others_see(program: Callable[[], Any], mode: str) -> None:
    check(program, mode)


def test_numpy_view_from_before_the_context(mode: str) -> None:
    def program() -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            t = torch.zeros(N)
            view = t.numpy()
        t.add_(1)
        return view.tolist()

    check(program, mode)


def test_memory_freed_after_a_pending_read(mode: str) -> None:
    said = in_process(f"""
        import torch
        from fused_eager import fused_eager, sync
        with fused_eager(mode={mode!r}):
            x = torch.empty(2_000_000).fill_(1.0)
            sync()
            y = x + 1
            x.untyped_storage().resize_(0)
            z = torch.empty(2_000_000)
            z.numpy()[:] = 9.0
            print(y.min().item(), y.max().item())
    """)
    assert said == "2.0 2.0\n"
