"""TorchRL: a collector's rollouts in TensorDicts, generalized advantages, the clipped loss of PPO, a replay buffer."""

import argparse

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


def rollout(actor, device, steps=16, width=8):
    """Points that are pushed to and fro on a line."""
    at, taken = torch.rand(width, 1, device=device) * 2 - 1, []
    for _ in range(steps):
        now = TensorDict({"observation": at}, [width], device=device)
        with torch.no_grad():
            now = actor(now)
        at = (at + 0.1 * (2 * now["action"][:, :1].float() - 1)).clamp(-2, 2)
        end = torch.zeros(width, 1, dtype=torch.bool, device=device)
        now["next"] = TensorDict(
            {"observation": at, "reward": -at.abs(), "done": end, "terminated": end}, [width], device=device
        )
        taken.append(now)
    return torch.stack(taken, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2)).to(args.device)
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    value = ValueOperator(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(args.device), ["observation"])
    advantage = GAE(gamma=0.95, lmbda=0.9, value_network=value)
    objective = ClipPPOLoss(actor, value, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(objective.parameters(), 1e-2)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(128, device=args.device), sampler=SamplerWithoutReplacement(), batch_size=32
    )
    losses, rewards = [], []
    for _ in range(3):
        data = rollout(actor, args.device)
        rewards.append(data["next", "reward"].mean().item())
        with torch.no_grad():
            advantage(data)
        buffer.extend(data.reshape(-1))
        for _ in range(4):
            batch = buffer.sample()
            parts = objective(batch)
            loss = parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(objective.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    if args.out:
        torch.save({"losses": losses, "rewards": rewards, "net": net.state_dict()}, args.out)


if __name__ == "__main__":
    main()
