"""diffusers: a small UNet trained to denoise and sampled by pipelines; latents that follow embeddings of a text."""

import argparse

import torch
from diffusers import (
    AutoencoderKL,
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.training_utils import EMAModel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    blocks = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **blocks,
    ).to(args.device)
    noisy = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    ema = EMAModel(unet.parameters(), decay=0.9)
    losses = []
    for _ in range(4):
        images, noise = torch.rand(4, 3, 16, 16) * 2 - 1, torch.randn(4, 3, 16, 16)
        images, noise = images.to(args.device), noise.to(args.device)
        times = torch.randint(0, 50, (4,)).to(args.device)
        loss = torch.nn.functional.mse_loss(unet(noisy.add_noise(images, noise, times), times).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(unet.parameters())
        losses.append(loss.item())
    ema.copy_to(unet.parameters())
    found = {"losses": losses}
    for name, kind, scheduler in (
        ("ddpm", DDPMPipeline, noisy),
        ("ddim", DDIMPipeline, DDIMScheduler(num_train_timesteps=50)),
    ):
        pipe = kind(unet, scheduler).to(args.device)
        pipe.set_progress_bar_config(disable=True)
        images = pipe(2, torch.Generator().manual_seed(1), num_inference_steps=5, output_type="np").images
        found[name] = torch.from_numpy(images)
    torch.manual_seed(1)
    latents = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **blocks,
    )
    decoder = AutoencoderKL(
        latent_channels=4,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        **blocks,
    )
    pipe = StableDiffusionPipeline(
        vae=decoder,
        text_encoder=None,
        tokenizer=None,
        unet=latents,
        scheduler=EulerDiscreteScheduler(num_train_timesteps=50),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).to(args.device)
    pipe.set_progress_bar_config(disable=True)
    words = torch.randn(1, 7, 16).to(args.device)
    images = pipe(
        prompt_embeds=words,
        negative_prompt_embeds=torch.zeros_like(words),
        num_inference_steps=4,
        height=16,
        width=16,
        generator=torch.Generator().manual_seed(2),
        output_type="np",
    ).images
    found["text"] = torch.from_numpy(images)
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
