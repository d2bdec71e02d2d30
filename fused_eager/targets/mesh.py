"""A mesh: the chips of a target by named axes, and which dimensions of arrays are divided along them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .target import TargetError

GROWS = re.compile(r"\{(\d+)\*(\w+)\}")


@dataclass(frozen=True, slots=True)
class Mesh:
    """`axes` are sizes by name, the slowest first. `split` has, for a size of a dimension, the axis that divides it."""

    axes: tuple[tuple[str, int], ...]
    split: tuple[tuple[int, str], ...] = ()

    @classmethod
    def parse(cls, axes: str, split: str) -> Mesh:
        """The mesh that `data=64,model=16` names, with dimensions divided as `512=data,4096=model` says.

        Raises:
            TargetError: one of them says nothing of the kind.
        """
        try:
            named = tuple((name.strip(), int(n)) for name, n in (part.split("=") for part in axes.split(",")))
            split = cls(named).grown(split)
            sizes = tuple((int(n), name.strip()) for n, name in (part.split("=") for part in split.split(",")))
        except TargetError:
            raise
        except ValueError:
            raise TargetError(
                f"--mesh {axes} --split {split}: write axes with their sizes, and sizes of dimensions with the axes "
                "that divide them, as --mesh data=8,model=2 --split 512=data,4096=model"
            ) from None
        made, known = cls(named, sizes), dict(named)
        if any(n < 1 for n in known.values()) or len(known) < len(named):
            raise TargetError(f"--mesh {axes}: each axis has a name of its own, and a chip or more")
        for n, name in sizes:
            if name not in known:
                raise TargetError(f"--split {n}={name}: the mesh has no axis {name!r}, only {', '.join(known)}")
            if n % known[name]:
                raise TargetError(f"--split {n}={name}: {n} cannot be divided among {known[name]} chips")
        return made

    @property
    def chips(self) -> int:
        """How many there are."""
        return math.prod(n for _, n in self.axes)

    def divided(self, shape: tuple[int, ...]) -> tuple[str | None, ...]:
        """The axis that divides each dimension of an array, or None; an axis divides one of them, the first."""
        axes, left = dict(self.split), {name for name, _ in self.axes}
        found: list[str | None] = []
        for n in shape:
            name = axes.get(n)
            found.append(name if name in left else None)
            left.discard(name or "")
        return tuple(found)

    def smaller(self) -> Iterator[Mesh]:
        """Meshes of ever more chips, up to this one: its first axis quartered until one chip is left of it."""
        (name, n), *others = self.axes
        sizes = [n]
        while sizes[-1] > 1:
            sizes.append(max(sizes[-1] // 4, 1))
        yield from (replace(self, axes=((name, size), *others)) for size in reversed(sizes))

    def grown(self, text: str) -> str:
        """A text with the products in it that grow with an axis: of a mesh with `data=4`, `{64*data}` is 256.

        Raises:
            TargetError: it names an axis that the mesh has not.
        """
        sizes = dict(self.axes)

        def product(found: re.Match[str]) -> str:
            if found[2] not in sizes:
                raise TargetError(f"{found[0]}: the mesh has no axis {found[2]!r}, only {', '.join(sizes)}")
            return str(int(found[1]) * sizes[found[2]])

        return GROWS.sub(product, text)

    def __str__(self) -> str:
        return ",".join(f"{name}={n}" for name, n in self.axes)


def bytes_of(shape: str, sizes: Mapping[str, int]) -> int:
    """The bytes of an array that XLA writes as `f32[8,128]`."""
    kind, _, dims = shape.rstrip("]").partition("[")
    return sizes.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
