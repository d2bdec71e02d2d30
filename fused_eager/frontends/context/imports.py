"""What is to be done when a module is imported that most programs do without."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Has the module `name` imported in the body of `during`, and calls `then`, as long as it is on `sys.meta_path`."""

    def __init__(self, name: str, during: Callable[[], AbstractContextManager[None]], then: Callable[[], None]):
        self.name, self.during, self.then = name, during, then

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The others' answer, with a loader that does so."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        self.remove()  # so that the others are asked
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_go_on(module: ModuleType) -> None:
            with self.during():
                load(module)
            self.then()

        spec.loader.exec_module = load_and_go_on  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def after_import(
    name: str, during: Callable[[], AbstractContextManager[None]], then: Callable[[], None]
) -> Callable[[], None]:
    """Call `then` once `name` is imported, at once if it is; the import runs in the body of `during`. Returns what
    gives up waiting for it."""
    if name in sys.modules:
        importlib.import_module(name)  # another thread may be in the middle of it
        then()
        return lambda: None
    finder = AfterImport(name, during, then)
    sys.meta_path.insert(0, finder)
    return finder.remove
