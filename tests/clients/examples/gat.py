"""Graph attention: masked softmax over a dense adjacency, the mask made from a sparse one, all nodes in each step."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, n_heads, concat, dropout, leaky_relu_slope=0.2):
        super().__init__()
        self.n_heads, self.concat, self.dropout = n_heads, concat, dropout
        self.n_hidden = out_features // n_heads if concat else out_features
        self.W = nn.Parameter(torch.empty(size=(in_features, self.n_hidden * n_heads)))
        self.a = nn.Parameter(torch.empty(size=(n_heads, 2 * self.n_hidden, 1)))
        self.leakyrelu = nn.LeakyReLU(leaky_relu_slope)
        self.softmax = nn.Softmax(dim=1)
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adj_mat):
        n_nodes = h.shape[0]
        h_transformed = F.dropout(torch.mm(h, self.W), self.dropout, training=self.training)
        h_transformed = h_transformed.view(n_nodes, self.n_heads, self.n_hidden).permute(1, 0, 2)
        source_scores = torch.matmul(h_transformed, self.a[:, : self.n_hidden, :])
        target_scores = torch.matmul(h_transformed, self.a[:, self.n_hidden :, :])
        e = self.leakyrelu(source_scores + target_scores.mT)
        connectivity_mask = -9e16 * torch.ones_like(e)
        e = torch.where(adj_mat > 0, e, connectivity_mask)
        attention = F.dropout(F.softmax(e, dim=-1), self.dropout, training=self.training)
        h_prime = torch.matmul(attention, h_transformed)
        if self.concat:
            return h_prime.permute(1, 0, 2).contiguous().view(n_nodes, self.n_heads * self.n_hidden)
        return h_prime.mean(dim=0)


class GAT(nn.Module):
    def __init__(self, in_features, n_hidden, n_heads, num_classes, dropout):
        super().__init__()
        self.gat1 = GraphAttentionLayer(in_features, n_hidden, n_heads, True, dropout)
        self.gat2 = GraphAttentionLayer(n_hidden, num_classes, 1, False, dropout)

    def forward(self, input_tensor, adj_mat):
        x = F.elu(self.gat1(input_tensor, adj_mat))
        return F.log_softmax(self.gat2(x, adj_mat), dim=1)


def load_graph(device):
    labels = torch.randint(0, 4, (60,))
    features = F.one_hot(labels, 24).float() + (torch.rand(60, 24) < 0.1).float()
    edges = torch.randint(0, 60, (2, 300))
    edges = edges[:, labels[edges[0]] == labels[edges[1]]]
    adj = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (60, 60)).to_dense()
    adj = adj + adj.t().multiply(adj.t() > adj) - adj.multiply(adj.t() > adj)
    features = features / features.sum(1, keepdim=True)
    return features.to(device), labels.to(device), (adj + torch.eye(60)).to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(13)
    device = torch.device(args.device)
    features, labels, adj_mat = load_graph(device)
    idx = torch.randperm(len(labels)).to(device)
    idx_test, idx_val, idx_train = idx[:15], idx[15:25], idx[25:]
    net = GAT(24, 16, 4, 4, 0.3).to(device)
    optimizer = Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    criterion = nn.NLLLoss()
    losses, accuracies = [], []
    for epoch in range(args.epochs):
        net.train()
        optimizer.zero_grad()
        output = net(features, adj_mat)
        loss = criterion(output[idx_train], labels[idx_train])
        loss.backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            output = net(features, adj_mat)
            loss_val = criterion(output[idx_val], labels[idx_val])
            acc = output[idx_val].argmax(dim=1).eq(labels[idx_val]).sum().item() / len(idx_val)
        losses += [loss.item(), loss_val.item()]
        accuracies.append(acc)
        print(f"step {epoch} loss {loss.item():.4f} val {loss_val.item():.4f} accuracy {acc:.4f}")
    with torch.no_grad():
        output = net(features, adj_mat)
        accuracies.append(output[idx_test].argmax(dim=1).eq(labels[idx_test]).float().mean().item())
    if args.out:
        torch.save({"losses": losses, "tests": accuracies, "model": net.state_dict()}, args.out)


if __name__ == "__main__":
    main()
