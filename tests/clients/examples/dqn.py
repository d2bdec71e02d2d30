"""Deep Q-learning: a replay memory of small tensors, masks of varying length, a target network updated in place."""

import argparse
import math
import random
from collections import deque, namedtuple

import torch
import torch.nn.functional as F
from torch import nn, optim

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
BATCH_SIZE, GAMMA, TAU, LR = 16, 0.99, 0.005, 1e-3


class Walk:
    """A walk on a line from 0 to 9: right is worth more than left, over at either end."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self):
        self.at, self.steps = 4, 0
        return [self.at / 9, 1 - self.at / 9, 1.0]

    def step(self, action):
        self.at += 1 if action == 1 else -1
        self.at = min(max(self.at + self.random.choice((0, 0, 0, -1)), 0), 9)
        self.steps += 1
        return [self.at / 9, 1 - self.at / 9, 1.0], float(self.at == 9), self.at in (0, 9), self.steps >= 15


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--episodes", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device(args.device)
    env, memory = Walk(0), deque(maxlen=1000)
    policy_net, target_net = DQN().to(device), DQN().to(device)
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
    steps_done, losses, actions = 0, [], []

    def select_action(state):
        nonlocal steps_done
        sample = random.random()
        steps_done += 1
        if sample > 0.05 + 0.85 * math.exp(-1.0 * steps_done / 50):
            with torch.no_grad():
                return policy_net(state).max(1).indices.view(1, 1)
        return torch.tensor([[random.randrange(2)]], device=device, dtype=torch.long)

    def optimize_model():
        if len(memory) < BATCH_SIZE:
            return
        batch = Transition(*zip(*random.sample(memory, BATCH_SIZE), strict=True))
        non_final_mask = torch.tensor(tuple(s is not None for s in batch.next_state), device=device, dtype=torch.bool)
        non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
        state_batch, action_batch = torch.cat(batch.state), torch.cat(batch.action)
        reward_batch = torch.cat(batch.reward)
        state_action_values = policy_net(state_batch).gather(1, action_batch)
        next_state_values = torch.zeros(BATCH_SIZE, device=device)
        with torch.no_grad():
            next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
        expected = (next_state_values * GAMMA) + reward_batch
        loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        losses.append(loss.item())
        print(f"step {len(losses)} loss {losses[-1]:.5f}")

    for _ in range(args.episodes):
        state = torch.tensor(env.reset(), dtype=torch.float32, device=device).unsqueeze(0)
        done = False
        while not done:
            action = select_action(state)
            actions.append(action.item())
            observation, reward, terminated, truncated = env.step(action.item())
            reward = torch.tensor([reward], device=device)
            done = terminated or truncated
            next_state = None
            if not terminated:
                next_state = torch.tensor(observation, dtype=torch.float32, device=device).unsqueeze(0)
            memory.append(Transition(state, action, next_state, reward))
            state = next_state
            optimize_model()
            target_state, policy_state = target_net.state_dict(), policy_net.state_dict()
            for key in policy_state:
                target_state[key] = policy_state[key] * TAU + target_state[key] * (1 - TAU)
            target_net.load_state_dict(target_state)
    if args.out:
        torch.save({"losses": losses, "actions": actions, "model": target_net.state_dict()}, args.out)


if __name__ == "__main__":
    main()
