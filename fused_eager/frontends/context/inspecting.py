"""What whoever looks for a mistake wants: each op run by itself, its call, and where the first NaN comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...executing import run
from ...log import site
from ...log.reasons import Reason
from ...recording import native
from ...tracing.calls import shape_of
from ...tracing.opinfo import OpInfo
from ...tracing.stream import Stream


def print_call(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> None:
    """Print an op with what it takes, and the line that it is called from."""

    def show(a: Any) -> str:
        if isinstance(a, torch.Tensor):
            return f"{str(a.dtype).removeprefix('torch.')}{list(shape_of(a) or ())}"
        if isinstance(a, (list, tuple)):
            return f"[{', '.join(map(show, a))}]"
        return repr(a)

    shown = [show(a) for a in args] + [f"{k}={show(v)}" for k, v in kwargs.items()]
    print(f"{info.op}({', '.join(shown)})  # {site.describe(site.here())}", flush=True)


CHECK_NAN = Reason("sync.value", "check_nan")


def materialized(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the host's, with its value in its memory."""
    native.materialize([t], CHECK_NAN)
    return t


def run_single(
    stream: Stream,
    info: OpInfo,
    args: Any,
    kwargs: dict[str, Any],
    out: Any,
    value_of: Callable[[torch.Tensor], torch.Tensor] = materialized,
) -> None:
    """Run the op that has just been recorded, as the modes strict and debug do; debug waits for it and looks at `out`.

    Raises:
        Exception: what an op raised that ran natively; the one that has been recorded has not happened.
        FloatingPointError: as `find_nan`.
    """
    try:
        run.flush(stream, Reason("mode.single"))
    except Exception as error:  # of an op before this one, most likely
        run.withdraw(stream, error)
        raise
    if stream.config.mode == "debug":
        run.wait()
        run.check()
        if stream.config.check_nan:
            find_nan(info, args, kwargs, out, value_of)


def find_nan(
    info: OpInfo,
    args: Any,
    kwargs: dict[str, Any],
    out: Any,
    value_of: Callable[[torch.Tensor], torch.Tensor] = materialized,
) -> None:
    """Raise where the first NaN or infinity appears: the op's results have one and its operands have none.

    `value_of` gives a tensor's finished value on the host.
    """

    def has_nan(tree: Any) -> bool:
        for t in native.leaves(tree):
            if not isinstance(t, torch.Tensor) or t.is_meta or not (t.is_floating_point() or t.is_complex()):
                continue
            if not torch.isfinite(value_of(t)).all():
                return True
        return False

    if has_nan([out]) and not has_nan([args, kwargs]):
        raise FloatingPointError(f"{info.op} made the first NaN or infinity at {site.describe(site.here())}")
