"""datasets: a table mapped, split, saved, read again and streamed; its rows arrive as tensors where they are wanted."""

import argparse
import tempfile

import torch
from datasets import Dataset, load_dataset, load_from_disk
from torch import nn
from torch.utils.data import DataLoader


def rows():
    generator = torch.Generator().manual_seed(0)
    for i in range(96):
        length = int(torch.randint(3, 9, (), generator=generator))
        words = torch.randint(1, 30, (length,), generator=generator).tolist()
        yield {"number": i, "text": " ".join(f"w{w}" for w in words), "label": int(sum(words) / length > 15)}


def numbered(batch):
    ids = [[int(w[1:]) for w in text.split()][:8] for text in batch["text"]]
    return {"ids": [i + [0] * (8 - len(i)) for i in ids], "length": [float(len(i)) for i in ids]}


def train(model, batches, device, losses):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in batches:
        ids, length, label = (batch[k].to(device) for k in ("ids", "length", "label"))
        mean = model[0](ids).sum(1) / length.unsqueeze(1)
        loss = nn.functional.cross_entropy(model[1](mean), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(30, 16, padding_idx=0), nn.Linear(16, 2)]).to(args.device)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        table = Dataset.from_list(list(rows())).map(numbered, batched=True)
        parts = table.train_test_split(test_size=0.25, seed=1)
        parts.save_to_disk(f"{folder}/parts")
        parts = load_from_disk(f"{folder}/parts")
        wanted = {"type": "torch", "columns": ["ids", "length", "label"]}
        train(model, DataLoader(parts["train"].with_format(**wanted), batch_size=12), args.device, losses)
        # Rows that are put where they are wanted by datasets itself.
        placed = parts["train"].with_format(**wanted, device=args.device)
        train(model, placed.iter(batch_size=12), args.device, losses)
        # Rows of a file, one after another, from a loader's process.
        table.to_json(f"{folder}/rows.jsonl")
        streamed = load_dataset(
            "json", data_files=f"{folder}/rows.jsonl", split="train", streaming=True, cache_dir=f"{folder}/cache"
        )
        streamed = streamed.shuffle(seed=3, buffer_size=20).select_columns(["ids", "length", "label"])
        train(model, DataLoader(streamed.with_format("torch"), batch_size=12, num_workers=1), args.device, losses)
        test = parts["test"].with_format(**wanted, device=args.device)[:]
        # A model within a map.
        def judged(batch):
            with torch.no_grad():
                score = model[1](model[0](batch["ids"]).sum(1) / batch["length"].unsqueeze(1))
            return {"score": score.cpu().tolist()}

        scores = parts["test"].with_format(**wanted, device=args.device).map(judged, batched=True, batch_size=8)
    print("step", losses[-1], len(losses))
    if args.out:
        found = {"losses": losses, "placed": test["ids"].device.type == args.device}
        found["scores"] = torch.tensor(scores.with_format(None)["score"][:])
        torch.save({**found, "model": {k: v.cpu() for k, v in model.state_dict().items()}}, args.out)


if __name__ == "__main__":
    main()
