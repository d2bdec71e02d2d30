"""Everyday programs: what a user may run that is in no table of workloads. `python -m benchmarks --programs` runs them.

The workloads are few and chosen for what fusing does to them; these are many and small, chosen for being unlike each
other, so that what is slow without anybody having thought of it shows. Each ends by reading a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import loop_programs as loops
from benchmarks import model_programs as models
from benchmarks import numeric_programs as numerics
from benchmarks.workloads import Step, Workload


def _row(
    setup: Callable[..., Step], about: str, full: Mapping[str, Any], tiny: Mapping[str, Any], draws: bool = False
) -> Workload:
    """All of them read their result, so there is nothing to wait for (`trains`); rounding differs more from round to
    round than in a workload, hence the tolerance."""
    return Workload(setup.__name__, about, setup, full, tiny, trains=True, draws=draws, rtol=1e-2, atol=1e-2)


_DATA, _SMALL_DATA = {"samples": 1000, "pixels": 784, "hidden": 256}, {"samples": 7, "pixels": 6, "hidden": 4}
_POINTS = {"points": 4096, "dim": 16, "clusters": 32, "rounds": 4}
_FEW_POINTS = {"points": 20, "dim": 3, "clusters": 4, "rounds": 2}

PROGRAMS: tuple[Workload, ...] = (
    _row(
        models.lstm_train,
        "two-layer LSTM of 256 on 16 x 32 tokens, SGD",
        {"vocab": 500, "dim": 128, "seq": 32, "batch": 16},
        {"vocab": 7, "dim": 4, "seq": 3, "batch": 2},
    ),
    _row(
        models.gru_cell_loop,
        "a GRU cell called 40 times in a Python loop",
        {"dim": 64, "seq": 40, "batch": 16},
        {"dim": 4, "seq": 3, "batch": 2},
    ),
    _row(
        models.mobilenet_train,
        "four separable convolutions on 64 px, batch 16, SGD",
        {"width": 16, "pixels": 64, "batch": 16},
        {"width": 4, "pixels": 16, "batch": 2},
    ),
    _row(
        models.small_cnn_mnist,
        "two convolutions with dropout on 28 px, batch 64, Adadelta",
        {"width": 32, "pixels": 28, "batch": 64},
        {"width": 4, "pixels": 8, "batch": 2},
        draws=True,
    ),
    _row(
        models.tiny_mlp_train,
        "10 -> 32 -> 1, batch 64, Adam: next to no work",
        {"features": 10, "hidden": 32, "batch": 64},
        {"features": 3, "hidden": 4, "batch": 2},
    ),
    _row(
        models.autoencoder_train,
        "784 -> 400 -> 20 and back, batch 128, Adam",
        {"pixels": 784, "hidden": 400, "code": 20, "batch": 128},
        {"pixels": 6, "hidden": 5, "code": 2, "batch": 2},
    ),
    _row(
        models.gan_train,
        "a generator and a critic of two layers each in turn, batch 64, two Adams",
        {"noise": 64, "hidden": 256, "pixels": 784, "batch": 64},
        {"noise": 3, "hidden": 4, "pixels": 6, "batch": 2},
        draws=True,
    ),
    _row(
        models.reinforce_small,
        "a policy gradient over 20 sampled actions, each read, Adam",
        {"hidden": 64, "length": 20},
        {"hidden": 4, "length": 3},
        draws=True,
    ),
    _row(
        models.gather_scatter_gnn,
        "two graph layers by index_add, 2000 nodes, 20000 edges, Adam",
        {"nodes": 2000, "edges": 20000, "dim": 64},
        {"nodes": 5, "edges": 12, "dim": 4},
    ),
    _row(
        models.embedding_bag_rec,
        "bags of 20 out of 10000 items, batch 256, SGD",
        {"items": 10000, "dim": 32, "bag": 20, "batch": 256},
        {"items": 9, "dim": 4, "bag": 3, "batch": 2},
    ),
    _row(
        models.attention_infer,
        "nn.TransformerEncoder of 3 layers, d 256, in eval mode, 8 x 64",
        {"layers": 3, "dim": 256, "seq": 64, "batch": 8},
        {"layers": 1, "dim": 8, "seq": 3, "batch": 2},
    ),
    _row(
        models.transformer_train,
        "nn.TransformerEncoder of 2 layers, d 128, dropout, 8 x 64, AdamW",
        {"layers": 2, "dim": 128, "seq": 64, "batch": 8},
        {"layers": 1, "dim": 8, "seq": 3, "batch": 2},
        draws=True,
    ),
    _row(
        models.mnist_varying_batch,
        "an epoch of 1000 images in batches of 300, 300, 300 and 100, SGD",
        {**_DATA, "batch": 300},
        {**_SMALL_DATA, "batch": 3},
    ),
    _row(
        models.eval_accuracy,
        "right answers on 1000 images, counted batch by batch",
        {**_DATA, "batch": 100},
        {**_SMALL_DATA, "batch": 3},
    ),
    _row(
        models.unet_train,
        "a UNet of two sizes with group norm, 64 px, batch 4, AdamW",
        {"width": 32, "pixels": 64, "batch": 4},
        {"width": 8, "pixels": 8, "batch": 1},
    ),
    _row(
        models.bf16_autocast_train,
        "two layers of 512 and 1024 under autocast to bfloat16, batch 128, AdamW",
        {"dim": 512, "batch": 128},
        {"dim": 8, "batch": 2},
    ),
    _row(
        models.sampling_loop,
        "20 tokens drawn among the 50 best of 1000, each read",
        {"vocab": 1000, "dim": 64, "best": 50, "tokens": 20},
        {"vocab": 9, "dim": 4, "best": 3, "tokens": 3},
        draws=True,
    ),
    _row(
        models.grad_penalty_double_backward,
        "a gradient's norm in the loss, two layers, batch 64, Adam",
        {"dim": 64, "batch": 64},
        {"dim": 4, "batch": 2},
    ),
    _row(
        models.gradient_accumulation,
        "four backward passes to one SGD step with momentum, each loss read",
        {"dim": 256, "batch": 64, "parts": 4},
        {"dim": 4, "batch": 2, "parts": 2},
    ),
    _row(
        models.conv1d_audio,
        "1-d convolutions down and up, 8 x 4096 samples, RMSprop",
        {"width": 16, "samples": 4096, "batch": 8},
        {"width": 2, "samples": 32, "batch": 1},
    ),
    _row(
        models.scheduler_clip_train,
        "six linear layers of 128, clipping, SGD with a cosine schedule",
        {"layers": 6, "dim": 128, "batch": 32},
        {"layers": 2, "dim": 4, "batch": 2},
    ),
    _row(
        numerics.heat_equation,
        "20 steps on 512 x 512, in place on slices",
        {"side": 512, "rounds": 20},
        {"side": 6, "rounds": 2},
    ),
    _row(
        numerics.roll_stencil,
        "20 steps on 256 x 256 by rolling",
        {"side": 256, "rounds": 20},
        {"side": 5, "rounds": 2},
    ),
    _row(
        numerics.nbody,
        "three steps of 512 bodies, all pairs",
        {"bodies": 512, "rounds": 3},
        {"bodies": 5, "rounds": 2},
    ),
    _row(numerics.kmeans, "4096 points, 32 clusters: cdist, index_add_, bincount", _POINTS, _FEW_POINTS),
    _row(numerics.kmeans_onehot, "4096 points, 32 clusters: broadcasting, one_hot", _POINTS, _FEW_POINTS),
    _row(numerics.newton_sqrt_item_loop, "100 rounds on a scalar, each change read", {"rounds": 100}, {"rounds": 3}),
    _row(
        numerics.sort_topk,
        "sort, topk and cumsum of 256 x 4096",
        {"rows": 256, "columns": 4096, "best": 10},
        {"rows": 3, "columns": 7, "best": 2},
    ),
    _row(
        numerics.fft_filter,
        "a filter in the frequencies of 64 x 8192",
        {"rows": 64, "length": 8192},
        {"rows": 2, "length": 8},
    ),
    _row(numerics.linalg_mix, "cholesky, solve, qr and logdet of 64 x 64", {"size": 64}, {"size": 4}),
    _row(
        numerics.beam_search_ops,
        "four beams over 20 tokens, sequences that grow",
        {"beams": 4, "vocab": 1000, "tokens": 20},
        {"beams": 2, "vocab": 5, "tokens": 3},
    ),
    _row(
        numerics.image_aug,
        "flip, resize, normalise, pad and crop of 32 images of 128 px",
        {"pixels": 128, "smaller": 96, "batch": 32},
        {"pixels": 8, "smaller": 6, "batch": 2},
    ),
    _row(
        numerics.float64_physics,
        "ten steps of 100000 pendulums in float64",
        {"count": 100_000, "rounds": 10},
        {"count": 5, "rounds": 2},
    ),
    _row(
        numerics.mandelbrot,
        "20 rounds of complex numbers on 200 x 200",
        {"side": 200, "rounds": 20},
        {"side": 6, "rounds": 3},
    ),
    _row(
        numerics.lbfgs,
        "up to ten rounds of LBFGS on 100 numbers",
        {"size": 100, "rounds": 10},
        {"size": 4, "rounds": 2},
    ),
    _row(numerics.vmap_jac, "vmap of grad over 64 x 16", {"rows": 64, "dim": 16}, {"rows": 3, "dim": 4}),
    _row(
        numerics.ema_update,
        "moving averages of 20 tensors of 256 x 256, in place, one number read",
        {"tensors": 20, "side": 256},
        {"tensors": 2, "side": 3},
    ),
    _row(numerics.big_matmul, "one product of 1024 x 1024", {"side": 1024}, {"side": 5}),
    _row(numerics.bool_masks, "indexing, where and masked_fill by masks of 1000 x 1000", {"side": 1000}, {"side": 5}),
    _row(
        numerics.int_hash,
        "five rounds of shifts, xor and products of 1M int64",
        {"count": 1 << 20, "rounds": 5},
        {"count": 9, "rounds": 2},
    ),
    _row(
        numerics.dataset_normalise_print,
        "eigenvalues of the covariance of 1000 x 50, made into text",
        {"rows": 1000, "columns": 50},
        {"rows": 9, "columns": 3},
    ),
    _row(
        numerics.list_append_stack,
        "100 sums appended to a list and stacked",
        {"size": 64, "rounds": 100},
        {"size": 3, "rounds": 4},
    ),
    _row(
        loops.prefetching_train,
        "a thread prepares the next batch, two layers of 512, batch 64, AdamW",
        {"dim": 512, "batch": 64},
        {"dim": 4, "batch": 3},
    ),
    _row(
        loops.static_cache_decode,
        "32 tokens into a key-value cache of fixed size, 4 layers, d 256",
        {"layers": 4, "dim": 256, "length": 32},
        {"layers": 1, "dim": 8, "length": 3},
    ),
    _row(
        loops.two_metrics_eval,
        "loss and hits of 10 batches of 256 read one by one, three layers of 512",
        {"features": 784, "hidden": 512, "batch": 256, "batches": 10},
        {"features": 5, "hidden": 4, "batch": 3, "batches": 2},
    ),
    _row(
        loops.rnn_200_steps,
        "a recurrent network written as a loop, 200 steps of 64 x 64, SGD",
        {"dim": 64, "length": 200, "batch": 64},
        {"dim": 3, "length": 4, "batch": 2},
    ),
    _row(
        loops.dqn_small_batches,
        "20 moves of Q-learning, two layers of 128, batch 64 from a replay memory",
        {"states": 4, "hidden": 128, "memory": 500, "batch": 64, "moves": 20},
        {"states": 3, "hidden": 4, "memory": 9, "batch": 3, "moves": 2},
    ),
    _row(
        loops.notebook_mix,
        "a table of random size normalised, printed, sorted, masked",
        {"most": 100},
        {"most": 6},
        draws=True,
    ),
)
