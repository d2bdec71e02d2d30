"""What is patched while a context is open: all of it is in the documented table, and none is known by identity."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.dlpack

from fused_eager import fused_eager
from fused_eager.frontends.context import composites, guards

from ...semantics.programs import in_process

COUNT = "torch._dynamo.eval_frame.set_fullgraph_compiled_frame_count"
DOCS = Path(__file__).parents[3] / "docs" / "semantics.md"


def name_of(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def documented() -> set[str]:
    """The names in the first column of the table under "What is patched"."""
    text = DOCS.read_text().split("### What is patched", 1)[1].partition("\nSome composites")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_table_lists_what_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    patch, recode = guards._patch, guards._recode

    def patched(owner: Any, name: str, make: Any) -> None:
        seen.add(f"{name_of(owner)}.{name}")
        patch(owner, name, make)

    def recoded(function: Any, *others: Any) -> None:
        seen.add(f"{function.__module__}.{function.__qualname__}")
        recode(function, *others)

    monkeypatch.setattr(guards, "_patch", patched)
    monkeypatch.setattr(guards, "_recode", recoded)
    with fused_eager():
        import torch._dynamo  # what is patched there is patched when it is imported
    lacking = [
        *["torch.Tensor.const_data_ptr"] * (not hasattr(torch.Tensor, "const_data_ptr")),
        *[COUNT] * (not hasattr(torch._dynamo.eval_frame, COUNT.rpartition(".")[2])),
    ]  # what torch 2.11 has not
    assert seen == documented() - set(lacking)


def test_the_table_lists_the_composites() -> None:
    text = DOCS.read_text()
    missing = [row.name for row in composites.READING_COMPOSITES if f"`{row.name.partition('.')[0]}`" not in text]
    assert not missing


def public() -> dict[str, Any]:
    """Every public function that torch has in a module of its own, and its code."""
    named = [(name.split("."), module) for name, module in list(sys.modules.items())]
    modules = [
        module
        for parts, module in named
        if parts[0] == "torch" and isinstance(module, ModuleType) and not any(part.startswith("_") for part in parts)
    ]
    found = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if inspect.isroutine(value) and not name.startswith("_"):
                found[f"{module.__name__}.{name}"] = value
    return found


def test_no_public_function_is_replaced_but_two() -> None:
    before = public()
    with fused_eager():
        inside = public()
        changed = {name for name, value in before.items() if inside[name] is not value}
    assert changed == {"torch.to_dlpack", "torch.utils.dlpack.to_dlpack", "torch.set_flush_denormal"}
    after = public()
    assert all(after[name] is value for name, value in before.items())


def test_nothing_is_left_of_the_methods() -> None:
    before = dict(vars(torch.Tensor)), torch.random.set_rng_state.__code__
    with fused_eager():
        assert torch.random.set_rng_state.__code__ is not before[1]
        assert "_fused_eager_finished" in vars(torch.random)
    assert (dict(vars(torch.Tensor)), torch.random.set_rng_state.__code__) == before
    assert "_fused_eager_finished" not in vars(torch.random)
    assert torch.Tensor([1.0]).tolist() == [1.0] and torch.Tensor.__new__ is torch._C.TensorBase.__new__


@pytest.mark.thinned(2)
@pytest.mark.parametrize("follower", ["python", "compiled"])
def test_tables_that_are_made_inside_hold_outside(follower: str) -> None:
    in_process(
        f"""
        import torch
        from fused_eager import fused_eager
        methods = {{name: getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__", "__float__", "numpy")}}
        with fused_eager(follower={follower!r}):
            torch.overrides.get_overridable_functions(), torch.overrides.get_testing_overrides()
            torch.overrides.get_ignored_functions()
            torch.jit._builtins._get_builtin_table()
            assert all(getattr(torch.Tensor, name) == m and m == getattr(torch.Tensor, name)
                       for name, m in methods.items())
        assert torch.overrides.resolve_name(torch.Tensor.item) == "torch.Tensor.item"
        assert torch.overrides.is_tensor_method_or_property(torch.Tensor.item)
        assert torch.jit._builtins._find_builtin(torch.tensor) == "aten::tensor"
        assert torch.jit._builtins._find_builtin(torch.autograd.backward) == "aten::backward"
        def f(x):
            return x + torch.tensor(2.0)
        """,
        seconds=240,
    )


def test_signatures_and_pickles() -> None:
    # Of TorchScript's the one in its own module: where Dynamo has compiled something, another stands in `torch.jit`.
    trace = torch.jit._trace.trace
    functions = (torch.tensor, torch.as_tensor, torch.compile, trace, torch.set_rng_state, torch.from_dlpack)
    signatures = [str(inspect.signature(f)) for f in functions[2:]]
    with fused_eager():
        assert [str(inspect.signature(f)) for f in functions[2:]] == signatures
        assert inspect.getsource(torch.set_rng_state).startswith("def set_rng_state(new_state")
        pickled = pickle.dumps(functions), pickle.dumps(torch.utils.dlpack.to_dlpack)
    assert pickle.loads(pickled[0]) == functions
    assert pickle.loads(pickled[1]) is torch.utils.dlpack.to_dlpack


def test_dynamo_refuses_no_fullgraph() -> None:
    said = in_process(
        """
        import torch
        from fused_eager import fused_eager
        def f(x):
            return x * 2
        def g(x):
            return x * 3
        before = torch.compile(f, backend="eager", fullgraph=True)
        with fused_eager(compile="wait"):
            print(before(torch.ones(2)).tolist())
            print(torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2)).tolist())
        count = getattr(torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)  # not in torch 2.11
        assert count is None or type(count).__name__ == "builtin_function_or_method", count
        print(torch.compile(g, backend="eager", fullgraph=True)(torch.ones(2)).tolist())
        """,
        seconds=240,
    )
    assert said.split("\n")[:3] == ["[2.0, 2.0]", "[2.0, 2.0]", "[3.0, 3.0]"]


@pytest.mark.skipif(not hasattr(torch.compiler, "_patch_engine_backward"), reason="torch 2.13 has it first")
def test_backward_ends_a_stream_under_torchs_own_patch() -> None:
    """Torch puts a function of its own in the place of the private one, and puts back what it found in both places."""
    x = torch.ones(3, requires_grad=True)
    with fused_eager(compile="wait", native="never"):
        with torch.compiler._patch_engine_backward():
            pass
        (x * 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"
    assert not hasattr(torch.autograd._engine_run_backward, "__wrapped__")


def test_dynamo_is_imported_inside() -> None:
    """It notes functions by identity, the constructor of tensors among them."""
    in_process(
        """
        import sys, torch
        from fused_eager import fused_eager
        class S(torch.Tensor):
            pass
        with fused_eager(compile="auto", native="measured"):
            assert "torch._dynamo" not in sys.modules
            import torch._dynamo.polyfills.tensor
            assert type(S([[1.0, 2.0]])) is S and "__new__" in vars(torch.Tensor)
        assert "__new__" not in vars(torch.Tensor)
        from torch._dynamo.trace_rules import _polyfilled_function_ids as ids
        # not in torch 2.11
        assert id(torch.Tensor.__new__) in ids or not hasattr(torch._dynamo.polyfills.tensor, "tensor_pynew")
        with fused_eager(compile="wait", native="never"):
            assert type(S([[1.0, 2.0]]) * 2) is S
        """
    )
