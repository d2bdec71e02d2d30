"""C++ that reads memory before the dispatcher is asked: composites, lists of tensors, and what is said of the rest."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_eager import fused_eager, report

from .programs import check


def pending(n: int = 4) -> torch.Tensor:
    """0, 2, 4, ... computed in the mode."""
    return torch.arange(float(n)) * 2


def whole(*numbers: int) -> torch.Tensor:
    """Pending integers."""
    return torch.tensor(numbers) * 1


def coo(**options: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(whole(0, 1, 2).view(1, 3), pending(3), **options).to_dense()


def _scrambled_beside_a_reader() -> Any:
    """What is to read the old value gets it, though C++ writes the memory itself."""
    state = torch.zeros(3, 30, dtype=torch.long)
    later = state + 1
    torch._sobol_engine_initialize_state_(state, 3)
    return later, state


def _saved_without_data(make: Callable[[], Any]) -> bool:
    file = io.BytesIO()
    with torch.serialization.skip_data():
        torch.save(make(), file)
    return len(file.getvalue()) > 0


def _load_an_invalid_one() -> None:
    bad = torch.sparse_coo_tensor(whole(0, 4, 8).view(1, 3), pending(3), (5,), check_invariants=False)
    file = io.BytesIO()
    torch.save(bad, file)
    file.seek(0)
    torch.load(file)


def _csr(**options: Any) -> torch.Tensor:
    return torch.sparse_csr_tensor(whole(0, 1, 2), whole(0, 1), pending(2), **options).to_dense()


def _lazily_cloned() -> Any:
    x = pending()
    y = torch._lazy_clone(x)
    y.add_(1)
    return x, y


def _in_inference_mode() -> Any:
    with torch.inference_mode():
        first = torch.meshgrid(pending(2), pending(3), indexing="xy")[0]
        return first.tolist(), torch.quantile(pending(), whole(1).float()).tolist()


PROGRAMS: dict[str, Callable[[], Any]] = {
    "sobol": lambda: torch.quasirandom.SobolEngine(3).draw(4),
    "sobol, scrambled": lambda: torch.quasirandom.SobolEngine(3, scramble=True, seed=1).fast_forward(2).draw(4),
    "sobol beside a reader": _scrambled_beside_a_reader,
    "meshgrid": lambda: torch.meshgrid(pending(2), pending(3), indexing="ij"),
    "meshgrid of a matrix": lambda: torch.meshgrid(pending().view(2, 2), pending(3)),
    "meshgrid of a matrix, indexing": lambda: torch.meshgrid(pending().view(2, 2), pending(3), indexing="xy"),
    "tensor_split": lambda: torch.tensor_split(pending(), whole(1, 3)),
    "quantile": lambda: torch.quantile(pending(), whole(0, 1).float()),
    "nanquantile": lambda: torch.nanquantile(pending(), whole(1).float()),
    "quantile under vmap": lambda: torch.vmap(lambda t: torch.quantile(t, whole(1).float()))(pending().view(2, 2)),
    "in inference mode": lambda: _in_inference_mode(),
    "quantile out of range": lambda: torch.quantile(pending(), whole(2).float()),
    "nested view": lambda: [
        torch.nested.as_nested_tensor(pending().view(2, 2), dtype=dtype).unbind() for dtype in (None, torch.float64) * 2
    ],
    "reshape from tensor": lambda: torch._reshape_from_tensor(pending(), whole(2, 2)),
    "coo": lambda: coo(size=(5,)),
    "coo without a size": lambda: coo(),
    "coo, checked": lambda: coo(size=(5,), check_invariants=True),
    "coo out of range": lambda: coo(size=(2,), check_invariants=True),
    "coo of lists": lambda: torch.sparse_coo_tensor([[whole(1)[0], 0]], [pending()[1], 3.0], (4,)).to_dense(),
    "csr": lambda: (_csr(), _csr(size=(2, 2), check_invariants=True)),
    "csr out of range": lambda: _csr(size=(2, 1), check_invariants=True),
    "validate coo": lambda: torch._validate_sparse_coo_tensor_args(whole(0, 1, 2).view(1, 3), pending(3), (5,)),
    "validate csr": lambda: torch._validate_sparse_csr_tensor_args(whole(0, 1, 2), whole(0, 1), pending(2), (2, 2)),
    "load an invalid one": _load_an_invalid_one,
    "skip_data": lambda: _saved_without_data(pending),
    "lazy clone": _lazily_cloned,
    "tensor of numbers": lambda: torch.tensor([pending()[1], 2.0]),
    "tensor of matrices": lambda: torch.tensor([[pending()[1].long(), 1], [2, whole(5)[0]]]),
    "tensor of bools": lambda: torch.tensor([pending()[1] > 1, True]),
    "tensor of complex ones": lambda: torch.tensor([pending()[1] * 1j]),
    "tensor of halves": lambda: (torch.tensor((pending()[0].half(),)), torch.tensor([pending()[1].bfloat16()])),
    "tensor of vectors": lambda: torch.tensor([pending(), pending() + 1]),
    "tensor of single ones": lambda: torch.tensor([pending()[1:2], pending()[2:3]]),
    "as_tensor": lambda: (torch.as_tensor([pending()[1]]), torch.as_tensor(pending())),
    "asarray": lambda: (torch.asarray([pending()[1], 1]), torch.asarray(pending(), copy=True)),
    "set_rng_state": lambda: (torch.random.set_rng_state(torch.get_rng_state().clone()), torch.rand(2)),
    "dlpack": lambda: (torch.from_dlpack(pending()), torch.from_dlpack(torch.to_dlpack(pending()))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_composite(name: str, mode: str) -> None:
    check(PROGRAMS[name], mode, versions=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sobol", "meshgrid of a matrix", "tensor of numbers", "coo, checked"])
def test_composite_with_the_follower_in_python(name: str) -> None:
    check(PROGRAMS[name], "fused", versions=False, follower="python")


def test_those_that_need_not_read_stay_fused() -> None:
    def told() -> list[str]:  # of other tests in this process as well
        return [line for line in str(report()).splitlines() if "meshgrid" in line]

    before = told()
    with fused_eager(compile="wait", native="never"):
        x = pending(3)
        first, _ = torch.meshgrid(x, x, indexing="ij")
        total = (first * 2).sum()
        total = total.item()
    assert total == 36.0
    assert told() == before


def test_a_refusal_names_the_line_the_call_and_the_value() -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer") as raised, fused_eager(compile="wait"):
        state = torch.get_rng_state() * 1
        torch.Generator().set_state(state)
    said = str(raised.value) + "".join(getattr(raised.value, "__notes__", ()))
    assert "test_composites.py:" in said and "torch.Generator().set_state(state)" in said
    assert "`state` (made by aten.mul" in said and "sync()" in said


def test_other_errors_get_no_note() -> None:
    with pytest.raises(RuntimeError, match="shape") as raised, fused_eager():
        torch.ones(3).view(2)
    assert not getattr(raised.value, "__notes__", ())


def test_an_op_of_the_programs_that_refuses_its_arguments_runs_once(mode: str) -> None:
    calls: list[int] = []

    @torch.library.custom_op(f"tests_composites::refuses_{mode}", mutates_args=())
    def refuses(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        raise RuntimeError("Expected a value of type 'Tensor' for argument 'y' but instead found type 'int'.")

    with pytest.raises(RuntimeError, match="argument 'y'"), fused_eager(mode=mode):
        refuses(torch.ones(3) * 2)
    assert calls == [1]
