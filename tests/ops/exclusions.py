"""What the op corpus leaves out: one row each, with the reason."""

from __future__ import annotations

# Not run at all.
EXCLUDED: dict[str, str] = {}

# Run, but only shapes, dtypes and strides are compared: the values are unwritten memory in eager too.
UNWRITTEN: dict[str, str] = {
    "empty": "returns unwritten memory",
    "empty_like": "returns unwritten memory",
    "empty_permuted": "returns unwritten memory",
    "empty_strided": "returns unwritten memory",
    "new_empty": "returns unwritten memory",
    "new_empty_strided": "returns unwritten memory",
}

# Run, but strides of results are not compared: torch itself makes others as soon as any dispatch mode is active.
STRIDES: dict[str, str] = {
    "ormqr": "its backward takes another formula under a dispatch mode (composite compliance)",
}

# Error inputs that do not raise eager's type, by (op, mode or "all").
ERRORS: dict[tuple[str, str], str] = {}
