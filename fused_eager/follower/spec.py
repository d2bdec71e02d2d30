"""What the two followers share, as tables.

Following is written twice, in Python (`recording.follow`) and in C++ beside this module, over the same objects. What
both have to agree on is said here once: which slots of which classes the C++ one reads and writes, what it is handed,
how an op is treated, and where the kinds of numbers end. `header` makes of it what C++ includes as `spec.h`, and
`frontends.context.connection` hands over what is named here.
"""

from __future__ import annotations

import math
from enum import IntEnum

from ..tracing.numbers import BOUNDS

# The name in C++, the class, and its slots.
SLOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "buffer": (
        "HostBuffer",
        (
            *("array", "born_native", "cdata", "epoch", "error", "home", "origin", "previous", "storage", "stream"),
            *("vacant", "vid"),
        ),
    ),
    "stream": (
        "Stream",
        (
            *("at", "config", "ended", "epoch", "first", "guess", "inputs", "natives", "nodes"),
            *("pending", "policy", "reads", "shadowed", "unfinished", "vids"),
        ),
    ),
    "step": (
        "Step",
        ("call", "compiled", "depth", "info", "likely", "node", "operands", "then", "vids", "warm"),
    ),
    "node": ("Node", ("place", "results", "scalars")),
    "policy": ("Policy", ("autotuner", "backoff")),
    "autotuner": ("Autotuner", ("countdown", "native", "stepping", "waiting")),
    "backoff": ("Backoff", ("due", "left")),
    "read": ("DeviceInput", ("array", "buffer", "home", "origin", "vid")),
    "native": ("NativeInput", ("vid",)),
}

# Classes that objects are compared with, or made of.
TYPES = {
    "front_door": "FrontDoor",
    "place_type": "Place",  # the line of an op, where somebody wants to know more than the line
    "buffer_type": "HostBuffer",
    "device_input_type": "DeviceInput",
}

# What is shared by all, each under the name by which it is handed over.
OBJECTS = {
    "table": "the storages whose value is not in their memory, by address",
    "streams": "those that live, by weak reference",
    "deferred": "what has been launched",
    "site": "the names of that module",
    "acquire": "takes the runtime's lock",
    "release": "gives it back",
    "native_input": "`recording.pending.native_input`",
    "open_native": "`recording.native.open_native`",
    "must_stay": "`recording.native.must_stay`",
    "is_awaited": "`recording.native.is_awaited`",
    "passed_to_other_device": "`recording.other_devices.passed`",
    "release_buffer": "`HostBuffer.release`",
    "with_scalars": "`Node.with_scalars`",
    "treatment_of": "what is known of an overload, whether it writes a list, and its treatment",
    "settings_of": "the `SETTINGS` of a `Config`",
    "is_internal": "`log.site.is_internal`",
    "count": "`LOG.count`",
    "was_read": "told of each read that is not overlooked",
    "read_again": "reads what the trap has refused",
}
NUMBERS = {
    "flags_at": "of the three flags in `StorageImpl` by which a storage is trapped",
    "unwritten": "where the addresses without memory begin",
    "unwritten_least": "bytes of the smallest tensor that lies over them",
    "unwritten_most": "bytes of the largest one",
}

# Of a context's options.
SETTINGS = {"follows": "bool", "measures": "bool", "allows_islands": "bool", "max_pending": "int64_t"}


class Treatment(IntEnum):
    """What happens to an op."""

    UNKNOWN = -1  # Python has not been asked yet
    OTHER = 0  # it goes to Python
    VIEW = 1  # it goes on to ATen
    COMPUTE = 2  # it is followed, where it came next last time
    NATIVE_AT_MOST = 3  # it goes on to ATen where nothing is pending
    READ = 4  # it reads a number


def classes() -> set[str]:
    """The names of the classes that are handed over."""
    return {name for name, _ in SLOTS.values()} | set(TYPES.values())


def header() -> str:
    """The tables as C++."""
    slots = [f"struct {_struct(name)} {{ Slot {', '.join(fields)}; }};" for name, (_, fields) in SLOTS.items()]
    members = [f"  {_struct(name)} {name};" for name in SLOTS]
    members += [f"  PyTypeObject* {name} = nullptr;" for name in TYPES]
    members += [f"  PyObject* {name} = nullptr;  // {about}" for name, about in OBJECTS.items()]
    members += [f"  int64_t {name} = 0;  // {about}" for name, about in NUMBERS.items()]
    found = []
    for name, (of, fields) in SLOTS.items():
        found.append(f'  r.{name} = {{{", ".join(f"{{names.of({_text(of)}), {_text(f)}}}" for f in fields)}}};')
    found += [f"  r.{name} = reinterpret_cast<PyTypeObject*>(names.kept({_text(of)}));" for name, of in TYPES.items()]
    found += [f"  r.{name} = names.kept({_text(name)});" for name in OBJECTS]
    found += [f"  r.{name} = number(names.of({_text(name)}));" for name in NUMBERS]
    return "\n".join([
        "// Made by spec.py.",
        "#pragma once",
        "namespace fused_eager {",
        *slots,
        "struct Shared {",
        *members,
        "};",
        "template <class Names>",
        "void find_shared(Shared& r, const Names& names) {",
        *found,
        "}",
        f"struct Settings {{ {' '.join(f'{kind} {name} = 0;' for name, kind in SETTINGS.items())} }};",
        "inline Settings settings_from(PyObject* t) {",
        f"  return {{{', '.join(_setting(i, kind) for i, kind in enumerate(SETTINGS.values()))}}};",
        "}",
        f"enum Treatment : int64_t {{ {', '.join(f'{t.name} = {t.value}' for t in Treatment)} }};",
        f"inline constexpr std::array<double, {len(BOUNDS)}> BOUNDS = {{{', '.join(map(_exact, BOUNDS))}}};",
        "}",
        "",
    ])  # fmt: skip


def _struct(name: str) -> str:
    return f"{name.title().replace('_', '')}Slots"


def _text(name: str) -> str:
    return f'"{name}"'


def _setting(i: int, kind: str) -> str:
    item = f"PyTuple_GetItem(t, {i})"
    return f"is_true({item})" if kind == "bool" else f"number({item})"


def _exact(bound: float) -> str:
    assert math.isfinite(bound)
    return bound.hex()
