"""Forms: a node, its arguments and its values as plain values that mean the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.cache import Unencodable
from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.rule import rule_for
from fused_eager.fusion_rules.spec import Spec, contiguous_strides

from ..devices.home import Home
from ..tracing.stream import Hole, Node, Ref, Result, Use

Parts = dict[str, Any]
_OWN = "fused_eager.fusion_rules."


def of_node(node: Node, path: str, local: dict[int, int]) -> Parts:
    """A node as plain values. `local` numbers the values that exist; the node's results are added to it.

    Raises:
        Unencodable: an argument at `path`, or the rule of the op, has no form that another process would understand.
    """
    form: Parts = {
        "op": _twin_name(node, path),
        "reads": [_read(use, local) for use in node.uses],
        "args": [_leaf(a, f"{path}.args") for a in node.args],
    }
    outs = {a.name for a in node.op._schema.arguments if a.is_out}
    if node.op is not node.twin:
        # What an op writes decides whether XLA may write in place.
        form["called"], form["targets"] = str(node.op), list(node.targets)
    named = {k: _leaf(v, f"{path}.{k}") for k, v in sorted(node.kwargs.items()) if k not in outs}
    if named:
        form["kwargs"] = named
    if node.scalars:
        form["scalars"] = [type(s).__name__ for s in node.scalars]
    makes = []
    for r in node.results:
        makes.append(_result(r, local))
        local[r.vid] = len(local)
    form["makes"] = makes
    return form


# ---- arguments -------------------------------------------------------------------------------------------------


def to_node(form: Parts, number: int, homes: dict[int, Home]) -> Node:
    """The node that `of_node` gives `form` for. Its results are added to `homes`, numbered as they come.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, IndexError: it is none, or names what this torch does not have.
    """
    uses = tuple(_to_use(u) for u in form["reads"])
    results = []
    for made in form["makes"]:
        result = _to_result(made, len(homes))
        results.append(result)
        homes[result.vid] = result.home
    twin = _to_op(form["op"])
    op, targets = _to_op(form.get("called") or form["op"]), tuple(form.get("targets", ()))
    args = [_to_leaf(a) for a in form["args"]]
    kwargs = {k: _to_leaf(v) for k, v in form.get("kwargs", {}).items()}
    scalars = [_KINDS[name](0) for name in form.get("scalars", ())]
    same = (-1, number)  # no signature of a recorded call
    return Node(-1, op, twin, args, kwargs, uses, scalars, tuple(results), targets, same, None)


def _twin_name(node: Node, path: str) -> str:
    if node.twin is None:
        raise Unencodable(path, f"{node.op} has no functional overload")
    rule = rule_for(node.twin)
    if rule is not None and not rule.lower.__module__.startswith(_OWN):
        # Its source is not part of the digest that stands for our lowerings.
        raise Unencodable(path, f"the rule of {node.twin} comes from {rule.lower.__module__}")
    return str(node.twin)


def _to_op(name: str) -> OpOverload:
    families.load()  # some rows define the ops that they are rows of
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload):
        raise ValueError(f"{name} is no op")
    return found


_KINDS: dict[str, type] = {"float": float, "int": int, "bool": bool}


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


# How leaves of argument templates are written, by exact type; plain values stay what they are. Containers and all
# others are mappings of one member, so that nothing a program passes can be taken for one of them.
_WRITE: dict[type, tuple[str, Callable[[Any], Any]]] = {
    Ref: ("read", lambda leaf: leaf.index),
    Hole: ("scalar", lambda leaf: [leaf.index, leaf.kind.__name__]),
    torch.dtype: ("dtype", _torch_name),
    torch.layout: ("layout", _torch_name),
    torch.memory_format: ("format", _torch_name),
    torch.device: ("device", str),
    complex: ("complex", lambda leaf: [leaf.real, leaf.imag]),
}
_PLAIN = (type(None), bool, int, float, str)
_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "shape"}


def _leaf(leaf: Any, path: str) -> Any:
    kind = type(leaf)
    if kind in _PLAIN:
        return leaf
    if kind in _CONTAINERS:
        return {_CONTAINERS[kind]: [_leaf(x, f"{path}[{i}]") for i, x in enumerate(leaf)]}
    if kind in _WRITE:
        name, write = _WRITE[kind]
        return {name: write(leaf)}
    raise Unencodable(path, f"{kind.__module__}.{kind.__qualname__} has no canonical form")


def _known(kind: type, name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, kind):
        raise ValueError(f"torch.{name} is no {kind.__name__}")
    return found


_READ: dict[str, Callable[[Any], Any]] = {
    "read": Ref,
    "scalar": lambda form: Hole(form[0], _KINDS[form[1]]),
    "dtype": lambda form: _known(torch.dtype, form),
    "layout": lambda form: _known(torch.layout, form),
    "format": lambda form: _known(torch.memory_format, form),
    "device": torch.device,
    "complex": lambda form: complex(*form),
    "list": lambda form: [_to_leaf(x) for x in form],
    "tuple": lambda form: tuple(_to_leaf(x) for x in form),
    "shape": lambda form: torch.Size(form),
}


def _to_leaf(form: Any) -> Any:
    if isinstance(form, Mapping):
        ((name, inner),) = form.items()
        return _READ[name](inner)
    return form


# ---- values ------------------------------------------------------------------------------------------------------


def of_home(home: Home) -> Parts:
    return {"dtype": _torch_name(home[0]), "shape": list(home[1])}


def to_home(form: Mapping[str, Any]) -> Home:
    return _known(torch.dtype, form["dtype"]), tuple(form["shape"])


def _view(g: Geometry) -> Parts:
    """A geometry; what is as in a contiguous tensor is left out, which keeps keys small and readable."""
    form: Parts = {"dtype": _torch_name(g.dtype), "size": list(g.size)}
    if tuple(g.stride) != contiguous_strides(g.size):
        form["stride"] = list(g.stride)
    for name in ("offset", "conj", "neg"):
        if getattr(g, name):
            form[name] = getattr(g, name)
    return form


def _to_view(form: Mapping[str, Any]) -> Geometry:
    size = tuple(form["size"])
    stride = tuple(form["stride"]) if "stride" in form else contiguous_strides(size)
    dtype = _known(torch.dtype, form["dtype"])
    return Geometry(size, stride, form.get("offset", 0), dtype, form.get("conj", False), form.get("neg", False))


def _read(use: Use, local: Mapping[int, int]) -> Parts:
    form = {"value": local[use.vid], **_view(use.geometry)}
    return form if use.start is None else {**form, "start": use.start, "extent": use.extent}


def _to_use(form: Mapping[str, Any]) -> Use:
    return Use(form["value"], _to_view(form), form.get("start"), form.get("extent", 0))


def _result(r: Result, local: Mapping[int, int]) -> Parts:
    form = {**_view(r.geometry), "home": of_home(r.home)}
    if r.base is not None:
        form["base"] = local[r.base]
    if (r.spec.shape, r.spec.dtype, r.spec.strides) != (r.geometry.size, r.geometry.dtype, r.geometry.stride):
        form["spec"] = {
            "dtype": _torch_name(r.spec.dtype), "shape": list(r.spec.shape), "strides": list(r.spec.strides),
        }  # fmt: skip
    if str(r.spec.device) != "cpu":
        form["device"] = str(r.spec.device)
    return form


def _to_result(form: Mapping[str, Any], vid: int) -> Result:
    g = _to_view(form)
    shape, dtype, strides = g.size, g.dtype, g.stride
    if "spec" in form:
        inner = form["spec"]
        shape, dtype, strides = tuple(inner["shape"]), _known(torch.dtype, inner["dtype"]), tuple(inner["strides"])
    spec = Spec(shape, dtype, strides, torch.device(form.get("device", "cpu")))
    return Result(vid, to_home(form["home"]), g, form.get("base"), spec)
