"""Reproducing: a recorded stream as a program that anybody can run, without the values that it was recorded with.

The program calls each op of the stream, on random tensors of the same dtypes and shapes, once in plain PyTorch and once
in a context with the same options, and says what differs. Numbers that are arguments (a learning rate) stay; what is in
tensors does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.spec import contiguous_strides

from ..config import Config
from ..devices.home import Home
from ..log.site import UNKNOWN, describe
from ..planning.plan import Work
from ..tracing.node import Hole, Node, Ref, place_of, targets_of

_HEAD = '''"""What fused_eager was given: {ops} ops, up to {reason}. Shapes are the program's, values are random.

Run it: it computes all of it in plain PyTorch and fused, and says what differs.
"""

import torch

import fused_eager


def draw(dtype, shape):
    """Random values of a dtype and shape; integers are 0 or 1, as they may be indices."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, shape).to(dtype)
    return torch.rand(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def see(value, dtype, size, stride, offset=0, conj=False, neg=False):
    """A view of the memory that holds a value."""
    if dtype != value.dtype:
        value = value.as_strided((value.untyped_storage().nbytes() // value.dtype.itemsize,), (1,), 0).view(dtype)
    value = value.as_strided(size, stride, offset)
    value = value.conj() if conj else value
    return torch._neg_view(value) if neg else value


def made(returned):
    """The tensors in what an op has returned."""
    if isinstance(returned, torch.Tensor):
        return [returned]
    return [t for part in returned for t in made(part)] if isinstance(returned, (list, tuple)) else []


'''

_TAIL = '''

torch.set_default_dtype({default})
torch.manual_seed(0)
with torch.no_grad():
    values = inputs()
    plain = [t.cpu() for t in program("cpu", *[t.clone() for t in values])]
{fused}
differ = 0
for name, a, b in zip(OUTPUTS, plain, fused, strict=True):
    try:
        torch.testing.assert_close(b, a, equal_nan=True)
    except AssertionError as error:
        differ += 1
        print(f"{{name}} differs: {{error}}")
print(f"{{differ}} of {{len(OUTPUTS)}} results differ")
'''

_IN_CONTEXT = '''    with fused_eager.fused_eager({options}):
        fused = program("cpu", *[t.clone() for t in values])
        fused_eager.sync()
'''

_ON_DEVICE = '''    fused_eager.register("{name}")
    getattr(torch, "{name}").eager_mode = "{mode}"
    fused = [t.cpu() for t in program("{name}", *[t.to("{name}") for t in values])]
'''


def as_program(work: Work) -> str:
    """The program for a stream, as Python source."""
    wanted = sorted(work.live & set(work.homes))
    device = torch.device(work.device.name)
    written = _Written(work, device)
    body = list(written.lines())
    kept = [v for v in wanted if v in written.made]
    outputs = ", ".join(_seen_entire(v, work.homes[v]) for v in kept)
    drawn = "".join(f"        draw({home[0]}, {home[1]!r}),  # v{v}\n" for v, home in written.inputs.items())
    if device.type == "cpu":
        fused = _IN_CONTEXT.format(options=_options(work.config))
    else:
        fused = _ON_DEVICE.format(name=device.type, mode=work.config.mode)
    return "".join(
        (
            _HEAD.format(ops=len(work.nodes), reason=work.reason.code),
            f"def inputs():\n    return [\n{drawn}    ]\n\n\n",
            f"def program(device{''.join(f', v{v}' for v in written.inputs)}):\n",
            *(f"    {line}\n" for line in body),
            f"    return [{outputs}]\n\n\n",
            f"OUTPUTS = {[f'v{v}' for v in kept]!r}\n",
            _TAIL.format(default=work.default, fused=fused),
        )
    )


def _options(config: Config) -> str:
    """What has to be given for a context to have these options, and to compile the stream when it first comes."""
    chosen: dict[str, Any] = {"mode": config.mode, "compile": "wait", "native": "never"}
    plain = Config()
    for name in ("max_region", "check_bounds", "islands", "deterministic"):
        if getattr(config, name) != getattr(plain, name):
            chosen[name] = getattr(config, name)
    return ", ".join(f"{name}={value!r}" for name, value in chosen.items())


def _seen_entire(vid: int, home: Home) -> str:
    dtype, shape = home
    return f"see(v{vid}, {dtype}, {tuple(shape)!r}, {contiguous_strides(shape)!r})"


class _Written:
    """The lines of a stream's program. A value of the stream is a tensor over the memory that holds it."""

    def __init__(self, work: Work, device: torch.device):
        self.work = work
        self.device = device
        self.made: set[int] = set()
        self.as_is: dict[int, tuple[Any, ...]] = {}  # size, stride and dtype of the tensor that a name stands for
        results = {r.vid for node in work.nodes for r in node.results}
        self.inputs: dict[int, Home] = {}
        for node in work.nodes:
            for vid in [use.vid for use in node.uses] + [r.base for r in node.results if r.base is not None]:
                if vid not in results and vid not in self.inputs:
                    self.inputs[vid] = home = work.homes[vid]
                    self.as_is[vid] = tuple(home[1]), contiguous_strides(home[1]), home[0]

    def lines(self) -> Iterator[str]:
        """One for each node, with the program's line behind it, and one for each value that a node overwrites."""
        for node in self.work.nodes:
            yield from self._lines_of(node)

    def _lines_of(self, node: Node) -> Iterator[str]:
        call = f"torch.ops.{node.op}({', '.join(self._arguments(node))})"
        fresh, written = _split(node)
        names = ", ".join(f"v{r.vid}" for r in fresh)
        if len(fresh) == 1 and isinstance(node.op._schema.returns[0].type, torch.TensorType):
            line = f"{names} = {call}" if len(node.op._schema.returns) == 1 else f"{names} = made({call})[0]"
        elif fresh:
            aliased = sum(r.alias_info is not None for r in node.op._schema.returns)  # which come first
            line = f"[{names}] = made({call})" + (f"[{aliased}:]" if aliased else "")
        else:
            line = call
        yield f"{line}{_comment(node)}"
        for result in fresh:
            self.as_is[result.vid] = result.spec.shape, result.spec.strides, result.spec.dtype
            self.made.add(result.vid)
        for result, of in written:
            self.made.add(result.vid)
            if of in self.as_is:
                self.as_is[result.vid] = self.as_is[of]
            yield f"v{result.vid} = v{of}  # overwritten"

    def _arguments(self, node: Node) -> Iterator[str]:
        names = [a.name for a in node.op._schema.arguments]
        by_position = [a for a in node.op._schema.arguments if not a.kwarg_only]
        for i, value in enumerate(node.args):
            shown = self._leaf(node, value)
            yield shown if i < len(by_position) else f"{names[i]}={shown}"
        for name, value in node.kwargs.items():
            yield f"{name}={self._leaf(node, value)}"

    def _leaf(self, node: Node, leaf: Any) -> str:
        if isinstance(leaf, Ref):
            use = node.uses[leaf.index]
            return self._view(use.vid, place_of(node, use))
        if isinstance(leaf, Hole):
            return _plain(leaf.kind(node.scalars[leaf.index]))
        if isinstance(leaf, torch.device):
            here = leaf.type in ("cpu", self.device.type)  # what is recorded of a device names the CPU
            return "device" if here else f"torch.device({str(leaf)!r})"
        if isinstance(leaf, (list, tuple)):
            inner = ", ".join(self._leaf(node, each) for each in leaf)
            return f"[{inner}]"
        return _plain(leaf)

    def _view(self, vid: int, g: Geometry) -> str:
        plain = not (g.offset or g.conj or g.neg)
        if plain and self.as_is.get(vid) == (tuple(g.size), tuple(g.stride), g.dtype):
            return f"v{vid}"
        extra = f", {g.offset}" if g.offset else ""
        extra += "".join(f", {name}=True" for name in ("conj", "neg") if getattr(g, name))
        return f"see(v{vid}, {g.dtype}, {tuple(g.size)!r}, {tuple(g.stride)!r}{extra})"


def _split(node: Node) -> tuple[list[Any], list[tuple[Any, int]]]:
    """The results that a node makes, and those that it writes into a value that there was, with that value."""
    count = len(node.results) - len(node.targets)
    overwritten = targets_of(node)
    written = [(r, overwritten[at][0]) for at, r in zip(node.targets, node.results[count:], strict=True)]
    return list(node.results[:count]), written


def _plain(value: Any) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)  # of dtypes, layouts and memory formats too


def _comment(node: Node) -> str:
    site = describe(node.place)
    return "" if site == UNKNOWN else f"  # {os.path.basename(site.file)}:{site.line}"
