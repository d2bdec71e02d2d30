"""PPO as CleanRL writes it: environments in tensors, advantages from a loop backwards, minibatches, an early stop."""

import argparse

import torch
from torch import nn
from torch.distributions import Categorical, Normal


def layer(inner, outer, std=2**0.5):
    made = nn.Linear(inner, outer)
    nn.init.orthogonal_(made.weight, std)
    nn.init.constant_(made.bias, 0.0)
    return made


class Agent(nn.Module):
    def __init__(self, continuous):
        super().__init__()
        self.continuous = continuous
        self.critic = nn.Sequential(layer(4, 32), nn.Tanh(), layer(32, 32), nn.Tanh(), layer(32, 1, 1.0))
        self.actor = nn.Sequential(layer(4, 32), nn.Tanh(), layer(32, 32), nn.Tanh(), layer(32, 2, 0.01))
        self.logstd = nn.Parameter(torch.zeros(1, 2))

    def act(self, x, action=None):
        out = self.actor(x)
        chosen = Normal(out, self.logstd.expand_as(out).exp()) if self.continuous else Categorical(logits=out)
        if action is None:
            action = chosen.sample()
        logs, entropy = chosen.log_prob(action), chosen.entropy()
        if self.continuous:
            logs, entropy = logs.sum(1), entropy.sum(1)
        return action, logs, entropy, self.critic(x)


def step(state, action, continuous):
    push = action[:, 0].clamp(-1, 1) if continuous else action.float() * 2 - 1
    x, v, angle, spin = state.unbind(1)
    spin = spin + 0.2 * torch.sin(angle) + 0.1 * push
    angle = angle + 0.1 * spin
    v = v + 0.1 * push
    x = x + 0.1 * v
    made = torch.stack([x, v, angle, spin], 1)
    done = (x.abs() > 1.5) | (angle.abs() > 0.4)
    return torch.where(done[:, None], torch.zeros_like(made) + 0.02, made), 1.0 - angle.abs(), done


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    found = {}
    for name, continuous in [("discrete", False), ("continuous", True)]:
        torch.manual_seed(1)
        agent = Agent(continuous).to(args.device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
        state = torch.linspace(-0.1, 0.1, 32).view(8, 4).to(args.device)
        steps, losses, returns = 12, [], []
        shape = (steps, 8)
        seen = torch.zeros(*shape, 4, device=args.device)
        actions = torch.zeros(*shape, 2) if continuous else torch.zeros(shape, dtype=torch.int64)
        actions = actions.to(args.device)
        logs, rewards, ends, values = (torch.zeros(shape, device=args.device) for _ in range(4))
        done = torch.zeros(8, device=args.device)
        for update in range(2):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / 2)
            for t in range(steps):
                seen[t], ends[t] = state, done
                with torch.no_grad():
                    action, log, _, value = agent.act(state)
                    values[t] = value.flatten()
                actions[t], logs[t] = action, log
                state, rewards[t], over = step(state, action, continuous)
                done = over.float()
            with torch.no_grad():
                after = agent.critic(state).reshape(1, -1)
                advantages, last = torch.zeros_like(rewards), 0
                for t in reversed(range(steps)):
                    left = 1.0 - (done if t == steps - 1 else ends[t + 1])
                    coming = after if t == steps - 1 else values[t + 1]
                    delta = rewards[t] + 0.99 * coming * left - values[t]
                    advantages[t] = last = delta + 0.99 * 0.95 * left * last
                targets = advantages + values
            flat = [t.reshape(-1, *t.shape[2:]) for t in (seen, actions, logs, advantages, targets, values)]
            clipped = []
            for epoch in range(2):
                order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
                for at in range(0, 96, 32):
                    o, a, old, adv, ret, val = (t[order[at : at + 32].to(args.device)] for t in flat)
                    _, new, entropy, value = agent.act(o, a)
                    ratio = (new - old).exp()
                    with torch.no_grad():
                        kl = ((ratio - 1) - (new - old)).mean()
                        clipped.append(((ratio - 1.0).abs() > 0.2).float().mean().item())
                    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                    policy = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
                    value = value.view(-1)
                    kept = val + torch.clamp(value - val, -0.2, 0.2)
                    critic = 0.5 * torch.max((value - ret) ** 2, (kept - ret) ** 2).mean()
                    loss = policy - 0.01 * entropy.mean() + 0.5 * critic
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
                    losses.append(loss.item())
                if kl > 0.05:
                    break
            real, told = flat[4].cpu().numpy(), flat[5].cpu().numpy()
            returns.append(float(1 - (real - told).var() / real.var()))
        found[name] = {"losses": losses, "explained": returns, "clipped": clipped, "state": state.cpu()}
        print(name, losses[-1])
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
