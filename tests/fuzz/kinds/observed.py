"""Statements that a profiler watches."""

from __future__ import annotations

STATEMENTS = [
    "{a}, ops = profiled(lambda: {f} * {f} + {s}, record_shapes=True)\nseen.append(ops)",
    "{a}, ops = profiled(lambda: {f} @ {f}, record_shapes=True)\nseen.append(ops)",
    "{a}, ops = profiled(lambda: F.softmax({f}, -1).sum({d}), record_shapes=True, with_stack=True)\nseen.append(ops)",
    "{a}, ops = profiled(lambda: {w}.add_({f}), record_shapes=True)\nseen.append(ops)",
    "{a}, ops = profiled(lambda: {x}.clone()[0], record_shapes=True, profile_memory=True)\nseen.append(ops)",
    "{a}, ops = profiled(lambda: torch.cat([{x}, {x}]).t(), record_shapes=True)\nseen.append(ops)",
    "{a}, ops = profiled(lambda: torch.where({b}, {f}, {f}), with_flops=True)\nseen.append(ops)",
    "{a}, ops = profiled(lambda: {f}.reshape({r}).tanh(), record_shapes=True)\nseen.append(ops)",
    "_, ops = profiled(lambda: seen.append(({f} * 2).sum().item()), record_shapes=True)\nseen.append(ops)",
    "{a}, ops = profiled(lambda: {n}.cumsum({d}) + {n})\nseen.append(ops)",
    "p = {f}.detach().clone().requires_grad_()\n"
    "profiled(lambda: (p * {f}.detach()).tanh().sum().backward(), record_shapes=True)\n{a} = laid_out(p.grad)",
    "prof = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)\n"
    "prof.start()\n{w}.mul_({s})\n{a} = {f} + 1\nprof.stop()\n"
    "seen.append(sorted(e.key for e in prof.key_averages() if e.key in ('aten::add', 'aten::mul_')))",
    "with torch.autograd.profiler.profile(record_shapes=True) as prof:\n    {a} = {f} * {s}\n    {w}.add_({f})\n"
    "seen.append(sorted((e.key, e.count) for e in prof.key_averages() if e.key in ('aten::mul', 'aten::add_')))",
    "with torch.profiler.record_function('mine'):\n    {a} = {f}.sin() + {f}",
    "with torch.autograd.profiler.emit_itt(False):\n    {a} = {f} - {s}",
]
