"""A model under training as a program that may call it in any order: forward, backward, steps, held and dropped results."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Dropout, a statistic that is written, a second result."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x):
        h = F.dropout(F.gelu(self.norm(self.first(x))), 0.25, self.training)
        self.seen.mul_(0.9).add_(h.detach().mean(0))
        return self.last(h), h.sum(1)


class World:
    """A model, the results of calls that are still held, and what can happen to them."""

    def __init__(self, model, fn, device):
        self.model, self.fn, self.device, self.held = model, fn, device, []
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def act(self, action, n) -> str:
        """Does it; what torch raises when a step has changed what backward needs."""
        try:
            getattr(self, action)(n)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return "modified"
        return ""

    def forward(self, n):
        torch.manual_seed(n)
        x = torch.randn(8, 16, device=self.device, requires_grad=bool(n % 2))
        torch.manual_seed(n)
        self.held.append((*self.fn(x), x))

    def backward(self, n, again=False):
        if self.held:
            y, s, x = self.held[n % len(self.held)]
            if y.grad_fn is not None:
                (y.square().sum() + s.sum() * 0.1).backward(retain_graph=again)
                if not again:
                    self.held[n % len(self.held)] = (y.detach(), s.detach(), x)

    def retained(self, n):
        self.backward(n, again=True)

    def drop(self, n):
        if self.held:
            self.held.pop(n % len(self.held))

    def scale(self, n):
        """A result that is held is changed in place."""
        if self.held:
            y, s, x = self.held[n % len(self.held)]
            y, s = y.detach(), s.detach()
            s.mul_(0.5)
            self.held[n % len(self.held)] = (y, s, x)

    def clear(self, n):
        self.model.zero_grad(set_to_none=bool(n % 2))

    def step(self, n):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()

    def moved(self, n):
        """A parameter has other memory."""
        p = list(self.model.parameters())[n % 3]
        p.data = p.data.clone()

    def infer(self, n):
        torch.manual_seed(n)
        with torch.no_grad():
            self.held.append((*self.fn(torch.randn(8, 16, device=self.device)), None))

    def values(self) -> list[torch.Tensor]:
        return [t.detach() for h in self.held for t in h if t is not None] + [*self.model.state_dict().values()] + \
               [p.grad for p in self.model.parameters() if p.grad is not None]


ACTIONS = ("forward",) * 4 + ("backward",) * 4 + ("retained", "drop", "drop", "scale", "clear", "step", "moved", "infer")
