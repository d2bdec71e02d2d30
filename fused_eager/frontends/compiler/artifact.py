"""Load an exported program in plain JAX: `load(folder)`. A copy of this file lies beside each program: it needs jax and
numpy alone."""

import json
import pathlib

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

_enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


def load(folder):  # type: ignore[no-untyped-def]
    """The program in `folder`, as a function of arrays that returns a list of them.

    Its `signature` says what it takes and returns, its `weights` are what it was trained to; others may be put there.
    """
    folder = pathlib.Path(folder)
    signature = json.loads((folder / "signature.json").read_text())
    program = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    with _enable_x64(True):
        weights = []
        for row in signature["weights"]:
            raw = np.fromfile(folder / row["file"], np.uint8)
            weights.append(jnp.asarray(raw.view(jnp.dtype(row["dtype"])).reshape(row["shape"])))

    def call(*inputs):  # type: ignore[no-untyped-def]
        wanted = signature["inputs"]
        if len(inputs) != len(wanted):
            raise TypeError(f"the program takes {len(wanted)} arrays, and was given {len(inputs)}")
        with _enable_x64(True):
            given = [jnp.asarray(x, jnp.dtype(row["dtype"])) for x, row in zip(inputs, wanted, strict=True)]
            block, rows = signature["block"], None
            if block:
                rows = next(x.shape[0] for x, row in zip(given, wanted, strict=True) if row["batch"])
                extra = -rows % block  # no row depends on another: what is computed of these is left out again
                given = [
                    jnp.concatenate([x, jnp.repeat(x[-1:], extra, 0)]) if row["batch"] and extra else x
                    for x, row in zip(given, wanted, strict=True)
                ]
            out = program.call(call.weights, given)
            return [x if not rows else x[:rows] for x in out]

    call.weights, call.signature = weights, signature
    return call
