"""Names that test files of other PyTorch versions import, and that the installed one does not have.

A file that cannot be imported says nothing. Each row gives a missing name a stand-in; tests that use it for more than
a decorator or a constant fail without the library too, and so are not compared.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


def no() -> bool:
    """What a question about hardware answers."""
    return False


def undecorated(*args: Any, **kwargs: Any) -> Any:
    """A decorator factory whose decorator changes nothing."""
    return lambda function: function


MISSING: dict[str, dict[str, Any]] = {
    "torch.testing._internal.common_cuda": {"tf32_is_not_fp32": no, "tf32_on_and_off": undecorated},
    "torch.testing._internal.common_mkldnn": {"bf32_on_and_off": undecorated},
    "torch.testing._internal.common_nn": {"new_module_tests": []},
    "torch.autograd._functions.utils": {"check_onnx_broadcast": None},
    "torch._custom_op.functional": {"register_functional_op": None},
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
                setattr(module, attribute, value)
