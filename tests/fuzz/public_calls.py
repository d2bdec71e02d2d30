"""The public functions of torch, and arguments for them that are often right: what `tests.fuzz.public` calls.

An argument is described before it is made, so that the same call can be made on the CPU and on the device.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import get_testing_overrides

PENDING = "pending"  # in the place of a device: on the CPU, not computed yet
MODULES = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "torch.nested", "torch.sparse")
MODULES += ("torch.accelerator",)
# They change the process, ask the system for something or wait for others.
LEFT_OUT = (
    *("set_", "use_deterministic", "init_num_threads", "compile", "load", "save", "import_", "fork", "wait", "hub"),
    *("from_file", "autocast_", "prepare_multiprocessing", "FatalError", "FileCheck", "PyTorchFile", "profiler_"),
    *("ThroughputBenchmark", "ScriptModuleSerializer", "DisableTorchFunction", "ExcludeDispatchKeyGuard", "parse_"),
    *("StaticModule", "CompilationUnit", "Tensor.share_memory_", "Tensor.reinforce", "Tensor.register_hook"),
)
# Where the device is another than the CPU, and why.
EXPECTED = {
    "tpu.": "the CPU has none of it",
    "accelerator.": "the CPU has none of it",
    "Tensor.tpu": "it goes to the device",
    "from_dlpack": "there is no memory to hand out",
    "Tensor.__dlpack": "there is no memory to hand out",
    "Tensor.__array__": "torch refuses it on every device",
    "Tensor.numpy": "torch refuses it on every device",
    "Tensor.pin_memory": "tensors of the CPU alone can be pinned",
    "Tensor.apply_": "torch has it on the CPU alone",
    "Tensor.map_": "torch has it on the CPU alone",
    "Tensor.is_pinned": "tensors of the CPU alone can be pinned",
    "tensor_split": "torch wants its indices on the CPU",
    "Tensor.tensor_split": "torch wants its indices on the CPU",
    "Tensor.to_mkldnn": "a layout of the CPU",
    "histc": "whole numbers are taken, as by CUDA",
    "Tensor.histc": "whole numbers are taken, as by CUDA",
    "batch_norm_": "ops of CUDA's alone",
    "fbgemm_": "packed for the CPU; what lies between is arbitrary",
}
# Numbers that nobody has written, or that a generator drew, or addresses.
ARBITRARY = ("empty", "resize", "rand", "normal", "dropout", "bernoulli", "multinomial", "poisson", "rrelu", "uniform")
ARBITRARY += ("exponential_", "cauchy", "geometric", "new_tensor", "Tensor.new", "data_ptr", "gumbel", "fractional_max")
ARBITRARY += ("svd_lowrank", "pca_lowrank", "lobpcg", "Tensor.set_", "seed", "storage", "hash")


@dataclass(frozen=True)
class Made:
    """A tensor to be made: its shape and dtype, how it lies, and whether it wants a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    lies: str
    grad: bool
    seed: int

    def on(self, device: str) -> torch.Tensor:
        """The tensor, on a device, or pending in the context that is open."""
        g = torch.Generator().manual_seed(self.seed)
        shape = self.shape[::-1] if self.lies == "transposed" else self.shape
        if self.dtype.is_floating_point or self.dtype.is_complex:
            t = torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype)
        else:
            t = torch.randint(0, 3, shape, generator=g).to(self.dtype)
        if self.lies == "stepped" and shape:
            t = t.repeat_interleave(2, -1)
        t = t.clone() if device == PENDING else t.to(device)
        if self.lies == "transposed":
            t = t.permute(*range(t.ndim)[::-1])
        elif self.lies == "stepped" and shape:
            t = t[..., ::2]
        return t.requires_grad_() if self.grad else t


@dataclass(frozen=True)
class Device:
    """The device that a call is made on, as an argument of it."""


@dataclass(frozen=True)
class Call:
    """A function by name, and its arguments as descriptions."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def arguments(self, device: str) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with their tensors on a device. One description is one tensor, however often it comes."""
        made: dict[int, Any] = {}

        def of(x: Any) -> Any:
            if isinstance(x, Made):
                if id(x) not in made:
                    made[id(x)] = x.on(device)
                return made[id(x)]
            if isinstance(x, Device):
                return torch.device("cpu" if device == PENDING else device)
            return type(x)(of(v) for v in x) if isinstance(x, (list, tuple)) else x

        return [of(a) for a in self.args], {k: of(v) for k, v in self.kwargs}


SHAPES = ((), (0,), (3,), (2, 3), (3, 3), (1, 3), (2, 0), (2, 3, 4), (2, 2, 5, 5), (1, 2, 3, 4, 4))
FLOATS, WHOLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16), (torch.int64, torch.int32, torch.uint8)
OTHERS = (torch.bool, torch.complex64, torch.complex128, torch.int8, torch.int16)
WORDS = ("mean", "sum", "none", "left", "constant", "reflect", "ij", "fro", "nearest", "bilinear", "floor", "trunc")


class Arguments:
    """Draws arguments by the names of parameters. Most tensors of one call are alike, so that many calls are right."""

    def __init__(self, seed: str) -> None:
        r = self.r = random.Random(seed)
        self.shape = r.choice(SHAPES)
        self.dtype = r.choice(r.choice((FLOATS, FLOATS, WHOLE, OTHERS)))

    def tensor(self) -> Made:
        """One that is like the others, or not."""
        r = self.r
        shape = self.shape if r.random() < 0.8 else r.choice(SHAPES)
        dtype = self.dtype if r.random() < 0.85 else r.choice(FLOATS + WHOLE + OTHERS)
        grad = r.random() < 0.15 and (dtype.is_floating_point or dtype.is_complex)
        return Made(shape, dtype, r.choice(("dense", "dense", "dense", "transposed", "stepped")), grad, r.randrange(99))

    def index(self) -> Made:
        return Made(self.r.choice((self.shape, (2,), ())), torch.int64, "dense", False, self.r.randrange(99))

    def number(self) -> Any:
        return self.r.choice((0, 1, 2, 3, -1, 0.5, 2.0, 1, True, -1.5, 1j))

    def size(self) -> Any:
        return self.r.choice(((2,), (3, 2), self.shape, (0,), (), (1, 3), [2, 2], (-1,), 3))

    def named(self, name: str) -> Any:
        """An argument for a parameter of this name."""
        r, name = self.r, name.lower()
        if r.random() < 0.1:
            return self.any()
        if name in ("dtype", "out_dtype"):
            return r.choice((*FLOATS, *WHOLE, *OTHERS, None))
        if name == "device":
            return Device()
        if name in ("dim", "axis", "dim0", "dim1", "axis0", "axis1", "dimension", "start_dim", "end_dim"):
            return r.choice((0, 1, -1, 0, 2))
        if name in ("dims", "axes"):
            return r.choice(((0,), (0, 1), (-1,), 1, [0], ()))
        if "size" in name or "shape" in name or name in ("repeats", "reps", "output_padding", "normalized_shape"):
            return self.size()
        if "stride" in name or name in ("padding", "dilation", "kernel", "pad"):
            return r.choice((1, 2, (1, 1), (2,), 0, (1, 1, 1, 1)))
        if "ind" in name and name != "unique_indices":
            return self.index()
        if name in ("n", "k", "p", "offset", "diagonal", "groups", "num_classes", "steps", "start", "end", "length"):
            return r.choice((0, 1, 2, 3, -1, 4))
        if name in ("value", "alpha", "beta", "eps", "scale", "lambd", "momentum", "min", "max", "threshold", "q"):
            return self.number()
        if name in ("reduction", "mode", "rounding_mode", "indexing", "ord", "side", "equation", "reduce"):
            return r.choice((*WORDS, 1, 2, None, float("inf"), "ij,jk->ik", "amax", "prod"))
        if name in ("tensors", "arrays", "operands", "matrices", "sequences", "tensor_list"):
            return [self.tensor() for _ in range(r.randint(1, 3))]
        if name.startswith(("is_", "has_", "keep", "return_", "training", "requires_", "pin_", "sorted", "largest")):
            return r.choice((True, False))
        if name.startswith(("num", "n_", "size", "bins", "min_", "max_", "upscale", "downscale", "chunks", "sections")):
            return r.choice((1, 2, 3, 0))
        if name in ("layout",):
            return r.choice((torch.strided, torch.sparse_coo, torch.jagged))
        if name == "memory_format":
            return r.choice((torch.contiguous_format, torch.channels_last, torch.preserve_format))
        if name in ("generator", "names", "weight_scale"):
            return None
        return self.tensor()

    def any(self) -> Any:
        """An argument of any kind."""
        r = self.r
        kinds: tuple[Callable[[], Any], ...] = (
            *(self.tensor,) * 5, *(self.number,) * 3, self.size, self.index, lambda: None, lambda: r.choice(WORDS),
            lambda: r.choice(FLOATS + WHOLE + OTHERS), Device, lambda: [self.tensor(), self.tensor()],
            lambda: slice(0, 2), lambda: torch.strided, lambda: torch.channels_last, lambda: -(2**31),
        )  # fmt: skip
        return r.choice(kinds)()


def functions() -> dict[str, tuple[Callable[..., Any], list[str] | None]]:
    """Every public function by name, and the names of its parameters where torch tells them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, tuple[Callable[..., Any], list[str] | None]] = {}
        told = {id(f): _parameters(stub) for f, stub in get_testing_overrides().items()}
        homes = [(name.removeprefix("torch."), _module(name)) for name in MODULES]
        homes.append(("Tensor", torch.Tensor))
        if hasattr(torch, "tpu"):
            homes.append(("tpu", _module("torch.tpu")))
        for home, module in homes:
            for name in dir(module):
                function = getattr(module, name, None)
                full = name if home == "torch" else f"{home}.{name}"
                if name.startswith("_") and not (home == "Tensor" and name in _OPERATORS):
                    continue
                if isinstance(function, type) and home != "tpu":
                    continue  # what torch makes of its own in C++
                if not callable(function):
                    descriptor = home == "Tensor" and hasattr(function, "__get__")
                    function = function.__get__ if descriptor else None  # type: ignore[union-attr]
                if function is None or full.startswith(LEFT_OUT) or name.startswith(LEFT_OUT):
                    continue
                found[full] = function, told.get(id(function), _parameters(function))
    return found


_OPERATORS = frozenset(
    f"__{name}__"
    for names in (
        ("add", "radd", "iadd", "sub", "rsub", "mul", "imul", "matmul", "truediv", "rtruediv", "floordiv", "mod"),
        ("pow", "rpow", "and", "or", "xor", "invert", "lshift", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"),
        ("getitem", "setitem", "len", "bool", "int", "float", "complex", "index", "contains", "iter", "repr", "str"),
        ("format", "array", "deepcopy", "reduce_ex", "hash", "dlpack", "dlpack_device", "cuda_array_interface"),
    )
    for name in names
)


def _module(name: str) -> Any:
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def _parameters(function: Any) -> list[str] | None:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def call_of(name: str, parameters: list[str] | None, number: int) -> Call:
    """The `number`th call of a function, the same in every process."""
    draws = Arguments(f"{name} {number}")
    r = draws.r
    if parameters is None:
        args = [draws.tensor() if r.random() < 0.6 else draws.any() for _ in range(r.choice((0, 1, 1, 2, 2, 3)))]
    else:
        args = [draws.named(p) for p in parameters[: r.randint(1, len(parameters)) if parameters else 0]]
    if name.startswith("Tensor.") and (not args or not isinstance(args[0], Made)):
        args = [draws.tensor(), *args[1:]]
    kwargs: dict[str, Any] = {}
    if r.random() < 0.06:
        kwargs["out"] = draws.tensor()
    if r.random() < 0.06 or (not any(isinstance(a, Made) for a in args) and name.startswith(_FACTORIES)):
        kwargs["device"] = Device()
    if r.random() < 0.05:
        kwargs["dtype"] = draws.named("dtype")
    return Call(name, tuple(args), tuple(kwargs.items()))


_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "arange", "linspace", "logspace", "eye", "tensor", "as_tensor")
_FACTORIES += ("asarray", "scalar_tensor", "range", "normal", "hann_", "hamming_", "kaiser_", "blackman_", "bartlett_")
