"""Calls of rows that torch's op corpus has none of: most follow from the schema, the others are in a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Given:
    """Arguments of one dtype. Values do not matter, for nothing is run."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu"):
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype or self.dtype, device=self.device)

    def long(self, *shape: int) -> torch.Tensor:
        """Indices."""
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def bools(self, *shape: int) -> torch.Tensor:
        """A mask."""
        return torch.ones(shape, dtype=torch.bool, device=self.device)

    def lists(self, n: int) -> list[list[torch.Tensor]]:
        """Lists of tensors of equal shapes."""
        return [[self(4, 6), self(5)] for _ in range(n)]

    def one(self) -> torch.Tensor:
        """A scale."""
        return self(dtype=torch.float32)

    def ends(self, *ends: int) -> torch.Tensor:
        """Where groups end, or sequences begin."""
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    def steps(self) -> list[torch.Tensor]:
        """The steps that an optimizer has counted, for each tensor of a list."""
        return [self.one(), self.one()]


def _adam(g: Given, rate: Any) -> tuple[Any, ...]:
    last = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    return (*g.lists(4), [], g.steps(), {"lr": rate, **last})


def _adagrad(g: Given, rate: Any) -> tuple[Any, ...]:
    last = {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    return (*g.lists(3), g.steps(), {"lr": rate, **last})


def _sgd(g: Given, rate: Any) -> tuple[Any, ...]:
    last = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
    return (*g.lists(3), {"weight_decay": 0.1, "momentum": 0.9, "lr": rate, **last})


def _dropped(g: Given) -> tuple[torch.Tensor, ...]:
    return g(2, 2, 5, 4), g(2, 2, 5, 4), g(2, 2, 5, 4), g.bools(2, 2, 5, 5)


def _eights(g: Given) -> tuple[Any, ...]:
    return g(16, 32, dtype=torch.float8_e4m3fn), g(48, 32, dtype=torch.float8_e4m3fn).t()


def _ragged(g: Given) -> tuple[Any, ...]:
    return (*(g(8, 2, 8) for _ in range(3)), g.ends(0, 4, 8), g.ends(0, 4, 8))


def _encoder(g: Given) -> tuple[Any, ...]:
    norms, widening = (g(8), g(8), g(8), g(8)), (g(16, 8), g(16), g(8, 16), g(8))
    return (g(2, 5, 8), 8, 2, g(24, 8), g(24), g(8, 8), g(8), True, False, 1e-5, *norms, *widening)


def _recurrent(g: Given) -> tuple[Any, ...]:
    if not g.dtype.is_floating_point:
        raise TypeError("the gates of a recurrent layer are numbers between 0 and 1")
    return (g(5, 3, 16), g(3, 4), g(3, 4), g(16, 4), g(16), None, None, "lstm", False)


def _recurrent_backward(g: Given) -> tuple[Any, ...]:
    made = torch.ops.fused_eager.recurrent(*_recurrent(g))
    out, hy, cy, *kept = made
    first, hx, cx, w, b, *_ = _recurrent(g)
    return (out, hy, cy, first, hx, cx, w, b, None, None, out, *kept, "lstm", False)


# By row: its arguments; a dict at the end is of named ones.
BY_HAND: dict[str, Callable[[Given], tuple[Any, ...]]] = {
    "_addmm_activation.default": lambda g: (g(6), g(4, 5), g(5, 6)),
    "_amp_foreach_non_finite_check_and_unscale.default": lambda g: (
        *g.lists(1), g(1, dtype=torch.float32), g(1, dtype=torch.float32)
    ),
    "_amp_update_scale.default": lambda g: (
        g(1), g(1, dtype=torch.int32), g(1), 2.0, 0.5, 2000
    ),
    "_batch_norm_no_update.default": lambda g: (g(2, 3, 4, 4), g(3), g(3), g(3), g(3), 0.1, 1e-5),
    "_efficientzerotensor.default": lambda g: ([4, 6],),
    "_euclidean_dist.default": lambda g: (g(4, 5), g(6, 5)),
    "_foreach_mm.default": lambda g: ([g(4, 5)], [g(5, 6)]),
    "_foreach_pow.ScalarAndTensor": lambda g: (2, *g.lists(1)),
    "_fused_rms_norm.default": lambda g: (g(4, 6), [6], g(6), 1e-5),
    "_fused_rms_norm_backward.default": lambda g: (g(4, 6), g(4, 6), [6], g(4, 1), g(6), [True, True]),
    "_index_put_impl.default": lambda g: (g(4, 6), [g.long(3)], g(3, 6)),
    "_unsafe_index.Tensor": lambda g: (g(4, 6), [g.long(3)]),
    "_unsafe_index_put.default": lambda g: (g(4, 6), [g.long(3)], g(3, 6)),
    "_int_mm.default": lambda g: (g(32, 8), g(8, 16)),
    "_grouped_mm.default": lambda g: (g(8, 16), g(2, 16, 8), g.ends(4, 8)),
    "_scaled_mm.default": lambda g: (*_eights(g), g.one(), g.one(), {"out_dtype": g.dtype}),
    "_scaled_mm_v2.default": lambda g: (*_eights(g), [g.one()], [0], [], [g.one()], [0], [], None, g.dtype),
    "_weight_int8pack_mm.default": lambda g: (g(16, 32), g(48, 32, dtype=torch.int8), g(48)),
    "_flash_attention_forward.default": lambda g: (*_ragged(g), 4, 4, 0.0, True, False),
    "_flash_attention_backward.default": lambda g: (
        g(8, 2, 8), *_ragged(g)[:3], g(8, 2, 8), g(2, 8, dtype=torch.float32), *_ragged(g)[3:], 4, 4, 0.0, True,
        g(2, dtype=torch.uint64), g(dtype=torch.uint64),
    ),
    "_masked_scale.default": lambda g: (g(4, 6), g(4, 6, dtype=torch.uint8), 2.0),
    "_masked_softmax.default": lambda g: (g(4, 6), g.bools(4, 6), 1),
    "_masked_softmax_backward.default": lambda g: (g(4, 6), g(4, 6), g.bools(4, 6), 1),
    "_native_batch_norm_legit.no_stats": lambda g: (g(2, 3, 4, 4), g(3), g(3), True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training.default": lambda g: (g(2, 3, 4, 4), g(3), g(3), g(3), g(3), 0.1, 1e-5),
    "_native_multi_head_attention.default": lambda g: (
        g(2, 5, 8), g(2, 5, 8), g(2, 5, 8), 8, 2, g(24, 8), g(24), g(8, 8), g(8)
    ),
    "_transformer_encoder_layer_fwd.default": _encoder,
    "_reshape_alias_copy.default": lambda g: (g(4, 6), [6, 4], [4, 1]),
    "_weight_norm_interface.default": lambda g: (g(4, 6), g(4, 1)),
    "_weight_norm_interface_backward.default": lambda g: (
        g(4, 6), g(4, 6), g(4, 1), g(4, 1, dtype=torch.float32 if g.dtype.itemsize < 4 else None), 0
    ),
    "mv.default": lambda g: (g(4, 5), g(5)),
    "addmv.default": lambda g: (g(4), g(4, 5), g(5)),
    "dot.default": lambda g: (g(5), g(5)),
    "vdot.default": lambda g: (g(5), g(5)),
    "bmm.default": lambda g: (g(2, 4, 5), g(2, 5, 6)),
    "baddbmm.default": lambda g: (g(2, 4, 6), g(2, 4, 5), g(2, 5, 6)),
    "addbmm.default": lambda g: (g(4, 6), g(2, 4, 5), g(2, 5, 6)),
    "_trilinear.default": lambda g: (g(2, 1, 5), g(2, 6, 1), g(2, 6, 5), [], [], [], [2]),
    "convolution.default": lambda g: (g(2, 3, 5), g(4, 3, 3), None, [1], [0], [1], False, [0], 1),
    "addmm.dtype": lambda g: (g(4, 6), g(4, 5), g(5, 6), torch.float32),
    "mm.dtype": lambda g: (g(4, 5), g(5, 6), torch.float32),
    "bmm.dtype": lambda g: (g(2, 4, 5), g(2, 5, 6), torch.float32),
    "baddbmm.dtype": lambda g: (g(2, 4, 6), g(2, 4, 5), g(2, 5, 6), torch.float32),
    "affine_grid_generator.default": lambda g: (g(2, 2, 3), [2, 3, 5, 5], False),
    "all.dims": lambda g: (g(4, 6), [0, 1]),
    "any.dims": lambda g: (g(4, 6), [0, 1]),
    "count_nonzero.dim_IntList": lambda g: (g(4, 6), [0, 1]),
    "squeeze_copy.dims": lambda g: (g(4, 1, 6, 1), [1, 3]),
    "bucketize.Scalar": lambda g: (2, g(6)),
    "searchsorted.Scalar": lambda g: (g(6), 2),
    "conv_tbc.default": lambda g: (g(7, 2, 3), g(3, 3, 4), g(4), 1),
    "div.Scalar_mode": lambda g: (g(4, 6), 2, {"rounding_mode": "floor"}),
    "eye.m": lambda g: (4, 6),
    "fill.Tensor": lambda g: (g(4, 6), g()),
    "glu_jvp.default": lambda g: (g(4, 3), g(4, 6), g(4, 6), 1),
    "glu_backward_jvp.default": lambda g: (g(4, 6), g(4, 3), g(4, 6), g(4, 3), g(4, 6), 1),
    "_foreach_addcmul.Tensor": lambda g: (*g.lists(3), g(2)),
    "_foreach_addcdiv.Tensor": lambda g: (*g.lists(3), g(2)),
    "linspace.Scalar_Tensor": lambda g: (0, g(), 5),
    "linspace.Tensor_Scalar": lambda g: (g(), 5, 5),
    "linspace.Tensor_Tensor": lambda g: (g(), g(), 5),
    "logspace.Scalar_Tensor": lambda g: (0, g(), 5),
    "logspace.Tensor_Scalar": lambda g: (g(), 5, 5),
    "logspace.Tensor_Tensor": lambda g: (g(), g(), 5),
    "select_copy.int": lambda g: (g(4, 6), 1, 2),
    "linear.default": lambda g: (g(4, 5), g(6, 5), g(6)),
    "matmul.default": lambda g: (g(2, 4, 5), g(5, 6)),
    "native_channel_shuffle.default": lambda g: (g(2, 4, 3, 3), 2),
    "norm.ScalarOpt_dim_dtype": lambda g: (g(4, 6), 2, [1], False),
    "norm.ScalarOpt_dtype": lambda g: (g(4, 6), 2),
    "range.default": lambda g: (0, 5),
    "range.step": lambda g: (0, 6, 2),
    "repeat_interleave.Tensor": lambda g: (g(5), {"output_size": 5}),
    "replication_pad1d.default": lambda g: (g(2, 3, 5), [1, 2]),
    "replication_pad1d_backward.default": lambda g: (g(2, 3, 8), g(2, 3, 5), [1, 2]),
    "scaled_dot_product_attention.default": lambda g: (g(2, 2, 5, 4), g(2, 2, 5, 4), g(2, 2, 5, 4)),
    "scatter.value_reduce": lambda g: (g(4, 6), 1, g.long(4, 3), 2, {"reduce": "add"}),
    "slice_copy.Tensor": lambda g: (g(4, 6), 0, 1, 3),
    "sort.stable": lambda g: (g(4, 6), {"stable": True}),
    "unsafe_split_with_sizes.default": lambda g: (g(4, 6), [1, 3]),
    "view_as_real_copy.default": lambda g: (g(4, 2),),
    "view_as_complex_copy.default": lambda g: (g(4, 2),),
    "view_copy.dtype": lambda g: (g(4, 6), torch.int32 if g.dtype == torch.float32 else torch.float32),
    "fused_eager.multinomial_of.default": lambda g: (g(3, 6), g(3, 6), 2, False),
    "fused_eager.random_bits.default": lambda g: ([4, 6], 0, 0),
    "fused_eager.random_exponential.default": lambda g: ([4, 6], 0, 0),
    "fused_eager._scaled_dot_product_attention_dropped.default": lambda g: (*_dropped(g), None, 0.1, True, None),
    "fused_eager._scaled_dot_product_attention_dropped_backward.default": lambda g: (
        g(2, 2, 5, 4), *_dropped(g), g(2, 2, 5, 4), g(2, 2, 5, 5), 0.1, None,
    ),
    "fused_eager.random_mask.default": lambda g: ([4, 6], 0, 0, 0.1),
    "fused_eager.random_normal.default": lambda g: ([4, 6], 0, 0, 0.0, 1.0),
    "fused_eager.random_uniform.default": lambda g: ([4, 6], 0, 0),
    "fused_eager.recurrent.default": _recurrent,
    "fused_eager.recurrent_backward.default": _recurrent_backward,
}  # fmt: skip
for _op, _made in {"adam": _adam, "adamw": _adam, "adagrad": _adagrad, "sgd": _sgd}.items():
    BY_HAND[f"_fused_{_op}.default"] = lambda g, made=_made: made(g, 0.1)
    BY_HAND[f"_fused_{_op}.tensor_lr"] = lambda g, made=_made: made(g, g.one())
for _kind, _dims in {"bicubic2d_aa": 2, "lanczos2d_aa": 2, "nearest_exact1d": 1, "nearest_exact2d": 2}.items():
    _more = (False,) if "aa" in _kind else ()
    BY_HAND[f"_upsample_{_kind}.default"] = lambda g, n=_dims, more=_more: (g(2, 3, *[5] * n), [8] * n, *more)
    BY_HAND[f"_upsample_{_kind}_backward.default"] = lambda g, n=_dims, more=_more: (
        g(2, 3, *[8] * n), [8] * n, [2, 3, *[5] * n], *more
    )  # fmt: skip
for _dims in (1, 2):
    _plain, _exact = f"upsample_nearest{_dims}d", f"_upsample_nearest_exact{_dims}d"
    for _end in (".default", "_backward.default"):
        BY_HAND[_plain + _end] = BY_HAND[_exact + _end]

# Those of which there is no kernel of ATen's to refuse other dtypes.
OF_FLOATS = (
    "_flash_attention_forward.default", "_flash_attention_backward.default", "_scaled_mm.default",
    "_scaled_mm_v2.default", "_fused_rms_norm_backward.default", "_masked_scale.default", "addmm.dtype", "mm.dtype",
    "bmm.dtype", "baddbmm.dtype", "glu_backward_jvp.default", "fused_eager.multinomial_of.default",
    "fused_eager.random_exponential.default", "fused_eager.random_normal.default", "fused_eager.random_uniform.default",
    "fused_eager._scaled_dot_product_attention_dropped.default", "fused_eager.random_mask.default",
    "fused_eager._scaled_dot_product_attention_dropped_backward.default",
)  # fmt: skip

# What an argument that has to be given gets, by its type in the schema.
_BY_TYPE: dict[str, Callable[[Given], Any]] = {
    "Tensor": lambda g: g(6, 6),
    "List[Tensor]": lambda g: g.lists(1)[0],
    "number": lambda g: 2,
    "int": lambda g: 3,
    "float": lambda g: 0.5,
    "bool": lambda g: True,
    "List[int]": lambda g: [6, 6],
}


def call_of(row: str, dtype: torch.dtype, device: str) -> Any:
    """Call a row with arguments of one dtype. Raises what eager raises, and KeyError for an unknown type."""
    space, _, op = row.partition(".")
    name, _, overload = op.rpartition(".")
    call = getattr(getattr(getattr(torch.ops, space), name), overload)
    told, given, made = call._schema.arguments, Given(dtype, device), BY_HAND.get(row.removeprefix("aten."))
    if row.removeprefix("aten.") in OF_FLOATS and not dtype.is_floating_point:
        raise TypeError(f"{row} takes no {dtype}")
    arguments: list[Any]
    if made is not None:
        arguments = list(made(given))
    else:
        arguments = [_BY_TYPE[str(a.type)](given) for a in told if not (a.has_default_value() or a.kwarg_only)]
    named = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    options = {"dtype": dtype, "device": device}
    return call(*arguments, **{a.name: options[a.name] for a in told if a.kwarg_only and a.name in options}, **named)
