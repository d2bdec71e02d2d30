"""LoRA and DoRA adapters on a small model with peft: trained, merged, saved and loaded."""

import argparse
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--dora", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=60, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, **sizes)
    base = LlamaForCausalLM(config)
    state = {name: value.clone() for name, value in base.state_dict().items()}
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, use_dora=args.dora)
    model = get_peft_model(base, lora).to(args.device)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(6):
        ids = ((torch.arange(12) * 5 + step) % 60).expand(3, -1).to(args.device)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step} loss {losses[-1]:.4f}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = LlamaForCausalLM(config)
        again.load_state_dict(state)
        again = PeftModel.from_pretrained(again.to(args.device), folder)
        with torch.no_grad():
            logits = again(input_ids=ids).logits
    merged = model.merge_and_unload()
    with torch.no_grad():
        same = merged(input_ids=ids).logits
    if args.out:
        torch.save({"losses": losses, "logits": logits.cpu(), "merged": same.cpu()}, args.out)


if __name__ == "__main__":
    main()
