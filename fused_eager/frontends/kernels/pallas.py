"""Pallas: `pallas_op`, a `jax_op` whose function calls Pallas kernels, with grid and block sizes chosen by measurement.

Kernels are compiled for the platform that they run on (`platforms`). Of several configurations the fastest is taken:
each is run a few times on made-up operands at the first call with such shapes, or forecast for a target that is not
here. The times go to the compile cache, where the next process finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from fused_eager.cache import Key

from ...compiling.caching import keeper as keeper_of
from ...compiling.caching import settings
from ...config import resolve
from ...devices.device import Device
from ...devices.host.device import HOST
from ...executing import choices
from ...log.events import LOG
from ...policy.segment import Choice
from ...quiet import uncompiled
from ...targets.device import TargetDevice
from ...targets.target import Target
from . import tuning
from .declare import declared
from .native import config as options
from .op import JaxOp
from .program import KernelError, form_of
from .signature import MISSING, STATIC
from .tuning import Run

Tensor = torch.Tensor
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for operands of some shapes: the configuration, and the seconds of each that could be run."""

    config: Config
    seconds: Mapping[int, float]  # by their position among the configurations
    remembered: bool


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

    def forecast(self, *args: Any, target: str, **kwargs: Any) -> Tuned:
        """Choose the configuration for a target ("v5e:2x2") by what XLA's compiler for it expects, and keep that in the
        compile cache, where programs on such chips find it. Of the arguments only shapes and dtypes count.

        Raises:
            TargetError, NoCompiler: there is no such target, or no compiler for it here.
            Exception: what the first configuration raised, if the compiler refuses all.
        """
        return self._tuned(args, kwargs, TargetDevice(Target.parse(target)))

    def _config(self, args: Any, kwargs: Any) -> Config:
        tensors = [t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        device = tuning.device_of(tensors) if len(self.configs) > 1 and all(map(_has_values, tensors)) else None
        if device is None or options().is_reproducible:  # nothing is chosen by time
            return self.configs[0]
        return self._tuned(args, kwargs, device).config

    def _tuned(self, args: Any, kwargs: Any, device: Device) -> Tuned:
        leaves = _pytree.tree_leaves((args, kwargs))
        form = form_of([t for t in leaves if isinstance(t, Tensor)])
        others = tuple([x for x in leaves if not isinstance(x, (Tensor, float))])
        key = self._current().digest, device.name, form, others
        found = self.tuned.get(key)
        if found is None:
            # A device's own options may have no cache, as those of a program that is run for a target.
            kept = settings(options()).keeper if device is HOST else keeper_of(resolve())
            found = self.tuned[key] = self._measured(args, kwargs, kept, device)
            LOG.count(f"{self.name} is tuned to {dict(found.config)}")
        return found

    def _measured(self, args: Any, kwargs: Any, keeper: Any, device: Device) -> Tuned:
        """Times of all configurations, from the compile cache, by running them, or from a target's compiler.

        One that returns something else than the first of them is left out: a grid that does not cover the array
        computes, quickly, a part of it.
        """
        seconds: dict[int, float] = {}
        error: Exception | None = None
        remembered = True
        first: Run | None = None
        for i, config in enumerate(self.configs):
            keys: list[Key] = []
            try:
                run = Run(self._ops["call"], *self.taken(*args, **{**kwargs, **config}), device)
                first = first or run
                keys = run.keys(keeper, first)
                known = next((c for k in keys if (c := choices.find(keeper, k)) is not None), None)
                if known is None:
                    remembered = False
                    took = self._seconds(run)
                    # "Native" is what is not taken.
                    known = Choice(not (run is first or _agree(run.results, first.results)), took, took)
                    if keys:
                        choices.keep(keeper, keys[0], known)
                if known.native:
                    first = None if run is first else first
                    LOG.count(f"{self.name} leaves out {dict(config)}, which returns something else or was refused")
                else:
                    seconds[i] = known.fused_s
            except Exception as why:  # a block that does not divide the array, or is too large for the device
                error = why
                first = None if not seconds else first
                LOG.count(f"{self.name} cannot be run with {dict(config)}: {type(why).__name__}")
                if keys and not device.is_here:  # a target's compiler would refuse it again
                    choices.keep(keeper, keys[0], Choice(True, 1.0, 1.0))
        if not seconds:
            raise error or KernelError(f"{self.name} has no configuration that {device.name} takes")
        return Tuned(self.configs[min(seconds, key=lambda i: seconds[i])], seconds, remembered)

    def _seconds(self, run: Run) -> float:
        return run.seconds()


uncompiled(PallasOp.apply)


def _has_values(t: Tensor) -> bool:
    """Whether a tensor is one of a call, and none that stands for others."""
    return not (
        isinstance(t, FakeTensor)
        or any(isinstance(n, torch.SymInt) for n in t.shape)
        or torch._C._functorch.is_functorch_wrapped_tensor(t)
        or torch._C._functorch.is_legacy_batchedtensor(t)
    )


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
            the first call with new shapes, or forecast where a program is compiled for a target; a call that gives one
            of them itself is not tuned. While a graph is traced, and in reproducible runs, the first is taken.
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
