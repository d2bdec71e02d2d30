"""Training on the device: losses and gradients as on the CPU, whatever the layers, the optimizer and the mode."""

from __future__ import annotations

import copy
import io
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax import Array
from torch import nn

from fused_eager import jax_op, report
from fused_eager.frontends.device.doors import DOORS, set_options
from fused_eager.log.events import LOG

from .compare import TPU, check, same

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def losses(device: Any, optimizer: Callable[[Any], torch.optim.Optimizer], steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).to(device)
    made, drawn = optimizer(model.parameters()), torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(6, 8, generator=drawn).to(device)
        y = torch.randint(0, 5, (6,), generator=drawn).to(device)
        loss = F.cross_entropy(model(x), y)
        made.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        found.append(loss.detach())
    return [loss.item() for loss in found]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_the_cpus(name: str) -> None:
    assert losses("tpu", OPTIMIZERS[name]) == pytest.approx(losses("cpu", OPTIMIZERS[name]), rel=1e-4)


def test_a_steady_loop_compiles_nothing() -> None:
    losses("tpu", OPTIMIZERS["SGD"], 3)
    before = report().compilations
    losses("tpu", OPTIMIZERS["SGD"], 6)
    assert report().compilations == before


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 6, 6)),
    "LSTM": (lambda: nn.LSTM(4, 5, num_layers=2, batch_first=True), (2, 3, 4)),
    "LSTM without biases": (lambda: nn.LSTM(4, 5, bias=False, bidirectional=True), (3, 2, 4)),
    "GRU": (lambda: nn.GRU(4, 5, num_layers=2), (3, 2, 4)),
    "RNN": (lambda: nn.RNN(4, 5), (3, 2, 4)),
    "LSTM cell": (lambda: nn.LSTMCell(4, 5), (2, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten()), (2, 2, 8, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_gradients(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    here = make()
    there = copy.deepcopy(here).to(TPU)
    x = torch.randn(shape)
    for model, given in ((here, x.clone().requires_grad_()), (there, x.to(TPU).requires_grad_())):
        out = model(given)
        flat = out if isinstance(out, torch.Tensor) else out[0]
        (flat * torch.linspace(0, 1, flat.numel(), device=flat.device).reshape(flat.shape)).sum().backward()
        model.kept = (flat.detach(), given.grad)
    same(here.kept, there.kept, 1e-4)
    same([p.grad for p in here.parameters()], [p.grad for p in there.parameters()], 1e-4)
    same(list(here.buffers()), list(there.buffers()), 1e-4)


def test_parameters_stay_tied_and_the_same_objects() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    weight, optimizer = model[0].weight, torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("tpu")
    assert model[0].weight is model[2].weight is weight and weight.device == TPU
    model(torch.ones(2, 3, device=TPU)).sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, weight)
    kept = weight.view_as(weight)  # autograd holds on to it
    model.to("cpu")
    assert model[0].weight is model[2].weight and model[0].weight.device.type == "cpu" and kept.device == TPU


def test_dynamo_has_the_device_as_a_backend() -> None:
    compiled = torch.compile(lambda x: torch.sin(x) * 2, backend="tpu")
    assert torch.allclose(compiled(torch.ones(3, device=TPU)).cpu(), torch.sin(torch.ones(3)) * 2)


def test_what_looks_for_mistakes_looks_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    before = DOORS[0].stream.config
    x = torch.tensor([1.0, 0.0], device=TPU)
    try:
        set_options(mode="debug", check_nan=True)
        with pytest.raises(FloatingPointError, match=r"aten.log.default made the first NaN or infinity at .*test_tr"):
            torch.log(x)
        set_options(mode="fused", verify=1.0, log="ops")
        assert (torch.exp(x) + 1).sum().item() == pytest.approx(math.e + 3)
        assert "aten.exp.default(float32[2])" in capsys.readouterr().out
    finally:
        set_options(**{name: getattr(before, name) for name in ("mode", "check_nan", "verify", "log")})


@pytest.mark.parametrize("again", ["loaded", "copied"])
def test_a_checkpoint_is_gone_on_from_with_what_was_compiled(again: str) -> None:
    model = nn.Linear(5, 3).to(TPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(7, 5).to(TPU)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        torch.tpu.synchronize()

    for _ in range(3):
        step()
    state: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if again == "copied":
        state = copy.deepcopy(state)
    else:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, map_location="tpu")
    buffer = DOORS[0].buffer_of(state["optimizer"]["state"][0]["momentum_buffer"])
    assert buffer.home == (torch.float32, (3, 5))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.tpu.synchronize()
    before = report().compilations
    for _ in range(2):
        step()
    assert report().compilations == before


def test_cross_entropy_under_autocast_is_of_float32_down_to_its_logarithms() -> None:
    logits, target = torch.randn(64, 50).bfloat16(), torch.arange(64) % 50
    with torch.autocast("tpu", dtype=torch.bfloat16):
        found = F.cross_entropy(logits.to(TPU), target.to(TPU))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.cpu(), F.cross_entropy(logits.float(), target), rtol=1e-6, atol=0)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch 2.13 has it first")
def test_cross_entropy_of_a_linear_layer_in_chunks_is_fused_and_keeps_no_logits() -> None:
    torch.manual_seed(0)
    given = torch.randn(512, 16), torch.randn(1000, 16), torch.randn(1000)
    target, options = torch.randint(0, 1000, (512,)), nn.LinearCrossEntropyOptions(batch_chunk_size=64)

    def run(device: str) -> list[torch.Tensor]:
        x, weight, bias = (t.to(device).requires_grad_() for t in given)
        loss = F.linear_cross_entropy(x, weight, target.to(device), linear_bias=bias, options=options)
        return [loss.detach(), *torch.autograd.grad(loss, (x, weight, bias))]

    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    found = [t.cpu() for t in run("tpu")]
    assert torch.tpu.max_memory_allocated() - before < 512 * 1000 * 4
    for ours, theirs in zip(found, run("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not [op for op in report().islands if "addmm" in op]


def test_autocast_without_a_dtype_is_of_bfloat16_in_every_thread() -> None:
    x, found = torch.ones(2, 2, device=TPU), []

    def compute() -> None:
        with torch.autocast("tpu"):
            found.append((x @ x).dtype)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    compute()
    torch.compile(compute)()
    assert found == [torch.bfloat16] * 3 and torch.get_autocast_dtype("tpu") is torch.bfloat16
    torch.set_autocast_dtype("tpu", torch.float16)
    try:
        compute()
    finally:
        torch.set_autocast_dtype("tpu", torch.bfloat16)
    assert found[-1] is torch.float16


def test_autocast_computes_in_the_lower_dtype_what_gains_by_it() -> None:
    x = torch.ones(4, 4, device=TPU)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == F.linear(x, x).dtype == torch.bfloat16
        assert torch.softmax(x @ x, -1).dtype == (x @ x).exp().dtype == torch.float32
        assert ((x @ x) + x).dtype == torch.cat([x @ x, x]).dtype == torch.float32
        with torch.autocast("tpu", enabled=False):
            assert (x @ x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x * 0.5, x)


def test_mixed_precision_trains() -> None:
    model = nn.Linear(4, 1).to("tpu")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("tpu")
    x, first, last = torch.randn(16, 4).to("tpu"), None, None
    for _ in range(10):
        with torch.autocast("tpu", dtype=torch.float16):
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        first, last = first if first is not None else loss.item(), loss.item()
    assert last < first


def test_transforms_hooks_and_checkpoints() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    check(torch.func.vmap(torch.func.grad(lambda v: (v**2).sum())), x)
    check(lambda v: torch.func.jvp(torch.sin, (v,), (torch.ones_like(v),)), x)
    y, seen = x.to(TPU).requires_grad_(), []
    y.register_hook(lambda grad: seen.append(grad.sum().item()))
    torch.utils.checkpoint.checkpoint(lambda v: (v * 2).sin(), y, use_reentrant=False).sum().backward()
    assert seen == pytest.approx([(x * 2).cos().mul(2).sum().item()], rel=1e-5)
    z = torch.ones(3, dtype=torch.float64, device=TPU, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: (v * v).sum(), z)


@pytest.mark.skipif(torch.tpu.device_count() < 4, reason="the process has fewer than four devices")
def test_several_devices() -> None:
    a = torch.ones(3, device="tpu:1", requires_grad=True)
    b = torch.full((3,), 2.0, device="tpu:3", requires_grad=True)
    ((a * 2).to("tpu:3") * b).sum().backward()
    assert a.grad is not None and b.grad is not None
    assert (a.grad.device.index, a.grad.tolist()) == (1, [4, 4, 4])
    assert (b.grad.device.index, b.grad.tolist()) == (3, [2, 2, 2])
    with pytest.raises(RuntimeError, match="same device"):
        a + b
    with torch.tpu.device(2):
        assert torch.ones(1, device="tpu").device.index == 2
    assert torch.tpu.current_device() == 0


def test_threads_share_a_device() -> None:
    shared, found = torch.eye(8, device=TPU) * 2, {}

    def work(number: int) -> None:
        x = torch.full((8, 8), float(number), device=TPU)
        for _ in range(20):
            x = (shared @ x) / 2
        found[number] = x.sum().item()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {n: 64.0 * n for n in range(6)}


def test_the_memory_of_a_loop_is_flat() -> None:
    x, sizes = torch.ones(64, device=TPU), []
    for step in range(40):
        x = x * 1.01 + 1
        if step % 10 == 9:
            x.sum().item()
            sizes.append(torch.tpu.memory_allocated())
    assert sizes[1:] == [sizes[1]] * 3


def test_copies_that_nobody_has_any_more_are_let_go() -> None:
    source, table = torch.ones(1 << 16), DOORS[0].device.table
    for _ in range(100):
        copied = source.to("tpu")
    assert copied.device.type == "tpu"
    assert sum(b.array.nbytes for b in table.values() if b.array is not None and not b.is_alive()) <= 4 * source.nbytes


def _perceptron() -> tuple[nn.Module, torch.Tensor, int]:
    layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(256, 256), 256


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.lstm, self.head = nn.Embedding(50, 64), nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedded(x))[0][:, -1])


def _recurrent() -> tuple[nn.Module, torch.Tensor, int]:
    return _Recurrent(), torch.randint(0, 50, (16, 64)), 10


@pytest.mark.parametrize("made", [_perceptron, _recurrent])
def test_a_training_step_takes_no_more_memory_than_eagers(made: Callable[[], tuple[Any, torch.Tensor, int]]) -> None:
    """Bytes that live at once, at most: here what the device counts, and in eager's step what the allocator did."""

    def steps(device: Any) -> tuple[Callable[[], float], Callable[[], int]]:
        torch.manual_seed(0)
        model, x, classes = made()
        model, x, y = model.to(device), x.to(device), torch.randint(0, classes, (len(x),)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        def kept() -> int:
            state = [v for each in optimizer.state.values() for v in each.values()]
            tensors = [x, y, *model.parameters(), *[p.grad for p in model.parameters()], *state]
            return sum(t.nbytes for t in tensors if t is not None)

        for _ in range(3):
            step()
        return step, kept

    step, kept = steps("cpu")
    at_rest = kept()
    with torch.profiler.profile(profile_memory=True) as watched:
        step()
    events = watched.profiler.kineto_results.events()
    found = sorted((e.start_ns(), e.nbytes()) for e in events if "[memory]" in e.name())
    most = at_rest + max(itertools.accumulate(nbytes for _, nbytes in found))
    step, kept = steps("tpu")
    torch.tpu.reset_peak_memory_stats()
    step()
    at_rest = kept()
    # A product on a GPU has a workspace of cuBLAS's, which eager's has beside its account.
    workspace = 33 << 20 if torch.tpu.get_device_properties().platform == "gpu" else 0
    assert at_rest < torch.tpu.max_memory_allocated() <= 1.05 * most + workspace


def test_an_op_that_the_user_wrote_in_jax_is_recorded_as_any_other() -> None:
    @jax_op("device_tests::wave")
    def wave(x: Array, s: float) -> Array:
        return jnp.sin(x) * s

    report(reset=True)
    here, there = (torch.arange(3.0, device=device, requires_grad=True) for device in ("cpu", TPU))
    same(wave(here, 2.0), wave(there, 2.0))
    for x in (here, there):
        (wave(x, 2.0) * 3).sum().backward()
    same(here.grad, there.grad)
    assert "natively" not in str(report())


@pytest.mark.parametrize("kind", ["Adam", "AdamW, one by one", "NAdam"])
def test_an_optimizer_whose_state_was_loaded_onto_the_device_counts_as_before(kind: str) -> None:
    """torch reads the counters of steps in every step: on the device each step would be cut in two for good."""

    def trained(device: Any) -> tuple[list[float], list[int], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
        optimizer = OPTIMIZERS[kind](model.parameters())
        x, found, reads = torch.randn(12, 8).to(device), [], []
        for i in range(7):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            before = len(LOG.of("flush"))
            optimizer.step()
            reads.append(len(LOG.of("flush")) - before)
            found.append(loss.item())
            if i == 2:
                kept = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
                kept.seek(0)
                loaded = torch.load(kept, map_location=device)
                model.load_state_dict(loaded["model"])
                optimizer.load_state_dict(loaded["optimizer"])
        return found, reads, optimizer.state_dict()["state"]

    expected = trained("cpu")[0]
    found, reads, state = trained(TPU)
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4)
    assert {str(kept["step"].device) for kept in state.values()} == {"cpu"}
    assert {kept["step"].item() for kept in state.values()} == {7.0}
    assert {kept["exp_avg"].device for kept in state.values()} == {TPU}
    assert reads[-1] == reads[1], reads


class Marked(nn.Parameter):
    """A parameter of a program's own class."""


@pytest.mark.parametrize("held", [False, True], ids=["exchanged", "made anew"])
def test_a_parameter_that_moves_keeps_its_hooks_class_and_attributes(held: bool) -> None:
    calls: list[str] = []
    layer = nn.Linear(2, 2)
    layer.bias = Marked(torch.zeros(2))
    layer.weight.scale, layer.bias.name_of_mine = 3, "b"  # type: ignore[attr-defined,assignment]
    first = layer.weight.register_hook(lambda g: calls.append("first"))
    layer.weight.register_hook(lambda g: g * 2)
    layer.bias.register_post_accumulate_grad_hook(lambda p: calls.append(f"after {p.device.type}"))
    view = layer.weight.expand(2, 2) if held else None  # then torch cannot exchange it
    for device in ("tpu", "cpu", "tpu"):
        layer.to(device)
        layer(torch.ones(1, 2, device=device)).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[2, 2], [2, 2]]
        assert sorted(calls) == [f"after {device}", "first"]
        assert type(layer.bias) is Marked and (layer.weight.scale, layer.bias.name_of_mine) == (3, "b")
        layer.zero_grad()
        calls.clear()
    first.remove()
    layer(torch.ones(1, 2, device="tpu")).sum().backward()
    assert calls == ["after tpu"] and (view is None) == (not held)


def test_a_lazy_module_is_moved_before_its_shapes_are_known() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to("tpu")
    assert model(torch.ones(2, 5, device=TPU)).shape == (2, 3)
    assert model[0].weight.device == TPU and type(model[0]) is nn.Linear
