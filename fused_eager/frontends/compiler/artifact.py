"""Load an exported program in plain JAX: `load(folder)`. A copy of this file lies beside each program: it needs jax and
numpy alone."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import pickle
import warnings
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

_enable_x64: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


class Program:
    """The program in a folder: called with arrays it returns a list of them.

    `signature` says what it takes and returns; `weights` are what it was trained to, and others may be put there.
    """

    def __init__(self, folder: Any):
        folder = pathlib.Path(folder)
        self.signature = json.loads((folder / "signature.json").read_text())
        self._program = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
        self._executable = _executable(folder, self.signature["targets"])
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
        wanted = self.signature["inputs"]
        if len(inputs) != len(wanted):
            raise TypeError(f"the program takes {len(wanted)} arrays, and was given {len(inputs)}")
        sizes: dict[str, int] = {}
        for at, (x, row) in enumerate(zip(inputs, wanted, strict=True)):
            _check(at, x, row, sizes, self.signature["sizes"])
        with _enable_x64(True):
            if 0 in sizes.values():
                return [_nothing(row, sizes) for row in self.signature["results"]]
            given = [jnp.asarray(x, jnp.dtype(row["dtype"])) for x, row in zip(inputs, wanted, strict=True)]
            return list((self._executable or self._program.call)(self.weights, given))


def _executable(folder: Any, rows: list[dict[str, Any]]) -> Any:
    """What was compiled for the devices that are here; None if nothing was, or by another XLA."""
    if jax.default_backend() != "tpu":
        return None
    kind, jaxlib = jax.local_devices()[0].device_kind, importlib.metadata.version("jaxlib")
    for row in rows:
        if (row["kind"], row["jaxlib"]) == (kind, jaxlib):
            code, takes, returns = pickle.loads((folder / row["file"]).read_bytes())  # as much code as the program is
            try:
                return serialize_executable.deserialize_and_load(code, takes, returns)
            except jax.errors.JaxRuntimeError as error:
                warnings.warn(f"{row['file']} is not loaded, and the program is compiled here: {error}", stacklevel=3)
    return None


def _check(at: int, x: Any, row: dict[str, Any], sizes: dict[str, int], ranges: dict[str, Any]) -> None:
    """See that an array is what the program takes, and note the sizes that vary: another dtype would change numbers,
    and say nothing. Python's own numbers, and lists of them, have none."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and dtype != jnp.dtype(row["dtype"]):
        raise TypeError(f"array {at} has the dtype {dtype}, and the program takes {row['dtype']}")
    given, shape = tuple(np.shape(x)), tuple(row["shape"])
    fits = len(given) == len(shape) and all(isinstance(m, str) or n == m for n, m in zip(given, shape, strict=False))
    if not fits:
        raise ValueError(f"array {at} has the shape {given}, and the program takes ({', '.join(map(str, shape))})")
    for n, name in zip(given, shape, strict=True):
        if name in ranges:
            if sizes.setdefault(name, n) != n:
                raise ValueError(f"array {at} has the shape {given}, where {name} is {sizes[name]} in another")
            low, high = ranges[name]
            if n and (n < low or (high is not None and n > high)):
                raise ValueError(f"{name} is {n}; the program takes {low} to {high or 'any'}")


def _nothing(row: dict[str, Any], sizes: dict[str, int]) -> Any:
    """A result that has no elements, where a size is 0: the program itself takes none of that."""
    shape = [sizes.get(n, n) for n in row["shape"]]
    if 0 not in shape or any(isinstance(n, str) for n in shape):
        raise ValueError(f"a size is 0, and a result of the shape ({', '.join(map(str, row['shape']))}) is not empty")
    return jnp.zeros(shape, jnp.dtype(row["dtype"]))


def load(folder: Any) -> Program:
    """The program in `folder`."""
    return Program(folder)
