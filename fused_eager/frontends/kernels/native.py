"""Running a program natively, as ATen runs an op: outside of contexts, as an island, or while a stream is shadowed.

It is a region of one node, so it is keyed, cached and compiled like any other: the next process finds it there.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec, contiguous_strides

from ...bounded import Bounded
from ...compiling import compile
from ...compiling.caching import settings
from ...compiling.executable import Executable
from ...compiling.key import Computation
from ...config import Config, resolve
from ...devices.buffer import LOCK
from ...devices.dlpack import to_tensor
from ...devices.host.buffers import COPIED
from ...devices.host.device import for_caller
from ...log import site
from ...log.reasons import Reason
from ...planning.plan import Region
from ...quiet import unobserved
from ...tracing.node import Hole, Ref
from ...tracing.stream import Node, Result, Use
from ...xla import refuse_fork
from ..context.threads import THREAD
from .program import Form, KernelError, form_of
from .recipes import make

_ALONE = Reason("mode.single")
_KNOWN: Bounded[Hashable, Executable] = Bounded(1024)
_CONFIG: list[Config] = []
_MAKING = threading.Lock()


def run(
    op: OpOverload, operands: Sequence[torch.Tensor], numbers: Sequence[int | float], program: str
) -> list[torch.Tensor]:
    """Call a program on finished tensors, now. Its results are new tensors.

    Raises:
        KernelError: no function of this process has that digest, or a tensor has a dtype that XLA has not.
        RuntimeError: the process is a fork of one that had started XLA.
        Exception: what the user's function raised while it was traced.
    """
    form = form_of(operands)
    kinds = tuple([type(n) for n in numbers])
    refuse_fork(str(op))
    with unobserved():
        dense = [t.resolve_conj().resolve_neg().contiguous() for t in operands]
        key, device = (op, program, form, kinds), for_caller(sum(t.nbytes for t in dense))
        executable = _KNOWN.get(key)
        if executable is None:
            made = alone(op, form, numbers, program)
            executable = _KNOWN[key] = compile.load_or_compile(made, settings(config(), device))
        floats = [n for n in numbers if type(n) is float]
        ints = [n for n in numbers if type(n) is int]
        memory: list[Any] = []
        with LOCK:
            arrays = [device.put(t) for t in dense]
            arrays += [device.numbers(floats, torch.float64, memory), device.numbers(ints, torch.int64, memory)]
            outputs, _ = executable.call(*arrays)
        # Waits until they are computed; what they are computed from is alive until then.
        return [_own(array) for array in outputs]


def _own(array: Any) -> torch.Tensor:
    made = to_tensor(array)
    return made.clone() if made.nbytes <= COPIED else made


def _node(op: OpOverload, form: Form, numbers: Sequence[int | float], program: str) -> Node:
    refuse_unknown(form)
    specs = make(program).traced(form, tuple([type(n) for n in numbers])).specs
    cpu = torch.device("cpu")
    uses, results = [], []
    for vid, (shape, dtype) in enumerate(form):
        uses.append(Use(vid, Geometry(shape, contiguous_strides(shape), 0, dtype)))
    for vid, (shape, dtype) in enumerate(specs, len(form)):
        spec = Spec(shape, dtype, contiguous_strides(shape), cpu)
        results.append(Result(vid, (dtype, shape), Geometry(shape, spec.strides, 0, dtype), None, spec))
    args = [[Ref(i) for i in range(len(form))], [Hole(i, type(n)) for i, n in enumerate(numbers)], program]
    same = (("alone", str(op), program, form, tuple([type(n) for n in numbers])),)
    return Node(-1, op, op, args, {}, tuple(uses), list(numbers), tuple(results), (), same, site.here())


def refuse_unknown(form: Form) -> None:
    """Raises KernelError where a tensor is of a dtype that JAX has not."""
    for i, (_, dtype) in enumerate(form):
        if dtype not in JAX_DTYPE:
            raise KernelError(f"tensor number {i} is {dtype}, which JAX has not")


def alone(op: OpOverload, form: Form, numbers: Sequence[int | float], program: str) -> Computation:
    """A call of a program as a region of one node."""
    node = _node(op, form, numbers, program)
    homes = {i: (dtype, shape) for i, (shape, dtype) in enumerate(form)}
    homes.update({r.vid: r.home for r in node.results})
    region = Region((0,), tuple(range(len(form))), tuple(r.vid for r in node.results), (), "xla", _ALONE)
    return Computation([node], region, homes)


def config() -> Config:
    """The options of the context that this thread is in, else those of the environment."""
    if THREAD.door is not None:
        return THREAD.door.config
    with _MAKING:
        if not _CONFIG:
            _CONFIG.append(resolve())
    return _CONFIG[0]
