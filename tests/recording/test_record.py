"""Recording: calls become nodes over storages; views, writes and numbers land where they belong."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fused_eager import fused_eager
from fused_eager.devices.host.buffers import TABLE, buffer_of
from fused_eager.devices.storage import storage_of
from fused_eager.log import site
from fused_eager.recording import record
from fused_eager.tracing import calls
from fused_eager.tracing.opinfo import info_of
from fused_eager.tracing.stream import DeviceInput, Hole, NativeInput
from tests.semantics.programs import in_process
from tests.streams import flush_now, forget_pending, open_stream


@pytest.fixture
def inside() -> Iterator[None]:
    """An open context."""
    with fused_eager():
        yield


def recorded() -> list[str]:
    return [str(n.op) for n in open_stream().nodes]


def n(*shape: int) -> torch.Tensor:
    """Native memory (whatever it holds)."""
    return torch.empty(shape)


@pytest.mark.usefixtures("inside")
def test_an_op_is_recorded_and_its_output_is_pending() -> None:
    y = n(8) * 2
    assert recorded() == ["aten.mul.Tensor"]
    b = buffer_of(y)
    assert b is not None and b.stream is open_stream() and not b.born_native


@pytest.mark.usefixtures("inside")
def test_values_are_numbered_in_the_order_of_their_appearance() -> None:
    a, b = n(8), n(8)
    y = a + b
    z = y * a
    first, second = open_stream().nodes
    assert [u.vid for u in first.uses] == [0, 1] and first.results[0].vid == 2
    assert [u.vid for u in second.uses] == [2, 0] and second.results[0].vid == 3
    del y, z


@pytest.mark.usefixtures("inside")
def test_equal_programs_on_other_tensors_have_equal_signatures() -> None:
    signatures = []
    for _ in range(2):
        y = (n(8) * 2 + n(8)).relu()
        signatures.append([node.signature for node in open_stream().nodes])
        flush_now()
        del y
    assert signatures[0] == signatures[1]


@pytest.mark.usefixtures("inside")
def test_views_run_natively_and_read_through_the_base() -> None:
    y = n(4, 4) * 2
    z = y.t()[1:3] + 1
    assert recorded() == ["aten.mul.Tensor", "aten.add.Tensor"]
    (use,) = open_stream().nodes[1].uses
    assert use.geometry[:3] == ((2, 4), (1, 4), 1)
    del y, z


@pytest.mark.usefixtures("inside")
def test_a_write_through_a_view_makes_a_new_value_of_the_base() -> None:
    y = n(4, 4) * 2
    y[1].add_(1)
    result = open_stream().nodes[1].results[0]
    assert result.base == open_stream().nodes[0].results[0].vid
    b = buffer_of(y)
    assert b is not None and b.vid == result.vid


@pytest.mark.usefixtures("inside")
def test_a_write_of_everything_forgets_the_base() -> None:
    y = n(8) * 2
    y.zero_()
    assert open_stream().nodes[1].results[0].base is None


@pytest.mark.usefixtures("inside")
def test_numbers_are_holes_and_the_rest_is_structure() -> None:
    x = n(8)
    y, z = x * 2.5, x * 3.5
    a, b = open_stream().nodes
    assert a.scalars == [2.5] and b.scalars == [3.5]
    assert isinstance(a.args[1], Hole) and a.signature[0] == b.signature[0]  # type: ignore[index]
    s, t = x.sum(0), x.sum(0, keepdim=True)
    assert open_stream().nodes[2].signature[0] != open_stream().nodes[3].signature[0]  # type: ignore[index]
    del y, z, s, t


PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "1 and 1.0": (lambda x: x * 1, lambda x: x * 1.0),
    "1 and True": (lambda x: x * 1, lambda x: x * True),
    "0.0 and -0.0, kept": (
        lambda x: torch.nn.functional.hardtanh(x, 0.0, 1.0), lambda x: torch.nn.functional.hardtanh(x, -0.0, 1.0),
    ),
    "dims": (lambda x: x.sum(0), lambda x: x.sum(1)),
    "lists": (lambda x: x.sum((0, 1)), lambda x: x.sum((1,))),
    "dtype": (lambda x: x.sum(dtype=torch.float64), lambda x: x.sum(dtype=torch.float32)),
}  # fmt: skip


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("name", PAIRS)
def test_calls_that_differ_in_structure_or_number_differ(name: str) -> None:
    x = n(4, 4)
    kept = [program(x) for program in PAIRS[name]]
    a, b = open_stream().nodes
    differ = a.signature[0] != b.signature[0]  # type: ignore[index]
    bits = [[np.float64(s).tobytes() for s in node.scalars] for node in (a, b)]
    assert differ or bits[0] != bits[1]
    del kept


@pytest.mark.usefixtures("inside")
def test_tiny_finished_numbers_are_computed_at_once() -> None:
    step = torch.zeros(())
    step += 1
    assert not recorded() and buffer_of(step) is None and step.tolist() == 1.0
    pending = n(8).sum()
    pending += 1
    assert recorded() == ["aten.sum.default", "aten.add_.Tensor"]


@pytest.mark.usefixtures("inside")
def test_a_second_flush_reads_the_first_one_s_values_from_the_device() -> None:
    y = n(8) * 2
    flush_now()
    z = y + 1
    (item,) = open_stream().inputs
    assert isinstance(item, DeviceInput) and item.array is not None
    del z


@pytest.mark.usefixtures("inside")
def test_native_slices_are_inputs_of_their_own_size() -> None:
    x = n(100)
    y = x[40:44] * 2
    (item,) = open_stream().inputs
    assert isinstance(item, NativeInput) and item.home == (torch.float32, (4,)) and item.offset == 160
    del y


# ---- reads and writes in program order -----------------------------------------------------------------------------


def check(program: Callable[[], Any]) -> None:
    """Eager and fused give the same values."""
    expected = program()
    with fused_eager():
        actual = program()
    for e, a in zip(expected, actual, strict=True):
        assert torch.equal(a, e), (a, e)


def numpy_changes_between_two_reads() -> Any:
    memory = np.ones(64, np.float32)
    t = torch.from_numpy(memory)
    y = t * 2
    memory[:] = 5
    return y, t * 2


def numpy_memory_is_recycled() -> Any:
    return [torch.from_numpy(np.full(64, i, np.float32)) * 2 for i in range(8)]


def numpy_is_taken_after_a_read() -> Any:
    t = torch.ones(2000)
    y = t * 2
    t.numpy()[:] = 5
    return y, t + 0


def storage_is_taken_after_a_read() -> Any:
    t = torch.ones(2000)
    y = t * 2
    ctypes.memset(t.data_ptr(), 0, 8000)
    return y, t + 0


def a_draw_after_a_pending_write() -> Any:
    torch.manual_seed(0)
    x = torch.ones(2000)
    x.tolist()
    y = x * 2
    x.add_(1)
    x.normal_()
    return y, x


def a_draw_into_a_value_that_was_read_back() -> Any:
    torch.manual_seed(0)
    x = torch.ones(2000) * 2
    (x * 3).sum().item()
    y = x + 1
    x[0].item()
    x.normal_()
    return y, x


def a_slice_is_read_before_the_whole_is_written() -> Any:
    x = torch.empty(4096).fill_(1)
    x[0].item()
    y = x[:2048] * 3
    x.mul_(2)
    return y, x, x[5:9] + 1


def one_tensor_twice_in_a_list() -> Any:
    x = torch.ones(40)
    torch._foreach_add_([x, x], 1.0)
    torch._foreach_mul_([x[:20], x[10:]], 2.0)
    return (x,)


def a_list_op_writes_what_it_reads_later() -> Any:
    x, y = torch.ones(40), torch.full((40,), 2.0)
    torch._foreach_add_([x, y], [y, x])
    return x, y


PROGRAMS = [
    numpy_changes_between_two_reads, numpy_memory_is_recycled, numpy_is_taken_after_a_read,
    storage_is_taken_after_a_read, a_draw_after_a_pending_write, a_draw_into_a_value_that_was_read_back,
    a_slice_is_read_before_the_whole_is_written, one_tensor_twice_in_a_list, a_list_op_writes_what_it_reads_later,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program_order(program: Callable[[], Any]) -> None:
    check(program)


def test_memory_that_is_freed_after_a_read() -> None:
    code = """
        import torch
        from fused_eager import fused_eager
        with fused_eager():
            t = torch.empty(2000).fill_(1)
            t.tolist()
            y = t * 2
            t.untyped_storage().resize_(0)
        print(y.sum().item())
    """
    assert in_process(code).strip() == "4000.0"


def test_the_default_dtype_of_a_call_is_the_one_of_its_time() -> None:
    a = torch.arange(40)
    with fused_eager():
        before = a / 2
        torch.set_default_dtype(torch.float64)
        try:
            after = a / 2
        finally:
            torch.set_default_dtype(torch.float32)
    assert (before.dtype, after.dtype) == (torch.float32, torch.float64)
    assert after.tolist() == [i / 2 for i in range(40)]


REFUSED: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.ones(2, 2) @ torch.ones(2, 2).double(),
    "addmm": lambda: torch.addmm(torch.ones(2), torch.ones(2, 2), torch.ones(2, 2).double()),
    "mv": lambda: torch.mv(torch.ones(2, 2), torch.ones(2).double()),
    "index_add": lambda: torch.ones(4).index_add(0, torch.tensor([1, 2]), torch.ones(2).double()),
    "nll_loss": lambda: torch.nn.functional.nll_loss(torch.ones(3, 4), torch.ones(3).int()),
    "argmax of bool": lambda: torch.ones(20, dtype=torch.bool).argmax(),
    "relu of bool": lambda: torch.ones(20, dtype=torch.bool).relu(),
    "partial overlap": lambda: (lambda x: x[1:].add_(x[:-1]))(torch.ones(40)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused_at_the_op(name: str) -> None:
    with pytest.raises(RuntimeError) as expected:
        REFUSED[name]()
    with fused_eager(), pytest.raises(RuntimeError) as told:
        REFUSED[name]()
    assert type(told.value) is type(expected.value) and str(expected.value) in str(told.value)


@pytest.mark.parametrize("size", [40, 40_000], ids=["in torch's memory", "in the device's memory"])
def test_a_result_can_be_resized(size: int) -> None:
    with fused_eager():
        y = torch.ones(size) * 2
        y.resize_(2 * size)
    assert y.shape == (2 * size,) and y[:size].eq(2).all()


def test_an_interrupted_recording_leaves_every_tensor_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        describe = staticmethod(site.describe)

        @staticmethod
        def here() -> None:
            raise KeyboardInterrupt

    x = torch.ones(40)
    try:
        with fused_eager():
            y = x * 3
            with monkeypatch.context() as m:
                m.setattr(record, "site", Interrupting)
                with pytest.raises(KeyboardInterrupt):
                    x.add_(1)
            assert y.tolist() == [3.0] * 40
            assert x.tolist() == [1.0] * 40
    finally:
        forget_pending()


def test_calls_remembered_by_two_threads_at_once_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2)
    made: list[calls.Call] = []
    original = calls.Call

    def both_at_once(*args: Any) -> calls.Call:
        meet.wait(30)
        made.append(original(*args))
        return made[-1]

    def work(op: Any) -> None:
        x = torch.ones(31, 3)
        calls.new_call(info_of(op), (str(op), "a test"), [x], (x,), {})

    monkeypatch.setattr(calls, "Call", both_at_once)
    ops = (torch.ops.aten.sinh.default, torch.ops.aten.cosh.default)
    threads = [threading.Thread(target=work, args=(op,)) for op in ops]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len({call.structure for call in made}) == len(made) == 2


@pytest.mark.parametrize("options", [{}, {"native": "measured"}, {"mode": "strict"}, {"log": "ops"}], ids=str)
def test_tensors_that_have_no_shape_or_no_strides(options: dict[str, str]) -> None:
    """Nested ones, and parameters of lazy modules; also as the first op after a read, by which a segment is known."""

    def program() -> list[object]:
        out: list[object] = []
        for _ in range(3):
            out.append((torch.ones(3) * 2).sum().item())
            out.append((torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]) * 2).size(0))
            out.append((torch.ones(3) * 2).sum().item())
            lazy = torch.nn.LazyLinear(4).to(torch.float64)
            out.append(lazy(torch.ones(2, 3, dtype=torch.float64)).shape)
            out.append((torch.eye(3).to_sparse_csr() * 2).values().tolist())
        return out

    wanted = program()
    with fused_eager(**options):  # type: ignore[arg-type]
        assert program() == wanted


def test_a_value_that_is_read_element_by_element_comes_to_native_memory() -> None:
    """Each number that is taken from XLA's memory costs what bringing all of them home does; a few stay there."""
    with fused_eager(native="never"):
        x, loss = torch.arange(100.0) * 2, torch.ones(2) * 3
        assert [float(a) for a in x] == [2.0 * i for i in range(100)]
        assert [float(a) for a in loss] == [3.0, 3.0]
        assert storage_of(x)._cdata not in TABLE
        assert storage_of(loss)._cdata in TABLE
        x.add_(1)
        assert float(x[7]) == 15.0


def test_losses_of_many_steps_are_many_values() -> None:
    """Wherever in memory they come to lie, none is brought to native memory."""
    with fused_eager(compile="wait", native="never"):
        for step in range(40):
            loss = torch.ones(2).mul_(3).add_(step)
            assert [float(a) for a in loss] == [3.0 + step] * 2
            assert storage_of(loss)._cdata in TABLE
