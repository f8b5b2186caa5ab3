"""What machine code for NVIDIA's GPUs says of itself: registers, stack, how often in a row it waits for memory. No GPU is asked, nothing is run."""
from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

# -- ELF files -------------------------------------------------------------------------------------------------------------
_REGISTERS, _STACK = 0x2f, 0x11          # attributes in a cubin's section .nv.info: (function, count) each
_EXECUTABLE = 4         # of a section of an ELF file


def resources(code: bytes, entry: str, listing: str = "") -> tuple[int, int]:
    """(registers, bytes of stack) a thread of the kernel `entry` in an ELF file for NVIDIA, or as an AMD listing says; (0, 0) where neither does."""
    amd = [re.search(rf"\.{word}:\s+(\d+)", listing) for word in ("vgpr_count", "private_segment_fixed_size")]
    if all(amd):
        return int(amd[0][1]), int(amd[1][1])
    try:
        sections = _sections(code)
        symbols, names = sections[".symtab"], sections[".strtab"]
        numbers = [i for i in range(len(symbols) // 24) if _string(names, struct.unpack_from("<I", symbols, 24 * i)[0]) == entry]
        found = _attributes(sections[".nv.info"], numbers[0])
        return found[_REGISTERS], found[_STACK]
    except (struct.error, KeyError, IndexError, ValueError):
        return 0, 0


def _sections(code: bytes) -> dict[str, bytes]:
    """Contents by name of the sections of a 64-bit ELF file."""
    start, = struct.unpack_from("<Q", code, 40)
    size, count, naming = struct.unpack_from("<3H", code, 58)
    headers = [struct.unpack_from("<2I4Q", code, start + i * size) for i in range(count)]
    held = [b"" if h[1] == 8 else code[h[4]:h[4] + h[5]] for h in headers]         # 8: the section takes no room in the file
    return {_string(held[naming], h[0]): content for h, content in zip(headers, held)}


def _string(table: bytes, offset: int) -> str:
    return table[offset:table.index(b"\0", offset)].decode()


def _attributes(info: bytes, symbol: int) -> dict[int, int]:
    """Attribute -> value of the function with that symbol number. Entries: format, attribute, and by the format a size (4) or a value beside them."""
    found, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<2BH", info, at)
        if form == 4 and size == 8:
            function, value = struct.unpack_from("<2I", info, at + 4)
            if function == symbol:
                found[attribute] = value
        at += 4 + (size if form == 4 else 0)
    return found


def _texts(code: bytes) -> Iterator[bytes]:
    """The machine code of each function of an ELF file."""
    start, = struct.unpack_from("<Q", code, 40)
    size, count, _ = struct.unpack_from("<3H", code, 58)
    for at in range(start, start + size * count, size):
        _, _, flags, _, begin, length = struct.unpack_from("<2I4Q", code, at)
        if flags & _EXECUTABLE:
            yield code[begin:begin + length]


# -- instructions (sm_90: 16 bytes each) ---------------------------------------------------------------------------------------
_LOAD, _COPY = 0x981, 0xDAE             # global memory -> registers; -> shared memory, with an address of the form that is misplaced
_COPIES = _COPY, 0xFAE                  # global memory -> shared memory, while the warp goes on
_LOCAL = 0x983, 0x387, 0x987            # a thread's stack
_SHARED = 0x984, 0x388, 0x988           # shared memory
_BRANCH = 0x947
_SLOWLY = 24            # instructions of a loop at least: that of a large angle's sine has 13, no kernel's own fewer than 40
_WIDTHS = 1, 1, 2, 2, 4, 8, 16, 16      # bytes of what is read or written
_ROW = 4                # of them of a thread, for which a warp goes to all banks of shared memory once
_MEMORY, _OTHER = 700, 30               # cycles until what memory answers, and what else takes longer than an instruction, is there


@dataclass(frozen=True)
class Waits:
    """Of one warp that runs through a kernel's code once from its beginning to its end, as if no branch were taken and no other warp were there:
    `cycles` it takes, how often in a row (`rounds`) it waits for what it reads of global memory, and how many `bytes` a thread reads into
    registers; how many instructions are `issued`; bytes of its stack that a thread reads and writes (`local`); how often the warp goes to all banks
    of `shared` memory; how many `copies` into that go on beside it. `again`: what of these lies in innermost loops, which each further turn takes."""
    cycles: int
    rounds: int
    bytes: int
    issued: int = 0
    local: int = 0
    shared: int = 0
    copies: int = 0
    again: Waits | None = None

    def contended(self, all_of_it: float, again: float) -> Waits:
        """The same where the warp goes so many times as often to the banks of shared memory, in all and in innermost loops (`gpu_access`)."""
        loops = replace(self.again, shared=round(self.again.shared * again)) if self.again is not None else None
        return replace(self, shared=round(self.shared * all_of_it), again=loops)

    @classmethod
    def read(cls, values: Sequence) -> Waits:
        """Of what `astuple` makes, also once it was JSON."""
        *own, again = values
        return cls(*own, again=cls.read(again) if again is not None else None)


def misplaced(code: bytes) -> bool:
    """Are there asynchronous copies in machine code (sm_90) of the form in which the assembler names other registers than it fills? The GPU stops
    at one that has a policy."""
    return any(int.from_bytes(text[i:i + 2], "little") & 0xFFF == _COPY for text in _texts(code) for i in range(0, len(text), 16))


def waits(code: bytes) -> Waits:
    """The longest function's. Every instruction says how many cycles follow it, which of six counters its result frees, and which it waits for."""
    return max((_waits(text) for text in _texts(code)), key=lambda w: w.cycles, default=Waits(0, 0, 0))


def _waits(text: bytes) -> Waits:
    now, rounds, due, memory, upto = 0, 0, [0] * 6, [False] * 6, [(0,) * 7]          # before each instruction
    read = issued = local = shared = copies = 0
    for low, high in struct.iter_unpack("<2Q", text[:len(text) // 16 * 16]):
        kind, width = low & 0xFFF, _WIDTHS[high >> 9 & 7]
        pause, frees, needs = high >> 41 & 15, high >> 46 & 7, high >> 52 & 63
        for i in range(6):
            if needs >> i & 1 and due[i] > now:
                rounds += memory[i] and due[i] - now > _MEMORY // 2
                now = due[i]
        load = kind == _LOAD
        read += width if load else 0
        local += width if kind in _LOCAL else 0
        shared += max(1, width // _ROW) if kind in _SHARED else 0
        copies += kind in _COPIES
        issued += 1
        then = now + (_MEMORY if load else _OTHER)
        if frees < 6 and then > due[frees]:
            due[frees], memory[frees] = then, load
        now += max(pause, 1)
        upto.append((now, rounds, read, issued, local, shared, copies))
    turns = _innermost(text)
    again = (sum(upto[last + 1][n] - upto[first][n] for first, last in turns) for n in range(len(upto[0])))
    return Waits(*upto[-1], again=Waits(*again))


def _innermost(text: bytes) -> list[tuple[int, int]]:
    """The loops that have no other one inside: (first, last) instruction; but those of fewer than _SLOWLY are of functions, on ways that are seldom
    taken. A branch says how many quarters of an instruction it goes from the next one: 8 bits from bit 16 on, the higher 48 from bit 34 on."""
    found = []
    for at, (low, high) in enumerate(struct.iter_unpack("<2Q", text[:len(text) // 16 * 16])):
        if low & 0xFFF == _BRANCH:
            far = (low >> 34 | (high & 0x3FFFF) << 30) << 8 | low >> 16 & 0xFF
            to = at + 1 + (far - (far >> 55 << 56)) // 4
            if 0 <= to <= at - _SLOWLY:
                found.append((to, at))
    return [x for x in found if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in found)]


def resident(registers: int, warps: int, shared: int) -> int:
    """Programs that a multiprocessor of sm_90 holds at once, of so many `warps`, `registers` a thread and bytes of `shared` memory."""
    each = -(-max(registers, 1) // 8) * 8 * 32 * warps
    return min(65536 // each, 233472 // (shared + 1024), 64 // warps, 32)
