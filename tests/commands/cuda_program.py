"""A program that says "cuda" wherever a program can, as people write them. It knows of no other device."""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.checkpoint import checkpoint

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.backends.cudnn.benchmark = True
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
on_cpu = copy.deepcopy(model).cpu()
assert next(model.parameters()).is_cuda
x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, pin_memory=True)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler()
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
for inputs, labels in loader:
    inputs, labels = inputs.to(device, non_blocking=True), labels.cuda(non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(inputs)
        loss = F.cross_entropy(out, labels)
    assert out.dtype == torch.bfloat16
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
with autocast(dtype=torch.bfloat16):
    assert model(inputs).dtype == torch.bfloat16
end.record()
torch.cuda.synchronize()
assert begin.elapsed_time(end) > 0

reference = torch.optim.AdamW(on_cpu.parameters(), lr=1e-2)
for inputs, labels in loader:
    reference.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(on_cpu(inputs), labels).backward()
    reference.step()
for ours, theirs in zip(model.parameters(), on_cpu.parameters(), strict=True):
    torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-2, atol=2e-3)

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    z = torch.zeros(3, device="cuda:0") + torch.ones(3, device=device)
torch.cuda.current_stream().wait_stream(side)
with torch.device("cuda"):
    made = [torch.randn(2), torch.empty(3).normal_()]
torch.set_default_device("cuda")
made.append(torch.ones(2))
torch.set_default_device(None)
made += [z, torch.tensor([1.0]).to(z), torch.empty_like(x, device="cuda"), z.new_zeros(2, device="cuda:0")]
made += [nn.Linear(3, 3, device="cuda").weight, nn.Linear(3, 3).to(device=device, dtype=torch.float64).weight]
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "model.pt")
    torch.save(model.state_dict(), file)
    for where in ("cuda:0", device, {"cuda:0": "cuda:0"}):
        made += torch.load(file, map_location=where).values()
assert {str(t.device) for t in made} == {sys.argv[1]}, {str(t.device) for t in made}
assert torch.ones(2).device.type == "cpu"

with torch.no_grad(), torch.cuda.device(0):
    assert torch.cuda.current_device() == 0
with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
    assert (z[None] @ z[:, None]).dtype == torch.bfloat16
assert torch.amp.GradScaler("cuda").is_enabled()
checkpoint(model, x.cuda(), use_reentrant=False).sum().backward()
with torch.random.fork_rng():
    pass
assert torch.cuda.device_count() == 1
assert torch.cuda.get_device_properties(0).multi_processor_count >= 1
several = nn.DataParallel(model).cuda()  # which looks at whether the devices are alike
assert several(torch.randn(4, x.shape[1]).cuda()).device.type == sys.argv[1].partition(":")[0]
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    batch = x.cuda(non_blocking=True)
    assert torch.cuda.current_stream() == side
torch.cuda.current_stream().wait_stream(side)
batch.record_stream(torch.cuda.current_stream())
if torch.cuda.default_generators:  # there is a compiler
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator) and generator.device.type == batch.device.type
    torch.cuda.default_generators[0].manual_seed(3)
    assert torch.equal(torch.rand(2, device="cuda", generator=generator), torch.rand(2, device="cuda"))
assert torch.Generator().device.type == "cpu"
assert torch.cuda.get_device_name(device)
assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
torch.cuda.empty_cache()
try:
    torch.cuda.CUDAGraph()
except RuntimeError:
    print("no graphs")
print("all of it")
