"""One boxed function for all sizes, of programs that are for some: a call of other sizes has a further program made, and later calls find it.

The first program's function is the entry. It looks at the sizes itself, and hands a call that it is not for to `Classes.other`, so that a program
that meets one class of sizes alone costs a comparison or two a call.
"""
from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping

Boxed = Callable[[list], list]
MOST = 32               # programs for classes; what comes then gets the one that is for all sizes


class Classes:
    """`make(sizes, other)`: (condition, function) for the class of `sizes`, or for all sizes where they are None; a condition is text over the names
    of inputs, and the function hands calls of other sizes to `other`. `inputs`: the names of the arguments in order."""

    def __init__(self, inputs: tuple[str, ...], make: Callable[[Mapping[str, int] | None, Boxed], tuple[str, Boxed]]):
        self.inputs, self.make = inputs, make
        self.made: tuple[tuple[Callable[[list], bool], Boxed], ...] = ()       # the one that was asked for last is first
        self.lock = threading.RLock()

    def enter(self, condition: str, fn: Boxed) -> Boxed:
        """Takes a program in."""
        holds = eval(f"lambda args: {self._indexed(condition)}") if condition else lambda args: True
        self.made = ((holds, fn), *self.made)
        return fn

    def other(self, args: list) -> list:
        """The result of the program that the sizes in `args` are for."""
        fn = self._found(args)
        if fn is None:
            with self.lock:
                fn = self._found(args) or self._new(args)
        return fn(args)

    def boxed(self) -> Boxed:
        """`other` as a function that may be the entry."""
        def run(args: list) -> list:
            return self.other(args)
        run._boxed_call = True
        return run

    def _found(self, args: list) -> Boxed | None:
        made = self.made
        for n, (holds, fn) in enumerate(made):
            if holds(args):
                if n:
                    with self.lock:
                        self.made = ((holds, fn), *(x for x in self.made if x[1] is not fn))
                return fn
        return None

    def _new(self, args: list) -> Boxed:
        sizes = {name: n for name, n in zip(self.inputs, args) if type(n) is int} if len(self.made) < MOST else None
        return self.enter(*self.make(sizes, self.other))

    def _indexed(self, condition: str) -> str:
        """`condition` over args[0], args[1], ..."""
        names = {name: f"args[{n}]" for n, name in enumerate(self.inputs)}
        return re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m[0], m[0]), condition)
