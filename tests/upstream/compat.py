"""Names that test files of other PyTorch versions import, and that the installed one does not have.

A file that cannot be imported says nothing. Each row gives a missing name a stand-in; tests that use it for more than
a decorator or a constant fail without the library too, and so are not compared.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._dtype_abbrs


def no() -> bool:
    """What a question about hardware answers."""
    return False


def undecorated(*args: Any, **kwargs: Any) -> Any:
    """A decorator factory whose decorator changes nothing."""
    return lambda function: function


@dataclass(frozen=True, slots=True)
class Made:
    """A stand-in that is made of what its module has."""

    by: Callable[[Any], Any]


def _binary(invocations: Any) -> list[Any]:
    kind = invocations.BinaryUfuncInfo
    return [info for info in invocations.ops_and_refs if isinstance(info, kind)]


MISSING: dict[str, dict[str, Any]] = {
    "torch.testing._internal.common_cuda": {"tf32_is_not_fp32": no, "tf32_on_and_off": undecorated},
    "torch.testing._internal.common_mkldnn": {"bf32_on_and_off": undecorated},
    "torch.testing._internal.common_nn": {"new_module_tests": []},
    "torch.autograd._functions.utils": {"check_onnx_broadcast": None},
    "torch.testing._internal.common_methods_invocations": {
        "binary_ufuncs_and_refs": Made(_binary),
        "skip": undecorated,
        "xfail": undecorated,
        "skipOps": undecorated,
    },
    "torch.testing._internal.common_utils": {"dtype_abbrs": Made(lambda _: torch.utils._dtype_abbrs.dtype_abbrs)},
    "torch.testing._internal.jit_metaprogramming_utils": {"additional_module_tests": []},
    "torch._custom_op.functional": {"register_functional_op": None},
    "torch.export": {"export_for_training": None},
    "torch.jit.frontend": {"_IS_ASTUNPARSE_INSTALLED": False},
    "torch.nn.attention.flex_attention": {"create_nested_block_mask": None},
    "functorch.experimental.control_flow": {"UnsupportedAliasMutationException": RuntimeError},
    # Neighbours of test_autograd.py, which runs their tests as well where they lie beside it.
    "autograd": {},
    "autograd.test_complex": {"TestAutogradComplex": None},
    "autograd.test_functional": {"TestAutogradFunctional": None},
    "autograd.test_logging": {"TestAutogradLogging": None},
}


def add_missing() -> None:
    """Give each missing name its stand-in; what is there stays."""
    for name, attributes in MISSING.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            module = sys.modules[name] = types.ModuleType(name)
        for attribute, value in attributes.items():
            if not hasattr(module, attribute):
                setattr(module, attribute, value.by(module) if isinstance(value, Made) else value)
