"""Training steps of ten models of `transformers`, made from configurations: nothing is downloaded.

All are of one size: 4 layers, 512 wide, 8 heads, bfloat16, AdamW, 16 sequences of 128 tokens (ViT: of 50 patches).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

LAYERS, WIDTH, HEADS, INNER, VOCAB, BATCH, LENGTH = 4, 512, 8, 2048, 8192, 16, 128
DECODER: Mapping[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": INNER, "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip

# The class of each model's configuration, the model's, and the configuration.
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel",
             {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * LENGTH}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**DECODER, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**DECODER, "num_key_value_heads": 2}),
    "opt": ("OPTConfig", "OPTForCausalLM", {
        **{k: v for k, v in DECODER.items() if k != "intermediate_size"},
        "ffn_dim": INNER, "word_embed_proj_dim": WIDTH,
    }),
    "bert": ("BertConfig", "BertForMaskedLM", DECODER),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**DECODER, "pad_token_id": 1}),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {
        "vocab_size": VOCAB, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER,
        "max_position_embeddings": 2 * LENGTH,
    }),
    "t5": ("T5Config", "T5ForConditionalGeneration", {
        "vocab_size": VOCAB, "d_model": WIDTH, "num_layers": LAYERS // 2, "num_heads": HEADS, "d_ff": INNER,
        "d_kv": WIDTH // HEADS, "decoder_start_token_id": 0,
    }),
    "vit": ("ViTConfig", "ViTForImageClassification", {
        **{k: v for k, v in DECODER.items() if k not in ("vocab_size", "max_position_embeddings")},
        "image_size": 112, "patch_size": 16, "num_labels": 1000,
    }),
}  # fmt: skip


def build(name: str) -> Callable[[], Any]:
    """One step of a model's training, on torch's default device: forward, backward, AdamW. Returns what it is of."""
    import torch
    import transformers

    config, model, sizes = MODELS[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    net = getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if name == "vit":
        batch = {"pixel_values": torch.randn(BATCH, 3, 112, 112), "labels": torch.randint(0, 1000, (BATCH,))}
    else:
        ids = torch.randint(2, VOCAB, (BATCH, LENGTH))
        batch = {"input_ids": ids, "labels": ids}

    def step() -> Any:
        loss = net(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
