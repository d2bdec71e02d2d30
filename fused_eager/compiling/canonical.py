"""Canonical regions: a region as plain values, and a region again out of plain values.

The second level of a key. `to_parts` says everything that lowering looks at and nothing else: positions instead of
value numbers, kinds of hoisted numbers instead of numbers.
`to_region` is its inverse, which proves that nothing is missing: what comes out can be compiled again anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..log.reasons import Reason
from ..planning import forms
from ..planning.forms import Parts
from ..planning.plan import Region
from ..tracing.stream import Node
from .key import Computation


def to_parts(computation: Computation) -> Parts:
    """A region as plain values; equal for regions that lower to the same function.

    Raises:
        Unencodable: an argument, or the rule of an op, has no form that another process would understand.
    """
    region = computation.region
    local = {vid: p for p, vid in enumerate(region.inputs)}
    body = []
    for p, node in enumerate(computation.chosen):
        body.append(forms.of_node(node, f"region.nodes[{p}]", local))
    made = {
        "inputs": [forms.of_home(computation.homes[v]) for v in region.inputs],
        "nodes": body,
        "outputs": [local[v] for v in region.outputs],
        "donated": list(region.donated),
    }
    if computation.smaller:
        smaller = [[size, to_parts(other)] for size, other in computation.smaller]
        made["bucket"] = {"size": computation.size, "smaller": smaller}
    return made


def to_computation(parts: Mapping[str, Any]) -> Computation:
    """What `to_parts` gives `parts` for: a region over all of its nodes.

    Raises:
        ValueError: they are no region, or name what this version of torch does not have.
    """
    try:
        homes = {vid: forms.to_home(form) for vid, form in enumerate(parts["inputs"])}
        inputs = tuple(homes)
        nodes: list[Node] = []
        for form in parts["nodes"]:
            nodes.append(forms.to_node(form, len(nodes), homes))
        outputs, donated = tuple(parts["outputs"]), tuple(parts["donated"])
        region = Region(tuple(range(len(nodes))), inputs, outputs, donated, "xla", Reason("cut.exit"))
        bucket = parts.get("bucket", {"size": 0, "smaller": ()})
        smaller = tuple([(size, to_computation(other)) for size, other in bucket["smaller"]])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"no region: {type(error).__name__}: {error}") from error
    return Computation(nodes, region, homes, bucket["size"], smaller)
