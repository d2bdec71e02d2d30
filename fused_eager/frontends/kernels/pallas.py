"""Pallas: `pallas_op`, a `jax_op` whose function calls Pallas kernels, with grid and block sizes chosen by measurement.

Kernels are compiled for the platform that they run on (`platforms`). Of several configurations the fastest is taken:
each is run a few times on made-up operands at the first call with such shapes, and the times go to the compile cache,
where the next process finds them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from fused_eager.cache import Unencodable

from ...compiling.caching import Keeper, settings
from ...executing import choices
from ...log.events import LOG
from ...policy.segment import Choice
from ...quiet import uncompiled, unobserved
from . import native
from .declare import declared
from .op import JaxOp
from .program import KernelError, Program, digest, form_of
from .signature import MISSING, STATIC

Tensor = torch.Tensor
Config = Mapping[str, Any]
RUNS, BUDGET = 3, 0.2  # runs of each, and seconds after which no further one is begun


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for operands of some shapes: the configuration, and the seconds of each that could be run."""

    config: Config
    seconds: Mapping[int, float]  # by their position among the configurations
    remembered: bool


class _Run:
    """A call with one configuration, on values made up."""

    def __init__(self, op: OpOverload, operands: Sequence[Tensor], numbers: Sequence[int | float], program: Program):
        self.op, self.operands, self.numbers, self.program = op, operands, numbers, program

    @functools.cached_property
    def results(self) -> list[Tensor]:
        with unobserved():
            return native.run(self.op, [_made_up(t) for t in self.operands], self.numbers, self.program.name)


def _agree(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two configurations compute the same but for rounding."""
    return len(results) == len(others) and all(map(_is_close, results, others))


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex) or not a.numel():
        return torch.equal(a, b)
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    a, b, rounding = a.to(wide), b.to(wide), torch.finfo(a.dtype).eps ** 0.5
    finite = b[b.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=rounding * largest, equal_nan=True)


class PallasOp(JaxOp):
    """A JAX function that calls Pallas kernels, as a torch op.

    Attributes:
        configs: the configurations that are tried.
        tuned: what was found so far, by the shapes and dtypes of operands and by all other arguments.
    """

    configs: tuple[Config, ...] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tuned: dict[Hashable, Tuned] = {}
        self.configs = tuple(self._options["configs"])
        del self._options["configs"]  # which of them is taken is in the static arguments
        names = {name for config in self.configs for name in config}
        known = {p.name: p for p in self._parameters}
        for name in sorted(names):
            p = known.get(name)
            if p is None or p.kind is not STATIC or p.default is MISSING:
                allowed = [n for n, q in known.items() if q.kind is STATIC and q.default is not MISSING]
                raise KernelError(
                    f"configs of {self.name} set {name!r}, which is not one of its static parameters with a default; "
                    f"those are {', '.join(allowed)}"
                )
        self._tunes = names

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """The op as a composition of ops, with the configuration that is fastest for these arguments."""
        given = {p.name for p, _ in zip(self._parameters, args)} | kwargs.keys()  # noqa: B905 - fewer may be given
        if self.configs and not (self._tunes & given):
            kwargs = {**kwargs, **self._config(args, kwargs)}
        return super().apply(*args, **kwargs)

    def _config(self, args: Any, kwargs: Any) -> Config:
        tensors = [t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if len(self.configs) == 1 or not all(_is_plain(t) for t in tensors):
            return self.configs[0]
        config = native.config()
        if config.is_reproducible:  # nothing is chosen by time
            return self.configs[0]
        others = tuple([x for x in _pytree.tree_leaves((args, kwargs)) if not isinstance(x, (Tensor, float))])
        key = self._current().digest, form_of(tensors), others
        found = self.tuned.get(key)
        if found is None:
            found = self.tuned[key] = self._measured(args, kwargs, settings(config).keeper)
            LOG.count(f"{self.name} is tuned to {dict(found.config)}")
        return found.config

    def _measured(self, args: Any, kwargs: Any, keeper: Any) -> Tuned:
        """Times of all configurations, from the compile cache or by running them.

        One that returns something else than the first of them is left out: a grid that does not cover the array
        computes, quickly, a part of it.
        """
        seconds: dict[int, float] = {}
        error: Exception | None = None
        remembered = True
        first: _Run | None = None
        for i, config in enumerate(self.configs):
            try:
                run = _Run(self._ops["call"], *self.taken(*args, **{**kwargs, **config}))
                first = first or run
                key = _key(keeper, first.program.digest, run.program.digest, form_of(run.operands))
                known = None if key is None else choices.find(keeper, key)
                if known is None:
                    remembered = False
                    took = self._seconds(run.operands, run.numbers, run.program.name)
                    # "Native" is what is not taken.
                    known = Choice(not (run is first or _agree(run.results, first.results)), took, took)
                    if key is not None:
                        choices.keep(keeper, key, known)
                if known.native:
                    LOG.count(f"{self.name} returns something else with {dict(config)} than with the first one")
                else:
                    seconds[i] = known.fused_s
            except Exception as why:  # a block that does not divide the array, or is too large for the device
                error = why
                first = None if not seconds else first
                LOG.count(f"{self.name} cannot be run with {dict(config)}: {type(why).__name__}")
        if not seconds:
            assert error is not None
            raise error
        return Tuned(self.configs[min(seconds, key=lambda i: seconds[i])], seconds, remembered)

    def _seconds(self, operands: Sequence[Tensor], numbers: Sequence[int | float], program: str) -> float:
        with unobserved():
            made = [_made_up(t) for t in operands]
            times: list[float] = []
            native.run(self._ops["call"], made, numbers, program)  # compiles it
            while len(times) < RUNS and sum(times) < BUDGET:
                began = time.perf_counter()
                native.run(self._ops["call"], made, numbers, program)
                times.append(time.perf_counter() - began)
        return max(min(times), 1e-9)


uncompiled(PallasOp.apply)


def _is_plain(t: Tensor) -> bool:
    """Whether a tensor can be measured with: on the host, and none that stands for others."""
    return (
        t.is_cpu
        and not isinstance(t, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and not torch._C._functorch.is_legacy_batchedtensor(t)
    )


def _made_up(t: Tensor) -> Tensor:
    """Values of its own: those of the program may not be there yet. Indices of zero are in range wherever any is."""
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return torch.linspace(-1, 1, max(t.numel(), 1))[: t.numel()].reshape(t.shape).to(t.dtype)
    return torch.zeros(t.shape, dtype=t.dtype)


def _key(keeper: Any, first: str, program: str, form: Any) -> Any:
    if not isinstance(keeper, Keeper):
        return None
    try:
        keeper.describe_here()
        return choices.key((("config", digest(first, program, str(form))),), keeper.salt, torch.get_num_threads())
    except Unencodable:
        return None


def pallas_op(
    name: Any = None,
    /,
    *,
    configs: Sequence[Config] = (),
    schema: str | None = None,
    mutates_args: Sequence[str] = (),
    static: Sequence[str] = (),
    traced: Sequence[str] = (),
    autocast: Mapping[str, Any] | str | torch.dtype | None = None,
) -> Any:
    """Make a torch op of a JAX function that calls Pallas kernels.

    It is `jax_op`, and chooses configurations. Kernels run on every platform: interpreted on a CPU, through Mosaic on a
    TPU, through Triton on a GPU. Nothing in the function says which.

    >>> @pallas_op(configs=[{"block": 128}, {"block": 256}])
    ... def doubled(x: torch.Tensor, block: int = 128) -> torch.Tensor:
    ...     spec = pl.BlockSpec((block,), lambda i: (i,))
    ...     return pl.pallas_call(kernel, grid=(x.size // block,), in_specs=[spec], out_specs=spec, out_shape=x)(x)

    Arguments:
        name: as in `jax_op`.
        configs: values for static parameters that have defaults, of which the fastest is taken. They are measured at
            the first call with new shapes, on CPU tensors; a call that gives one of them itself is not tuned. On
            tensors that cannot be measured with, and in reproducible runs, the first is taken.
        schema, mutates_args, static, traced, autocast: as in `jax_op`.

    Returns:
        The op, a `PallasOp`.

    Raises:
        KernelError: the declaration does not fit the function; the text says what was given, and what is allowed.
    """
    if isinstance(configs, Mapping) or not all(isinstance(c, Mapping) for c in configs):
        raise KernelError(f"configs is {configs!r:.100}: it is a list of dicts, [{{'block': 128}}, {{'block': 256}}]")

    def decorate(function: Callable[..., Any]) -> PallasOp:
        own = None if name is None or not isinstance(name, str) else name
        options = {"configs": [dict(c) for c in configs]}
        made: PallasOp = declared(function, own, schema, mutates_args, static, traced, autocast, options, PallasOp)
        return made

    return decorate if name is None or isinstance(name, str) else decorate(name)
