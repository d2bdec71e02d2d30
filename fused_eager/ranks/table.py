"""Which collectives there are, and what each does to the tensors that it takes, as rows.

The schemas of `c10d` do not say what is written. Each row names an op's arguments: those that it reads alone, those
that it only writes, and those that it reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Collective:
    """One op of `c10d`: the names of its tensor arguments, by what happens to them; and those whose shapes and dtypes
    are the same on all ranks. Of what is sent from one to another rank nothing is (`is_for_all`)."""

    op: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    is_for_all: bool = True


COLLECTIVES = (
    Collective("allreduce_", updates=("tensors",), alike=("tensors",)),
    Collective("allreduce_coalesced_", updates=("tensors",), alike=("tensors",)),
    Collective("broadcast_", updates=("tensors",), alike=("tensors",)),
    Collective("reduce_", updates=("tensors",), alike=("tensors",)),
    Collective("allgather_", reads=("input_tensors",), writes=("output_tensors",), alike=("output_tensors",)),
    Collective("_allgather_base_", reads=("input_tensor",), writes=("output_tensor",), alike=("output_tensor",)),
    Collective("allgather_coalesced_", reads=("input_list",), writes=("output_lists",), alike=("output_lists",)),
    Collective("allgather_into_tensor_coalesced_", reads=("inputs",), writes=("outputs",), alike=("outputs",)),
    Collective("reduce_scatter_", reads=("input_tensors",), writes=("output_tensors",), alike=("input_tensors",)),
    Collective("_reduce_scatter_base_", reads=("input_tensor",), writes=("output_tensor",), alike=("input_tensor",)),
    Collective("reduce_scatter_tensor_coalesced_", reads=("inputs",), writes=("outputs",), alike=("inputs",)),
    Collective("alltoall_", reads=("input_tensors",), writes=("output_tensors",)),
    Collective("alltoall_base_", reads=("input",), writes=("output",)),
    Collective("gather_", reads=("input_tensors",), writes=("output_tensors",)),
    Collective("scatter_", reads=("input_tensors",), writes=("output_tensors",)),
    Collective("send", reads=("tensors",), is_for_all=False),
    Collective("recv_", writes=("tensors",), is_for_all=False),
    Collective("recv_any_source_", writes=("tensors",), is_for_all=False),
    Collective("barrier", reads=("tensor",)),
    Collective("monitored_barrier_", reads=("tensor",)),
)

BY_OP = {row.op: row for row in COLLECTIVES}
