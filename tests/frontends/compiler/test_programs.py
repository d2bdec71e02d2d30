"""Programs under `torch.compile(backend="fused_eager")`: values, gradients, aliases and updates are eager's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map

from fused_eager.frontends.compiler.backend import compile_graph

from .programs import PROGRAMS, parameters

Tensor = torch.Tensor


def copied(args: Any) -> Any:
    """Equal arguments, which share memory as the given ones do."""
    bases: dict[int, Tensor] = {}

    def one(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        storage = t.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        base = bases.setdefault(storage._cdata, whole.clone())
        out = torch.empty(0, dtype=t.dtype)
        out.set_(base.untyped_storage(), t.storage_offset(), t.shape, t.stride())
        return out.conj() if t.is_conj() else out

    return tree_map(one, args)


def outcome(function: Any, called: Any, args: Any, trains: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    args = copied(args)
    if trains:
        args = tree_map(
            lambda t: t.requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t, args
        )
    found: dict[str, Any] = {}
    for turn in range(2):
        out = called(*args)
        found[f"out {turn}"] = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, out)
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        found[f"form {turn}"] = [(t.shape, t.stride(), t.dtype, t.requires_grad, t.is_conj()) for t in tensors]
        everything = [*tensors, *(a for a in args if isinstance(a, Tensor))]
        found[f"shared {turn}"] = [
            [t.untyped_storage()._cdata == u.untyped_storage()._cdata for t in everything] for u in everything
        ]
        found[f"same {turn}"] = [[t is u for t in everything] for u in everything]
        if trains:
            roots = [t for t in tensors if t.requires_grad and t.grad_fn is not None]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        found[f"args {turn}"] = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
        found[f"grads {turn}"] = [t.grad for t in (*args, *parameters(function)) if isinstance(t, Tensor)]
        found[f"state {turn}"] = [t.detach().clone() for t in parameters(function)]
    found["draws"] = torch.rand(2)  # the generator has advanced as far
    return found


def same(a: Any, b: Any, where: str) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if name.startswith(("form", "shared", "same")):
            assert a[name] == b[name], (where, name)
        else:
            torch.testing.assert_close(b[name], a[name], msg=lambda text, name=name: f"{where}, {name}: {text}")


UPDATES = [name for name in PROGRAMS if name.startswith("update_of") and name != "update_of_what_is_returned"]


@pytest.mark.thinned(12)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_in_eager(name: str, trains: bool, tmp_path: Path, monkeypatch: Any) -> None:
    if trains and name in UPDATES:
        pytest.skip("eager refuses to update a leaf that requires a gradient")
    torch.manual_seed(0)
    function, args = PROGRAMS[name]()
    others = {how: copy.deepcopy(function) for how in ("checked", "prepared", "kept", "read")}
    expected = outcome(function, function, args, trains)
    # Each folder is used twice: the second time, what AOTAutograd made is read from it.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for how, other in others.items():
        torch._dynamo.reset()
        options = {"validate": how == "checked", "cache": "" if how in ("kept", "read") else "off"}
        compiled = torch.compile(other, backend=compile_graph, options=options)
        counters.clear()
        same(expected, outcome(other, compiled, args, trains), f"{name}, {how}")
    counted = counters["aot_autograd"]
    assert not counted["autograd_cache_miss"] or counted["autograd_cache_bypass"], "it was not read"
