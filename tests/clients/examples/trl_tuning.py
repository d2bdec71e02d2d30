"""trl on a small model with a tokenizer of its own words: supervised tuning, preferences (DPO), and a reward (GRPO)."""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "slept", "ate"]


def tokenizer():
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def save(folder):
    """A model and its tokenizer, as they lie in a folder."""
    torch.manual_seed(0)
    tokenizer().save_pretrained(folder)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.save_pretrained(folder)
    return folder


def sentences(count):
    g = torch.Generator().manual_seed(count)
    for _ in range(count):
        length = int(torch.randint(3, 7, (), generator=g))
        yield " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=g).tolist())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--ways", default="sft,dpo")
    args = parser.parse_args()
    set_seed(0)
    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "max_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": args.device == "cpu",
        "bf16": False,
        "save_strategy": "no",
        "gradient_checkpointing": False,
    }
    found, model = {}, save(tempfile.mkdtemp())
    for way in args.ways.split(","):
        if way == "sft":
            data = Dataset.from_dict({"text": list(sentences(24))})
            trainer = SFTTrainer(
                model, SFTConfig(max_length=16, **common), train_dataset=data
            )
        elif way == "dpo":
            pairs = {"prompt": list(sentences(16)), "chosen": list(sentences(17))[:16]}
            data = Dataset.from_dict(pairs | {"rejected": list(sentences(18))[:16]})
            trainer = DPOTrainer(
                model, args=DPOConfig(max_length=24, **common), train_dataset=data
            )
        else:
            data = Dataset.from_dict({"prompt": list(sentences(16))})
            options = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.0}
            trainer = GRPOTrainer(
                model,
                reward_funcs=lambda completions, **_: [c.count("cat") - 0.1 * len(c.split()) for c in completions],
                args=GRPOConfig(**options, **common),
                train_dataset=data,
            )
        trainer.train()
        kept = ("loss", "grad_norm", "rewards/margins", "reward", "mean_token_accuracy")
        found[way] = [{k: x[k] for k in kept if k in x} for x in trainer.state.log_history]
        found[f"{way} placed"] = trainer.model.device.type == args.device
        print(way, found[way][-2])
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
