"""Steady loops of the libraries that people run most, through their own entry points, of a size that a CPU trains.

A program gets the device and what to call after each step; it goes on until that raises. A trainer calls it from a hook
of torch's after each step of the optimizer. What a program imports is imported in it: not every client is installed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[], None]
LENGTH, VOCAB = 64, 512
DECODER = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**DECODER))


class _Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token ids, as a tokenizer leaves them."""

    def __init__(self) -> None:
        self.ids = torch.randint(3, VOCAB, (512, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def _pictures() -> DataLoader[tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(256, 3, 32, 32, generator=g), torch.randint(0, 10, (256,), generator=g))
    return DataLoader(data, batch_size=16, shuffle=True, drop_last=True)


def _convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for into, out in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def _after_each_step_of_the_optimizer(step: Step) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: step())


def _common(device: str) -> dict[str, Any]:
    """What transformers' Trainer, and trl's, are told here."""
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 8, "max_steps": 10**6, "logging_steps": 10,
        "report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": device == "cpu",
    }  # fmt: skip


def trainer(device: str, step: Step) -> None:
    """transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    _after_each_step_of_the_optimizer(step)
    Trainer(model=_llama(), args=TrainingArguments(**_common(device)), train_dataset=_Texts()).train()


def generate(device: str, step: Step) -> None:
    """transformers' generate: 32 tokens for each of four prompts."""
    model = _llama().eval().to(device)
    prompts = torch.randint(3, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0)).to(device)
    while True:
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=32, min_new_tokens=32, do_sample=False
        ).tolist()
        step()


def accelerate(device: str, step: Step) -> None:
    """A loop of one's own with accelerate: clipped gradients, a scheduler, a loss that is read every ten steps."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    model = _convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, _pictures(), scheduler)
    done = 0
    while True:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % 10 == 0:
                loss.item()
            step()


def peft(device: str, step: Step) -> None:
    """LoRA on attention's projections, in a loop of one's own."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(_llama(), LoraConfig(r=8, lora_alpha=16, target_modules=names)).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loader = DataLoader(_Texts(), batch_size=8, shuffle=True)
    while True:
        for batch in loader:
            loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step()


def trl(device: str, step: Step) -> None:
    """trl's supervised tuning; sentences of 20 to 28 words, padded to the longest of their batch."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *(f"word{i}" for i in range(VOCAB - len(special)))]
    by_words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    by_words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 29, (512,), generator=g).tolist()
    texts = [" ".join(words[i] for i in torch.randint(4, VOCAB, (n,), generator=g).tolist()) for n in lengths]
    arguments = SFTConfig(max_length=32, bf16=False, gradient_checkpointing=False, **_common(device))
    _after_each_step_of_the_optimizer(step)
    SFTTrainer(
        _llama(), arguments, train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=by_words, **names),
    ).train()  # fmt: skip


def lightning(device: str, step: Step) -> None:
    """Lightning's Trainer: a loss and an accuracy that are logged, a progress bar's worth of reading them."""
    import lightning as L

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _convolutions()

        def training_step(self, batch: tuple[Tensor, Tensor], i: int) -> Tensor:
            x, y = batch
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            self.log("loss", loss)
            self.log("accuracy", (logits.argmax(1) == y).float().mean())
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    places = {"accelerator": "cpu"} if device == "cpu" else {"accelerator": "fused_eager", "strategy": "fused_eager"}
    said: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(max_epochs=-1, enable_model_summary=False, **said, **places).fit(Classifier(), _pictures())


def titan_files(folder: Path) -> None:
    """What torchtitan's debug model reads and its package lacks: a tokenizer in `folder`/tokenizer, and texts where it
    looks for those of its repository, below the folder that it runs in. Both are made of this project's pages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    pages = sorted((Path(__file__).resolve().parent.parent / "docs").glob("*.md"))
    texts = [part for page in pages for part in page.read_text().split("\n\n")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=special))
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    data = folder / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    (data / "data.json").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts if len(text) > 200))


def torchtitan(device: str, step: Step) -> None:
    """torchtitan's debug model by its own trainer, on one rank. It cannot run on plain CPU tensors."""
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    folder = Path(tempfile.mkdtemp())
    titan_files(folder)
    os.chdir(folder)
    options = {
        "model.name": "llama3", "model.flavor": "debugmodel", "model.hf_assets_path": "./tokenizer",
        "training.dataset": "c4_test", "training.local_batch_size": "4", "training.seq_len": "128",
        "training.steps": "1000000", "training.mixed_precision_param": "float32",
    }  # fmt: skip
    config = ConfigManager().parse_args([word for name, value in options.items() for word in (f"--{name}", value)])
    _after_each_step_of_the_optimizer(step)
    Trainer(config).train()


def diffusers(device: str, step: Step) -> None:
    """diffusers' pipeline: two pictures of 32 by 32 pixels, in ten steps of a scheduler."""
    from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pipeline = DDIMPipeline(unet, DDIMScheduler(num_train_timesteps=1000)).to(device)
    pipeline.set_progress_bar_config(disable=True)
    while True:
        pipeline(batch_size=2, num_inference_steps=10, output_type="np")
        step()


def timm(device: str, step: Step) -> None:
    """One of timm's models in a loop of one's own, with its own optimizer."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # PyPI's is CUDA's; of its kernels timm needs none, but their schemas are looked up on import
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm as models
    import timm.optim

    torch.manual_seed(0)
    model = models.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=4, depth=4).to(device)
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    loader = _pictures()
    while True:
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step()


class _Block(nn.Module):
    """nanoGPT's: attention and a perceptron, each after a norm."""

    def __init__(self, wide: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.attend, self.project = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.perceptron = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.attend(self.before(x)).chunk(3, 2))
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.between(x))


def nano_gpt(device: str, step: Step) -> None:
    """A GPT's training script after nanoGPT's: accumulated, clipped, its loss read each step."""
    torch.manual_seed(0)
    wide = 128
    ids, places = nn.Embedding(VOCAB, wide), nn.Embedding(LENGTH, wide)
    blocks, head = nn.Sequential(*(_Block(wide, 4) for _ in range(4)), nn.LayerNorm(wide)), nn.Linear(wide, VOCAB)
    model = nn.ModuleList([ids, places, blocks, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(0, VOCAB, (4096,))
    while True:
        for _ in range(2):
            at = torch.randint(len(text) - LENGTH, (8,)).tolist()
            x = torch.stack([text[i : i + LENGTH] for i in at]).to(device)
            y = torch.stack([text[i + 1 : i + 1 + LENGTH] for i in at]).to(device)
            logits = head(blocks(ids(x) + places(torch.arange(LENGTH, device=device))))
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        step()
