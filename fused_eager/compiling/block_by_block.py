"""Block by block: the executable of a block of rows, called for as many rows as there are.

Blocks are parts of the program's own memory, so nothing is copied or padded on the way in. The last block is a whole
one as well: it begins with rows that were computed before. What comes out of a block is copied to its place while it is
in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fused_eager.fusion_rules.deferred import jax

from ..devices.dlpack import to_array, to_tensor
from ..devices.home import Home, home_of, nbytes_of
from ..devices.host.device import HOST, INLINE
from ..planning.plan import Region
from ..xla import device
from .executable import Executable
from .template import Template


class BlockByBlock:
    """The executable of a region of a template, for any number of rows."""

    def __init__(self, of: Template, region: Region, executable: Executable):
        self.block, self.call = of.block, executable.call
        homes = [(of.homes[v], v in of.by_rows) for v in region.inputs]
        # With the bytes of a row; 0 if it is the same for all rows.
        self.inputs = [(home, nbytes_of(home) // of.block if by_rows else 0) for home, by_rows in homes]

    def __call__(self, count: int, outputs: Sequence[Home], *arrays: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """All results, of so many rows. Returns when they are computed. The caller holds the runtime's lock."""
        values, vectors = arrays[:-2], arrays[-2:]
        numbers = [INLINE.borrow(v.unsafe_buffer_pointer(), home_of(v), anew=True) for v in vectors]
        jax.block_until_ready(values)
        starts = [value.unsafe_buffer_pointer() for value in values]
        results = list(map(HOST.unwritten, outputs))
        places = [r.view(count, -1) for r in results]
        # What is the same for all rows.
        fixed = [
            None if width else INLINE.borrow(start, home, anew=True)
            for start, (home, width) in zip(starts, self.inputs, strict=True)
        ]
        for begin, done in _turns(count, self.block):
            given = [
                INLINE.borrow(start + begin * width, home, anew=True) if value is None else value
                for value, start, (home, width) in zip(fixed, starts, self.inputs, strict=True)
            ]
            made, flags = self.call(*given, *numbers)
            for place, part in zip(places, made, strict=True):
                rows, last = to_tensor(part).view(self.block, -1), begin + self.block - done
                place.narrow(0, done, last).copy_(rows.narrow(0, self.block - last, last))
        return [to_array(r, device()) for r in results], flags


def _turns(count: int, block: int) -> Iterator[tuple[int, int]]:
    """Where each block begins, and the first of its rows that is not computed yet."""
    for begin in range(0, count - block, block):
        yield begin, begin
    yield count - block, (count - 1) // block * block
