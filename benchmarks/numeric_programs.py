"""Everyday programs without a model: simulations, statistics, small loops. Their rows are in `benchmarks.programs`.

What a user would hand to `torch.compile` is wrapped; the result is read outside of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workloads import Step, Wrap


def heat_equation(wrap: Wrap, side: int, rounds: int) -> Step:
    start = torch.rand(side, side)

    @wrap
    def simulate(heat: Tensor) -> Tensor:
        heat = heat.clone()
        for _ in range(rounds):
            neighbours = heat[2:, 1:-1] + heat[:-2, 1:-1] + heat[1:-1, 2:] + heat[1:-1, :-2]
            heat[1:-1, 1:-1] += 0.1 * (neighbours - 4 * heat[1:-1, 1:-1])
        return heat.sum()

    return lambda: simulate(start).item()


def roll_stencil(wrap: Wrap, side: int, rounds: int) -> Step:
    start = torch.rand(side, side)

    @wrap
    def simulate(heat: Tensor) -> Tensor:
        for _ in range(rounds):
            neighbours = heat.roll(1, 0) + heat.roll(-1, 0) + heat.roll(1, 1) + heat.roll(-1, 1)
            heat = heat + 0.1 * (neighbours - 4 * heat)
        return heat.sum()

    return lambda: simulate(start).item()


def nbody(wrap: Wrap, bodies: int, rounds: int) -> Step:
    start, masses = torch.randn(bodies, 3), torch.rand(bodies)

    @wrap
    def simulate(places: Tensor) -> Tensor:
        speeds = torch.zeros_like(places)
        for _ in range(rounds):
            apart = places[None] - places[:, None]
            squares = (apart * apart).sum(-1) + 1e-2
            speeds = speeds + 0.01 * (apart * (masses / squares**1.5)[..., None]).sum(1)
            places = places + 0.01 * speeds
        return places.sum()

    return lambda: simulate(start).item()


def kmeans(wrap: Wrap, points: int, dim: int, clusters: int, rounds: int) -> Step:
    x = torch.randn(points, dim)
    start = x[:clusters].clone()

    @wrap
    def centres(centre: Tensor) -> Tensor:
        for _ in range(rounds):
            nearest = torch.cdist(x, centre).argmin(1)
            sums = torch.zeros(clusters, dim).index_add_(0, nearest, x)
            centre = sums / torch.bincount(nearest, minlength=clusters).clamp(min=1)[:, None]
        return centre.sum()

    return lambda: centres(start).item()


def kmeans_onehot(wrap: Wrap, points: int, dim: int, clusters: int, rounds: int) -> Step:
    x = torch.randn(points, dim)
    start = x[:clusters].clone()

    @wrap
    def centres(centre: Tensor) -> Tensor:
        for _ in range(rounds):
            nearest = ((x[:, None] - centre[None]) ** 2).sum(-1).argmin(1)
            belongs = F.one_hot(nearest, clusters).float()
            centre = (belongs.T @ x) / belongs.sum(0).clamp(min=1)[:, None]
        return centre.sum()

    return lambda: centres(start).item()


def newton_sqrt_item_loop(wrap: Wrap, rounds: int) -> Step:
    """Reads in every round whether it may stop, which it never may: no change is smaller than the tolerance."""
    tolerance = 0.0

    @wrap
    def better(root: Tensor, of: Tensor) -> Tensor:
        return 0.5 * (root + of / root)

    def step() -> float:
        of, root = torch.tensor(2.0), torch.tensor(1.0)
        for _ in range(rounds):
            following = better(root, of)
            if abs((following - root).item()) < tolerance:
                break
            root = following
        return root.item()

    return step


def sort_topk(wrap: Wrap, rows: int, columns: int, best: int) -> Step:
    x = torch.randn(rows, columns)

    @wrap
    def ranks(x: Tensor) -> Tensor:
        return x.sort(1)[0][:, ::2].sum() + x.topk(best, 1)[0].sum() + x.cumsum(1)[:, -1].sum()

    return lambda: ranks(x).item()


def fft_filter(wrap: Wrap, rows: int, length: int) -> Step:
    signals, weights = torch.randn(rows, length), torch.rand(length // 2 + 1)

    @wrap
    def loudness(signals: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(signals) * weights).abs().sum()

    return lambda: loudness(signals).item()


def linalg_mix(wrap: Wrap, size: int) -> Step:
    matrix = torch.randn(size, size)
    positive = matrix @ matrix.T + size * torch.eye(size)

    @wrap
    def decompose(a: Tensor, s: Tensor) -> Tensor:
        factor, solution = torch.linalg.cholesky(s), torch.linalg.solve(s, a)
        upper = torch.linalg.qr(a)[1]
        return factor.sum() + solution.sum() + upper.abs().sum() + torch.logdet(s)

    return lambda: decompose(matrix, positive).item()


def beam_search_ops(wrap: Wrap, beams: int, vocab: int, tokens: int) -> Step:
    logits = torch.randn(tokens, beams, vocab)

    @wrap
    def advance(scores: Tensor, read: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = (scores[:, None] + logits.log_softmax(-1)).flatten().topk(beams)
        return scores, torch.cat([read[chosen // vocab], (chosen % vocab)[:, None]], 1)

    def step() -> float:
        scores, read = torch.zeros(beams), torch.zeros(beams, 0, dtype=torch.long)
        for place in range(tokens):
            scores, read = advance(scores, read, logits[place])
        return scores.sum().item()

    return step


def image_aug(wrap: Wrap, pixels: int, smaller: int, batch: int) -> Step:
    images = torch.rand(batch, 3, pixels, pixels)

    @wrap
    def augment(images: Tensor) -> Tensor:
        y = images.flip(-1) * 0.8 + 0.1
        y = F.interpolate(y, size=(smaller, smaller), mode="bilinear", align_corners=False)
        mean, deviation = y.mean((0, 2, 3), keepdim=True), y.std((0, 2, 3), keepdim=True)
        y = F.pad(((y - mean) / deviation).clamp(-2, 2), (4, 4, 4, 4))
        return y[:, :, 4 : smaller + 4, 4 : smaller + 4].sum()

    return lambda: augment(images).item()


def float64_physics(wrap: Wrap, count: int, rounds: int) -> Step:
    """Pendulums by the leapfrog method; what is read is their energy."""
    angles, speeds = torch.randn(count, dtype=torch.float64), torch.randn(count, dtype=torch.float64)

    @wrap
    def energy(angle: Tensor, speed: Tensor) -> Tensor:
        for _ in range(rounds):
            speed = speed - 0.005 * torch.sin(angle)
            angle = angle + 0.01 * speed
            speed = speed - 0.005 * torch.sin(angle)
        return (0.5 * speed * speed - torch.cos(angle)).sum()

    return lambda: energy(angles, speeds).item()


def mandelbrot(wrap: Wrap, side: int, rounds: int) -> Step:
    plane = torch.complex(*torch.meshgrid(torch.linspace(-2, 1, side), torch.linspace(-1, 1, side), indexing="xy"))

    @wrap
    def stay(c: Tensor) -> Tensor:
        z, inside = torch.zeros_like(c), torch.zeros(c.shape)
        for _ in range(rounds):
            z = z * z + c
            inside = inside + (z.abs() < 2)
        return inside.sum()

    return lambda: stay(plane).item()


def lbfgs(wrap: Wrap, size: int, rounds: int) -> Step:
    wanted = torch.randn(size)

    @wrap
    def loss_of(x: Tensor) -> Tensor:
        return ((x - wanted) ** 2).sum() + (x**4).sum() * 0.01

    def step() -> float:
        x = torch.zeros(size, requires_grad=True)
        optimizer = torch.optim.LBFGS([x], max_iter=rounds)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(x)
            loss.backward()
            return loss

        optimizer.step(closure)
        return x.sum().item()

    return step


def vmap_jac(wrap: Wrap, rows: int, dim: int) -> Step:
    weights, points = torch.randn(dim, dim), torch.randn(rows, dim)

    def value(x: Tensor) -> Tensor:
        return torch.tanh(x @ weights).sum(-1)

    @wrap
    def slopes(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(value))(x).sum()

    return lambda: slopes(points).item()


def ema_update(wrap: Wrap, tensors: int, side: int) -> Step:
    values = [torch.randn(side, side) for _ in range(tensors)]
    averages = [value.clone() for value in values]

    @wrap
    def update() -> None:
        for average, value in zip(averages, values, strict=True):
            average.mul_(0.999).add_(value, alpha=0.001)

    def step() -> float:
        update()
        return averages[0][0, 0].item()

    return step


def big_matmul(wrap: Wrap, side: int) -> Step:
    matrix = torch.randn(side, side)

    @wrap
    def square(a: Tensor) -> Tensor:
        return (a @ a).sum()

    return lambda: square(matrix).item()


def bool_masks(wrap: Wrap, side: int) -> Step:
    x = torch.randn(side, side)

    @wrap
    def masked(x: Tensor) -> Tensor:
        mask = (x > 0) & (x < 1)
        y = torch.where(mask, x, -x)
        return y[mask].sum() + y.masked_fill(~mask, 0).sum()

    return lambda: masked(x).item()


def int_hash(wrap: Wrap, count: int, rounds: int) -> Step:
    numbers = torch.arange(count)

    @wrap
    def odd(numbers: Tensor) -> Tensor:
        for _ in range(rounds):
            numbers = (numbers ^ (numbers >> 15)) * 0x85EBCA6B
            numbers = (numbers ^ (numbers >> 13)) % (1 << 31)
        return (numbers & 1).sum()

    return lambda: float(odd(numbers).item())


def dataset_normalise_print(wrap: Wrap, rows: int, columns: int) -> Step:
    x = torch.randn(rows, columns)

    @wrap
    def covariance_spectrum(x: Tensor) -> Tensor:
        y = (x - x.mean(0)) / x.std(0)
        return torch.linalg.eigvalsh((y.T @ y) / (rows - 1))

    def step() -> float:
        spectrum = covariance_spectrum(x)
        str(spectrum)  # what print() would show
        return spectrum.sum().item()

    return step


def list_append_stack(wrap: Wrap, size: int, rounds: int) -> Step:
    x = torch.randn(size)

    @wrap
    def collect(x: Tensor) -> Tensor:
        sums = []
        for factor in range(rounds):
            sums.append((x * factor).sum())
        return torch.stack(sums).mean()

    return lambda: collect(x).item()
