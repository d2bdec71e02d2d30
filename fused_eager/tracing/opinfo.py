"""What the front door must know about an overload, read from its schema once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.decompose import decomposition_of, is_composite
from fused_eager.fusion_rules.rule import OpClass, functional_twin, hoisted_names, rule_for


class Kind(Enum):
    """What happens to an op at the front door."""

    VIEW = "view"  # metadata only: runs natively at once, on pending tensors too
    METADATA = "metadata"  # changes a tensor's own geometry or storage (transpose_, set_, resize_)
    ALLOCATE = "allocate"  # makes memory without values
    RANDOM = "random"  # draws from torch's generator: in program order, natively
    PARTS = "parts"  # the dense tensors that a sparse one consists of
    VALUES = "values"  # returns numbers, or shapes that depend on them: a sync point
    # is called to raise (`_linalg_check_errors`), which programs catch at its own line, or looks at memory and hands
    # out a view of it: a sync point at which the program reads nothing
    CHECK = "check"
    COMPOSITE = "composite"  # its own decomposition is recorded instead
    CUSTOM = "custom"  # somebody's own op: it may do more than compute, so it runs at once
    COMPUTE = "compute"  # recorded


@dataclass(frozen=True, slots=True, eq=False)
class OpInfo:
    """One overload, as the recorder sees it. Arguments are named by their position in the schema.

    What the table of lowerings says of it is looked up when it is first asked for: an op that torch runs alone needs
    neither the table nor JAX, which comes with it.
    """

    op: OpOverload
    number: int  # stands for `op` in keys: OpOverload hashes slowly
    kind: Kind
    twin: OpOverload | None
    names: tuple[str, ...]
    written: tuple[int, ...]
    writes_list: bool = False  # it writes the elements of a list (`_foreach_add_`)
    hoisted: frozenset[int] = field(init=False)
    island: str = field(init=False)  # why XLA cannot run it; "" if it can
    scattered: bool = field(init=False)  # it writes other places than it reads (`index_add_`, `out=` of a product)
    adds_onto: bool = field(init=False)  # what it writes may be its first tensor: the op in place
    on_cpu: bool = field(init=False)  # torch has it for CPU tensors

    @property
    def may_resize(self) -> bool:
        """Whether it has a kernel of ATen's alone, and writes arguments that are neither `out=` nor the one that an
        in-place op is called on: such kernels lay those out anew (what observers of quantization keep), and no schema
        or shape inference says so."""
        outs = [a.is_out for a in self.op._schema.arguments]
        return bool(self.island) and any(i and not outs[i] for i in self.written)

    def __getattr__(self, name: str) -> Any:  # of a slot that is empty
        if name not in ("hoisted", "island", "scattered", "adds_onto", "on_cpu"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        hoisted = hoisted_names(self.twin) if self.twin is not None else frozenset()
        object.__setattr__(self, "hoisted", frozenset(i for i, n in enumerate(self.names) if n in hoisted))
        object.__setattr__(self, "island", _island(self.twin))
        object.__setattr__(self, "scattered", bool(self.written) and not _is_pointwise(self.op))
        object.__setattr__(self, "adds_onto", str(self.op) in ADD_ONTO)
        has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        object.__setattr__(self, "on_cpu", self.op.namespace != "aten" or has(self.op.name(), "CPU"))
        return getattr(self, name)


# Ops that write arguments although their schema does not say so: (argument names), when the named flag is true.
HIDDEN_WRITES: dict[str, tuple[tuple[str, ...], str]] = {
    "aten.native_batch_norm.default": (("running_mean", "running_var"), "training"),
}

# Ops of these namespaces write tensors that they take (a collective fills them), and no schema says so.
SILENT_WRITERS = frozenset({"c10d"})
# And these of another one, whose schemas say of the rest what they write.
RECEIVERS = frozenset({"_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops"})

# Ops marked as random that draw nothing as long as the named argument is 0.
RANDOM_UNLESS_ZERO: dict[str, str] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "dropout_p",
    "aten._scaled_dot_product_attention_math.default": "dropout_p",
    "aten._flash_attention_forward.default": "dropout_p",
    "aten._fused_sdp_choice.default": "dropout_p",
}

ALLOCATORS = frozenset(
    # A zero tensor has not even memory: what torch does with one it does above us. Zeros that are laid out like
    # another tensor, whose storage may be larger than it is, begin in the middle of their own.
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
     "_efficientzerotensor", "_new_zeros_with_same_feature_meta"}
)  # fmt: skip

# Aliases that no schema declares.
ALIASES = frozenset({"aten._unsafe_view.default", "aten._reshape_alias.default"})

# Views that look at the memory of what they are views of: a nested tensor asks where it begins.
READING_VIEWS = frozenset({"aten._nested_view_from_buffer.default"})

# They hand out the dense tensors that a sparse one consists of, which have memory of their own.
SPARSE_PARTS = frozenset(
    {"_values", "values", "_indices", "indices", "crow_indices", "ccol_indices", "row_indices", "col_indices"}
)

# Sums of a tensor and a product, which may be written over that tensor: `addmm_` is `addmm.out` into itself.
ADD_ONTO = frozenset(f"aten.{name}.out" for name in ("addmm", "addmv", "addr", "addbmm", "baddbmm"))

# Ops that only look at metadata although they take tensors.
QUERIES = frozenset(
    {
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "size",
        "stride",
        "storage_offset",
        "dim",
        "numel",
        "is_same_size",
        "is_contiguous",
        "is_strides_like_format",
        "_fused_sdp_choice",
        "_has_compatible_shallow_copy_type",
        "_version",
        "is_leaf",
        "output_nr",
        "_assert_tensor_metadata",
    }
)

_INFO: dict[OpOverload, OpInfo] = {}
_numbers = itertools.count()  # not the length of the above: two threads may each meet a new op at once


def info_of(op: OpOverload) -> OpInfo:
    """The `OpInfo` of an overload, computed once per process."""
    found = _INFO.get(op)
    if found is None:
        found = _INFO.setdefault(op, _read(op))
    return found


def _kind(op: OpOverload) -> Kind:
    packet = op._schema.name.partition("::")[2]
    tags = op.tags
    if packet in QUERIES or op.namespace == "profiler":  # whose marks, four in a step of an optimizer, see no tensor
        return Kind.VIEW
    if torch.Tag.inplace_view in tags:
        return Kind.METADATA
    if packet in SPARSE_PARTS:
        return Kind.PARTS
    if is_composite(op) and rule_for(op) is None:
        return Kind.COMPOSITE
    if str(op) in READING_VIEWS:
        return Kind.CHECK
    if op.is_view or str(op) in ALIASES:
        return Kind.VIEW
    if op.namespace not in ("aten", "prims") and rule_for(op) is None:
        return Kind.CUSTOM
    if any("Tensor" not in str(r.type) for r in op._schema.returns):
        return Kind.VALUES
    if not (op._schema.returns or op._schema.is_mutable):
        return Kind.CHECK
    if op.namespace == "aten" and packet in ALLOCATORS and not op._schema.is_mutable:
        return Kind.ALLOCATE
    if torch.Tag.data_dependent_output in tags or (torch.Tag.dynamic_output_shape in tags and rule_for(op) is None):
        # With a rule (index by integers), shape inference tells the static calls from the others.
        return Kind.VALUES
    if torch.Tag.nondeterministic_seeded in tags:
        return Kind.RANDOM
    return Kind.COMPUTE


def _is_pointwise(op: OpOverload) -> bool:
    rule = rule_for(op)
    return torch.Tag.pointwise in op.tags or (rule is not None and rule.cls is OpClass.POINTWISE)


def _island(twin: OpOverload | None) -> str:
    if twin is None:
        return "ATen has no functional overload of it"
    return "" if rule_for(twin) is not None or decomposition_of(twin) is not None else "it has no lowering"


def _read(op: OpOverload) -> OpInfo:
    arguments = op._schema.arguments
    hidden = HIDDEN_WRITES.get(str(op), ((), ""))[0]
    silent = op.namespace in SILENT_WRITERS or op._schema.name in RECEIVERS
    written = tuple(
        i
        for i, a in enumerate(arguments)
        if (a.alias_info is not None and a.alias_info.is_write)
        or a.name in hidden
        or (silent and "Tensor" in str(a.type))
    )
    return OpInfo(
        op,
        next(_numbers),
        _kind(op),
        functional_twin(op),
        tuple(a.name for a in arguments),
        written,
        bool(written) and op._schema.name.startswith("aten::_foreach_"),
    )
