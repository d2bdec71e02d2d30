"""Why things end, sync, or run natively: every boundary is a coded value, never a bare False."""

from __future__ import annotations

from dataclasses import dataclass

from .site import UNKNOWN, Site


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of reason: what it means, and what a user can change.

    `example` is a program that meets it, `cured` the same without; both stand for `docs/reasons.md`.
    """

    name: str
    meaning: str
    hint: str
    example: str
    cured: str


CODES: dict[str, Code] = {
    row.name: row
    for row in (
        Code(
            "sync.value",
            "Python asked for a number",
            "read values less often, or after the loop",
            "for x in data:\n    total += loss(x).item()",
            "for x in data:\n    losses.append(loss(x).detach())\ntotal = torch.stack(losses).sum().item()",
        ),
        Code(
            "sync.shape",
            "a result's shape depends on values",
            "use a mask of fixed shape instead",
            "y = x[x > 0].sum()",
            "y = torch.where(x > 0, x, 0).sum()",
        ),
        Code(
            "sync.check",
            "an op that raises for some values looked at them",
            "use the variant that returns `info` instead",
            "factor = torch.linalg.cholesky(a)",
            "factor, info = torch.linalg.cholesky_ex(a)  # info.any() when it suits",
        ),
        Code(
            "sync.memory",
            "something asked for a tensor's memory",
            "keep data as tensors until the end",
            "for x in data:\n    rows.append(model(x).numpy())",
            "for x in data:\n    rows.append(model(x))\nrows = torch.stack(rows).numpy()",
        ),
        Code(
            "sync.island",
            "an op that must run at once needs the value",
            "see the island's own reason",
            "radius = torch.linalg.eigvals(a).abs().max()  # in every step",
            "if step % 100 == 0:\n    radius = torch.linalg.eigvals(a).abs().max()",
        ),
        Code(
            "sync.collective",
            "a collective reads values, and those of a device's tensors on the host",
            "fewer and larger collectives: a bucket instead of a tensor each",
            "for p in model.parameters():\n    dist.all_reduce(p.grad)",
            "model = DistributedDataParallel(model)  # all-reduces buckets while backward runs",
        ),
        Code(
            "sync.thread",
            "another thread needs a pending value",
            "hand over finished tensors",
            "threading.Thread(target=log, args=(loss,)).start()  # in every step",
            "queue.put(loss.detach())  # one thread, started before the loop",
        ),
        Code(
            "sync.call",
            "the program called sync()",
            "remove it if only speed is wanted",
            "for x in data:\n    step(x)\n    fused_eager.sync()",
            "for x in data:\n    step(x)",
        ),
        Code(
            "sync.fork",
            "the process is about to fork",
            "start workers before the context",
            "with fused_eager():\n    for x in DataLoader(data, num_workers=2):\n        step(x)",
            "loader = iter(DataLoader(data, num_workers=2, persistent_workers=True))\n"
            "with fused_eager():\n    for x in loader:\n        step(x)",
        ),
        Code(
            "cut.backward",
            "backward() returned",
            "none needed: a natural cut",
            "loss.backward()",
            "loss.backward()  # nothing to change: a loop is cut at the same place in every round",
        ),
        Code(
            "cut.optimizer",
            "an optimizer step ended",
            "none needed: a natural cut",
            "optimizer.step()",
            "optimizer.step()  # nothing to change: a loop is cut at the same place in every round",
        ),
        Code(
            "cut.copy",
            "values are copied to a device on a stream of the program's own, beside what the other streams compute",
            "none needed: a natural cut",
            "with torch.tpu.stream(side):\n    x = batch.to(\"tpu\", non_blocking=True)",
            "with torch.tpu.stream(side):\n    x = batch.to(\"tpu\", non_blocking=True)  # nothing to change",
        ),
        Code(
            "cut.profiler",
            "a profiler started, or stopped",
            "none needed: what a part of the program computes is measured with it",
            "with torch.profiler.profile() as profile:\n    step(x)",
            "with torch.profiler.profile() as profile:\n    step(x)  # nothing to change: what it computes is measured",
        ),
        Code(
            "cut.exit",
            "the context ended",
            "keep the context around the whole loop",
            "for x in data:\n    with fused_eager():\n        step(x)",
            "with fused_eager():\n    for x in data:\n        step(x)",
        ),
        Code(
            "cut.graph",
            "a graph of torch.compile's ended",
            "none needed: a natural cut",
            "torch.compile(model, backend=\"fused_eager\")(x)",
            "torch.compile(model, backend=\"fused_eager\")(x)  # nothing to change: a graph is run as a whole",
        ),
        Code(
            "cut.options",
            "a nested context changed the options",
            "use one context where speed matters",
            "for x in data:\n    with fused_eager(mode=\"strict\"):\n        check(x)\n    step(x)",
            "for x in data:\n    step(x)\nwith fused_eager(mode=\"strict\"):\n    check(x)",
        ),
        Code(
            "cut.full",
            "the stream reached max_pending ops, or past one half of that the op it began with, as in a loop",
            "raise max_pending",
            "with fused_eager(max_pending=100):\n    y = model(x)",
            "with fused_eager(max_pending=10_000):\n    y = model(x)",
        ),
        Code(
            "mode.single",
            "the mode runs one op at a time",
            "use mode fused",
            "with fused_eager(mode=\"strict\"):\n    step(x)",
            "with fused_eager(mode=\"fused\"):\n    step(x)",
        ),
        Code(
            "region.new",
            "these ops have come for the first time, or are being compiled, so ATen runs them",
            "none needed: what comes again is compiled; compile=\"wait\" waits for it",
            "for x in data:  # its first rounds\n    step(x)",
            "with fused_eager(compile=\"wait\"):\n    for x in data:\n        step(x)",
        ),
        Code(
            "region.unstable",
            "these ops keep coming with other shapes, so ATen runs them",
            "pad to a few fixed shapes; drop_last=True",
            "for sentence in data:  # each of another length\n    step(sentence)",
            "for sentence in data:\n    step(pad(sentence, to=64 * math.ceil(len(sentence) / 64)))",
        ),
        Code(
            "region.budget",
            "compiling these ops would take longer than it can save, for they are small and each has another form, so "
            "ATen runs them",
            "compute on whole tensors instead of element by element; native=\"never\" compiles them",
            "for i in range(1000):\n    x[i] += rate * i",
            "x += rate * torch.arange(1000)",
        ),
        Code(
            "region.native",
            "this part of the program was measured to be faster natively",
            "none needed; more work per op (larger batches) gives fusion something to gain",
            "for row in rows:\n    total += model(row).item()",
            "total = model(rows).sum().item()",
        ),
        Code(
            "region.repeat",
            "the same ops follow once more, as in the next layer, and are compiled once for all of them",
            "none needed: a natural cut",
            "for layer in layers:\n    x = layer(x)",
            "for layer in layers:\n    x = layer(x)  # nothing to change: equal layers are one compilation",
        ),
        Code(
            "region.alone",
            "these random numbers are drawn alone, so that they are the same to the last bit whatever is computed of "
            "them",
            "none needed: a natural cut",
            "y = x + torch.randn_like(x)",
            "y = x + torch.randn_like(x)  # nothing to change: what is drawn goes from region to region",
        ),
        Code(
            "region.memory",
            "the region would take more memory for its temporaries than the heap keeps for the next run",
            "none needed: a natural cut; smaller batches need less memory",
            "loss = model(x).sum()\nloss.backward()",
            "loss = model(x).sum()\nloss.backward()  # nothing to change: what waits goes from region to region",
        ),
        Code(
            "region.size",
            "the region reached max_region ops",
            "raise max_region",
            "with fused_eager(max_region=100):\n    y = model(x)",
            "with fused_eager(max_region=1024):\n    y = model(x)",
        ),
        Code(
            "region.island",
            "an op that ATen runs needs a result",
            "see the island's own reason",
            "y = torch.linalg.det(torch.tanh(a)).abs()",
            "y = torch.linalg.lu(torch.tanh(a)).U.diagonal().prod().abs()  # lu has a lowering",
        ),
    )
}


# ATen runs all of these regions, and not because of an op in them.
NOT_COMPILED = ("region.new", "region.unstable", "region.budget")
OUTSIDE = "is active outside the context and sees each op"  # after the name of a mode: why an op runs natively
NOT_FUSED = "is not fused: only what lies in the host's memory is"  # after the name of a device


@dataclass(frozen=True, slots=True)
class Reason:
    """A code with the place it applies to and what exactly it was."""

    code: str
    detail: str = ""
    site: Site = UNKNOWN

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise KeyError(f"no reason code {self.code!r}; known: {', '.join(CODES)}")

    def __str__(self) -> str:
        where = "" if self.site is UNKNOWN else f" at {self.site}"
        what = f" ({self.detail})" if self.detail else ""
        return f"{self.code}: {CODES[self.code].meaning}{what}{where}"
