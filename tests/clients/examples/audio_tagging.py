"""torchaudio: sounds made into spectrograms, features and back, and two of its models trained on them."""

import argparse

import torch
import torchaudio
from torchaudio import functional, transforms
from torchaudio.models import Conformer, ConvTasNet

RATE, LENGTH = 8000, 2000


def sounds(count):
    """Two tones each, and which they are."""
    time = torch.arange(LENGTH) / RATE
    pitch = torch.randint(1, 6, (count, 1)) * 300.0
    return torch.sin(2 * torch.pi * pitch * time) + 0.3 * torch.randn(count, LENGTH), (pitch / 300).long().flatten() - 1


def features():
    """What is made of a sound, one after another."""
    window = {"n_fft": 128, "hop_length": 64}
    return {
        "spectrogram": transforms.Spectrogram(**window),
        "mel": transforms.MelSpectrogram(RATE, n_mels=16, **window),
        "cepstrum": transforms.MFCC(RATE, n_mfcc=8, melkwargs={"n_mels": 16, **window}),
        "resampled": transforms.Resample(RATE, 6000),
        "filtered": lambda x: functional.highpass_biquad(x[:, :200], RATE, 500.0),
        "quantised": transforms.MuLawEncoding(64),
        "louder": transforms.Vol(2.0),
        "differences": transforms.ComputeDeltas(),
    }


def train(model, inputs, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = inputs(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("step", losses)
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = args.device
    x, label = (v.to(device) for v in sounds(8))
    found = {}
    for name, make in features().items():
        make = make.to(device) if isinstance(make, torch.nn.Module) else make
        found[name] = make(x).cpu()
    complete = transforms.Spectrogram(128, power=None).to(device)(x)
    found["back"] = transforms.InverseSpectrogram(128).to(device)(complete, LENGTH).cpu()
    stretched = functional.phase_vocoder(complete, 1.2, torch.linspace(0, torch.pi * 64, 65, device=device)[:, None])
    found["stretched"] = stretched.abs().cpu()
    mel = transforms.AmplitudeToDB()(transforms.MelSpectrogram(RATE, 128, n_mels=16).to(device)(x)) / 40
    lengths = torch.full((8,), mel.shape[-1], device=device)
    conformer = Conformer(16, 4, 32, num_layers=1, depthwise_conv_kernel_size=7).to(device)
    head = torch.nn.Linear(16, 5).to(device)
    tagger = torch.nn.ModuleDict({"body": conformer, "head": head})

    def tagged(model):
        out, _ = model["body"](mel.transpose(1, 2), lengths)
        return torch.nn.functional.cross_entropy(model["head"](out.mean(1)), label)

    found["tagging"] = train(tagger, tagged)
    parts = {"msk_num_feats": 16, "msk_num_hidden_feats": 16, "msk_num_layers": 2, "msk_num_stacks": 1}
    separator = ConvTasNet(2, 16, 32, **parts).to(device)
    mixed = x[:4].unsqueeze(1) + x[4:].unsqueeze(1)
    target = torch.stack([x[:4], x[4:]], 1)
    found["separating"] = train(separator, lambda model: (model(mixed) - target).pow(2).mean())
    found["model"] = {k: v.cpu() for k, v in separator.state_dict().items()}
    print(torchaudio.__version__, len(found))
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
