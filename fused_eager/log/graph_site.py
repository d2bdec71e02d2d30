"""Lines of the program in graphs: the one that a node came from, and those that stand for the code of a graph."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from .site import Place, is_internal, stand_for

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


class _Code(NamedTuple):
    """The part of a code object that a line of a report needs."""

    co_filename: str
    co_name: str


def place_of(node: Node, caller: tuple[Any, ...] | None) -> Place | None:
    """The line of the program that a node of a graph came from; `caller`, which calls the graph, where nobody knows."""
    # The innermost line that is the program's own: those of an optimizer, or of a layer of torch's, are not.
    frames = [f for f in _FRAME.findall(node.meta.get("stack_trace") or "") if not is_internal(f[0])]
    if not frames and caller is None:
        return None
    file, line, function = frames[-1] if frames else (caller[0].co_filename, caller[1], caller[0].co_name)  # type: ignore[index]
    modules = list((node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}).values())
    path = modules[-1][0] if modules and isinstance(modules[-1], tuple) else ""
    path = re.sub(r"L\['self'\]|\._modules|_buffers|_parameters|['\"]", "", str(path))
    path = re.sub(r"\[(\w+)\]", r".\1", path).strip(".").replace("..", ".")
    backward = node.meta.get("partitioner_tag") == "is_backward"
    return Place(_Code(file, function.strip()), int(line), path, backward, None)  # type: ignore[arg-type]


def name_lines(graph: GraphModule) -> None:
    """Have the lines of the code that torch has made of a graph be told as those that its nodes came from."""
    make: Any = getattr(graph, "real_recompile", None)  # of graphs whose code is made when it is asked for
    if make is not None:
        make()
    code = getattr(getattr(graph.forward, "__func__", graph.forward), "__code__", None)
    nodes, numbers = list(graph.graph.nodes), getattr(graph, "_lineno_map", None)
    if code is None or not numbers:
        return
    first = graph._prologue_start
    places = {line + first: place_of(nodes[at], None) for line, at in numbers.items() if at is not None}
    stand_for(code.co_filename, {line: place for line, place in places.items() if place is not None})
