"""Small programs that the tests of the tools look at."""
import torch
from torch import nn


def chain(x, w, b):
    y = x.pow(2)
    y = y * w
    return y + b


def softmax(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def broken(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def broken_at_once(x):
    torch._dynamo.graph_break()
    return x + 1


def branch(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


class Block(nn.Module):
    """A norm, a linear layer and a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.fc(self.norm(x)).relu()


class Dropped(nn.Module):
    """A norm and dropout behind it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        return nn.functional.dropout(self.norm(x), 0.1)


def line_of(fn, text: str) -> int:
    """The number of the line of `fn` that has `text`."""
    code = fn.__code__
    with open(code.co_filename) as file:
        lines = file.readlines()
    return next(n for n, line in enumerate(lines, 1) if n >= code.co_firstlineno and text in line)
