"""`fused_eager.export`: a folder that plain JAX runs, and that loads again as a callable on tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fused_eager import Exported, ExportError, export

from .programs import GPT, Residual

pytest.importorskip("flatbuffers", reason="JAX writes programs with it (the extra `export`)")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["fused_eager"] = None
sys.path.insert(0, sys.argv[1])
from load import load
import numpy as np
tokens, targets = np.arange(16).reshape(2, 8), np.ones((2, 8), "int64")
loss, = load(sys.argv[1])(tokens, targets)
assert not any(name.partition(".")[0] == "torch" and module for name, module in sys.modules.items())
print(float(loss))
"""


def test_a_program_runs_where_there_is_no_torch(tmp_path: Path) -> None:
    model = GPT().eval()
    args = torch.arange(16).view(2, 8), torch.ones(2, 8, dtype=torch.int64)
    made = export(model, args, tmp_path / "gpt")
    expected = model(*args).detach()
    torch.testing.assert_close(made(*args), expected)
    assert made.signature["platforms"] == ["cpu", "cuda", "tpu"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "gpt")], capture_output=True, text=True, cwd=tmp_path
    )
    assert float(done.stdout) == pytest.approx(expected.item(), rel=1e-5), done.stderr


def test_weights_lie_beside_the_program_or_inside_it(tmp_path: Path) -> None:
    model, x = network(), torch.randn(3, 8)
    for weights in ("separate", "inside"):
        made = export(model, (x,), tmp_path / weights, weights=weights, platforms=["cpu"])
        torch.testing.assert_close(Exported(made.path)(x), model(x).detach())
        assert len(list(made.path.glob("weight*.bin"))) == (6 if weights == "separate" else 0)


def test_images_in_evaluation_and_results_of_any_structure(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Residual()

        def forward(self, x: torch.Tensor, scale: float, *, half: torch.Tensor) -> Any:
            y = self.block(x) * scale
            return {"y": y, "pair": (y.mean(), 3, half.t() + 1)}

    model, x, half = Net().eval(), torch.randn(2, 4, 6, 6), torch.randn(2, 3).bfloat16()
    made = export(model, (x, 0.5), tmp_path / "net", kwargs={"half": half})
    torch.testing.assert_close(made(x, 0.5, half=half), model(x, 0.5, half=half))


def test_what_torch_has_exported_is_taken_as_it_is(tmp_path: Path) -> None:
    model, x = network(), torch.randn(3, 8)
    made = export(torch.export.export(model, (x,)), (x,), tmp_path / "net", platforms=["cpu"])
    torch.testing.assert_close(made(x), model(x).detach())


def test_a_batch_may_vary_where_rows_are_proved_not_to_depend_on_each_other(tmp_path: Path) -> None:
    model, x = network(), torch.randn(3, 8)
    made = export(model, (x,), tmp_path / "net", dynamic_batch=True)
    for n in (0, 1, 2, 5):
        x = torch.randn(n, 8)
        torch.testing.assert_close(made(x), model(x).detach())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x, s, k: ((x.double(), s), k), TypeError, "array 0 has the dtype float64, and .* float32"),
        (lambda x, s, k: ((x[:2], s), k), ValueError, r"array 0 has the shape \(2, 8\), and .* \(3, 8\)"),
        (lambda x, s, k: ((x, 0.75), k), ValueError, "argument 1 is part of the program, as 0.5, and 0.75 was given"),
        (lambda x, s, k: ((s, x), k), TypeError, "argument 0 of the program is a tensor, and 0.5 was given"),
        (lambda x, s, k: ((x, s, 1), k), TypeError, "structure"),
        (lambda x, s, k: ((x, s), {}), TypeError, "structure"),
        (lambda x, s, k: ((x, s), {"other": x}), TypeError, "structure"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(change: Any, error: type, words: str, tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, scale: float, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return x * scale + a - 2 * b

    x, named = torch.randn(3, 8), {"a": torch.ones(8), "b": torch.zeros(8)}
    made = export(Net(), (x, 0.5), tmp_path / "net", kwargs=named, platforms=["cpu"])
    torch.testing.assert_close(made(x, 0.5, b=named["b"], a=named["a"]), x * 0.5 + 1)
    args, kwargs = change(x, 0.5, named)
    with pytest.raises(error, match=words):
        made(*args, **kwargs)


def test_dtypes_that_numpy_has_not(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x.to(torch.float8_e4m3fn), y.float() * 2, (x * 2).bfloat16()

    x, y = torch.randn(3), torch.randn(3).to(torch.float8_e5m2)
    made = export(Net(), (x, y), tmp_path / "net", platforms=["cpu"])
    for found, wanted in zip(made(x, y), Net()(x, y), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found.float(), wanted.float())


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (Centred(), {"dynamic_batch": True}, "rows depend on each other"),
        (nn.Dropout(), {}, "draws random numbers"),
        (nn.BatchNorm1d(8), {}, "call eval"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_its_reason(
    model: nn.Module, given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=words):
        export(model, (torch.randn(3, 8),), tmp_path / "none", **given)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("given", [{"weights": "elsewhere"}, {"platforms": ["abacus"]}, {"platforms": []}], ids=str)
def test_a_wrong_argument_is_refused_with_what_is_allowed(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowed"):
        export(network(), (torch.randn(3, 8),), tmp_path / "none", **given)


class Filling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        halves = torch.empty(4, 6)
        halves[:, :3] = x
        halves[:, 3:] = x * 2
        return halves, torch.empty_strided((4, 3), (1, 4)).copy_(x)


def test_memory_that_a_program_makes_and_fills_is_no_obstacle(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    program = export(Filling(), (x,), tmp_path / "filling", platforms=("cpu",))
    torch.testing.assert_close(program(x), Filling()(x), rtol=0, atol=0)
