"""Groups of a plan can run in some order, however long the chains are that lie between them."""
import torch

import tokamak


def test_gradients_of_a_long_recurrence_have_an_order():
    """Sums of 64 steps' gradients are several groups by size alone: one of them may reach far behind what it begins with."""
    def recurrence(decay, x):
        h, out = torch.zeros(x.shape[0], x.shape[2]), []
        for t in range(x.shape[1]):
            h = decay * h + x[:, t]
            out.append(h)
        return torch.stack(out, 1)
    g = torch.Generator().manual_seed(0)
    inputs = torch.rand(16, generator=g), torch.randn(8, 64, 16, generator=g)
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    torch._dynamo.reset()
    tokamak.compile(recurrence, strict=True)(*mine).sum().backward()
    recurrence(*theirs).sum().backward()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a.grad, b.grad)
