"""Policy gradients on a small cart of our own, an action at a time: REINFORCE and actor-critic."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

EPS = 1.1920929e-07


class Cart:
    """A pole on a cart in whole steps: four numbers of state, two actions, over after 30 steps or where it falls."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self):
        self.state = [self.random.uniform(-0.05, 0.05) for _ in range(4)]
        self.steps = 0
        return list(self.state)

    def step(self, action):
        x, v, a, w = self.state
        force = 1.0 if action == 1 else -1.0
        w += 0.3 * a - 0.05 * force
        v += 0.05 * force
        self.state = [x + 0.1 * v, v, a + 0.1 * w, w]
        self.steps += 1
        done = abs(self.state[2]) > 0.12 or self.steps >= 12
        return list(self.state), 1.0, done


class Policy(nn.Module):
    def __init__(self, critic):
        super().__init__()
        self.affine1 = nn.Linear(4, 32)
        self.dropout = nn.Dropout(p=0.1)
        self.action_head = nn.Linear(32, 2)
        self.value_head = nn.Linear(32, 1) if critic else None
        self.saved, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.dropout(self.affine1(x)))
        value = None if self.value_head is None else self.value_head(x)
        return F.softmax(self.action_head(x), dim=-1), value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--critic", action="store_true")
    parser.add_argument("--episodes", type=int, default=6)
    parser.add_argument("--gamma", type=float, default=0.99)
    args = parser.parse_args()
    torch.manual_seed(543)
    device = torch.device(args.device)
    env = Cart(543)
    policy = Policy(args.critic).to(device)
    optimizer = optim.Adam(policy.parameters(), lr=1e-2)

    def select_action(state):
        state = torch.tensor(state).float().to(device)
        probs, value = policy(state)
        m = Categorical(probs)
        action = m.sample()
        policy.saved.append((m.log_prob(action), value))
        return action.item()

    def finish_episode():
        R, returns = 0, []
        for r in policy.rewards[::-1]:
            R = r + args.gamma * R
            returns.insert(0, R)
        returns = torch.tensor(returns, device=device)
        returns = (returns - returns.mean()) / (returns.std() + EPS)
        policy_losses, value_losses = [], []
        for (log_prob, value), R in zip(policy.saved, returns, strict=True):
            if value is None:
                policy_losses.append((-log_prob * R).unsqueeze(0))
            else:
                advantage = R - value.item()
                policy_losses.append(-log_prob * advantage)
                value_losses.append(F.smooth_l1_loss(value, torch.tensor([R]).to(device)))
        optimizer.zero_grad()
        if value_losses:
            loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        else:
            loss = torch.cat(policy_losses).sum()
        loss.backward()
        optimizer.step()
        del policy.rewards[:]
        del policy.saved[:]
        return loss.item()

    losses, rewards, actions, running_reward = [], [], [], 10
    for i_episode in range(args.episodes):
        state, ep_reward, done = env.reset(), 0, False
        while not done:
            action = select_action(state)
            actions.append(action)
            state, reward, done = env.step(action)
            policy.rewards.append(reward)
            ep_reward += reward
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        losses.append(finish_episode())
        rewards.append(ep_reward)
        print(f"step {i_episode} last reward {ep_reward:.2f} average reward {running_reward:.2f}")
    if args.out:
        torch.save({"losses": losses, "rewards": rewards, "actions": actions, "model": policy.state_dict()}, args.out)


if __name__ == "__main__":
    main()
