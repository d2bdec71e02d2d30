"""Stable-Baselines3: PPO, DQN and SAC on two small environments."""

import argparse

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN, PPO, SAC


class Line(gym.Env):
    """Walk to the middle of a line."""

    def __init__(self, continuous=False):
        self.action_space = gym.spaces.Box(-1, 1, (1,)) if continuous else gym.spaces.Discrete(2)
        self.observation_space = gym.spaces.Box(-2, 2, (2,), np.float32)
        self.continuous = continuous

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.count = self.np_random.uniform(-1, 1), 0
        return self.seen(), {}

    def seen(self):
        return np.array([self.at, self.count / 20], dtype=np.float32)

    def step(self, action):
        self.at = float(np.clip(self.at + 0.1 * (float(action[0]) if self.continuous else 2 * int(action) - 1), -2, 2))
        self.count += 1
        return self.seen(), -abs(self.at), abs(self.at) < 0.05, self.count >= 20, {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    found = {}
    small = {"net_arch": [16, 16]}
    agents = {
        "ppo": (PPO, False, {"n_steps": 32, "batch_size": 16, "n_epochs": 3}),
        "dqn": (DQN, False, {"learning_starts": 16, "batch_size": 16, "target_update_interval": 20, "train_freq": 4}),
        "sac": (SAC, True, {"learning_starts": 16, "batch_size": 16, "buffer_size": 500}),
    }
    for name, (kind, continuous, options) in agents.items():
        agent = kind("MlpPolicy", Line(continuous), seed=0, device=args.device, policy_kwargs=small, **options)
        agent.learn(64 if name != "sac" else 40)
        grid = np.stack([np.linspace(-1, 1, 8), np.zeros(8)], 1).astype(np.float32)
        actions, _ = agent.predict(grid, deterministic=True)
        found[name] = {"actions": torch.from_numpy(np.asarray(actions)), "model": agent.policy.state_dict()}
        print(name, actions.ravel()[:4], agent.device)
    if args.out:
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
