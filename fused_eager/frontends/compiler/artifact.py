"""Load an exported program in plain JAX: `load(folder)`. A copy of this file lies beside each program: it needs jax and
numpy alone."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

_enable_x64: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


class Program:
    """The program in a folder: called with arrays it returns a list of them.

    `signature` says what it takes and returns; `weights` are what it was trained to, and others may be put there.
    """

    def __init__(self, folder: Any):
        folder = pathlib.Path(folder)
        self.signature = json.loads((folder / "signature.json").read_text())
        self._program = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
        self.weights = []
        with _enable_x64(True):
            for row in self.signature["weights"]:
                raw = np.fromfile(folder / row["file"], np.uint8)
                self.weights.append(jnp.asarray(raw.view(jnp.dtype(row["dtype"])).reshape(row["shape"])))

    def __call__(self, *inputs: Any) -> list[Any]:
        """Its results, as arrays.

        Raises:
            TypeError: there are too few or too many arrays, or one has another dtype.
            ValueError: one has another shape.
        """
        wanted, block = self.signature["inputs"], self.signature["block"]
        if len(inputs) != len(wanted):
            raise TypeError(f"the program takes {len(wanted)} arrays, and was given {len(inputs)}")
        for at, (x, row) in enumerate(zip(inputs, wanted, strict=True)):
            _check(at, x, row)
        with _enable_x64(True):
            given = [jnp.asarray(x, jnp.dtype(row["dtype"])) for x, row in zip(inputs, wanted, strict=True)]
            if not block:
                return list(self._program.call(self.weights, given))
            rows = given[0].shape[0]
            if any(x.shape[0] != rows for x in given):
                raise ValueError(f"all arrays have to have as many rows; they have {[x.shape[0] for x in given]}")
            # No row depends on another: what is computed of these is left out again.
            extra = -rows % block if rows else block
            if extra:
                given = [jnp.concatenate([x, jnp.zeros((extra, *x.shape[1:]), x.dtype)]) for x in given]
            return [x[:rows] for x in self._program.call(self.weights, given)]


def _check(at: int, x: Any, row: dict[str, Any]) -> None:
    """See that an array is what the program takes: another dtype would change numbers, and say nothing. Python's own
    numbers, and lists of them, have none."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and dtype != jnp.dtype(row["dtype"]):
        raise TypeError(f"array {at} has the dtype {dtype}, and the program takes {row['dtype']}")
    given, shape = tuple(np.shape(x)), tuple(row["shape"])
    if len(given) != len(shape) or given[int(row["batch"]) :] != shape[int(row["batch"]) :]:
        takes = ", ".join(["any"] * row["batch"] + [str(n) for n in shape[int(row["batch"]) :]])
        raise ValueError(f"array {at} has the shape {given}, and the program takes ({takes})")


def load(folder: Any) -> Program:
    """The program in `folder`."""
    return Program(folder)
