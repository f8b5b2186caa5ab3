"""A residual MLP block with a norm written in Python: some training steps in eager and through tokamak, from the same start.

    python examples/quickstart.py
    tokamak explain examples/quickstart.py        what was fused, what was not, and why
"""
from __future__ import annotations

import copy

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.grow, self.shrink = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        norm = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.shrink(nn.functional.gelu(self.grow(norm)))


def train(model: nn.Module, inputs: torch.Tensor, steps: int) -> list[float]:
    """The loss before each of `steps` steps towards the identity."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    block, inputs = Block(128, 512), torch.randn(256, 128)
    eager = train(copy.deepcopy(block), inputs, 5)
    fused = train(torch.compile(block, backend="tokamak"), inputs, 5)
    print("eager  ", *(f"{x:.6f}" for x in eager))
    print("tokamak", *(f"{x:.6f}" for x in fused))


if __name__ == "__main__":
    main()
