"""Random numbers on a device: drawn inside the regions, from a seed and a counter.

Each draw takes the next number of the counter. So the same seed gives the same numbers in every mode, at every cut and
on every platform. They are not those that a CPU tensor gets: with `FUSED_EAGER_RNG=torch_cpu` they are.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import follower
from ...quiet import as_eager
from ...tracing.opinfo import OpInfo, info_of
from . import transfers
from .doors import DOORS, door_of, unseen

Tensor = torch.Tensor
_OPS = torch.ops.fused_eager
_HERE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_STATE = struct.Struct("<QQ")  # seed, offset
_SEED = 67280421310721  # of torch's generators, until somebody gives them another
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class Generator:
    """The random state of a device, or of a `torch.Generator` on it: the seed, and how often it has been drawn from."""

    def __init__(self, seed: int = _SEED):
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Begin again, with another seed."""
        self.seed, self.offset = seed & _MOST, 0
        self._on_host: torch.Generator | None = None

    def copy(self) -> Generator:
        """Another one that draws the same from here on."""
        made = Generator(self.seed)
        made.state = self.state
        return made

    @property
    def on_host(self) -> torch.Generator:
        """The CPU's with the same seed, for `rng="torch_cpu"`."""
        if self._on_host is None:
            self._on_host = torch.Generator().manual_seed(self.seed)
        return self._on_host

    def draw(self) -> tuple[int, int]:
        """The seed and the counter of the next draw."""
        self.offset += 1
        return self.seed, self.offset - 1

    @property
    def state(self) -> Tensor:
        """All of it, as 16 bytes on the host; that of the CPU's generator where its numbers are drawn."""
        if self._on_host is not None:
            return self._on_host.get_state()
        return torch.frombuffer(bytearray(_STATE.pack(self.seed, self.offset)), dtype=torch.uint8)

    @state.setter
    def state(self, state: Tensor) -> None:
        if state.dtype is torch.uint8 and state.numel() == torch.default_generator.get_state().numel():
            self.on_host.set_state(state)
            return
        if state.dtype is not torch.uint8 or state.numel() != _STATE.size or not state.is_cpu:
            raise RuntimeError(
                f"the random state of a device is a CPU tensor of {_STATE.size} bytes (uint8), not {state.dtype} of "
                f"{tuple(state.shape)} on {state.device}"
            )
        self.seed, self.offset = _STATE.unpack(bytes(state.tolist()))
        self._on_host = None


GENERATORS: list[Generator] = []
_thread = threading.local()


def _given(generator: Any, args: Any, kwargs: dict[str, Any]) -> Generator | None:
    """The state that an op is to draw from, if it was given a generator of the device.

    Raises:
        RuntimeError: one of another device than its tensors'.
    """
    found: Generator | None = None if generator is None else follower.state_of(generator)
    if found is not None:
        door = door_of(args, kwargs)
        if door is None:
            raise RuntimeError(f"Expected a 'cpu' device type for generator but found '{generator.device.type}'")
        if door.device.name != str(generator.device):
            raise RuntimeError(f"Expected a '{door.device.name}' generator device but found '{generator.device}'")
    return found


def _source(index: int) -> Generator:
    """What is drawn from: the device's own state, or the one that an op was given."""
    given: Generator | None = getattr(_thread, "given", None)
    return GENERATORS[index] if given is None else given


@contextmanager
def _drawing_from(given: Generator) -> Iterator[None]:
    before, _thread.given = getattr(_thread, "given", None), given
    try:
        yield
    finally:
        _thread.given = before


def draws_as_cpu() -> bool:
    """Whether the numbers are to be those that CPU tensors would get."""
    return DOORS[0].stream.config.rng == "torch_cpu"


def _drawn(op: Any, t: Tensor, dtype: torch.dtype, size: Any = None, numbers: tuple[float, ...] = ()) -> Tensor:
    seed, offset = _source(t.get_device()).draw()
    size = list(t.shape if size is None else size)
    # By way of torch, so that it may be followed in C++.
    drawn: Tensor = op.default.redispatch(_HERE, size, seed, offset, *numbers, dtype=dtype, device=t.device)
    return drawn


def _in_float(t: Tensor) -> torch.dtype:
    """The dtype in which a draw for a tensor is computed: half types have too few numbers between 0 and 1."""
    return t.dtype if t.dtype in (torch.float32, torch.float64) else torch.float32


def uniform(t: Tensor) -> Tensor:
    """Numbers from [0, 1) in the shape of a tensor."""
    return _drawn(_OPS.random_uniform, t, _in_float(t))


def uniform_(self: Tensor, from_: float = 0, to: float = 1) -> Tensor:
    if self.dtype.is_complex:
        torch.view_as_real(self).uniform_(from_, to)
        return self
    u = uniform(self)
    if (from_, to) != (0, 1):
        u = u * (to - from_) + from_
    return self.copy_(u)


def normal_(self: Tensor, mean: float = 0, std: float = 1) -> Tensor:
    if self.dtype.is_complex:
        torch.view_as_real(self).normal_(0, std * math.sqrt(0.5))
        return self.add_(mean) if mean else self
    return self.copy_(_normal(self, mean, std))


def _normal(t: Tensor, mean: float, std: float) -> Tensor:
    return _drawn(_OPS.random_normal, t, _in_float(t), numbers=(float(mean), float(std)))


def exponential_(self: Tensor, lambd: float = 1) -> Tensor:
    return self.copy_(_drawn(_OPS.random_exponential, self, _in_float(self)) / lambd)


def log_normal_(self: Tensor, mean: float = 1, std: float = 2) -> Tensor:
    return self.copy_(torch.exp(_normal(self, mean, std)))


def cauchy_(self: Tensor, median: float = 0, sigma: float = 1) -> Tensor:
    return self.copy_(torch.tan((uniform(self) - 0.5) * math.pi) * sigma + median)


def geometric_(self: Tensor, p: float) -> Tensor:
    return self.copy_(torch.ceil(torch.log1p(-uniform(self)) / math.log1p(-p)).clamp(min=1))


def bernoulli_(self: Tensor, p: float = 0.5) -> Tensor:
    return self.copy_(_drawn_below(self, p))


def _drawn_below(t: Tensor, p: float) -> Tensor:
    """Booleans in the shape of a tensor, of which each is True with probability `p`."""
    return ~_mask(t, p)


def _mask(t: Tensor, p: float) -> Tensor:
    """Booleans in the shape of a tensor, of which each is False with probability `p`."""
    return _drawn(_OPS.random_mask, t, torch.bool, numbers=(float(p),))


def _probabilities(p: Tensor) -> Tensor:
    """What a tensor holds, which is refused once it is known if it is no probability."""
    info = info_of(_OPS.checked_probabilities.default)
    return transfers.recorded(DOORS[p.get_device()], info, (p,), {})  # type: ignore[no-any-return]


def bernoulli_of(self: Tensor, p: Tensor) -> Tensor:
    with as_eager():
        torch.empty(1, dtype=self.dtype).bernoulli_(torch.zeros(1, dtype=p.dtype), generator=_TRIED)
    if not transfers.is_ours(p):
        p = p.to(self.device)
    return self.copy_(uniform(self) < _probabilities(p))


def bernoulli(self: Tensor) -> Tensor:
    with as_eager():
        torch.bernoulli(torch.zeros(1, dtype=self.dtype), generator=_TRIED)
    return (uniform(self) < _probabilities(self)).to(self.dtype)


def bernoulli_p(self: Tensor, p: float) -> Tensor:
    with as_eager():
        torch.bernoulli(torch.zeros(1, dtype=self.dtype), p, generator=_TRIED)
    return _drawn_below(self, p).to(self.dtype)


def _integers(self: Tensor, low: int, high: int) -> Tensor:
    """Whole numbers from [low, high). (What the remainder is off by is less than one in 2^31 for ranges below 2^32.)"""
    bits = _drawn(_OPS.random_bits, self, torch.int64)
    span = high - low
    if span > _MOST:
        # As ATen: 64 bits modulo the range. They are written as the signed number 2**63 less, and sums wrap around.
        drawn = torch.where((_drawn(_OPS.random_bits, self, torch.int64) & 1) == 0, bits + _LEAST, bits)
        inside = drawn + _wrapped(low - _LEAST)
        if span == 1 << 64:
            return self.copy_(inside)
        return self.copy_(torch.where(drawn < span + _LEAST, inside, drawn + _wrapped(low - _LEAST - span)))
    return self.copy_(bits % span + low)


def _wrapped(n: int) -> int:
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)


def random_from(self: Tensor, from_: int, to: int | None) -> Tensor:
    return _integers(self, from_, _top(self, including=True) if to is None else to)


def random_to(self: Tensor, to: int) -> Tensor:
    return _integers(self, 0, to)


def random_(self: Tensor) -> Tensor:
    return _integers(self, 0, _top(self))


def _top(t: Tensor, including: bool = False) -> int:
    """One more than the largest whole number that a tensor's dtype holds, with all below it; of int64 that number alone
    unless it is to be `including`."""
    if t.dtype.is_floating_point:
        return int(2 ** (-math.log2(torch.finfo(t.dtype).eps) + 1)) + 1
    top = 2 if t.dtype is torch.bool else torch.iinfo(t.dtype).max + 1
    return top if including else min(top, _MOST)


def randperm_out(n: int, *, out: Tensor) -> Tensor:
    if out.dtype is not torch.int64:
        with as_eager():  # which refuses a number that the dtype has not
            torch.randperm(n, dtype=out.dtype, generator=_TRIED)
    bits = _drawn(_OPS.random_bits, out, torch.int64, (n,))
    out.resize_(n)
    return out.copy_(torch.argsort(bits))


def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or input.numel() == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if not 0 <= p <= 1:
        torch.empty(1).bernoulli_(1 - p)  # raises
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    if draws_as_cpu():
        # What `dropout` does there: torch has a fused one for accelerators alone.
        like = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype)
        kept = transfers.to_device(DOORS[input.get_device()], torch.empty_like(like).bernoulli_(1 - p))
        return input * (kept / (1 - p)), kept != 0
    mask = _mask(input, p)
    if not input.is_contiguous():
        mask = torch.empty_like(input, dtype=torch.bool).copy_(mask)  # so that the result is laid out as the input
    return torch.where(mask, input * (1 / (1 - p)), 0.0).to(input.dtype), mask


def multinomial(self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    with as_eager():  # what eager says of a dtype, of dimensions and of a count
        torch.multinomial(torch.ones((1,) * self.ndim, dtype=self.dtype), min(num_samples, 1), True, generator=_TRIED)
    if num_samples > self.shape[-1] and not replacement:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if self.shape[-1] > _MOST_CATEGORIES:
        raise RuntimeError("number of categories cannot exceed 2^24")
    if self.numel() == 0:
        return torch.empty((*self.shape[:-1], num_samples), dtype=torch.int64, device=self.device)
    dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
    if replacement and num_samples > 1:
        drawn = _drawn(_OPS.random_uniform, self, dtype, (*self.shape[:-1], num_samples))
    else:
        drawn = _drawn(_OPS.random_exponential, self, dtype)
    door, info = DOORS[self.get_device()], info_of(_OPS.multinomial_of.default)
    return transfers.recorded(door, info, (self, drawn, num_samples, replacement), {})  # type: ignore[no-any-return]


_MOST_CATEGORIES = 1 << 24


# By overload: how a device draws; each takes what the op does but for `generator`.
_OWN: dict[str, Callable[..., Any]] = {
    "aten.uniform_.default": uniform_,
    "aten.normal_.default": normal_,
    "aten.exponential_.default": exponential_,
    "aten.log_normal_.default": log_normal_,
    "aten.cauchy_.default": cauchy_,
    "aten.geometric_.default": geometric_,
    "aten.bernoulli_.float": bernoulli_,
    "aten.bernoulli_.Tensor": bernoulli_of,
    "aten.bernoulli.default": bernoulli,
    "aten.bernoulli.p": bernoulli_p,
    "aten.random_.from": random_from,
    "aten.random_.to": random_to,
    "aten.random_.default": random_,
    "aten.native_dropout.default": native_dropout,
    "aten.multinomial.default": multinomial,
}


_TRIED = torch.Generator()  # nobody's


def _check(op: Any, self: Tensor, *args: Any, **kwargs: Any) -> None:
    """Raise what eager raises for a dtype and numbers, which it alone knows: by one draw of ATen's, or none."""
    with as_eager():
        op(torch.empty(min(self.numel(), 1), dtype=self.dtype), *args, generator=_TRIED, **kwargs)


# In-place draws whose other arguments are numbers.
_CHECKED = frozenset(name for name in _OWN if name.partition(".")[2].partition(".")[0].endswith("_")) - {
    "aten.bernoulli_.Tensor"
}
_EITHER = frozenset({"aten.native_dropout.default"})  # they know themselves how CPU tensors draw


def _kernel(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    packet, _, overload = name.removeprefix("aten.").partition(".")
    info = info_of(getattr(getattr(torch.ops.aten, packet), overload))
    of_host = by_aten(info)

    def kernel(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        own = _given(generator, args, kwargs)
        if own is not None:
            if draws_as_cpu():
                return of_host(*args, generator=own.on_host, **kwargs)
            with _drawing_from(own):
                return kernel(*args, **kwargs)
        if generator is not None or (draws_as_cpu() and name not in _EITHER):
            return of_host(*args, generator=generator, **kwargs)
        if name in _CHECKED:
            _check(info.op, *args, **kwargs)
            if not args[0].numel():
                return args[0]  # of any dtype, as ATen looks at none
        # A schema calls `from` what Python cannot.
        return body(*args, **{"from_" if k == "from" else k: v for k, v in kwargs.items()})

    return kernel


def _randperm(n: int, *, generator: Any = None, out: Tensor) -> Tensor:
    own = _given(generator, (out,), {})
    if own is not None and draws_as_cpu():
        generator = own.on_host
    elif own is not None:
        with _drawing_from(own):
            return randperm_out(n, out=out)
    if generator is not None or draws_as_cpu():
        return out.resize_(n).copy_(torch.randperm(n, generator=generator))
    return randperm_out(n, out=out)


def by_aten(info: OpInfo) -> Callable[..., Any]:
    """Have ATen draw on the host: with the program's own generator, or one that a draw of the device's seeds."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        door = door_of(args, kwargs)
        if "generator" in info.names and len(args) > (at := info.names.index("generator")):  # not by its name
            args, kwargs = args[:at], {**kwargs, "generator": args[at]}
        own = _given(kwargs.get("generator"), args, kwargs)
        assert door is not None
        if own is not None:
            kwargs = {**kwargs, "generator": own.on_host if draws_as_cpu() else None}
        asked = kwargs.get("generator") is not None or draws_as_cpu()
        if not asked:
            seed, offset = (own or _source(door.device.index)).draw()
            made = torch.Generator().manual_seed((seed ^ (offset * 0x9E3779B97F4A7C15)) & _MOST)
            if "generator" in info.names:
                kwargs = {**kwargs, "generator": made}
            else:
                state = torch.default_generator.get_state()
                torch.default_generator.manual_seed(made.initial_seed())
                try:
                    return unseen(transfers.island, door, info, args, kwargs, _WHY)
                finally:
                    torch.default_generator.set_state(state)
        return unseen(transfers.island, door, info, args, kwargs, _ASKED if asked else _WHY)

    return kernel


_WHY = "the device has no form of it that draws"
_ASKED = "its numbers are to be a generator's of the CPU"
KERNELS: dict[str, Callable[..., Any]] = {
    **{name: _kernel(name, body) for name, body in _OWN.items()},
    "aten.randperm.generator_out": _randperm,
    "aten.randperm.out": _randperm,
}


def draws() -> list[Any]:
    """The ops that draw, which are there once the rows are."""
    return [getattr(_OPS, f"random_{name}").default for name in ("uniform", "mask", "normal", "exponential", "bits")]


__all__ = ["GENERATORS", "KERNELS", "Generator", "by_aten", "draws"]
