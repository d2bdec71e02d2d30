"""`fused_eager.export`: a folder that plain JAX runs, and that loads again as a callable on tensors."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from jax.experimental import serialize_executable
from torch import Tensor, nn
from torch.export import Dim

from fused_eager import Exported, ExportError, export
from fused_eager.frontends.compiler import artifact
from fused_eager.targets import topology
from fused_eager.targets.target import TargetError
from fused_eager.targets.topology import NoCompiler

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


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x - x.mean(0), x.std(0, correction=0), torch.cat([x, x.flip(0)])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean((2, 3)).softmax(-1)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("model", "shape", "sizes"),
    [
        (network(), (8,), (0, 1, 2, 5, 300)),
        (Centred(), (3,), (1, 2, 7, 300)),
        (Images().eval(), (3, 12, 12), (0, 1, 5)),
        (nn.LSTM(4, 5, batch_first=True), (6, 4), (1, 3, 9)),
    ],
    ids=["linear", "rows that depend on each other", "images", "lstm"],
)
def test_a_batch_may_vary(model: nn.Module, shape: Any, sizes: Any, tmp_path: Path) -> None:
    made = export(model, (torch.randn(1, *shape),), tmp_path / "net", dynamic_batch=True)
    for n in sizes:
        x = torch.randn(n, *shape)
        torch.testing.assert_close(made(x), torch.utils._pytree.tree_map(torch.detach, model(x)))


class Reader(nn.Module):
    """A transformer that may be told which tokens count, with places up to 64."""

    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.tokens, self.places, self.heads = nn.Embedding(32, width), nn.Embedding(64, width), heads
        self.norm, self.mixed, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> Any:
        b, n = x.shape
        h = self.tokens(x) + self.places(torch.arange(n))
        q, k, v = self.mixed(self.norm(h)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = counts[:, None, None, :] & torch.ones(n, n, dtype=torch.bool).tril()
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask | torch.eye(n, dtype=torch.bool))
        h = h + self.out(y.transpose(1, 2).flatten(2))
        return h, (h * counts[..., None]).sum(1) / counts.sum(1, keepdim=True)


def read(b: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.rand(b, n, generator=torch.Generator().manual_seed(n)) < 0.7
    counts[:, 0] = True
    return torch.randint(32, (b, n), generator=torch.Generator().manual_seed(b)), counts


BOTH_VARY = """
import sys
sys.modules["torch"] = sys.modules["fused_eager"] = None
sys.path.insert(0, sys.argv[1])
from load import load
import numpy as np
program = load(sys.argv[1])
for b, n in [(1, 1), (3, 40)]:
    h, mean = program(np.ones((b, n), "int64"), np.ones((b, n), bool))
    print(h.shape, mean.shape)
try:
    program(np.ones((2, 65), "int64"), np.ones((2, 65), bool))
except ValueError as error:
    print(error)
try:
    program(np.ones((2, 5), "int64"), np.ones((2, 6), bool))
except ValueError as error:
    print(error)
"""


class Named(nn.Module):
    """Torch's named results, an assertion of values, and an option of JAX's that is a number by name."""

    def forward(self, x: Tensor) -> Any:
        return x.sort(1), F.one_hot((x[:, 0] > 0).long(), 2), torch.fft.rfft(x, dim=1).abs()


def test_named_results_assertions_and_transforms_of_fourier_are_exported(tmp_path: Path) -> None:
    made = export(Named(), (torch.randn(4, 6),), tmp_path / "named", dynamic_batch=True, platforms=["cpu"])
    x = torch.randn(7, 6)
    (values, places), *rest = Named()(x)
    torch.testing.assert_close(made(x), ((values, places), *rest))


def test_batch_and_length_of_a_transformer_may_vary(tmp_path: Path) -> None:
    model = Reader().eval()
    axes = {0: Dim("batch"), 1: Dim("length", max=64)}
    given = {"x": axes, "counts": axes}
    made = export(model, read(2, 8), tmp_path / "net", dynamic_shapes=given, platforms=["cpu", "tpu"])
    for b, n in [(1, 1), (2, 8), (1, 64), (7, 3), (16, 33)]:
        torch.testing.assert_close(made(*read(b, n)), torch.utils._pytree.tree_map(torch.detach, model(*read(b, n))))
    done = subprocess.run(
        [sys.executable, "-c", BOTH_VARY, str(tmp_path / "net")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[:2] == ["(1, 1, 16) (1, 16)", "(3, 40, 16) (3, 16)"], done.stderr
    assert "size1 is 65; the program takes 1 to 64" in done.stdout and "where size1 is 5 in another" in done.stdout


def test_a_batch_that_torch_takes_to_be_fixed_is_refused(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] == 4 else x

    with pytest.raises(ExportError, match=r"torch does not export it.*batch"):
        export(Net(), (torch.ones(4, 2),), tmp_path / "net", dynamic_batch=True)


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


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros((x.shape[0] + 1) // 2 + 1) + 1


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (Halved(), {"dynamic_batch": True}, "a size is a fraction of another"),
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


def test_a_target_needs_its_compiler_and_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8)
    with pytest.raises(TargetError, match="there is no chip"):
        export(network(), (x,), tmp_path / "net", target="v5:2x2")
    monkeypatch.setattr("fused_eager.frontends.compiler.executables.obstacle", lambda: "pip install it")
    with pytest.raises(NoCompiler, match=r"v5e:2x2 needs XLA's compiler for TPUs: pip install it"):
        export(network(), (x,), tmp_path / "net", target="v5e:2x2")
    monkeypatch.setattr("fused_eager.frontends.compiler.executables.obstacle", lambda: "")
    with pytest.raises(ExportError, match="sizes of its own"):
        export(network(), (x,), tmp_path / "net", target="v5e:2x2", dynamic_batch=True)
    assert not (tmp_path / "net").exists()


FOR_A_TARGET = """
import sys, torch
from fused_eager import export
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
made = export(model, (torch.ones(3, 8),), sys.argv[1], target=["v5e:2x2", "v6e:1"], platforms=["cpu"])
print(made(torch.ones(3, 8)).shape)
"""


@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
def test_executables_for_targets_lie_beside_the_program(tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    done = subprocess.run(
        [sys.executable, "-c", FOR_A_TARGET, str(tmp_path / "net")], env={**inherited, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "Size([3, 4])" in done.stdout, done.stderr
    rows = json.loads((tmp_path / "net" / "signature.json").read_text())["targets"]
    assert [(row["target"], row["kind"]) for row in rows] == [("v5e:2x2", "TPU v5 lite"), ("v6e:1x1", "TPU v6 lite")]
    for row in rows:
        code, *_ = pickle.loads((tmp_path / "net" / row["file"]).read_bytes())
        assert len(code) > 10_000


def test_what_was_compiled_for_the_device_that_is_here_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No TPU is here: the CPU stands for one, and the executable computes something else, so that it is seen to run."""
    x = torch.ones(3)
    folder = export(nn.Identity(), (x,), tmp_path / "net", platforms=["cpu"]).path
    here = jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(here)
    form = jax.ShapeDtypeStruct((3,), "float32", sharding=place)
    other = jax.jit(lambda weights, inputs: [inputs[0] + 41]).lower([], [form]).compile()
    (folder / "e.bin").write_bytes(pickle.dumps(serialize_executable.serialize(other)))
    signature = json.loads((folder / "signature.json").read_text())
    monkeypatch.setattr(artifact.jax, "default_backend", lambda: "tpu")
    for jaxlib, expected in ((jax.version.__version__, 42), ("0.0.1", 1)):
        row = {"target": "x", "kind": here.device_kind, "jaxlib": jaxlib, "file": "e.bin"}
        (folder / "signature.json").write_text(json.dumps({**signature, "targets": [row]}))
        assert artifact.load(folder)(x.numpy())[0].tolist() == [expected] * 3
