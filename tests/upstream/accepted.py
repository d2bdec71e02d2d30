"""Differences from plain PyTorch that are accepted, each with its reason.

A row names tests by a pattern (`fnmatch`) of `file::class::test` and the modes it holds in. Rows are for what a test
knows of PyTorch's insides: how often the dispatcher is called, which private object is where. A wrong number, a
missing error or a crash is never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tests that may differ, in which modes (all, if none is named), and why."""

    tests: str
    why: str
    modes: tuple[str, ...] = ()

    def covers(self, test: str, mode: str) -> bool:
        """Whether this row is about a test in a mode."""
        return (not self.modes or mode in self.modes) and fnmatchcase(test, self.tests)


REGIONS = ("default", "wait", "xla", "blocking")  # the modes that fuse
_ROUNDING = (
    "it asks for equality to the last bit, which holds op by op: XLA contracts a product and the sum that takes it "
    "into one rounding (docs/semantics.md, Numbers; gradcheck takes nondet_tol there)"
)
_LATE = "an index out of range is found where the region has run (docs/semantics.md, Errors), and nothing reads there"
_LATE_VALUES = (
    "what only values can reveal is found where the region has run (docs/semantics.md, Errors), and nothing reads there"
)
_ANY_MODE = "torch does the same below any TorchDispatchMode, also one that does nothing: "
_NO_FALLBACK = "a fallback in Python for a key that is included for a whole thread is looked for again there, in vain"

ACCEPTED: tuple[Accepted, ...] = (
    Accepted("test_autograd.py::*::test_gradcheck_single_input", _ROUNDING, REGIONS),
    Accepted("test_autograd.py::*::test_lobpcg", _ROUNDING, REGIONS),
    Accepted("test_view_ops.py::*::test_as_strided_gradients_cpu", _ROUNDING, REGIONS),
    Accepted(
        "test_sort_and_select.py::*::test_sort_cpu",
        "it sorts 8,196 random numbers, of which two are equal now and then, without `stable`: which of these comes "
        "first torch leaves open, and ATen's answer depends on the processor (docs/semantics.md, equal elements)",
    ),
    Accepted(
        "test_indexing.py::*::test_trivial_fancy_out_of_bounds_cpu",
        _LATE,
        (*REGIONS, "strict"),
    ),
    Accepted("test_indexing.py::*::test_advancedindex_cpu_float64", _LATE, ("strict",)),
    *(
        Accepted(f"test_torch.py::*::{test}", _LATE_VALUES, (*REGIONS, "strict"))
        for test in ("test_index_add_correctness", "test_masked_scatter_cpu_*")
    ),
    Accepted(
        "test_torch.py::*::test_parallel_cow_materialize_error_cpu_*",
        "it looks, by an op of torch's that is for this test alone, at how a lazy copy of memory is made: here "
        "ATen runs ops on copies of its own",
    ),
    *(
        Accepted(f"test_python_dispatch.py::*::{test}", f"{_ANY_MODE}it asks which modes there are")
        for test in ("test_get_cur_mode", "test_get_mode_stack", "test_mode_detection", "test_standard_is_not_subclass")
    ),
    *(
        Accepted(f"test_python_dispatch.py::TestPythonRegistration::{test}", f"{_ANY_MODE}{_NO_FALLBACK}")
        for test in ("test_fallback", "test_fallback_keyset", "test_fallback_fallthrough")
    ),
    Accepted(
        "test_autograd.py::*::test_no_grad_copy_sparse",
        f"{_ANY_MODE}autograd copies a sparse gradient where it would keep its buffer, whose address the test compares",
    ),
    Accepted(
        "test_autograd.py::*::test_profiler_propagation",
        f"{_ANY_MODE}TorchScript's fork, which runs in a thread without the mode, fails at once",
    ),
    Accepted(
        "test_profiler.py::*::test_profiler_for_loop_indexing_pattern",
        "it counts loops by what stands side by side in the stack; where Python collects garbage in such a loop, the "
        "callbacks that JAX and the library have there stand in between",
    ),
    Accepted(
        "test_autograd.py::*::test_per_dispatch_key_input_saving_cpu",
        "backward refuses, as it does in eager, what has been written since; of a nested tensor torch's C++ prints the "
        "sizes into the message with ops, in the mode, and the message is of their memory instead",
    ),
)


_KINDS = "the device has no quantized tensors (docs/device.md, What is not there), and says so"
_EACH_SHAPE = "on a loaded machine it does not end in time: each of its {} is compiled for itself"
_ANY_INDEX = "it gives `index_fill` an index on the CPU, which only the CPU takes; for CUDA the test leaves that out"

# Those of tests that run on a device: besides the ones above, of which the names are the same.
ON_DEVICE: tuple[Accepted, ...] = (
    Accepted("test_view_ops.py::TestOldViewOps*::test_flatten_cpu", _KINDS),
    Accepted("test_view_ops.py::TestOldViewOps*::test_ravel_cpu", _KINDS),
    Accepted("test_shape_ops.py::*::test_flip_cpu_float32", _KINDS),
    Accepted("test_indexing.py::*::test_index_put_accumulate_duplicate_indices_cpu", _EACH_SHAPE.format("511 lengths")),
    Accepted("nn/test_embedding.py::*::test_embedding_bag_?D_padding_idx_*", _EACH_SHAPE.format("hundred bags")),
    Accepted("test_sort_and_select.py::*::test_stable_sort_against_numpy_cpu_*", _ANY_INDEX),
    Accepted("test_indexing.py::*::test_index_put_accumulate_empty_cpu", _LATE),
    Accepted("test_indexing.py::*::test_advancedindex_cpu_float64", _LATE),
)


def reason_for(test: str, mode: str) -> str | None:
    """Why a test may differ in a mode, or in one on a device ("tpu, strict"); None if it may not."""
    device, _, mode = mode.rpartition(", ")
    return next((row.why for row in (*ACCEPTED, *(ON_DEVICE if device else ())) if row.covers(test, mode)), None)
