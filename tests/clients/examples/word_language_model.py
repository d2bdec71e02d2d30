"""Word language models, an LSTM and a transformer: truncated backpropagation through time, perplexity, generation."""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 60


class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.ntoken, self.rnn_type, self.nhid, self.nlayers = ntoken, rnn_type, nhid, nlayers

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        zeros = weight.new_zeros(self.nlayers, bsz, self.nhid)
        return (zeros, zeros.clone()) if self.rnn_type == "LSTM" else zeros


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout, max_len=500):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0).transpose(0, 1))

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0), :])


class TransformerModel(nn.Transformer):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers, dropout):
        super().__init__(
            d_model=ninp, nhead=nhead, dim_feedforward=nhid, num_encoder_layers=nlayers, num_decoder_layers=1
        )
        self.src_mask = None
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.ninp = ninp
        self.decoder = nn.Linear(ninp, ntoken)
        nn.init.uniform_(self.input_emb.weight, -0.1, 0.1)

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            self.src_mask = torch.log(torch.tril(torch.ones(len(src), len(src)))).to(src.device)
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(self.ninp))
        output = self.decoder(self.encoder(src, mask=self.src_mask))
        return F.log_softmax(output, dim=-1)


def batchify(data, bsz, device):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


def get_batch(source, i, bptt):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--model", default="LSTM", choices=["LSTM", "GRU", "Transformer"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--bptt", type=int, default=12)
    args = parser.parse_args()
    torch.manual_seed(1111)
    device = torch.device(args.device)
    text = (torch.arange(1700) * 7 % 23 + torch.randint(0, 3, (1700,))) % VOCABULARY
    train_data, val_data = batchify(text[:1300], 10, device), batchify(text[1300:], 5, device)
    if args.model == "Transformer":
        model = TransformerModel(VOCABULARY, 16, 2, 32, 2, 0.2).to(device)
    else:
        model = RNNModel(args.model, VOCABULARY, 16, 16, 2, 0.2).to(device)
    criterion = nn.NLLLoss()
    losses, validation = [], []

    def evaluate(source):
        model.eval()
        total_loss = 0.0
        hidden = None if args.model == "Transformer" else model.init_hidden(5)
        with torch.no_grad():
            for i in range(0, source.size(0) - 1, args.bptt):
                data, targets = get_batch(source, i, args.bptt)
                if args.model == "Transformer":
                    output = model(data).view(-1, VOCABULARY)
                else:
                    output, hidden = model(data, hidden)
                    hidden = repackage_hidden(hidden)
                total_loss += len(data) * criterion(output, targets).item()
        return total_loss / (len(source) - 1)

    def train(epoch, lr):
        model.train()
        start_time = time.time()
        hidden = None if args.model == "Transformer" else model.init_hidden(10)
        for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
            data, targets = get_batch(train_data, i, args.bptt)
            model.zero_grad()
            if args.model == "Transformer":
                output = model(data).view(-1, VOCABULARY)
            else:
                hidden = repackage_hidden(hidden)
                output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-lr)
            cur_loss = loss.item()
            losses.append(cur_loss)
            elapsed = time.time() - start_time
            told = f"epoch {epoch} | batch {batch} | lr {lr:02.2f} | s {elapsed:.1f}"
            print(f"step {len(losses)} | {told} | ppl {math.exp(cur_loss):8.2f}")

    lr, best = 5.0, None
    for epoch in range(1, args.epochs + 1):
        train(epoch, lr)
        val_loss = evaluate(val_data)
        validation.append(val_loss)
        print(f"end of epoch {epoch} | valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}")
        if best is None or val_loss < best:
            best = val_loss
        else:
            lr /= 4.0

    model.eval()
    words = torch.full((1, 1), 3, dtype=torch.long, device=device)
    hidden = None if args.model == "Transformer" else model.init_hidden(1)
    chosen = []
    with torch.no_grad():
        for _ in range(8):
            if args.model == "Transformer":
                word_weights = model(words)[-1].squeeze().div(1.0).exp().cpu()
            else:
                output, hidden = model(words, hidden)
                word_weights = output.squeeze().div(1.0).exp().cpu()
            word_idx = torch.multinomial(word_weights, 1)[0]
            if args.model == "Transformer":
                words = torch.cat([words, torch.tensor([[word_idx]]).to(device)], 0)
            else:
                words.fill_(word_idx)
            chosen.append(int(word_idx))
    if args.out:
        torch.save({"losses": losses, "tests": validation, "words": chosen, "model": model.state_dict()}, args.out)


if __name__ == "__main__":
    main()
