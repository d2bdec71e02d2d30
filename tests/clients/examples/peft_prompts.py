"""Prefixes, prompts and scaled activations trained on a frozen model with peft: saved, loaded, generated with."""

import argparse
import tempfile

import torch
from peft import IA3Config, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

WAYS = {
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "ia3": IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.2}
    config, found = LlamaConfig(max_position_embeddings=48, **sizes, **tokens), {}
    for way in args.ways.split(","):
        torch.manual_seed(0)
        base = LlamaForCausalLM(config)
        state = {name: value.clone() for name, value in base.state_dict().items()}
        model = get_peft_model(base, WAYS[way]).to(args.device)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2, eps=1e-4)
        losses = []
        for step in range(5):
            ids = ((torch.arange(12) * 5 + step) % 57 + 3).expand(3, -1).contiguous().to(args.device)
            mask = torch.ones_like(ids)
            mask[0, :2] = 0
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = LlamaForCausalLM(config)
            again.load_state_dict(state)
            again = PeftModel.from_pretrained(again.to(args.device), folder).eval()
        with torch.no_grad():
            logits = again(input_ids=ids, attention_mask=mask).logits
        said = again.generate(input_ids=ids[:, :5], attention_mask=mask[:, :5], max_new_tokens=5, do_sample=False)
        found[way] = {"losses": losses, "logits": logits.cpu(), "said": said.cpu()}
        print(f"step {way} loss {losses[-1]:.4f}")
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
