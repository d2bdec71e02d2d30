"""Autograd cache: torch keeps what AOTAutograd made of a graph, and a second process need not trace it again.

Only graphs lie there, where torch puts inductor's too (`TORCHINDUCTOR_CACHE_DIR`). What is compiled of them is in this
library's cache, under the keys of its ops, whichever door asks.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache as torchs
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fused_eager.cache.local import is_private

from ...config import Config
from ...tracing.opinfo import Kind, info_of
from .graphs import CompiledGraph

Compiler = Callable[[GraphModule, Sequence[Any]], Any]
# What nodes are asked about, besides `val`: the lines that they came from.
_LINES = ("stack_trace", "partitioner_tag")
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_ITS_OWN = frozenset({"aten", "prims", "prim"})  # namespaces of ops whose code is torch's
_config: ContextVar[Config] = ContextVar("config of the graph that is loaded")


@dataclass(init=False)
class KeptGraph(OutputCode):
    """A compiled graph as torch keeps it: its nodes, and nothing of what was compiled."""

    def __init__(self, graph: GraphModule, config: Config, backward: bool, shown: int | None = None):
        super().__init__()
        self._boxed_call = True
        self.backward, self.shown = backward, shown
        self.graph: GraphModule | None = graph
        # torch takes them away before it asks for what is to be kept.
        self.told: list[dict[str, Any]] | None = [node.meta for node in graph.graph.nodes]
        self.written = b""
        self.compiled: CompiledGraph | None = CompiledGraph(graph, config, backward, shown)

    def __call__(self, inputs: Any) -> Any:
        return self.compiled(inputs)  # type: ignore[misc]

    def prepare_for_serialization(self) -> None:
        """Keep what can be written down; called on a copy."""
        assert self.graph is not None and self.told is not None
        self.written = _written(self.graph, self.told)
        self.graph = self.told = self.compiled = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        if self.compiled is None:
            graph = GraphPickler.loads(self.written, FakeTensorMode(shape_env=ShapeEnv()))
            self.compiled = CompiledGraph(graph, _config.get(), self.backward, self.shown)  # type: ignore[arg-type]

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There are none of Triton's kernels."""


def _written(graph: GraphModule, told: Sequence[dict[str, Any]]) -> bytes:
    """A graph's nodes, with what is asked of them, of what each has `told`; afterwards they tell all of it again.

    Raises:
        BypassAOTAutogradCache: something in it cannot be written down.
    """
    nodes = list(graph.graph.nodes)
    try:
        for node, all_of_it in zip(nodes, told, strict=True):
            if isinstance(node.target, HigherOrderOperator):
                # A graph in the graph, or an effect, for which torch has a wrapper that it does not keep.
                raise NotImplementedError(f"it calls {node.target}")
            node.meta = _asked(node, all_of_it)
        return GraphPickler.dumps(graph, Options(ops_filter=None, node_metadata_key_filter=None))
    except Exception as error:
        why = f"the graph cannot be written down ({type(error).__name__}: {error})"
        raise torchs.BypassAOTAutogradCache(why) from error
    finally:
        for node, all_of_it in zip(nodes, told, strict=True):
            node.meta = all_of_it


def _asked(node: Node, told: dict[str, Any]) -> dict[str, Any]:
    """The part of what a node has told that anyone asks for."""
    found = {name: told[name] for name in _LINES if name in told}
    for name in _STACKS:
        modules = list((told.get(name) or {}).values())
        if modules and isinstance(modules[-1], tuple):
            found[name] = {"": (str(modules[-1][0]), "")}
    plain = isinstance(node.target, OpOverload) and info_of(node.target).kind in (Kind.COMPUTE, Kind.VIEW)
    if "val" in told and not plain:
        found["val"] = told["val"]
    return found


def keeps(graph: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph is kept: its key says all that AOTAutograd makes of it, and nobody else writes to the folder.

    The key does not where code is called that is not torch's own, or where a tensor is a constant: it has their form.
    """
    if not isinstance(graph, GraphModule) or any(type(x) not in _TOLD for x in inputs) or not _is_folder_private():
        return False
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            return False
        if isinstance(node.meta.get("example_value"), torch.SymFloat):
            return False  # torch 2.13 forgets which value it has made a constant of, inductor's graphs as well
        op = node.target
        if isinstance(op, HigherOrderOperator):
            return False
        if isinstance(op, (OpOverload, OpOverloadPacket)) and _namespace(op) not in _ITS_OWN:
            return False
    return not hasattr(graph, "saved_tensors_hooks_pack_0")


_TOLD = {torch.Tensor, torch.nn.Parameter, FakeTensor, int, float, bool, type(None), torch.SymInt}


def _is_folder_private() -> bool:
    """Whether the folder is this user's, and writable by nobody else: what lies there is code that will run."""
    try:
        folders = (cache_dir(), torchs.AOTAutogradCache._get_tmp_dir())
        return all(is_private(os.stat(path)) for path in folders if os.path.exists(path))
    except OSError:
        return False


def _namespace(op: Any) -> str:
    name = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    return str(name).split("::", 1)[0]


def serializable(compilers: dict[str, Compiler]) -> dict[str, Any]:
    """The same compilers, as torch knows those by whose results can be kept."""
    return {name: SerializableAOTDispatchCompiler(OutputCode, make) for name, make in compilers.items()}


@functools.cache
def _own_digest() -> str:
    """What stands for the code that says what AOTAutograd is to make of a graph, and what is kept of it."""
    files = [Path(__file__), Path(__file__).with_name("backend.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@dataclass(frozen=True)
class _Details:
    """All that decides what AOTAutograd makes of a graph."""

    graph: GraphModule
    inputs: Sequence[Any]
    config: Any
    alike: list[tuple[Any, ...]]
    surroundings: tuple[Any, ...]


def _key(graph: GraphModule, inputs: Sequence[Any], config: Any, *_: Any) -> tuple[str, list[str]]:
    """The key of a graph, in the place of torch's: that one imports inductor's generators of code, for a second."""
    graph = getattr(graph, "gm", graph)
    with torchs.sanitize_gm_for_cache(graph):
        torchs.check_cacheable(graph)
        details = _Details(graph, inputs, config, _alike(inputs), _surroundings())
        return "a" + torchs.AOTAutogradCachePickler(graph).get_hash(details), []


def _alike(inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Which inputs share memory, and what torch's own description leaves out."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    storages = [x.untyped_storage()._cdata if x.layout is torch.strided else id(x) for x in tensors]
    return [
        (storages.index(storage), x.is_leaf, x._is_view(), x.storage_offset() if x.layout is torch.strided else 0)
        for x, storage in zip(tensors, storages, strict=True)
    ]


def _surroundings() -> tuple[Any, ...]:
    """The switches that ops are traced by, and whose code traces them."""
    attention = torch.backends.cuda  # those of the CPU's attention as well
    return (
        *(_own_digest(), torch.__version__, torch.version.git_version, functorch_config.save_config()),
        *(torch.get_default_dtype(), str(torch.get_default_device()), torch.is_grad_enabled()),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)],
        [attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()],
        torch.backends.mkldnn.enabled,
    )


@contextmanager
def kept(config: Config) -> Iterator[None]:
    """While AOTAutograd is asked for a graph: it looks among those that are kept, and keeps it.

    The backward graph is made at once, not when it is first called: both are kept as one.
    """
    token = _config.set(config)
    both = functorch_config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True)
    try:
        with both, mock.patch.object(torchs, "autograd_cache_key", _key):  # Dynamo compiles one at a time
            yield
    finally:
        _config.reset(token)
