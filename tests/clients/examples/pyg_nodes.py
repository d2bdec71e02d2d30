"""PyTorch Geometric: convolutions on a graph, node classification; a batch of graphs, pooled."""

import argparse

import torch
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv, global_add_pool, global_max_pool, global_mean_pool


class Nodes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = GCNConv(8, 16), GATConv(16, 8, heads=2), SAGEConv(16, 3)

    def forward(self, data):
        x = F.dropout(self.a(data.x, data.edge_index).relu(), 0.2, self.training)
        x = self.b(x, data.edge_index).relu()
        return self.c(x, data.edge_index)


class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = GINConv(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)))
        self.b = torch.nn.Linear(48, 2)

    def forward(self, data):
        x = self.a(data.x, data.edge_index).relu()
        pooled = [pool(x, data.batch) for pool in (global_add_pool, global_mean_pool, global_max_pool)]
        return self.b(torch.cat(pooled, 1))


def graph(n, seed):
    g = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, n, (2, 3 * n), generator=g)
    return Data(x=torch.randn(n, 8, generator=g), edge_index=edges, y=torch.tensor([seed % 2]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = graph(60, 0)
    data.y = data.x[:, :3].argmax(1)
    data.train_mask = torch.arange(60) < 40
    data = data.to(args.device)
    model = Nodes().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses, right = [], []
    for _ in range(12):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            guess = model(data).argmax(1)
        right.append(int((guess[~data.train_mask] == data.y[~data.train_mask]).sum()))
    loader = DataLoader([graph(5 + i % 4, i) for i in range(24)], batch_size=8)
    pooled = Graphs().to(args.device)
    optimizer = torch.optim.SGD(pooled.parameters(), lr=0.05)
    several = []
    for _ in range(3):
        for batch in loader:
            batch = batch.to(args.device)
            loss = F.cross_entropy(pooled(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            several.append(loss.item())
    if args.out:
        torch.save({"losses": losses, "right": right, "several": several}, args.out)


if __name__ == "__main__":
    main()
