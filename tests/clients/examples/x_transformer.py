"""x-transformers: a decoder with rotary positions and a wrapper that trains and samples; an encoder-decoder."""

import argparse

import torch
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper, XTransformer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
    model = TransformerWrapper(num_tokens=40, max_seq_len=64, attn_layers=layers)
    wrapped = AutoregressiveWrapper(model).to(args.device)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=3e-3)
    losses = []
    start = torch.randint(0, 40, (4, 1))
    ids = ((start + 3 * torch.arange(24)) % 40).to(args.device)
    for _ in range(10):
        loss = wrapped(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    greedy = wrapped.generate(ids[:2, :5], 8, temperature=0.0)
    encoder = TransformerWrapper(
        num_tokens=40,
        max_seq_len=32,
        use_abs_pos_emb=False,
        attn_layers=Encoder(dim=32, depth=1, heads=2, attn_dim_head=16, alibi_pos_bias=True, alibi_num_heads=1),
    )
    seen = encoder.to(args.device)(ids[:, :16], mask=(ids[:, :16] > 3))
    both = XTransformer(
        dim=32,
        enc_num_tokens=40,
        enc_depth=1,
        enc_heads=2,
        enc_max_seq_len=24,
        dec_num_tokens=40,
        dec_depth=1,
        dec_heads=2,
        dec_max_seq_len=24,
        tie_token_emb=True,
    ).to(args.device)
    loss = both(ids[:, :12], ids[:, 12:], mask=torch.ones_like(ids[:, :12]).bool())
    loss.backward()
    norms = {name: p.grad.norm().cpu() for name, p in both.named_parameters() if p.grad is not None}
    if args.out:
        found = {"losses": losses, "greedy": greedy.cpu(), "seen": seen.detach().cpu(), "both": loss.item()}
        torch.save(found | {"norms": norms}, args.out)


if __name__ == "__main__":
    main()
