"""Exporting: a program of torch's as a folder that plain JAX runs, with no torch installed.

The folder holds `program.bin` (StableHLO, by `jax.export`), the weights, `signature.json`, and `load.py`, which loads
it and needs jax alone.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch._ops import OpOverload
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from fused_eager.fusion_rules.decompose import is_composite
from fused_eager.fusion_rules.rule import rule_for
from fused_eager.fusion_rules.spec import JAX_DTYPE, TORCH_DTYPE

from ...config import resolve
from ...errors import ExportError
from . import artifact
from .capture import Capture
from .stablehlo import Iteration, exported, rows_are_apart, struct
from .values import Unfit

PLATFORMS = ("cpu", "cuda", "tpu")
BLOCK, BLOCKS = 2, 13  # rows of a batch that varies which are computed at a time; and blocks of the proof's batch


class Exported:
    """An exported program as a function of tensors: it takes and returns what the module did."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._call = artifact.load(self.path)
        self.signature = self._call.signature
        self._in, self._out = (pytree.treespec_loads(self.signature[name]) for name in ("takes", "returns"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on tensors of the host's memory. What it returns knows no gradients.

        Raises:
            TypeError: the arguments are not those that the program was exported for.
            ValueError: a shape is not, or a number.
        """
        flat = self._call(*map(_array, self._tensors(args, kwargs)))
        left = iter(flat)
        leaves = [row["value"] if "value" in row else _tensor(next(left)) for row in self.signature["outputs"]]
        return pytree.tree_unflatten(leaves, self._out)

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments, of which all else has to be what it was."""
        ordered = reorder_kwargs(kwargs, self._in) if set(kwargs) == set(self._in.child(1).context or ()) else kwargs
        leaves, given = pytree.tree_flatten((args, ordered))
        if given != self._in:
            raise TypeError(f"the program takes arguments of the structure {self._in}, and was given {given}")
        found = []
        for at, (leaf, fixed) in enumerate(zip(leaves, self.signature["arguments"], strict=True)):
            if "value" not in fixed:
                if not isinstance(leaf, torch.Tensor):
                    raise TypeError(f"argument {at} of the program is a tensor, and {leaf!r:.60} was given")
                found.append(leaf)
            elif type(leaf) is not type(fixed["value"]) or leaf != fixed["value"]:
                was = fixed["value"]
                raise ValueError(f"argument {at} is part of the program, as {was!r}, and {leaf!r:.60} was given")
        return found

    def __repr__(self) -> str:
        takes = ", ".join(f"{r['dtype']}{r['shape']}" for r in self.signature["inputs"])
        return f"Exported({str(self.path)!r}: {takes} on {', '.join(self.signature['platforms'])})"


def _array(t: torch.Tensor) -> Any:
    t = t.detach().cpu().contiguous().resolve_conj().resolve_neg()
    dtype = np.dtype(JAX_DTYPE[t.dtype])
    return np.asarray(t) if dtype.isbuiltin == 1 else np.asarray(t.view(_BITS[t.itemsize])).view(dtype)


def _tensor(x: Any) -> torch.Tensor:
    found = np.array(x)
    if found.dtype.isbuiltin == 1:
        return torch.from_numpy(found)
    bits = _BITS[found.dtype.itemsize]  # NumPy's own dtypes are not all that there are
    return torch.from_numpy(found.view(JAX_DTYPE[bits])).view(TORCH_DTYPE[found.dtype])


_BITS = {1: torch.uint8, 2: torch.int16}


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any],
    path: str | Path,
    *,
    kwargs: dict[str, Any] | None = None,
    platforms: Sequence[str] = PLATFORMS,
    weights: str = "separate",
    dynamic_batch: bool = False,
) -> Exported:
    """Write a program as StableHLO that plain JAX runs, and return it as a callable on tensors.

    Args:
        model: a module, which `torch.export` takes as it is, or what that has returned.
        args, kwargs: what it is called with; their shapes are the program's.
        path: a folder, which is made anew.
        platforms: what it is to run on.
        weights: "separate" files beside the program, or "inside" it.
        dynamic_batch: the first axis of all tensors among the arguments may have any length. Only where it is proved
            that no row depends on another.

    Raises:
        ExportError: an op has no lowering, draws random numbers or writes an argument, or rows depend on each other.
        ValueError: `weights` or `platforms` are none that there are.
    """
    if weights not in ("separate", "inside"):
        raise ValueError(f"weights cannot be {weights!r}; allowed: 'separate', 'inside'")
    if not platforms or not set(platforms) <= {*PLATFORMS, "rocm"}:
        raise ValueError(f"platforms cannot be {tuple(platforms)}; allowed: any of {', '.join((*PLATFORMS, 'rocm'))}")
    if dynamic_batch and isinstance(model, torch.export.ExportedProgram):
        raise ExportError("a program that is exported already has its sizes: give the module for a batch that varies")
    given, named = tuple(args), dict(kwargs or {})
    if dynamic_batch:
        of_block = _recorded(model, *_with_rows((given, named), BLOCK))
        whole = _recorded(model, *_with_rows((given, named), BLOCK * BLOCKS))
        why = rows_are_apart(whole.whole, of_block.whole, BLOCK * BLOCKS, BLOCK)
        if why:
            raise ExportError(f"the batch cannot vary: {why}")
        made, block = of_block, BLOCK
    else:
        made, block = _recorded(model, given, named), 0
    return _written(made, Path(path), tuple(platforms), weights, block)


def _with_rows(tree: Any, count: int) -> Any:
    """The same arguments with so many rows."""

    def rows(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if not t.ndim or not len(t):
            raise ExportError("a batch that varies needs a first axis in every tensor among the arguments")
        return t[torch.arange(count) % len(t)]

    return pytree.tree_map(rows, tree)


_SEEDED = torch.Tag.nondeterministic_seeded  # attention with a dropout that may be 0 says so of itself


def _taken_apart(op: OpOverload) -> Any:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    # Not `op.decompose`: torch puts in its place what it is given here.
    return op.py_kernels.get(key) or functools.partial(op._op_dk, key)


def _without_composites(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with ops that are others put together taken apart, as they are in a graph of AOTAutograd's."""
    known: set[Any] = set()
    while True:
        program = program.run_decompositions({op: _taken_apart(op) for op in known})
        left = {node.target for node in program.graph.nodes if isinstance(node.target, OpOverload)} - known
        left = {op for op in left if is_composite(op) and (rule_for(op) is None or _SEEDED in op.tags)}
        if not left:
            return program
        known |= left


class Recorded:
    """A program of torch's, recorded as one region: which slots its weights and its arguments are in."""

    def __init__(self, program: torch.export.ExportedProgram):
        lowered = _without_composites(program)
        graph, signature = lowered.graph_module, lowered.graph_signature
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        if changed:
            raise ExportError(f"the program writes {', '.join(changed)}: call eval() before, or write nothing")
        state = {**lowered.state_dict, **lowered.constants}
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
                 **signature.inputs_to_lifted_tensor_constants}  # fmt: skip
        leaves = pytree.tree_leaves(lowered.example_inputs)
        self.arguments = [{} if isinstance(x, torch.Tensor) else {"value": x} for x in leaves]
        examples = iter(leaves)
        values = []
        self.names: list[str | None] = []
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                name = names.get(node.name)
                value = next(examples) if name is None else state[name]
                values.append(value.detach().contiguous() if isinstance(value, torch.Tensor) else value)
                self.names.append(name)
        config = resolve({"mode": "fused", "max_pending": 1 << 30, "islands": "allow"})
        try:
            recorded = Capture(graph, config).program(values)
        except Unfit as why:
            raise ExportError(f"the program cannot be exported: {why}") from why
        self.whole = Iteration(recorded)
        slots = zip(recorded.arguments, self.names, values, strict=True)
        held = [(slot, name, value) for slot, name, value in slots if slot is not None]
        self.weights = [(slot, name, value) for slot, name, value in held if name is not None]
        self.weights += [(slot, f"constant {slot}", value.contiguous()) for slot, value in recorded.constants]
        self.inputs = [(slot, value) for slot, name, value in held if name is None]
        self.takes, self.returns = lowered.call_spec.in_spec, lowered.call_spec.out_spec


def _recorded(model: Any, args: Any, kwargs: Any) -> Recorded:
    if not isinstance(model, torch.export.ExportedProgram):
        model = torch.export.export(model, args, kwargs)
    return Recorded(model)


def _written(made: Recorded, path: Path, platforms: tuple[str, ...], where: str, block: int) -> Exported:
    whole, arrays = made.whole, [_array(value) for _, _, value in made.weights]
    outputs: list[dict[str, Any]] = []

    def function(weights: list[Any], inputs: list[Any]) -> list[Any]:
        if where == "inside":
            weights = [jax.numpy.asarray(x) for x in arrays]

        def of_block(*inputs: Any) -> list[Any]:
            held = dict(zip([slot for slot, *_ in made.weights], weights, strict=True))
            held.update(zip([slot for slot, _ in made.inputs], inputs, strict=True))
            found = whole(held)
            outputs[:] = [{} if isinstance(x, jax.Array) else {"value": x} for x in found]
            return [x for x in found if isinstance(x, jax.Array)]

        if not block:
            return of_block(*inputs)
        blocks = [x.reshape(-1, block, *x.shape[1:]) for x in inputs]
        return [x.reshape(-1, *x.shape[2:]) for x in jax.vmap(of_block)(*blocks)]

    inputs = [struct(value) for _, value in made.inputs]
    if block:
        count = jax.export.symbolic_shape("rows")[0]
        inputs = [jax.ShapeDtypeStruct((block * count, *x.shape[1:]), x.dtype) for x in inputs]
    kept = [] if where == "inside" else [struct(value) for *_, value in made.weights]
    program = exported(function, kept, inputs, platforms)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    (path / "program.bin").write_bytes(program)
    shutil.copyfile(artifact.__file__, path / "load.py")
    rows = []
    for at, (_, name, _) in enumerate(made.weights if kept else []):
        (path / f"weight{at}.bin").write_bytes(np.ascontiguousarray(arrays[at]).tobytes())
        rows.append({"name": name, "file": f"weight{at}.bin", **_row(kept[at])})
    signature = {
        "format": 1,
        "platforms": platforms,
        "block": block,
        "inputs": [{**_row(x), "batch": bool(block)} for x in map(struct, (value for _, value in made.inputs))],
        "outputs": outputs,
        "arguments": made.arguments,
        "takes": pytree.treespec_dumps(made.takes),
        "returns": pytree.treespec_dumps(made.returns),
        "weights": rows,
    }
    (path / "signature.json").write_text(json.dumps(signature, indent=1))
    return Exported(path)


def _row(x: jax.ShapeDtypeStruct) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": str(np.dtype(x.dtype))}
