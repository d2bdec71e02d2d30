"""A target: which device, and how many of them in which shape, as a plain value that is written as text.

>>> Target.parse("v5e:2x2")
Target(generation='v5e', shape=(2, 2))
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import FusedEagerError


class TargetError(FusedEagerError, ValueError):
    """A text that names no target, or one that XLA's compiler does not know. The text says what is allowed."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One generation of chips: public figures, for one *device* of JAX's (of TPU v4 and v7 a chip is two).

    `kind` is what JAX calls it. `flops` are bfloat16 operations a second, `hbm` is its memory in bytes, `bandwidth`
    what that moves in bytes a second. `dimensions` are those of its network, `host` the chips of one host, `pod` those
    of the largest slice.
    """

    kind: str
    flops: float
    hbm: int
    bandwidth: float
    dimensions: int
    host: tuple[int, ...]
    pod: tuple[int, ...]


# From cloud.google.com/tpu/docs, the page of each generation.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v4": Chip("TPU v4", 275e12 / 2, 32 << 29, 1228e9 / 2, 3, (2, 2, 1), (16, 16, 16)),
        "v5e": Chip("TPU v5 lite", 197e12, 16 << 30, 819e9, 2, (2, 2), (16, 16)),
        "v5p": Chip("TPU v5", 459e12, 95 << 30, 2765e9, 3, (2, 2, 1), (16, 20, 28)),
        "v6e": Chip("TPU v6 lite", 918e12, 32 << 30, 1640e9, 2, (2, 2), (16, 16)),
        "tpu7x": Chip("TPU7x", 2307e12 / 2, 192 << 29, 7380e9 / 2, 3, (2, 2, 1), (16, 24, 24)),
    }
)
_FORM = re.compile(r"(\w+):(\d+(?:x\d+)*)")
_GPU = (
    "XLA's compiler for GPUs comes with JAX's plugin for them and asks a GPU what it is. Run the program once on a "
    "machine that has one, with a shared cache"
)
_CPU = (
    "what is compiled for a CPU is for the processor of this host. Run the program once on a host of the other kind, "
    "with a shared cache"
)
_NO_TARGETS = {"gpu": _GPU, "cuda": _GPU, "rocm": _GPU, "cpu": _CPU}


@dataclass(frozen=True, slots=True)
class Target:
    """`shape` counts chips along each dimension of the network."""

    generation: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target that a text names: a generation, a colon, and a shape (`2x2`) or a number of chips (`8`).

        Raises:
            TargetError: it names none; the text says what is wrong with it.
        """
        text = text.strip().lower()
        why = _NO_TARGETS.get(text.partition(":")[0])
        if why is not None:
            raise TargetError(f"{text!r} is no target: {why}")
        found = _FORM.fullmatch(text)
        if found is None:
            form = f"write a chip ({', '.join(CHIPS)}) and its topology, as v5e:2x2, v5p:2x2x1 or v6e:8"
            raise TargetError(f"{text!r} is no target: {form}")
        generation, shape = found.group(1), tuple(int(n) for n in found.group(2).split("x"))
        if generation not in CHIPS:
            near = difflib.get_close_matches(generation, CHIPS, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise TargetError(f"there is no chip {generation!r} (in {text!r}){hint} Known: {', '.join(CHIPS)}")
        chip = CHIPS[generation]
        if 0 in shape:
            raise TargetError(f"{text!r} has no chips")
        if len(shape) == 1:
            return cls(generation, _spread(shape[0], chip, text))
        if len(shape) != chip.dimensions:
            raise TargetError(f"{text!r}: {generation} has {chip.dimensions} dimensions, as {_shown(chip.host)}")
        if any(n % h for n, h in zip(shape, chip.host, strict=True)) and math.prod(shape) != 1:
            raise TargetError(f"{text!r}: {generation} comes as one chip or a multiple of a host's {_shown(chip.host)}")
        if any(n > most for n, most in zip(sorted(shape), chip.pod, strict=True)):
            raise TargetError(f"{text!r}: the largest slice of {generation} is {_shown(chip.pod)}")
        return cls(generation, shape)

    @property
    def platform(self) -> str:
        """JAX's name of the platform."""
        return "tpu"

    @property
    def chip(self) -> Chip:
        """What is publicly known of one of its devices."""
        return CHIPS[self.generation]

    def __str__(self) -> str:
        return f"{self.generation}:{_shown(self.shape)}"


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _spread(chips: int, chip: Chip, text: str) -> tuple[int, ...]:
    """The shape of a slice of so many chips: one, or those of a host, doubled in the shortest of its dimensions (of
    several, in the last)."""
    if chips == 1:
        return (1,) * chip.dimensions
    shape = list(chip.host)
    while math.prod(shape) < chips:
        shape[max(range(len(shape)), key=lambda i: (-shape[i], i))] *= 2
    if math.prod(shape) != chips or any(n > most for n, most in zip(sorted(shape), chip.pod, strict=True)):
        raise TargetError(f"{text!r}: so many chips have no usual shape; write it out, as v5e:2x2")
    return tuple(shape)
