"""Everyday programs around a model: they train it, run it or draw from it. Their rows are in `benchmarks.programs`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.workloads import Step, Wrap


def _training(
    forward: Callable[[Tensor], Tensor],
    optimizer: Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> Step:
    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(forward(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


class TokenLSTM(nn.Module):
    """Tokens [batch, seq] -> logits [batch * seq, vocab]."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, 2 * dim, num_layers=2, batch_first=True)
        self.head = nn.Linear(2 * dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0]).flatten(0, 1)


def lstm_train(wrap: Wrap, vocab: int, dim: int, seq: int, batch: int) -> Step:
    model = TokenLSTM(vocab, dim)
    tokens, following = torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch * seq,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _training(wrap(model), optimizer, F.cross_entropy, tokens, following)


def gru_cell_loop(wrap: Wrap, dim: int, seq: int, batch: int) -> Step:
    cell = nn.GRUCell(dim, 2 * dim)
    forward = wrap(cell)
    inputs = torch.randn(seq, batch, dim)

    @torch.no_grad()
    def step() -> float:
        hidden = torch.zeros(batch, 2 * dim)
        for place in range(seq):
            hidden = forward(inputs[place], hidden)
        return hidden.sum().item()

    return step


def _separable(channels: int, out: int, stride: int) -> nn.Sequential:
    """The block of MobileNet: a convolution within each channel, then one across them."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
        nn.Conv2d(channels, out, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU6(),
    )


def mobilenet_train(wrap: Wrap, width: int, pixels: int, batch: int) -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        _separable(width, 2 * width, 1),
        _separable(2 * width, 4 * width, 2),
        _separable(4 * width, 8 * width, 2),
        _separable(8 * width, 8 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _training(wrap(model), optimizer, F.cross_entropy, images, labels)


def small_cnn_mnist(wrap: Wrap, width: int, pixels: int, batch: int) -> Step:
    """The MNIST example of PyTorch's own collection."""
    model = nn.Sequential(
        nn.Conv2d(1, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(2 * width * ((pixels - 4) // 2) ** 2, 4 * width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4 * width, 10),
        nn.LogSoftmax(1),
    )
    images, labels = torch.randn(batch, 1, pixels, pixels), torch.randint(10, (batch,))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    return _training(wrap(model), optimizer, F.nll_loss, images, labels)


def tiny_mlp_train(wrap: Wrap, features: int, hidden: int, batch: int) -> Step:
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    inputs, targets = torch.randn(batch, features), torch.randn(batch, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return _training(wrap(model), optimizer, F.mse_loss, inputs, targets)


def autoencoder_train(wrap: Wrap, pixels: int, hidden: int, code: int, batch: int) -> Step:
    encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, code))
    decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, pixels), nn.Sigmoid())
    model = nn.Sequential(encoder, decoder)
    images = torch.rand(batch, pixels)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return _training(wrap(model), optimizer, F.binary_cross_entropy, images, images)


def gan_train(wrap: Wrap, noise: int, hidden: int, pixels: int, batch: int) -> Step:
    generator = nn.Sequential(nn.Linear(noise, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, pixels), nn.Tanh())
    critic = nn.Sequential(nn.Linear(pixels, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))
    generate, judge = wrap(generator), wrap(critic)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4)
    images, real, fake = torch.randn(batch, pixels), torch.ones(batch, 1), torch.zeros(batch, 1)
    loss_of = F.binary_cross_entropy_with_logits

    def step() -> float:
        critic_optimizer.zero_grad()
        drawn = generate(torch.randn(batch, noise))
        critic_loss = loss_of(judge(images), real) + loss_of(judge(drawn.detach()), fake)
        critic_loss.backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = loss_of(judge(drawn), real)
        generator_loss.backward()
        generator_optimizer.step()
        return critic_loss.item() + generator_loss.item()

    return step


def reinforce_small(wrap: Wrap, hidden: int, length: int) -> Step:
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    policy = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    states = torch.randn(length, 4)

    def step() -> float:
        chosen = []
        for place in range(length):
            actions = torch.distributions.Categorical(logits=policy(states[place]))
            action = actions.sample()
            action.item()  # which an environment would take, to answer with the next state
            chosen.append(actions.log_prob(action))
        loss = -torch.stack(chosen).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def gather_scatter_gnn(wrap: Wrap, nodes: int, edges: int, dim: int) -> Step:
    """Two layers of a graph network: every node adds up what its neighbours send."""
    nodes_in, (senders, receivers) = torch.randn(nodes, dim), torch.randint(nodes, (2, edges))
    labels = torch.randint(8, (nodes,))
    first, second = nn.Linear(dim, dim), nn.Linear(dim, 8)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)

    @wrap
    def forward(x: Tensor) -> Tensor:
        hidden = F.relu(torch.zeros_like(x).index_add(0, receivers, first(x)[senders]))
        return second(torch.zeros_like(hidden).index_add(0, receivers, hidden[senders]))

    return _training(forward, optimizer, F.cross_entropy, nodes_in, labels)


def embedding_bag_rec(wrap: Wrap, items: int, dim: int, bag: int, batch: int) -> Step:
    model = nn.Sequential(
        nn.EmbeddingBag(items, dim, mode="mean"), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, 1)
    )
    bags, clicks = torch.randint(items, (batch, bag)), torch.rand(batch, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _training(wrap(model), optimizer, F.binary_cross_entropy_with_logits, bags, clicks)


def _encoder(layers: int, dim: int) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True), layers)


def attention_infer(wrap: Wrap, layers: int, dim: int, seq: int, batch: int) -> Step:
    model = wrap(_encoder(layers, dim).eval())
    inputs = torch.randn(batch, seq, dim)

    @torch.no_grad()
    def step() -> float:
        return model(inputs).sum().item()

    return step


def transformer_train(wrap: Wrap, layers: int, dim: int, seq: int, batch: int) -> Step:
    model = _encoder(layers, dim)
    inputs = torch.randn(batch, seq, dim)
    optimizer = torch.optim.AdamW(model.parameters())
    return _training(wrap(model), optimizer, F.mse_loss, inputs, inputs)


def _classifier(samples: int, pixels: int, hidden: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A model, images and labels."""
    model = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return model, torch.randn(samples, pixels), torch.randint(10, (samples,))


def mnist_varying_batch(wrap: Wrap, samples: int, batch: int, pixels: int, hidden: int) -> Step:
    """An epoch whose last batch is smaller than the others."""
    model, images, labels = _classifier(samples, pixels, hidden)
    forward = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        total = 0.0
        for start in range(0, samples, batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(images[start : start + batch]), labels[start : start + batch])
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    return step


def eval_accuracy(wrap: Wrap, samples: int, batch: int, pixels: int, hidden: int) -> Step:
    model, images, labels = _classifier(samples, pixels, hidden)
    forward = wrap(model)

    @torch.no_grad()
    def step() -> float:
        right = 0
        for start in range(0, samples, batch):
            found = forward(images[start : start + batch]).argmax(1)
            right += int((found == labels[start : start + batch]).sum().item())
        return float(right)

    return step


class UNet(nn.Module):
    """Down twice and up twice, with a shortcut at each size. [n, 3, h, w] -> [n, 3, h, w]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 2 * width)
        self.up = self._block(4 * width, width)
        self.head = nn.Conv2d(2 * width, 3, 1)

    @staticmethod
    def _block(channels: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        large = self.down1(x)
        small = self.down2(F.avg_pool2d(large, 2))
        y = self.middle(F.avg_pool2d(small, 2))
        y = self.up(torch.cat([F.interpolate(y, scale_factor=2.0), small], 1))
        return self.head(torch.cat([F.interpolate(y, scale_factor=2.0), large], 1))


def unet_train(wrap: Wrap, width: int, pixels: int, batch: int) -> Step:
    model = UNet(width)
    images = torch.randn(batch, 3, pixels, pixels)
    optimizer = torch.optim.AdamW(model.parameters())
    return _training(wrap(model), optimizer, F.mse_loss, images, images)


def bf16_autocast_train(wrap: Wrap, dim: int, batch: int) -> Step:
    model = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.LayerNorm(2 * dim), nn.Linear(2 * dim, dim))
    forward = wrap(model)
    inputs = torch.randn(batch, dim)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(forward(inputs).float(), inputs)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def sampling_loop(wrap: Wrap, vocab: int, dim: int, best: int, tokens: int) -> Step:
    """Draws token by token among the `best` ones. Which, hangs on the last bit of a probability: how many is told."""
    model = wrap(nn.Sequential(nn.Embedding(vocab, dim), nn.Linear(dim, vocab)))

    @torch.no_grad()
    def step() -> float:
        token, read = torch.tensor([1]), []
        for _ in range(tokens):
            logits = model(token) / 0.8
            least = logits.topk(best)[0][:, -1:]
            logits[logits < least] = -float("inf")
            token = torch.multinomial(logits.softmax(-1), 1)[:, 0]
            read.append(token.item())
        return float(len(read))

    return step


def grad_penalty_double_backward(wrap: Wrap, dim: int, batch: int) -> Step:
    """A loss with the norm of a gradient in it, as in a WGAN."""
    model = nn.Sequential(nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, 1))
    forward = wrap(model)
    optimizer = torch.optim.Adam(model.parameters())
    points = torch.randn(batch, dim)

    def step() -> float:
        inputs = points.clone().requires_grad_()
        scores = forward(inputs)
        (slopes,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        loss = scores.mean() + 10 * ((slopes.norm(dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def gradient_accumulation(wrap: Wrap, dim: int, batch: int, parts: int) -> Step:
    model = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
    forward = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(batch, dim)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for _ in range(parts):
            loss = F.mse_loss(forward(inputs), inputs) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def conv1d_audio(wrap: Wrap, width: int, samples: int, batch: int) -> Step:
    model = nn.Sequential(
        nn.Conv1d(1, width, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.Conv1d(width, 2 * width, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.ConvTranspose1d(2 * width, width, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose1d(width, 1, 4, stride=2, padding=1),
    )
    sounds = torch.randn(batch, 1, samples)
    optimizer = torch.optim.RMSprop(model.parameters())
    return _training(wrap(model), optimizer, F.l1_loss, sounds, sounds)


def scheduler_clip_train(wrap: Wrap, layers: int, dim: int, batch: int) -> Step:
    model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(layers)))
    forward = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    inputs = torch.randn(batch, dim)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(forward(inputs), inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss.item()

    return step
