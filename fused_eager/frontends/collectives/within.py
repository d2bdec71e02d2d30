"""The process group of ranks that are threads of one process: they give what they have, and the last one combines it.

It is a group in Python: torch takes it for the whole group, for tensors of the device and the CPU's alike. Nothing of
it waits in C++, where a rank that is lost could not end the wait: each wait lets the other ranks run (`turns`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from ...log import site
from ...log.reasons import Reason
from ...quiet import as_eager
from ...ranks import calls, status
from ...ranks.faults import Fault
from ...ranks.table import BY_OP
from ...ranks.turns import Rank, Turns
from ...ranks.work import told
from . import across, combined
from .boards import Board, Call, WorkWithin, here
from .combined import Given, Got
from .grouping import noted
from .promised import of_a_cut

Tensor = torch.Tensor


def _put(t: Tensor, value: Tensor) -> None:
    t = t.detach()
    t.copy_(value if value.is_sparse or value.shape == t.shape else value.reshape(t.shape))


_Base: Any = c10d.ProcessGroup  # whose stubs have other names than torch 2.11


class GroupWithin(_Base):  # type: ignore[misc]
    """A group of threads of this process.

    Arguments:
        rank: this one's number in the group.
        name: the group's, which is the same on all of its ranks.
    """

    def __init__(self, rank: int, board: Board, name: str):
        super().__init__(rank, len(board.ranks))
        self._rank, self._board, self._name = rank, board, name
        self._number = 0
        self._sent: dict[tuple[int, int, int], int] = defaultdict(int)
        self._asked: dict[tuple[int, int, int], int] = defaultdict(int)

    def size(self) -> int:
        """How many ranks it has."""
        return len(self._board.ranks)

    @property
    def group_name(self) -> str:
        """Its name in the process, by which C++ finds it, too."""
        return str(distributed.distributed_c10d._world.pg_names.get(self, self._name))

    supports_splitting = supports_coalescing = False

    def _get_backend(self, device: Any) -> GroupWithin:
        """What serves tensors of a device: the group itself."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """Of which devices it takes tensors."""
        return [torch.device("cpu"), torch.device(torch._C._get_privateuse1_backend_name())]

    def getBackendName(self) -> str:
        """The backend that programs have asked for."""
        return "fused_eager"

    def abort(self) -> None:
        """Nothing is under way that would have to be."""

    def shutdown(self) -> None:
        """As `abort`."""

    def __repr__(self) -> str:
        return f"GroupWithin(rank {self._rank} of {self.size()})"

    # ---- collectives of all ---------------------------------------------------------------------------------------

    def _call(
        self, row: str, combine: Callable[[Sequence[Given]], Got], read: Iterable[Tensor], written: Sequence[Tensor],
        alike: Sequence[Any] = (), **about: Any,
    ) -> Any:  # fmt: skip
        """Give this rank's part; the work is over once all have given theirs, and writes what is this rank's.

        Arguments:
            row: the op's name in the table.
            read, written: the tensors that it gives, and those that it gets.
            alike: the tensors of which every rank has the same shapes and dtypes.
        """
        turns, me = here()
        place = site.describe(site.here())
        at = status.place(thread=threading.get_ident())
        called = at.collective or row.strip("_")
        turns.refuse(me, f"calls {called} at {at.line}")
        began = time.monotonic()
        reason = Reason("sync.collective", of_a_cut(row), place)
        values = [across.part(t, reason) for t in read]
        nbytes = sum(t.nbytes for t in values if not t.is_sparse)
        ended = told(BY_OP[row], self, nbytes, time.monotonic() - began, str(place))
        number, self._number = self._number, self._number + 1
        words = calls.words(row, None, {}).removesuffix("()") + f"({_words(alike, about)})"
        call = self._board.calls.setdefault(number, Call(words, at.line, me.number))
        if call.words != words:
            turns.fail(me, Fault("differ", None, (
                f"the ranks of a group differ in collective number {number + 1}: rank {call.first} calls {call.words} "
                f"at {call.line}, and rank {me.number} calls {words} at {at.line}"
            )))  # fmt: skip
            turns.refuse(me, "")
        call.given[self._rank] = Given(values, about)
        if len(call.given) == self.size():
            try:
                with torch.no_grad(), as_eager():
                    call.got = across.together(combine, [call.given[r] for r in range(self.size())])
            except Exception as error:  # told to every rank
                call.error = f"{words} cannot be done: {error}"
            call.given.clear()
            del self._board.calls[number]
        targets = [(t, t.detach()) for t in written]

        def finish(waited: float) -> list[Tensor]:
            if call.error:
                raise RuntimeError(call.error)
            got = call.take(self._rank)
            if got is not None:
                for (_, t), value in zip(targets, got, strict=True):
                    _put(t, value)
            ended(waited)
            return [t for t, _ in targets]

        def missing() -> list[int]:
            return [rank for r, rank in enumerate(self._board.ranks) if r not in call.given]

        work = WorkWithin(called, lambda: call.got is not None or bool(call.error), finish, missing)
        return noted(self, work)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call("allreduce_", combined.allreduce, tensors, tensors, tensors, operation=_reduction(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        about = {"operation": _reduction(opts)}
        return self._call("allreduce_coalesced_", combined.allreduce, tensors, tensors, tensors, **about)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call("broadcast_", combined.broadcast, tensors, tensors, tensors, root=_root(opts))

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        about = {"operation": _reduction(opts), "root": _root(opts)}
        return self._call("reduce_", combined.reduce, tensors, tensors, tensors, **about)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        inputs = _listed(inputs)
        lists = outputs if outputs and isinstance(outputs[0], (list, tuple)) else [outputs]
        written = [t for of in lists for t in of]
        return self._call("allgather_", combined.allgather, inputs, written)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        written = [t for of in outputs for t in of]
        return self._call("allgather_coalesced_", combined.allgather_by_rank, inputs, written, written)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._call("_allgather_base_", combined.allgather_flat, [input], [output], [output])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        name = "allgather_into_tensor_coalesced_"
        return self._call(name, combined.allgather_flat, inputs, outputs, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        inputs = _listed(inputs)
        written = [t for of in outputs for t in of]
        return self._call("gather_", combined.gather, inputs, written, root=_root(opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs = _listed(outputs)
        read = [t for of in inputs for t in of]
        return self._call("scatter_", combined.scatter, read, outputs, root=_root(opts))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs = _listed(outputs)
        read = [t for of in inputs for t in of]
        return self._call("reduce_scatter_", combined.reduce_scatter, read, outputs, read, operation=_reduction(opts))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        of = combined.reduce_scatter_flat
        return self._call("_reduce_scatter_base_", of, [input], [output], [input], operation=_reduction(opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        of, name = combined.reduce_scatter_flat, "reduce_scatter_tensor_coalesced_"
        return self._call(name, of, inputs, outputs, inputs, operation=_reduction(opts))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._call("alltoall_", combined.alltoall, inputs, outputs)

    def all_to_all_single(
        self, output: Any, input: Any, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> Any:
        sizes = list(input_sizes or ())
        return self._call("alltoall_base_", combined.alltoall_flat, [input], [output], sizes=sizes)

    def barrier(self, opts: Any = None) -> Any:
        return self._call("barrier", combined.barrier, [], [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._call("monitored_barrier_", combined.barrier, [], []).wait()

    # Under the names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- between two ----------------------------------------------------------------------------------------------

    def _caller(self) -> tuple[Turns, Rank, str]:
        turns, me = here()
        at = status.place(thread=threading.get_ident())
        turns.refuse(me, f"calls {at.collective} at {at.line}")
        return turns, me, at.collective

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        _, _, called = self._caller()
        way = (self._rank, to, tag)
        (t,) = _listed(tensors)
        reason = Reason("sync.collective", "send", site.describe(site.here()))
        self._board.mail[way][self._sent[way]] = across.part(t, reason)
        self._sent[way] += 1
        return noted(self, WorkWithin(called or "send", lambda: True, lambda waited: [t], tuple))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        _, _, called = self._caller()
        way = (source, self._rank, tag)
        number, self._asked[way] = self._asked[way], self._asked[way] + 1
        mail, (t,) = self._board.mail[way], _listed(tensors)
        target = t.detach()

        def finish(waited: float) -> list[Tensor]:
            _receive(target, mail.pop(number), f"recv from rank {source}")
            return [t]

        return noted(self, WorkWithin(
            called or "recv", lambda: number in mail, finish, lambda: [self._board.ranks[source]], lambda: source
        ))  # fmt: skip

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        _, _, called = self._caller()
        (t,) = _listed(tensors)
        target, found = t.detach(), [-1]

        def sources() -> list[int]:
            ways = [(source, self._rank, tag) for source in range(self.size())]
            return [way[0] for way in ways if self._asked[way] in self._board.mail[way]]

        def finish(waited: float) -> list[Tensor]:
            found[0] = sources()[0]
            way = (found[0], self._rank, tag)
            number, self._asked[way] = self._asked[way], self._asked[way] + 1
            _receive(target, self._board.mail[way].pop(number), "recv")
            return [t]

        return noted(self, WorkWithin(called or "recv", lambda: bool(sources()), finish, tuple, lambda: found[0]))


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _reduction(opts: Any) -> Any:
    """The reduction, from options or by itself; a sum where none is named."""
    found = getattr(opts, "reduceOp", opts)
    return found if isinstance(found, c10d.ReduceOp) else c10d.ReduceOp(c10d.ReduceOp.SUM if found is None else found)


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts or 0))


def _words(alike: Sequence[Tensor], about: dict[str, Any]) -> str:
    """What of a call has to be the same on all ranks."""
    parts = [calls._shapes(list(alike))] if alike else []
    if "operation" in about:
        parts.append(about["operation"].op.name)
    if "root" in about:
        parts.append(f"root {about['root']}")
    return ", ".join(parts)


def _receive(t: Tensor, message: Tensor, told_: str) -> None:
    if message.nbytes != t.nbytes:
        raise RuntimeError(f"{told_}: the message has {message.nbytes} bytes, and the tensor {t.nbytes}")
    _put(t, message if message.dtype == t.dtype else message.view(-1).view(t.dtype))
