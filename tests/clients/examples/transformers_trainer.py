"""transformers' Trainer: accumulation, checkpointing, evaluation, saving, and going on from a checkpoint."""

import argparse
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Lines(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 40, (count, 1), generator=g)
        self.ids = (start + torch.arange(16) * 3 + torch.randint(0, 2, (count, 16), generator=g)) % 50

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def metrics(p):
    return {"accuracy": float((p.predictions[:, :-1].argmax(-1) == p.label_ids[:, 1:]).mean())}


def make():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=1, pad_token_id=2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    args = parser.parse_args()
    set_seed(0)
    folder = tempfile.mkdtemp()

    def trainer(model, steps):
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            max_steps=steps,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_steps=3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            weight_decay=0.01,
            bf16=args.bf16,
            gradient_checkpointing=args.gradient_checkpointing,
            report_to=[],
            disable_tqdm=True,
            seed=0,
            use_cpu=args.device == "cpu",
        )
        datasets = {"train_dataset": Lines(64, 0), "eval_dataset": Lines(16, 1)}
        return Trainer(model=model, args=arguments, compute_metrics=metrics, **datasets)

    first = trainer(make(), 6)
    first.train()
    losses = [x["loss"] for x in first.state.log_history if "loss" in x]
    tests = [(x["eval_loss"], x["eval_accuracy"]) for x in first.state.log_history if "eval_loss" in x]
    second = trainer(make(), 8)
    second.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-6"))
    losses += [x["loss"] for x in second.state.log_history if "loss" in x][6:]
    second.save_model(os.path.join(folder, "final"))
    again = GPT2LMHeadModel.from_pretrained(os.path.join(folder, "final"))
    with torch.no_grad():
        logits = again(Lines(2, 3).ids).logits
    prediction = torch.from_numpy(second.predict(Lines(8, 4)).predictions)
    if args.out:
        placed = second.args.device.type == args.device == second.model.device.type
        found = {"losses": losses, "tests": tests, "logits": logits, "prediction": prediction, "placed": placed}
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
