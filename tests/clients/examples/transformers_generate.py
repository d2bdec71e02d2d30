"""Text from small models with each kind of cache: greedy, sampling, beams, a batch with padding, an assistant."""

import argparse

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, T5Config, T5ForConditionalGeneration, set_seed

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.3, "vocab_size": 90}
CONFIGS = {
    "llama": LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **TOKENS,
    ),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **TOKENS),
}
WAYS = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "sample": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sample": {"num_beams": 2, "do_sample": True},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "min": {"min_new_tokens": 4, "typical_p": 0.9, "do_sample": True},
}
OF_ONE = {"lookup": {"prompt_lookup_num_tokens": 3}, "scores": {"output_scores": True, "return_dict_in_generate": True}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--model", default="llama")
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    set_seed(3)
    ids = torch.randint(3, 90, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 2
    inputs = {"input_ids": ids.to(args.device), "attention_mask": mask.to(args.device)}
    found = {}
    if args.model == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 90}
        t5 = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)).eval().to(args.device)
        found["t5"] = t5.generate(**inputs, max_new_tokens=6, num_beams=2).cpu()
    else:
        config = CONFIGS[args.model]
        model = AutoModelForCausalLM.from_config(config).eval().to(args.device)
        for way in args.ways.split(","):
            torch.manual_seed(5)
            found[way] = model.generate(**inputs, max_new_tokens=7, **WAYS[way]).cpu()
            print("step", way, found[way][0].tolist())
        if len(found) == len(WAYS):
            helper = AutoModelForCausalLM.from_config(config).eval().to(args.device)
            one = {name: value[1:] for name, value in inputs.items()}
            for way, options in {"assisted": {"assistant_model": helper}, **OF_ONE}.items():
                out = model.generate(**one, max_new_tokens=7, **options)
                found[way] = getattr(out, "sequences", out).cpu()
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
