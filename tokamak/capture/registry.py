"""The operator tables' registry: aten overload -> builder.

A builder is a function `fn(b, *args, **kwargs)` that returns a Tensor (or a tuple of Tensors / None, as the operator does) with the operator's
result computed in the compute type; the driver in `fx` casts it to the traced type (implicitly: an operation's own rounding) and gives it the
traced strides. `b` is the `builder.Builder`. Arguments: Tensor for tensors; int, or Index where symbolic; float, bool, str as they are, or an Expr
(Scalar) where the host passes the number; lists of these. A builder raises `NotCompiled(reason)` for a variant that it does not hold: the call is
then opaque.
"""
from __future__ import annotations

from typing import Callable


NO_KERNEL = "no kernel for this operator, torch runs it (docs/operators.md)"            # the reason beside a call of what has no entry here


class NotCompiled(Exception):
    """Torch runs this variant of the operator; the message is the reason in the record."""


TABLE: dict[object, Callable] = {}
# overload that torch runs -> what it computes: `fn(b, *args, **kwargs)` gives a Tensor, or None for a variant
MEANINGS: dict[object, Callable] = {}

MATRICES: dict[object, tuple] = {}           # overload that multiplies two matrices -> positions of a vector that is added (or None), and of the two
# overload of (added vector, left, right), or of (left, right) where one is added behind -> the library's own
ACTIVATED: dict[object, tuple] = {}
#                                             of the three with an activation behind; the same of
#                                             another shape, a further argument; of each activation: Expr -> Expr, the keywords that ask for it, and
#                                             whether it would be another one behind the product's rounding
ACTIVATED_ON_CPU: dict[object, tuple] = {}  # the same on CPUs
ALONE: dict[object, tuple] = {}             # overload of a product and what is added to it -> that of the product alone, positions of its arguments
# overload of a product of batches, (left, right) -> a function of (left, right, values, scale) that gives softmax(scale * left right) values
ATTENDED: dict[object, object] = {}
# overload of (left, right) -> a function of (value, left, right) that gives their sum in the value's shape
ADDED: dict[object, object] = {}
INTO: dict[object, object] = {}             # such a function -> the same that takes the value's memory


def register(*overloads):
    """Decorator: the function builds each of these aten overloads."""
    return _entry(TABLE, overloads)


def means(*overloads):
    """Decorator: the function says what a call of these overloads computes, which stays a call of torch until the planner makes a kernel of it."""
    return _entry(MEANINGS, overloads)


def _entry(table: dict, overloads):
    def add(fn):
        for o in overloads:
            if o in table:
                raise ValueError(f"{o} has two entries")
            table[o] = fn
        return fn
    return add
