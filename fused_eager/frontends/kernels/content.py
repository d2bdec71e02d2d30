"""Content: a digest of what a Python function computes, the same on every host that has the same code.

What counts is the bytecode, its constants, nested code, names, defaults, what it closes over and the globals that it
reads: by value, and, where those are functions or classes of the user's, by their content in turn. What comes from an
installed library counts by its name and version. File names, line numbers and docstrings do not count.

All but the code may be changed while the program runs, so whoever keeps a digest asks `Content.is_current` before each
use: it compares what the function refers to with what it referred to, by identity, which takes 50 ns for each name.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

_MISSING = object()
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")
# Of a class body: what says where it stands, or is made anew in each process.
_UNIMPORTANT = frozenset(
    {"__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__", "__qualname__",
     "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__",
     "_abc_impl"}
)  # fmt: skip
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
            types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType,
            types.ClassMethodDescriptorType, np.ufunc)  # fmt: skip


class NoContent(TypeError):
    """Something that a function refers to, and that has no content to be told by; the text says what and where."""


class Content:
    """The digest of values, and everything that it depends on and that a program may exchange."""

    def __init__(self, name: str, *values: Any):
        walk = _Walk()
        for value in values:
            walk.take(value, name)
        self.digest = walk.hash.hexdigest()
        self._seen = walk.seen

    def is_current(self) -> bool:
        """Whether nothing that the digest was taken of has been replaced since."""
        for now, key, value in self._seen.names:
            if now(key) is not value:
                return False
        return all(_same(look(thing), items) for thing, look, items in self._seen.things)


def digest_of(value: Any, name: str) -> str:
    """The digest of a value that is used at once.

    Raises:
        NoContent: it, or something that it refers to, has none.
    """
    return Content(name, value).digest


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


class _Seen:
    """What was looked at: names with what they meant, and mutable things with what they held."""

    def __init__(self) -> None:
        self.names: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self.things: list[tuple[Any, Callable[[Any], Any], Any]] = []

    def name(self, now: Callable[[Any], Any], key: Any, value: Any) -> None:
        self.names.append((now, key, value))

    def thing(self, thing: Any, look: Callable[[Any], Any]) -> None:
        self.things.append((thing, look, look(thing)))


def _items(mapping: Mapping[Any, Any]) -> list[Any]:
    return [x for pair in mapping.items() for x in pair]


def _bytes(array: np.ndarray) -> tuple[Any, ...]:
    # One object for each distinct content, so that it can be compared by identity like everything else.
    return (sys.intern(hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).tobytes()).hexdigest()),)


def _entry(space: Mapping[str, Any], name: str) -> Any:
    return space.get(name, _MISSING)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


@functools.cache
def is_installed(file: str) -> bool:
    """Whether code of this file was installed, and is nobody's own."""
    return any(f"/{folder}/" in file.replace("\\", "/") for folder in _LIBRARY_FOLDERS)


def library_of(module: str) -> str:
    """The library that a module belongs to, with its version; "" if it is the user's own code."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "builtins":
        return f"python {sys.version_info[0]}.{sys.version_info[1]}" if top != "__main__" else ""
    if top == "fused_eager":
        return "fused_eager"  # its sources are part of every key
    file = getattr(sys.modules.get(module), "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        # Built into a library's shared object, or nobody's: ufuncs, and what a notebook defines.
        return top if top in ("numpy", "jax", "jaxlib", "torch") else ""
    if not is_installed(file):
        return ""
    names = _distributions().get(top, [])
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


def _module_of(value: Any) -> str:
    found = getattr(value, "__module__", None)
    return found if isinstance(found, str) else ""


class _Walk:
    """One walk over a value and what it refers to."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256(b"fused-eager/content/1\0")
        self.seen = _Seen()
        self.met: dict[int, int] = {}
        self.kept: list[Any] = []  # what `met` has numbers of must stay alive

    def tell(self, *words: str | bytes) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else word.encode(errors="surrogatepass")
            self.hash.update(len(data).to_bytes(8, "little") + data)

    def take(self, value: Any, path: str) -> None:
        kind = type(value)
        plain = _PLAIN.get(kind)
        if plain is not None:
            self.tell(kind.__name__, plain(value))
            return
        if not isinstance(value, _ACYCLIC):  # of which two may be one or not: that is the interpreter's business
            if id(value) in self.met:
                self.tell("again", str(self.met[id(value)]))
                return
            self.met[id(value)] = len(self.met)
            self.kept.append(value)
        for kinds, take in _TAKERS:
            if isinstance(value, kinds):
                take(self, value, path)
                return
        self._object(value, path)

    # ---- containers and arrays -----------------------------------------------------------------------------------

    def _sequence(self, value: Any, path: str) -> None:
        if isinstance(value, list):
            self.seen.thing(value, tuple)
        self.tell("sequence", type(value).__name__, str(len(value)))
        for i, x in enumerate(value):
            self.take(x, f"{path}[{i}]")

    def _mapping(self, value: Any, path: str) -> None:
        self.seen.thing(value, _items)
        self.tell("mapping", type(value).__name__, str(len(value)))
        for key, x in value.items():
            self.take(key, f"a key of {path}")
            self.take(x, f"{path}[{key!r}]")

    def _set(self, value: Any, path: str) -> None:
        if isinstance(value, set):
            self.seen.thing(value, tuple)
        # In the order of what is in it: that of a set of strings is another one in each process.
        self.tell("set", type(value).__name__, *sorted(digest_of(x, path) for x in value))

    def _array(self, value: Any, path: str) -> None:
        if isinstance(value, jax.core.Tracer):
            raise NoContent(f"{path} is a value of a trace that JAX is making: pass it as an argument")
        if isinstance(value, np.ndarray) and value.dtype == object:
            raise NoContent(f"{path} is an array of Python objects")
        if isinstance(value, np.ndarray) and value.flags.writeable:
            self.seen.thing(value, _bytes)
        try:
            array = np.asarray(value)
        except TypeError as error:
            raise NoContent(f"{path} is an array of {value.dtype}, which has no bytes to be told by") from error
        self.tell("array", str(array.dtype), str(array.shape), *_bytes(array))

    def _tensor(self, value: Any, path: str) -> None:
        raise NoContent(f"{path} is a torch.Tensor, whose values may change: pass it as an argument")

    # ---- code ----------------------------------------------------------------------------------------------------

    def _function(self, value: Any, path: str) -> None:
        library = library_of(value.__module__ or "")
        self.tell("function")
        self._code(value.__code__, path)
        self.seen.name(operator.attrgetter("__code__"), value, value.__code__)
        self.seen.name(operator.attrgetter("__defaults__"), value, value.__defaults__)
        self.seen.name(operator.attrgetter("__kwdefaults__"), value, value.__kwdefaults__)
        self.take(value.__defaults__, f"a default of {path}")
        self.take(value.__kwdefaults__, f"a default of {path}")
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            inner = _cell(cell)
            self.seen.name(_cell, cell, inner)
            self.tell(name)
            if inner is not _MISSING:
                self.take(inner, f"{name}, which {path} closes over,")
        if library:
            self.tell(library, value.__module__, value.__qualname__)
        else:
            self._globals(value, path)
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            self.take(wrapped, path)

    def _code(self, code: types.CodeType, path: str) -> None:
        self.tell("code", code.co_code, *code.co_names, "\0", *code.co_varnames, "\0", *code.co_freevars)
        self.tell(*code.co_cellvars, "\0", str(code.co_argcount), str(code.co_posonlyargcount))
        self.tell(str(code.co_kwonlyargcount), str(code.co_flags), getattr(code, "co_exceptiontable", b""))
        consts = code.co_consts
        for i, const in enumerate(consts):
            if isinstance(const, types.CodeType):
                self._code(const, path)
            elif not (i == 0 and isinstance(const, str)):  # which is the docstring, where there is one
                self.take(const, f"a constant of {path}")

    def _globals(self, function: Any, path: str) -> None:
        """What the code reads by name: globals, and of the user's own modules the attributes that it names."""
        space, pending = function.__globals__, [function.__code__]
        names: dict[str, None] = {}
        attributes: set[str] = set()
        while pending:
            code = pending.pop()
            pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
            attributes.update(code.co_names)
            for step in dis.get_instructions(code):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    names[step.argval] = None
                elif step.opname == "IMPORT_NAME" and step.argval:
                    self._imported(step.argval, attributes, path)
        builtins = space.get("__builtins__", {})
        builtins = builtins if isinstance(builtins, dict) else vars(builtins)

        def now(name: str) -> Any:
            found = space.get(name, _MISSING)
            return builtins.get(name, _MISSING) if found is _MISSING else found

        for name in names:
            value = now(name)
            self.seen.name(now, name, value)
            self.tell("global", name)
            if value is _MISSING:
                continue  # it fails where it is read, or is defined by then
            if isinstance(value, types.ModuleType):
                self._module(value, attributes, path)
            else:
                self.take(value, f"{name}, a global that {path} reads,")

    def _module(self, module: types.ModuleType, attributes: set[str], path: str) -> None:
        library = library_of(module.__name__)
        if library:
            self.tell("module", module.__name__, library)
            return
        space = vars(module)
        for name in sorted(attributes & space.keys()):
            value = space[name]
            self.seen.name(functools.partial(_entry, space), name, value)
            self.tell("attribute", name)
            if isinstance(value, types.ModuleType):
                if id(value) not in self.met:
                    self.met[id(value)] = len(self.met)
                    self._module(value, attributes, path)
            else:
                self.take(value, f"{module.__name__}.{name}, which {path} reads,")

    def _imported(self, name: str, attributes: set[str], path: str) -> None:
        module = sys.modules.get(name)
        if module is None:
            self.tell("import", name)
        else:
            self._module(module, attributes, path)

    def _bare_module(self, value: types.ModuleType, path: str) -> None:
        library = library_of(value.__name__)
        if not library:
            raise NoContent(f"{path} is the module {value.__name__}, of which any part may be used")
        self.tell("module", value.__name__, library)

    def _builtin(self, value: Any, path: str) -> None:
        of = getattr(value, "__self__", None)
        self.tell("builtin", _module_of(value), getattr(value, "__qualname__", value.__name__))
        if of is not None and not isinstance(of, (types.ModuleType, type)):
            self.take(of, path)

    def _method(self, value: Any, path: str) -> None:
        self.tell("method")
        self.take(value.__func__, path)
        self.take(value.__self__, f"the object of {path}")

    def _partial(self, value: Any, path: str) -> None:
        self.tell("partial")
        self.take((value.func, value.args, value.keywords), path)

    def _class(self, value: type, path: str) -> None:
        library = library_of(_module_of(value))
        if library:
            self.tell("class", library, value.__module__, value.__qualname__)
            return
        self.tell("class", value.__name__)
        for base in value.__bases__:
            self.take(base, path)
        for name, part in sorted(vars(value).items()):
            if name in _UNIMPORTANT or isinstance(part, (types.GetSetDescriptorType, types.MemberDescriptorType)):
                continue
            self.tell(name)
            self.seen.name(functools.partial(_entry, vars(value)), name, part)
            self.take(part, f"{path}.{name}")

    def _descriptor(self, value: Any, path: str) -> None:
        self.tell(type(value).__name__)
        parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value.__func__,)
        self.take(parts, path)

    def _enum(self, value: enum.Enum, path: str) -> None:
        self.tell("enum", type(value).__name__, value.name)
        self.take(value.value, path)

    # ---- everything else -----------------------------------------------------------------------------------------

    def _object(self, value: Any, path: str) -> None:
        """An object is its class and its attributes; what was made of a function (`jax.jit`) is that function."""
        kind = type(value)
        self.tell("object")
        self.take(kind, f"the class of {path}")
        decisive = _DECISIVE.get(f"{kind.__module__}.{kind.__qualname__}")
        if decisive is not None:
            for name in decisive:
                part = getattr(value, name)
                self.seen.name(functools.partial(getattr, value), name, part)
                self.tell(name)
                self.take(part, f"{path}.{name}")
            return
        inner = getattr(value, "__wrapped__", None)
        state = getattr(value, "__dict__", None)
        slots = [n for c in kind.__mro__ for n in _names(vars(c).get("__slots__", ()))]
        if inner is not None and inspect.isroutine(inner):
            self.tell("wraps")
            self.take(inner, path)
            state = {k: v for k, v in (state or {}).items() if k not in _OF_WRAPPERS}
        if state is None and not slots and inner is None:
            self._reduced(value, path)
            return
        if state is not None:
            if inner is None:
                self.seen.thing(vars(value), _items)
            for name, part in state.items():
                self.tell(name)
                self.take(part, f"{path}.{name}")
        for name in slots:
            part = getattr(value, name, _MISSING)
            if part is not _MISSING and not name.startswith("__"):
                self.seen.name(functools.partial(getattr, value), name, part)
                self.tell(name)
                self.take(part, f"{path}.{name}")

    def _reduced(self, value: Any, path: str) -> None:
        try:
            reduced = value.__reduce_ex__(2)
        except Exception as error:
            raise NoContent(f"{path} is a {type(value).__name__}, which has no content to be told by") from error
        if isinstance(reduced, str):
            self.tell(reduced)
            return
        self.take(tuple(list(x) if isinstance(x, types.GeneratorType) else x for x in reduced[1:3]), path)


_ACYCLIC = (tuple, frozenset, np.ndarray, np.generic, jax.Array, types.CodeType, np.dtype)

# Of classes that keep locks and caches beside it: the attributes that say what they compute.
_DECISIVE: dict[str, tuple[str, ...]] = {
    "helion.runtime.kernel.Kernel": ("fn", "configs", "settings"),
    f"{__package__}.op.JaxOp": ("function",), f"{__package__}.pallas.PallasOp": ("function",),
}  # fmt: skip

# Attributes that functools.update_wrapper copies.
_OF_WRAPPERS = frozenset({"__wrapped__", "__module__", "__name__", "__qualname__", "__doc__", "__annotations__",
                          "__type_params__"})  # fmt: skip


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


_PLAIN: dict[type, Callable[[Any], str | bytes]] = {
    type(None): repr, bool: repr, int: repr, float: float.hex, str: str, bytes: bytes, complex: repr,
    type(Ellipsis): repr, type(NotImplemented): repr, range: repr, torch.dtype: str, torch.device: str,
    torch.memory_format: str, torch.layout: str, np.dtype: repr,
}  # fmt: skip

_TAKERS: list[tuple[Any, Callable[[_Walk, Any, str], None]]] = [
    (enum.Enum, _Walk._enum),
    ((tuple, list), _Walk._sequence),
    ((dict, types.MappingProxyType), _Walk._mapping),
    ((set, frozenset), _Walk._set),
    (torch.Tensor, _Walk._tensor),
    ((np.ndarray, np.generic, jax.Array), _Walk._array),
    (types.FunctionType, _Walk._function),
    (types.CodeType, _Walk._code),
    (types.MethodType, _Walk._method),
    (_BUILTIN, _Walk._builtin),
    (functools.partial, _Walk._partial),
    (types.ModuleType, _Walk._bare_module),
    ((property, staticmethod, classmethod), _Walk._descriptor),
    (type, _Walk._class),
    (np.dtype, lambda walk, value, path: walk.tell("dtype", repr(value))),
]
