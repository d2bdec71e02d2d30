"""Which programs are run, and how: one row each. The programs know nothing of the library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A program: what it is called, its file with its arguments, the packages it needs beyond the tests' own."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    tolerance: float = 2e-3  # of what it computes, against plain PyTorch on the CPU
    differs: str = ""  # why it is larger than that, or what is not compared
    skipped: tuple[str, ...] = ()  # what is not compared, by the name in its results
    on_device: tuple[str, ...] = ()  # how the program is told of the device, beyond `--device tpu`
    beside: tuple[str, ...] = ()  # packages that lie in a folder of their own: in the others' sight they break these


@dataclass(frozen=True)
class Door:
    """A way to run a program."""

    name: str
    ours: tuple[str, ...]  # after `python -m fused_eager run`
    theirs: tuple[str, ...] = ()  # the program's own arguments


_HALF = "autocast's list of ops is the accelerators', not the CPU's"
_ROUNDED = ("model", "words")  # what hangs on single roundings of a half type
_STEEP = "trained with a learning rate of 5, rounding doubles at each step"
_BETWEEN = "an activation halfway between two integers is rounded to either"
_SMALL = "Adam's first steps are as large for gradients that are near rounding errors as for others"
_INDUCED = "the covariance of near points is nearly singular: a last bit of its input moves the fourth digit"
_TRL = ("trl", "datasets", "accelerate")
_LIGHTNING = ("--accelerator", "fused_eager", "--strategy", "fused_eager")

CLIENTS = (
    Client("MNIST", ("mnist.py",)),
    Client("word language model, LSTM", ("word_language_model.py",)),
    Client("word language model, GRU", ("word_language_model.py", "--model", "GRU")),
    Client(
        "word language model, transformer", ("word_language_model.py", "--model", "Transformer"), (), 1e-2, _STEEP
    ),
    Client("DCGAN", ("dcgan.py",)),
    Client("VAE", ("vae.py",)),
    Client("super resolution", ("super_resolution.py",)),
    Client("REINFORCE", ("reinforce.py",)),
    Client("actor-critic", ("reinforce.py", "--critic")),
    Client("Siamese network", ("siamese.py",)),
    Client("time sequence prediction", ("time_sequence.py",)),
    Client("graph attention", ("gat.py",)),
    Client("graph attention over edges", ("gat_edges.py",), differs=_SMALL, skipped=("model",)),
    Client("nanoGPT", ("nano_gpt.py",)),
    Client("nanoGPT, attention written out", ("nano_gpt.py", "--flash", "0")),
    Client("nanoGPT, bfloat16", ("nano_gpt.py", "--dtype", "bfloat16"), (), 2e-2, _HALF, _ROUNDED),
    Client("nanoGPT, float16, scaled gradients", ("nano_gpt.py", "--dtype", "float16"), (), 2e-2, _HALF, _ROUNDED),
    Client("mixed precision, float16, loaders", ("amp_training.py",), (), 2e-2, _HALF),
    Client("mixed precision, bfloat16, loaders", ("amp_training.py", "--dtype", "bfloat16"), (), 2e-2, _HALF),
    Client("distributed checkpoints", ("saved_states.py",)),
    Client("torch's profiler", ("profiled_training.py",)),
    Client("DQN", ("dqn.py",)),
    Client(
        "SWA and EMA",
        ("averaging.py",),
        differs="the average of a counter, cut to a whole number, may be one less: a * b + c is one fused operation",
        skipped=("ema",),
    ),
    Client("activation checkpointing", ("checkpointing.py",)),
    Client("k-means", ("kmeans.py",)),
    Client("WGAN-GP, double backward", ("wgan_gp.py",)),
    Client("PPO", ("ppo_by_hand.py",)),
    Client("distributions and their divergences", ("svi_distributions.py",)),
    Client("detection and suppression", ("detection.py",)),
    Client("transformers: Trainer", ("transformers_trainer.py",), ("accelerate",)),
    Client(
        "transformers: Trainer, bf16 and checkpointing",
        ("transformers_trainer.py", "--bf16", "--gradient-checkpointing"),
        ("accelerate",),
        5e-2,
        _HALF,
    ),
    Client("transformers: generate, Llama", ("transformers_generate.py", "--model", "llama")),
    Client("transformers: generate, GPT-2", ("transformers_generate.py", "--model", "gpt2")),
    Client("transformers: generate, T5", ("transformers_generate.py", "--model", "t5")),
    *(
        Client(f"transformers: {group}", ("transformers_families.py", "--group", group))
        for group in ("decoders", "mixtures", "recurrences", "encoders", "pairs", "pictures", "sounds and both")
    ),
    Client("transformers: pipelines", ("transformers_pipelines.py",), ("PIL",)),
    Client("datasets", ("datasets_loader.py",), ("datasets",)),
    Client("accelerate", ("accelerate_loop.py",), ("accelerate",)),
    Client("peft: LoRA", ("peft_lora.py",), ("peft", "accelerate")),
    Client("peft: DoRA", ("peft_lora.py", "--dora"), ("peft", "accelerate")),
    Client("peft: prefix, prompt, IA3", ("peft_prompts.py",), ("peft", "accelerate")),
    Client("Lightning: Trainer", ("lightning_trainer.py",), ("lightning",), on_device=_LIGHTNING),
    Client(
        "Lightning: Trainer, bf16",
        ("lightning_trainer.py", "--precision", "bf16-mixed"),
        ("lightning",),
        3e-2,
        _HALF,
        ("model",),
        _LIGHTNING,
    ),
    Client("Lightning: Fabric", ("fabric_loop.py",), ("lightning",), on_device=_LIGHTNING),
    Client("trl: SFT", ("trl_tuning.py", "--ways", "sft"), _TRL),
    Client("trl: DPO", ("trl_tuning.py", "--ways", "dpo"), _TRL),
    Client("trl: GRPO", ("trl_tuning.py", "--ways", "grpo"), _TRL),
    Client("diffusers", ("diffusers_pipelines.py",), ("diffusers",)),
    *(
        Client(f"timm: {group}", ("timm_families.py", "--group", group), ("timm",), beside=("torchvision",))
        for group in ("convolutions", "small convolutions", "attention", "mixers")
    ),
    Client("torchvision", ("torchvision_training.py",), beside=("torchvision",)),
    Client("torchaudio", ("audio_tagging.py",), beside=("torchaudio",)),
    Client("torchao", ("torchao_quantized.py",), ("torchao",), 2e-2, _BETWEEN),
    Client("einops", ("einops_mixer.py",), ("einops",)),
    Client("einops, newer forms of attention", ("encoder_forms.py",), ("einops",)),
    Client("x-transformers", ("x_transformer.py",), ("x_transformers",)),
    Client("torchmetrics", ("torchmetrics_eval.py",), ("torchmetrics",)),
    Client("torchmetrics, twenty metrics", ("many_metrics.py",), ("torchmetrics",)),
    Client("GPyTorch", ("gpytorch_regression.py",), ("gpytorch",)),
    Client("GPyTorch, variational", ("gp_variational.py",), ("gpytorch",), 1e-2, _INDUCED),
    Client("BoTorch", ("botorch_loop.py",), ("botorch",)),
    Client("torchdiffeq", ("neural_ode.py",), ("torchdiffeq",)),
    Client("PyTorch Geometric", ("pyg_nodes.py",), ("torch_geometric",)),
    Client("Pyro", ("pyro_svi.py",), ("pyro",)),
    Client("TorchRL", ("torchrl_ppo.py",), ("torchrl",)),
    Client("Stable-Baselines3", ("sb3_agents.py",), ("stable_baselines3",), 1e-2, _SMALL),
)

DOORS = (
    Door("context", ()),
    Door("context, waiting", ("--option", "compile=wait", "--option", "native=never")),
    Door("context, strict", ("--mode", "strict")),
    Door("tpu", ("--device", "tpu"), ("--device", "tpu")),
    Door("tpu, strict", ("--device", "tpu", "--mode", "strict"), ("--device", "tpu")),
    Door("tpu, debug", ("--device", "tpu", "--mode", "debug"), ("--device", "tpu")),
)
BOTH = (DOORS[0], DOORS[3])
