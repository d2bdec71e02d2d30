"""Composites that read memory: C++ that looks at a tensor's values before it dispatches anything to a mode.

A composite of torch's is built of other ops, and only those reach the front door. A few look at memory themselves: for
indices, lengths or checks, to print a tensor in an error, or to fill one with a loop of their own. They get kernels of
the dispatch key that is first of all where a mode is active, and skipped where none is: neither Python nor a program
without modes sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from fused_eager.fusion_rules.lowering import leaves

from ...devices.host import trap
from ...devices.storage import storage_of
from ...executing.island import tell
from ...log import site
from ...log.reasons import Reason
from ...quiet import stack
from ...recording import native
from .intercept import FrontDoor
from .readers import Guard, materialized, natively
from .snapshot import KEY
from .threads import current_door

WHY = "its C++ reads memory before it calls any op"

_listed = torch.Tensor.tolist  # the unpatched one


def _between_0_and_1(self: torch.Tensor, q: torch.Tensor) -> None:
    comparable = self.dtype is q.dtype and q.dim() <= 1 and self.numel() > 0  # else the composite says what is wrong
    if comparable and not all(0 <= value <= 1 for value in _listed(q.reshape(-1))):
        raise RuntimeError("quantile() q values must be in the range [0, 1]")


@dataclass(frozen=True)
class ReadingComposite:
    """One of them, by the name of its overload, and the position of the operand that it reads in any case: that one is
    finished, and the rest may stay pending. Without it the composite is tried first, and if the trap refuses it a look
    it is called again on finished values: nothing has been written by then. Where a mode is active some leave out the
    `check` for which they would read.
    """

    name: str
    reads: int | None = None
    check: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    @property
    def op(self) -> OpOverload | None:
        """The overload; None where this torch has none of that name."""
        packet, _, overload = self.name.partition(".")
        return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


_ALSO = ("", "_fp32_activation")
READING_COMPOSITES: tuple[ReadingComposite, ...] = (
    ReadingComposite("tensor_split.tensor_indices_or_sections", reads=1),
    ReadingComposite("quantile", reads=1, check=_between_0_and_1),
    ReadingComposite("nanquantile", reads=1, check=_between_0_and_1),
    ReadingComposite("_reshape_from_tensor", reads=1),
    ReadingComposite("meshgrid"),
    ReadingComposite("meshgrid.indexing"),
    ReadingComposite("_sobol_engine_draw"),
    ReadingComposite("_sobol_engine_ff_"),
    ReadingComposite("_sobol_engine_scramble_"),
    ReadingComposite("_sobol_engine_initialize_state_"),
    ReadingComposite("_validate_sparse_coo_tensor_args"),
    ReadingComposite("sparse_coo_tensor.indices"),
    ReadingComposite("sparse_coo_tensor.indices_size"),
    ReadingComposite("_pack_padded_sequence_backward"),
    ReadingComposite("_saturate_weight_to_fp16"),
    ReadingComposite("choose_qparams_optimized"),
    ReadingComposite("_choose_qparams_per_tensor"),
    *[ReadingComposite(f"fbgemm_linear_{kind}_weight{also}") for kind in ("fp16", "int8") for also in _ALSO],
    *[ReadingComposite(f"fbgemm_linear_fp16_weight{also}.out") for also in _ALSO],
    ReadingComposite("fbgemm_linear_quantize_weight"),
    ReadingComposite("fbgemm_pack_gemm_matrix_fp16"),
    ReadingComposite("fbgemm_pack_quantized_matrix"),
    ReadingComposite("fbgemm_pack_quantized_matrix.KN"),
    *[ReadingComposite(f"quantized_{kind}_cell") for kind in ("lstm", "gru", "rnn_relu", "rnn_tanh")],
)


def _kernel(row: ReadingComposite, op: OpOverload) -> Callable[..., Any]:
    guard = Guard(torch.Tensor, op._opname)
    writes = op._schema.is_mutable

    def kernel(*args: Any, **kwargs: Any) -> Any:
        door = current_door()
        seen = door is not None and not door.hidden and door in stack()
        if door is not None and seen:
            if row.reads is not None:
                materialized(args[row.reads], guard)
                if row.check is not None:
                    row.check(args[0], args[row.reads])
            if writes:
                return _on_finished(door, op, args, kwargs)
        try:
            return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        except RuntimeError as error:
            if door is None or not seen or not trap.is_refusal(error):
                raise
        return _on_finished(door, op, args, kwargs)

    return kernel


def _on_finished(door: FrontDoor, op: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a composite on finished values, natively: what it makes on the way, it may read as well."""
    if native.is_away([args, kwargs]):
        tell(door.stream.config, op, site.here(), WHY)
    native.materialize([args, kwargs], Reason("sync.memory", str(op)))
    if op._schema.is_mutable:
        for t in leaves([args, kwargs]):
            if isinstance(t, torch.Tensor) and torch._C._has_storage(t):
                native.protect(storage_of(t))
    return natively(op, *args, **kwargs)


def meet_composites() -> Callable[[], None]:
    """Give the reading composites kernels of ours, for as long as a context is open; returns what takes them away."""
    library = torch.library.Library("aten", "IMPL")
    for row in READING_COMPOSITES:
        op = row.op
        if op is not None:
            library.impl(op, _kernel(row, op), KEY)
    return library._destroy
