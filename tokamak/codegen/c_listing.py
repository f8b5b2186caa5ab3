"""A kernel's C for people to read: the statements that are built, in one plain loop nest.

Left out are the vocabulary, the sharing of iterations among threads, and the second copy of each vector loop for its ragged end;
`c.render` has it all.
"""
from __future__ import annotations

from ..ir.dtype import F32
from .c import Printer
from .c_loop import loops_of, statements_of, wide_prefixes
from .c_partial import stored_type
from .kernel import BLOCK, Fetch, Kernel, Loop, Param, Partial, Phase, Refill, Write

_COLUMN = 64        # where comments begin
_MARK = "\0"         # between a line and its comment, until its indentation is known


def listing(kernel: Kernel, comments: dict[str, str]) -> str:
    """The loop nests of `kernel`; `comments`: parameter or register -> what it is."""
    return _Listing(kernel, comments).text()


class _Listing(Printer):
    def __init__(self, kernel: Kernel, comments: dict[str, str]):
        super().__init__(kernel, "")
        self.comments = comments

    def text(self) -> str:
        written = {s.memory for p in self.k.phases for s in statements_of((*p.once, *p.body)) if isinstance(s, Write)}
        lines = [self._param(p, p.name in written) for p in self.k.params]
        for q in (q for p in self.k.phases for q in p.partials):
            self.partial_slot[q] = 2 * len(self.partial_slot)
        for n, p in enumerate(self.k.phases):
            lines += ["", *(("// when all threads are done with that:",) if n else ()), *self._phase_lines(p)]
        return "\n".join(map(_aligned, lines)) + "\n"

    def _param(self, p: Param, written: bool) -> str:
        what = self.comments.get(p.name, "")
        if p.kind == "memory":
            return _commented(f"{'' if written else 'const '}{p.dtype.c} *{p.name};", what)
        return f"{'double' if p.kind == 'float' else 'int64_t'} {p.name} = {what};"

    def _phase_lines(self, p: Phase) -> list[str]:
        self.buffers = {b.name: b for b in p.buffers}
        self.flushed |= {a for loop in loops_of((*p.once, *p.body)) for a in loop.flush}
        self.carried |= wide_prefixes((*p.once, *p.body))
        out = [_commented(f"{stored_type(b.dtype)} {b.name}[{self.index(b.size)}];", "a buffer of each thread") for b in p.buffers]
        out += [line for q in p.partials for line in self._partial_start(q)]
        out += [line for s in p.once for line in self._statement(s)]
        depth = 0
        heads = [f"for (int64_t {v} = 0; {v} < {self.index(extent)}; {v}++) {{" for v, extent in ((self.k.axes[a], e) for a, e in p.parallel)]
        if p.block:
            high = self.index(p.extent)
            heads.insert(len(heads) - p.inside, f"for (int64_t b0 = 0, b1; b0 < {high}; b0 += {p.block}) {{ b1 = tk_min(b0 + {p.block}, {high});")
        for head in heads:
            out.append("  " * depth + _commented(head, "in parallel"))
            depth += 1
        out += ["  " * depth + line for s in p.body for line in self._statement(s)]
        return out + ["  " * n + "}" for n in reversed(range(depth))]

    def _partial_start(self, q: Partial) -> list[str]:
        kept = "double" if q.monoid == "sum" and q.dtype is F32 else stored_type(q.dtype)
        return [_commented(f"{kept} {q.name}[{self.index(q.size)}];", f"one of the copies that threads fill, of a {q.monoid}")]

    copies = "copies"

    def _again(self, s: Refill) -> str:
        return f"!({' | '.join(self.k.axes[a] for a in s.axes)})"

    def _share(self, q: Partial, c: str, slot: int) -> str:
        return f"{q.name}{'i' if slot % 2 else ''}[z]"

    def _loop(self, loop: Loop) -> list[str]:
        v, step = self.k.axes[loop.axis], self.k.lanes if loop.vector else 1
        if loop.piece:
            return [self._piece(v, self.index(loop.low), self.index(loop.high), loop.piece), *self._block(loop.items), "}"]
        head = f"for (int64_t {v} = {self.index(loop.low)}; {v} < {self.index(loop.high)}; {v} {f'+= {step}' if step > 1 else '++'}) {{"
        said = [f"{step} elements at a time"] if loop.vector else []
        said += [f"{a.var} moves into f64 every {BLOCK} steps" for a in loop.flush]
        return [_commented(head.replace(" ++", "++"), "; ".join(said)), *self._block(loop.items), "}"]

    def _statement(self, s) -> list[str]:
        lines = super()._statement(s)
        if isinstance(s, (Loop, Refill)) or not lines:
            return lines
        named = [s.memory] if isinstance(s, Write) else [getattr(s, "var", "")] + [v for v in getattr(s, "vars", ()) if v]
        said = next((self.comments[n].split(": ")[0] for n in named if n in self.comments), "")
        if isinstance(s, Fetch):
            said = "an index from memory, checked and clamped"
        return [_commented(lines[0], said), *lines[1:]] if said else lines


def _commented(line: str, comment: str) -> str:
    return f"{line}{_MARK}{comment}" if comment else line


def _aligned(line: str) -> str:
    """A line whose comment, behind the mark, begins at the column."""
    code, mark, comment = line.partition(_MARK)
    return f"{code:<{_COLUMN - 2}}  // {comment}" if mark else code
