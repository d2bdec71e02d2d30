"""transformers' pipelines over small models and a tokenizer made here: texts and images, one by one and in batches."""

import argparse

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, pipeline

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
TEXTS = ["the cat sees a red bird", "a big dog runs over the small fish and eats it", "it was not near"]
WORDS = sorted({word for text in TEXTS for word in text.split()})
BERT = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.4,
    "max_position_embeddings": 64,
}


def tokenizer():
    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=40, **SPECIAL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    device, words, found = args.device, tokenizer(), {}

    def model(name, config, **more):
        torch.manual_seed(4)
        return getattr(transformers, name)(getattr(transformers, config)(**more)).eval()

    labels = {"id2label": {0: "cat", 1: "dog", 2: "bird"}, "label2id": {"cat": 0, "dog": 1, "bird": 2}}
    entails = {"id2label": {0: "contradiction", 1: "entailment"}, "label2id": {"contradiction": 0, "entailment": 1}}

    classify = model("BertForSequenceClassification", "BertConfig", **BERT, **labels)
    pipe = pipeline("text-classification", model=classify, tokenizer=words, device=device)
    found["text-classification"] = [pipe(TEXTS), pipe(TEXTS, batch_size=2, top_k=None)]
    print("step", found["text-classification"][0][0], pipe.device)

    tag = model("BertForTokenClassification", "BertConfig", **BERT, **labels)
    pipe = pipeline("token-classification", model=tag, tokenizer=words, device=device, aggregation_strategy="simple")
    found["token-classification"] = pipe(TEXTS)

    fill = model("BertForMaskedLM", "BertConfig", **BERT)
    pipe = pipeline("fill-mask", model=fill, tokenizer=words, device=device)
    found["fill-mask"] = pipe("the [MASK] sees a bird", top_k=3), pipe("a cat [MASK]", targets=["runs", "eats"])

    entail = model("BertForSequenceClassification", "BertConfig", **BERT, **entails)
    pipe = pipeline("zero-shot-classification", model=entail, tokenizer=words, device=device)
    found["zero-shot"] = pipe(TEXTS[0], candidate_labels=["cat", "fish", "big"], multi_label=True)

    features = model("BertModel", "BertConfig", **BERT)
    pipe = pipeline("feature-extraction", model=features, tokenizer=words, device=device, return_tensors=True)
    found["feature-extraction"] = [t.cpu() for t in pipe(TEXTS)]

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes.update(num_attention_heads=4, initializer_range=0.3)
    tokens = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    llama = model("LlamaForCausalLM", "LlamaConfig", max_position_embeddings=64, **sizes, **tokens)
    words.padding_side = "left"
    pipe = pipeline("text-generation", model=llama, tokenizer=words, device=device)
    greedy = {"do_sample": False, "max_new_tokens": 6}
    found["text-generation"] = [pipe(TEXTS, batch_size=3, **greedy), pipe(TEXTS[2], num_beams=2, **greedy)]
    torch.manual_seed(6)
    found["sampled"] = pipe(TEXTS[0], do_sample=True, max_new_tokens=6, top_k=8, num_return_sequences=2)
    print("step", found["text-generation"][0][0][0]["generated_text"])

    drawn = np.random.default_rng(0)
    images = [Image.fromarray(drawn.integers(0, 255, (20 + 4 * i, 24, 3), dtype=np.uint8)) for i in range(3)]
    vit = {**BERT, "image_size": 16, "patch_size": 4, **labels}
    look = model("ViTForImageClassification", "ViTConfig", **{k: v for k, v in vit.items() if k != "vocab_size"})
    by = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    pipe = pipeline("image-classification", model=look, image_processor=by, device=device)
    found["image-classification"] = pipe(images, batch_size=2)
    pipe = pipeline("image-feature-extraction", model=look.vit, image_processor=by, device=device, return_tensors=True)
    found["image-features"] = [t.cpu() for t in pipe(images)]

    heard = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    heard.update({k: v for k, v in BERT.items() if k != "vocab_size"}, num_conv_pos_embeddings=8)
    heard.update(num_conv_pos_embedding_groups=2, classifier_proj_size=16, **labels)
    wave = model("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **heard)
    pipe = pipeline(
        "audio-classification", model=wave, device=device, feature_extractor=transformers.Wav2Vec2FeatureExtractor()
    )
    found["audio-classification"] = pipe([np.sin(np.arange(600) * (0.1 + i)).astype(np.float32) for i in range(2)])
    if args.out:
        torch.save(plain(found), args.out)


def plain(value):
    """Numbers as Python's, for some results are numpy's."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


if __name__ == "__main__":
    main()
