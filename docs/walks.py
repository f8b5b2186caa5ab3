"""The pages of this folder run: what they show is what their code prints.

    python -m docs.walks [PAGE ...]        runs the pages and writes into each what it printed, and its plots

A page's Python blocks run in order in one namespace. A block's output stands in the fence behind it, which says how it is compared with what is
printed elsewhere, as the tests do:

    ```text                     word for word
    ```text numbers             but for numbers, and units behind them
    ```text measured A B        it depends on the machine: lines begin with A and with B here and there
"""
from __future__ import annotations

import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
PAGES = ("why_is_my_step_slow.md", "a_new_normalisation.md", "from_linear_to_fused_mlp.md")
FENCE = re.compile(r"^```(python|text)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?( ?(ms|us|ns|s|B|KiB|MiB|GiB|TiB|k|M|G|T)\b)?%?")


@dataclass(frozen=True)
class Block:
    """Python of a page from line `line` on. `shown`: the output that stands behind it, compared as `kind` says with the labels in `words`; `span`:
    where that stands in the page, None where there is none."""
    line: int
    text: str
    kind: str = ""
    words: tuple[str, ...] = ()
    shown: str = ""
    span: tuple[int, int] | None = None


def blocks(page: str) -> list[Block]:
    """The blocks of the page with this text."""
    found: list[Block] = []
    for m in FENCE.finditer(page):
        if m[1] == "python":
            found.append(Block(page.count("\n", 0, m.start(3)) + 1, m[3]))
        else:
            kind, *words = m[2].split() or ["exact"]
            found[-1] = Block(found[-1].line, found[-1].text, kind, tuple(words), m[3], (m.start(3), m.end(3)))
    return found


def run(name: str) -> list[tuple[Block, str]]:
    """The blocks of the page of this name, with what each prints."""
    path = FOLDER / name
    namespace: dict = {"__name__": "walk"}
    torch._dynamo.reset()
    torch.manual_seed(0)
    found = []
    for b in blocks(path.read_text()):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * (b.line - 1) + b.text, str(path), "exec"), namespace)
        text = printed.getvalue().strip("\n").replace(f"{FOLDER}/", "")
        found.append((b, "".join(f"{line.rstrip()}\n" for line in text.splitlines())))
    return found


def difference(block: Block, printed: str) -> str:
    """How `printed` is not what the page shows, or ''."""
    if block.kind == "measured":
        missing = [w for w in block.words for text in (block.shown, printed) if not re.search(rf"^\s*{re.escape(w)}\b", text, re.MULTILINE)]
        return f"no line begins with {', '.join(missing)}" if missing else "" if bool(printed) == bool(block.shown) else "nothing is printed"
    shown, found = (plain(text) if block.kind == "numbers" else text for text in (block.shown, printed))
    return "" if shown == found else f"the page shows\n{shown}\nand it prints\n{found}"


def plain(text: str) -> str:
    """A text without its numbers, and without the spaces that depend on how long these are."""
    return "\n".join(" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines())


def write(name: str) -> None:
    """Runs a page and puts what it printed into it."""
    page = (FOLDER / name).read_text()
    for block, printed in reversed(run(name)):
        if block.span is not None:
            page = page[:block.span[0]] + printed + page[block.span[1]:]
    (FOLDER / name).write_text(page)


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        write(Path(name).name)
        print(f"{name}: written", file=sys.stderr)
