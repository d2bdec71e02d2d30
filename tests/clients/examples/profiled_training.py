"""A training loop under torch's profiler: a schedule of steps, ranges with names, a table, a trace in a file."""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile, record_function, schedule, supported_activities, tensorboard_trace_handler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(32, 5)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, seen = [], []
    with tempfile.TemporaryDirectory() as folder:
        handler = tensorboard_trace_handler(folder)

        def ready(found):
            handler(found)
            found.key_averages().table(sort_by="cpu_time_total", row_limit=5)
            seen.append({e.key for e in found.key_averages()})

        how = {"record_shapes": True, "profile_memory": True}
        steps = schedule(wait=1, warmup=1, active=2, repeat=2)
        with profile(activities=supported_activities(), schedule=steps, on_trace_ready=ready, **how) as profiler:
            for step in range(9):
                with record_function("data"):
                    x = torch.randn(4, 6, 32).to(args.device)
                    y = (torch.arange(24) + step).view(4, 6).to(args.device) % 5
                with record_function("forward"):
                    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                with record_function("backward"):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                profiler.step()
        traces = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        names = {e.get("name") for trace in traces for e in trace["traceEvents"]}
    wanted = ["data", "forward", "backward", "aten::linear", "Optimizer.step#SGD.step"]
    print("step", losses[-1], len(traces), len(seen))
    if args.out:
        found = {"losses": losses, "cycles": len(seen), "traces": len(traces)}
        found["rows"] = {name: all(name in keys for keys in seen) for name in wanted}
        found["in traces"] = {name: name in names for name in [*wanted, "ProfilerStep#2", "ProfilerStep#6"]}
        torch.save({**found, "model": {k: v.cpu() for k, v in model.state_dict().items()}}, args.out)


if __name__ == "__main__":
    main()
