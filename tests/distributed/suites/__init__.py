"""Programs that ranks run, in suites: each is given a device's name, and returns what every door should come to.

Programs are written as people write them, and know nothing of the library. `run` calls them, once on CPU tensors in
plain torch and then at a door. Nothing of what they do may hang on which rank comes first.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Program = Callable[[str], Any]
PROGRAMS: dict[str, dict[str, Program]] = {}


def program(suite: str, name: str = "") -> Callable[[Program], Program]:
    """Enter a program into a suite."""

    def enter(function: Program) -> Program:
        PROGRAMS.setdefault(suite, {})[name or function.__name__] = function
        return function

    return enter


def numbers(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other numbers on each rank."""
    n = functools.reduce(lambda a, b: a * b, shape, 1)
    return ((torch.arange(n) % 7 + 1) * (RANK + 1)).to(dtype).reshape(shape).to(device)


def waves(device: str, *shape: int, shift: float = 0.0) -> torch.Tensor:
    """Numbers between -1 and 1: the same on every rank unless they are shifted by it."""
    n = functools.reduce(lambda a, b: a * b, shape, 1)
    return torch.sin(torch.arange(float(n)) + shift).reshape(shape).to(device)


def room(device: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device)
