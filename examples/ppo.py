"""PPO of a cart on a line, whose gradients are reduced by hand, as in CleanRL's loops.
torchrun --nproc-per-node 2 examples/ppo.py
"""

import torch
import torch.distributed as dist
from torch import nn

from hvd_adaptive import ALQ, average

CARTS, STEPS, UPDATES, GAMMA = 64, 32, 40, 0.97
PUSHES = torch.tensor([-0.3, 0.0, 0.3])


def main() -> None:
    """Train, and print the mean reward of a step: 0 is best."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # so that all ranks begin with the same parameters
    body = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model = nn.Sequential(body, nn.Linear(64, 4))  # the scores of three pushes, and the value
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    compressor = ALQ(bits=3)
    torch.manual_seed(1 + dist.get_rank())  # each rank has carts of its own
    for update in range(UPDATES):
        place, speed, seen = torch.rand(CARTS) * 4 - 2, torch.zeros(CARTS), []
        for _ in range(STEPS):
            state = torch.stack([place, speed], dim=1)
            with torch.no_grad():
                policy = torch.distributions.Categorical(logits=model(state)[:, :3])
            action = policy.sample()
            speed = 0.9 * speed + PUSHES[action]
            place = place + 0.3 * speed
            seen.append((state, action, policy.log_prob(action), -place.abs()))
        states, actions, chances, rewards = map(torch.stack, zip(*seen, strict=True))
        returns = rewards.clone()
        for step in reversed(range(STEPS - 1)):
            returns[step] += GAMMA * returns[step + 1]
        for _ in range(4):
            out = model(states)
            advantage = (returns - out[..., 3]).detach() / returns.std()
            policy = torch.distributions.Categorical(logits=out[..., :3])
            ratio = (policy.log_prob(actions) - chances).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = 0.01 * (returns - out[..., 3]).square().mean() - gain.mean()
            optimizer.zero_grad()
            loss.backward()
            averages = average([p.grad for p in model.parameters()], compressor)
            for parameter, gradient in zip(model.parameters(), averages, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if dist.get_rank() == 0 and update % 13 == 0:
            sent = compressor.report()["wire_bytes"]
            print(f"update {update}: reward {rewards.mean():.3f}, {sent:,} bytes sent a call")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
