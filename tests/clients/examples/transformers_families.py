"""transformers: small models of many families, each trained for two steps and evaluated."""

import argparse

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

WORDS, LENGTH, IMAGE = 60, 10, 32
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
PICTURE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": 5,
}
PAIR = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# What is trained, with the family's name and what its configuration says beyond the common.
FAMILIES = {
    "decoders": {
        "llama": GROUPED,
        "mistral": GROUPED | {"sliding_window": 4},
        "qwen2": GROUPED,
        "qwen3": GROUPED,
        "gemma": GROUPED,
        "gemma2": GROUPED | {"sliding_window": 4, "query_pre_attn_scalar": 8},
        "phi": SMALL | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "phi3": GROUPED | {"original_max_position_embeddings": 40},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": WORDS}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "gpt_neox": SMALL | {"rotary_pct": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
        "bloom": {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "falcon": SMALL | {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
        "cohere": GROUPED,
        "olmo2": GROUPED,
        "granite": GROUPED,
        "stablelm": GROUPED,
        "starcoder2": GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    },
    "mixtures": {
        "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen2_moe": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 24},
        "qwen3_moe": GROUPED | EXPERTS,
        "olmoe": GROUPED | EXPERTS,
        "deepseek_v3": GROUPED
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 4}
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        "gpt_oss": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    },
    "recurrences": {
        "mamba": {"vocab_size": WORDS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
        "mamba2": {"vocab_size": WORDS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
        | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        "rwkv": {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 40},
        "recurrent_gemma": GROUPED | {"lru_width": 32, "attention_window_size": 4, "num_hidden_layers": 3},
        "falcon_mamba": {"vocab_size": WORDS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    },
    "encoders": {
        "bert": SMALL | STILL,
        "roberta": SMALL | STILL,
        "albert": SMALL | STILL | {"embedding_size": 16},
        "electra": SMALL | STILL | {"embedding_size": 16},
        "distilbert": {"vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
        | {"max_position_embeddings": 40, "dropout": 0.0, "attention_dropout": 0.0},
        "deberta-v2": SMALL | STILL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "modernbert": SMALL | {"local_attention": 4},
        "mpnet": SMALL | STILL,
        "fnet": SMALL | STILL,
    },
    "pairs": {
        "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        "bart": PAIR,
        "pegasus": PAIR,
        "marian": PAIR,
        "mbart": PAIR,
    },
    "pictures": {
        "vit": PICTURE,
        "beit": PICTURE | STILL | {"drop_path_rate": 0.0},
        "dinov2": PICTURE,
        "swin": {"image_size": IMAGE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]}
        | {"window_size": 4, "num_labels": 5, "drop_path_rate": 0.0},
        "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5},
        "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5},
    },
    "sounds and both": {
        "whisper": PAIR | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
        "wav2vec2": SMALL
        | STILL
        | {"conv_dim": [16, 16], "conv_stride": [4, 4], "conv_kernel": [8, 4], "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0},
        "clip": {"text_config": SMALL, "vision_config": PICTURE, "projection_dim": 16},
        "siglip": {"text_config": SMALL, "vision_config": PICTURE},
    },
}


def model_and_batch(group, family):
    """A small model of the family, and what it is given in a step."""
    config = AutoConfig.for_model(family, **FAMILIES[group][family])
    words = torch.randint(3, WORDS, (2, LENGTH))
    mask = torch.ones_like(words)
    mask[0, -3:] = 0
    pictures = torch.randn(2, 3, IMAGE, IMAGE)
    if group in ("decoders", "mixtures", "recurrences"):
        inputs = {"input_ids": words, "labels": words}
        inputs |= {} if group == "recurrences" else {"attention_mask": mask}
        return AutoModelForCausalLM.from_config(config), inputs
    if group == "encoders":
        inputs = {"input_ids": words, "labels": words}
        inputs |= {} if family == "fnet" else {"attention_mask": mask}
        return AutoModelForMaskedLM.from_config(config), inputs
    if group == "pairs":
        inputs = {"input_ids": words, "attention_mask": mask, "labels": words.flip(1)}
        return AutoModelForSeq2SeqLM.from_config(config), inputs
    if group == "pictures":
        labels = torch.randint(0, 5, (2,))
        return AutoModelForImageClassification.from_config(config), {"pixel_values": pictures, "labels": labels}
    if family == "whisper":
        from transformers import WhisperForConditionalGeneration

        return WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 40), "labels": words}
    if family == "wav2vec2":
        from transformers import Wav2Vec2ForCTC

        return Wav2Vec2ForCTC(config), {"input_values": torch.randn(2, 800), "labels": words[:, :6]}
    inputs = {"input_ids": words, "pixel_values": pictures, "return_loss": True}
    return AutoModel.from_config(config), inputs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--group", default="decoders")
    parser.add_argument("--families")
    args = parser.parse_args()
    found = {}
    for family in (args.families.split(",") if args.families else FAMILIES[args.group]):
        torch.manual_seed(0)
        model, inputs = model_and_batch(args.group, family)
        model.to(args.device)
        inputs = {k: v.to(args.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        losses = []
        for _ in range(2):
            loss = model(**inputs).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item(), norm.item()]
        model.eval()
        with torch.no_grad():
            out = model(**inputs)
        logits = out.logits if "logits" in out else out.logits_per_image
        found[family] = {"losses": losses, "logits": logits.flatten()[:64].cpu()}
        print(family, losses)
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
