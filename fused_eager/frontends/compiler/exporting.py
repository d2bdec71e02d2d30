"""Exporting: a program of torch's as a folder that plain JAX runs, with no torch installed.

The folder holds `program.bin` (StableHLO, by `jax.export`), the weights, `signature.json`, and `load.py`, which loads
it and needs jax alone.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import torch
from torch._ops import OpOverload
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from fused_eager.fusion_rules.decompose import is_composite
from fused_eager.fusion_rules.padded import Refused
from fused_eager.fusion_rules.platforms import ANY, lowering_for
from fused_eager.fusion_rules.rule import rule_for
from fused_eager.fusion_rules.spec import JAX_DTYPE, TORCH_DTYPE

from ...config import resolve
from ...errors import ExportError
from ...targets.target import Target
from ...tracing.opinfo import Kind, info_of
from ...xla import enable_x64, refuse_fork
from . import artifact, sizes, symbolic
from .capture import Capture
from .executables import compiled, target_of
from .stablehlo import Iteration, exported, struct
from .values import Unfit

PLATFORMS = ("cpu", "cuda", "tpu")
ROWS = 4  # of a batch that varies, where torch exports it


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
            RuntimeError: this process was forked from one that had started XLA.
        """
        refuse_fork("an exported program")
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
    dynamic_shapes: Any = None,
    target: str | Sequence[str] = (),
) -> Exported:
    """Write a program as StableHLO that plain JAX runs, and return it as a callable on tensors.

    Args:
        model: a module, which `torch.export` takes as it is, or what that has returned.
        args, kwargs: what it is called with; their shapes are the program's.
        path: a folder, which is made anew.
        platforms: what it is to run on.
        weights: "separate" files beside the program, or "inside" it.
        dynamic_batch: the first axis of all tensors among the arguments is one that may have any length.
        dynamic_shapes: which axes may, as `torch.export.export` takes it; up to three lengths.
        target: TPUs that need not be here, as "v5e:2x2": an executable for one of them is written beside the program.

    Raises:
        ExportError: an op has no lowering, draws random numbers or writes an argument, or its sizes cannot vary.
        ValueError: `weights`, `platforms` or `target` are none that there are, or both kinds of `dynamic` are given.
        NoCompiler: XLA's compiler for a target is not installed.
    """
    if weights not in ("separate", "inside"):
        raise ValueError(f"weights cannot be {weights!r}; allowed: 'separate', 'inside'")
    if not platforms or not set(platforms) <= {*PLATFORMS, "rocm"}:
        raise ValueError(f"platforms cannot be {tuple(platforms)}; allowed: any of {', '.join((*PLATFORMS, 'rocm'))}")
    if dynamic_batch and dynamic_shapes is not None:
        raise ValueError("give dynamic_batch or dynamic_shapes, not both")
    targets = [target_of(text) for text in ([target] if isinstance(target, str) else target)]
    given, named = tuple(args), dict(kwargs or {})
    if not isinstance(model, torch.export.ExportedProgram):
        if dynamic_batch:
            given, named = _with_rows((given, named))
            dynamic_shapes = _first_axes((given, named))
        try:
            model = torch.export.export(model, given, named, dynamic_shapes=dynamic_shapes)
        except torch._dynamo.exc.UserError as why:
            raise ExportError(f"torch does not export it: {why}") from why
    elif dynamic_batch or dynamic_shapes is not None:
        raise ExportError("a program that is exported already has its sizes: give the module for sizes that vary")
    lowered = Lowered(model)
    if targets and lowered.symbols:
        raise ExportError("an executable for a target has sizes of its own: give sizes that do not vary, or no target")
    return _written(lowered, Path(path), tuple(platforms), weights, targets)


def _with_rows(tree: Any) -> Any:
    """The same arguments with some rows: torch takes a first axis of one to be always one."""

    def rows(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if not t.ndim or not len(t):
            raise ExportError("a batch that varies needs a first axis in every tensor among the arguments")
        return t[torch.arange(ROWS) % len(t)]

    return pytree.tree_map(rows, tree)


def _first_axes(tree: Any) -> torch.export.ShapesCollection:
    shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch", min=1)  # type: ignore[no-untyped-call]
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            shapes[leaf] = {0: batch}
    return shapes


_SEEDED = torch.Tag.nondeterministic_seeded  # attention with a dropout that may be 0 says so of itself


def _decomposition(op: OpOverload) -> Any:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    # Not `op.decompose`: torch puts in its place what it is given here.
    return op.py_kernels.get(key) or functools.partial(op._op_dk, key)


def _without_composites(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with ops that are others put together taken apart, as they are in a graph of AOTAutograd's."""
    known: set[Any] = set()
    while True:
        program = program.run_decompositions({op: _decomposition(op) for op in known})
        left = {node.target for node in program.graph.nodes if isinstance(node.target, OpOverload)} - known
        left = {op for op in left if is_composite(op) and (rule_for(op) is None or _SEEDED in op.tags)}
        if not left:
            return program
        known |= left


class Lowered:
    """A program of torch's as a graph of ops: which of its arguments are weights, and which sizes vary."""

    def __init__(self, program: torch.export.ExportedProgram):
        lowered = _without_composites(program)
        self.graph, signature = lowered.graph_module, lowered.graph_signature
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        if changed:
            raise ExportError(f"the program writes {', '.join(changed)}: call eval() before, or write nothing")
        state = {**lowered.state_dict, **lowered.constants}
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
                 **signature.inputs_to_lifted_tensor_constants}  # fmt: skip
        leaves = pytree.tree_leaves(lowered.example_inputs)
        self.arguments = [{} if isinstance(x, torch.Tensor) else {"value": x} for x in leaves]
        examples = iter(leaves)
        self.values: list[Any] = []
        self.names: list[str | None] = []
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                name = names.get(node.name)
                value = next(examples) if name is None else state[name]
                self.values.append(value.detach().contiguous() if isinstance(value, torch.Tensor) else value)
                self.names.append(name)
        _take_out_checks(self.graph)
        self.takes, self.returns = lowered.call_spec.in_spec, _written_down(lowered.call_spec.out_spec)
        symbols = sizes.symbols(self.graph, self.values)
        self.symbols = {f"size{k}" if len(symbols) > 1 else "size": s for k, s in enumerate(symbols)}
        self.ranges = {n: _range(lowered.range_constraints.get(s)) for n, s in self.symbols.items()}

    def at(self, sample: Mapping[str, int]) -> Recorded:
        """The program where its sizes are these."""
        if not sample:
            return Recorded(self, self.values)
        env = {self.symbols[name]: n for name, n in sample.items()}
        return Recorded(self, [x.contiguous() if isinstance(x, torch.Tensor) else x
                               for x in sizes.at(self.graph, self.values, env)])  # fmt: skip


def _take_out_checks(graph: torch.fx.GraphModule) -> None:
    """An exported program looks at no values: not at indices, and not at what `one_hot` asserts of its classes."""
    for node in reversed(graph.graph.nodes):
        is_check = isinstance(node.target, OpOverload) and not node.target._schema.returns
        if is_check and not node.users and info_of(node.target).kind is Kind.CHECK:
            graph.graph.erase_node(node)


def _written_down(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """A structure that can be written down: torch's own named results, as those of `sort`, as tuples."""

    def is_named(x: Any) -> bool:
        return type(x).__module__ == "torch.return_types"

    made = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    return pytree.tree_structure(pytree.tree_map(lambda x: tuple(x) if is_named(x) else x, made, is_leaf=is_named))


def _range(found: Any) -> tuple[int, float]:
    low, high = (1, math.inf) if found is None else (int(found.lower), float(found.upper))
    return max(low, 1), high


class Recorded:
    """A program of torch's, recorded as one region: which slots its weights and its arguments are in."""

    def __init__(self, lowered: Lowered, values: Sequence[Any]):
        config = resolve({"mode": "fused", "max_pending": 1 << 30, "islands": "allow"})
        try:
            recorded = Capture(lowered.graph, config).program(values)
        except Unfit as why:
            raise ExportError(f"the program cannot be exported: {why}") from why
        self.iteration = Iteration(recorded)
        slots = zip(recorded.arguments, lowered.names, values, strict=True)
        held = [(slot, name, value) for slot, name, value in slots if slot is not None]
        self.weights = [(slot, name, value) for slot, name, value in held if name is not None]
        self.weights += [(slot, f"constant {slot}", value.contiguous()) for slot, value in recorded.constants]
        self.inputs = [(slot, value) for slot, name, value in held if name is None]
        self.rest: list[dict[str, Any]] = []

    def __call__(self, weights: Sequence[Any], inputs: Sequence[Any], numbers: Any = None) -> list[Any]:
        """Its results that are arrays; what the others are is noted in `rest`."""
        held = dict(zip([slot for slot, *_ in self.weights], weights, strict=True))
        held.update(zip([slot for slot, _ in self.inputs], inputs, strict=True))
        found = self.iteration(held, numbers)
        self.rest = [{} if isinstance(x, jax.Array) else {"value": x} for x in found]
        return [x for x in found if isinstance(x, jax.Array)]


class Fixed:
    """A program of one size."""

    def __init__(self, lowered: Lowered):
        self.made = lowered.at({})
        self.inputs = [struct(value) for _, value in self.made.inputs]
        self.sizes: dict[str, Any] = {}

    def __call__(self, weights: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        return self.made(weights, inputs)


class Varying:
    """A program of sizes that vary: what it is at samples of them, as one function."""

    def __init__(self, lowered: Lowered):
        names = list(lowered.symbols)
        bounds = [f"{n} >= {low}" for n, (low, _) in lowered.ranges.items() if low > 1]
        bounds += [f"{n} <= {int(high)}" for n, (_, high) in lowered.ranges.items() if math.isfinite(high)]
        symbols = jax.export.symbolic_shape(", ".join(names), constraints=bounds)
        samples = symbolic.samples(names, lowered.ranges)
        self.polynomials = symbolic.Polynomials(samples, dict(zip(names, symbols, strict=True)))
        every = [lowered.at(sample) for sample in samples]
        self.made = every[0]
        if any([x[:2] for x in r.weights] != [x[:2] for x in self.made.weights] for r in every):
            raise symbolic.Unlike("it has other weights at another size")
        forms = zip(*([struct(value) for _, value in r.inputs] for r in every), strict=True)
        self.inputs = [self._merged(each) for each in forms]
        self.sizes = {n: [low, int(high) if math.isfinite(high) else None] for n, (low, high) in lowered.ranges.items()}
        self.numbers = [r.iteration.numbers() for r in every]
        with enable_x64(True), lowering_for(ANY):
            self.call = symbolic.generalised([_traced(r) for r in every], self.polynomials)
        if any(r.rest != self.made.rest for r in every):
            raise symbolic.Unlike("it returns a size")

    def _merged(self, forms: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        shape = [self.polynomials.number(n) for n in zip(*(x.shape for x in forms), strict=True)]
        return jax.ShapeDtypeStruct(tuple(shape), forms[0].dtype)

    def __call__(self, weights: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        floats, ints = zip(*self.numbers, strict=True)
        numbers = (symbolic.numbers_of(floats, self.polynomials, "float64"),
                   symbolic.numbers_of(ints, self.polynomials, "int64"))  # fmt: skip
        return self.call(*weights, *inputs, *numbers)


def _traced(made: Recorded) -> Any:
    floats, ints = made.iteration.numbers()
    forms = [struct(value) for *_, value in made.weights], [struct(value) for _, value in made.inputs]
    numbers = jax.ShapeDtypeStruct((len(floats),), "float64"), jax.ShapeDtypeStruct((len(ints),), "int64")
    return jax.make_jaxpr(made)(*forms, numbers)


def _written(
    lowered: Lowered, path: Path, platforms: tuple[str, ...], where: str, targets: Sequence[Target]
) -> Exported:
    try:
        program = Varying(lowered) if lowered.symbols else Fixed(lowered)
        made = program.made
        arrays = [_array(value) for *_, value in made.weights]
        kept = [] if where == "inside" else [struct(value) for *_, value in made.weights]

        def function(weights: list[Any], inputs: list[Any]) -> list[Any]:
            return program([jax.numpy.asarray(x) for x in arrays] if where == "inside" else weights, inputs)

        executables = [compiled(function, kept, program.inputs, t) for t in targets]
        code, results = exported(function, kept, program.inputs, platforms, bool(lowered.symbols))
    except Refused as why:
        raise ExportError(f"the sizes cannot vary: {why}") from why
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    (path / "program.bin").write_bytes(code)
    shutil.copyfile(artifact.__file__, path / "load.py")
    for at, (blob, row) in enumerate(executables):
        row["file"] = f"executable{at}.bin"
        (path / row["file"]).write_bytes(blob)
    rows = []
    for at, (_, name, _) in enumerate(made.weights if kept else []):
        (path / f"weight{at}.bin").write_bytes(np.ascontiguousarray(arrays[at]).tobytes())
        rows.append({"name": name, "file": f"weight{at}.bin", **_row(kept[at])})
    signature = {
        "format": 2,
        "platforms": platforms,
        "sizes": program.sizes,
        "inputs": [_row(x) for x in program.inputs],
        "results": [_row(x) for x in results],
        "outputs": made.rest,
        "arguments": lowered.arguments,
        "takes": pytree.treespec_dumps(lowered.takes),
        "returns": pytree.treespec_dumps(lowered.returns),
        "weights": rows,
        "targets": [row for _, row in executables],
    }
    (path / "signature.json").write_text(json.dumps(signature, indent=1))
    return Exported(path)


def _row(x: jax.ShapeDtypeStruct) -> dict[str, Any]:
    return {"shape": [n if isinstance(n, int) else str(n) for n in x.shape], "dtype": str(np.dtype(x.dtype))}
