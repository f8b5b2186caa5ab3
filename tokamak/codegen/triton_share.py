"""Device functions of programs that share a row, neighbours of one cluster (NVIDIA from sm_90 on); front: `triton_lib`.

What they fold of it they exchange through shared memory: each writes its values into slots of all of them, and a barrier of the cluster stands
between that and reading. An exchange has slots of its own and happens once, so nothing is written twice. The first waits for the `arrive` of all:
until then a neighbour, and its memory, may not be there. In a loop values are swapped: what is sent counts itself in at a barrier in the receiver's
memory, of which there are two, for even and odd turns, and nobody waits until what it stored elsewhere has arrived. In the interpreter, which has no
threads, the exchange is `gpu_interpret`'s.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import INTERPRETED, from_bf16

MOST = 16           # programs of a cluster


@triton.jit
def again(x):
    """x, of 16 or 32 bits, as if it were new: what was computed from it before is not kept in registers, of 16 bits of twice its width, but computed
    again."""
    if INTERPRETED or x.numel == 1:         # one element: nothing to hold, nor two for a register
        return x
    elif x.dtype.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def packed(x):
    """x, of 16 bits, two to a register: what is loaded one by one would have a register each, and a plain copy is seen through. (The grid is x, 1,
    1.)"""
    if INTERPRETED or x.numel == 1:
        return x
    else:
        return tl.inline_asm_elementwise("{ .reg .b32 t; mov.u32 t, %nctaid.y; sub.u32 t, t, 1; xor.b32 $0, $1, t; }", "=r,r", [x], dtype=x.dtype,
                                         is_pure=False, pack=2)


@triton.jit
def widened(x):
    """x, bf16 of which a register holds two, as f32: an operation each. (The upper one is moved down and up again otherwise.)"""
    if INTERPRETED or x.numel == 1:
        return from_bf16(x)
    else:
        return tl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def arrive():
    """Says that this program is there. (It does not wait.)"""
    if not INTERPRETED:
        tl.inline_asm_elementwise("barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _exchange(bits, sharers, first):
    """Assembly that hands values of so many `bits` each to every program, and reads those of the program that the operand behind them numbers."""
    n = len(bits)
    lines = [f".shared .align 8 .b{b} slots{i}[{MOST}];" for i, b in enumerate(bits)]
    lines += [".reg .b32 rank, here, there, t; .reg .pred sends;", "mov.u32 t, %tid.x;", f"setp.lt.u32 sends, t, {sharers};",
              "mov.u32 rank, %cluster_ctarank;", "barrier.cluster.wait.acquire.aligned;" if first else ""]
    for i, b in enumerate(bits):
        lines += [f"mov.u32 here, slots{i};", f"mad.lo.u32 there, rank, {b // 8}, here;", "@sends mapa.shared::cluster.u32 there, there, t;",
                  f"@sends st.shared::cluster.b{b} [there], ${n + i};"]
    lines += ["barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"]
    for i, b in enumerate(bits):
        lines += [f"mov.u32 here, slots{i};", f"mad.lo.u32 here, ${2 * n}, {b // 8}, here;", f"ld.shared.b{b} ${i}, [here];"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _constraints(bits):
    kinds = ["l" if b == 64 else "r" for b in bits]
    return ",".join([f"=&{k}" for k in kinds] + kinds + ["r"])


@triton.jit
def exchange1(a, lanes, sharers: tl.constexpr, first: tl.constexpr):
    """The single numbers `a` (i32, f32, i64) of all programs of the cluster, by lane: `lanes` counts to the power of two that holds `sharers`.
    `first`: it is the kernel's first exchange."""
    bits: tl.constexpr = (a.dtype.primitive_bitwidth,)
    return tl.inline_asm_elementwise(_exchange(bits, sharers, first), _constraints(bits), [a, lanes], dtype=a.dtype, is_pure=False, pack=1)


@triton.jit
def exchange2(a, b, lanes, sharers: tl.constexpr, first: tl.constexpr):
    """`exchange1` of two numbers at once."""
    bits: tl.constexpr = (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth)
    return tl.inline_asm_elementwise(_exchange(bits, sharers, first), _constraints(bits), [a, b, lanes], dtype=(a.dtype, b.dtype),
                                     is_pure=False, pack=1)


@triton.jit
def exchange3(a, b, c, lanes, sharers: tl.constexpr, first: tl.constexpr):
    """`exchange1` of three numbers at once."""
    bits: tl.constexpr = (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth, c.dtype.primitive_bitwidth)
    return tl.inline_asm_elementwise(_exchange(bits, sharers, first), _constraints(bits), [a, b, c, lanes], dtype=(a.dtype, b.dtype, c.dtype),
                                     is_pure=False, pack=1)


@triton.jit
def exchange4(a, b, c, d, lanes, sharers: tl.constexpr, first: tl.constexpr):
    """`exchange1` of four numbers at once."""
    bits: tl.constexpr = (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth, c.dtype.primitive_bitwidth, d.dtype.primitive_bitwidth)
    return tl.inline_asm_elementwise(_exchange(bits, sharers, first), _constraints(bits), [a, b, c, d, lanes],
                                     dtype=(a.dtype, b.dtype, c.dtype, d.dtype), is_pure=False, pack=1)


# -- exchanges of several numbers each ---------------------------------------------------------------------------------------
@triton.constexpr_function
def _room(size):
    return f".shared .align 16 .b8 tk_shared[{size}]; mov.u32 $0, 0;"


@triton.jit
def room(size: tl.constexpr):
    """Once, at first: so many bytes in which runs of numbers are shared."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(_room(size), "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _hand(bits, many, at):
    """Assembly that hands a number to one of the programs: of `many` for each, the one that the operand behind it numbers among those of all."""
    size = bits // 8
    return " ".join(["{ .reg .b32 rank, there, who, t;", "mov.u32 rank, %cluster_ctarank;", f"div.u32 who, $2, {many};", f"rem.u32 t, $2, {many};",
                     f"mad.lo.u32 t, rank, {many}, t;", "mov.u32 there, tk_shared;", f"mad.lo.u32 there, t, {size}, there;",
                     f"add.u32 there, there, {at};", "mapa.shared::cluster.u32 there, there, who;", f"st.shared::cluster.b{bits} [there], $1;",
                     "mov.u32 $0, 0; }"])


@triton.constexpr_function
def _took(bits, at):
    size = bits // 8
    return f"{{ .reg .b32 here; mov.u32 here, tk_shared; mad.lo.u32 here, $1, {size}, here; ld.shared.b{bits} $0, [here+{at}]; }}"


@triton.constexpr_function
def _kind(bits):
    return "l" if bits == 64 else "r"


@triton.jit
def _handed(x, sharers: tl.constexpr, at: tl.constexpr):
    """The numbers `x` on their way to every program, from byte `at` of the room on."""
    many: tl.constexpr = x.shape[0]
    bits: tl.constexpr = x.dtype.primitive_bitwidth
    all_of_them = tl.reshape(tl.broadcast_to(x[None, :], [sharers, many]), [sharers * many])
    tl.inline_asm_elementwise(_hand(bits, many, at), "=r," + _kind(bits) + ",r", [all_of_them, tl.arange(0, sharers * many)], dtype=tl.int32,
                              is_pure=False, pack=1)


@triton.jit
def _taken(x, sharers: tl.constexpr, at: tl.constexpr):
    """What all programs have handed out in place of `x`: a row each."""
    many: tl.constexpr = x.shape[0]
    bits: tl.constexpr = x.dtype.primitive_bitwidth
    found = tl.inline_asm_elementwise(_took(bits, at), "=" + _kind(bits) + ",r", [tl.arange(0, sharers * many)], dtype=x.dtype, is_pure=False, pack=1)
    return tl.reshape(found, [sharers, many])


@triton.jit
def _joined(first: tl.constexpr):
    if first:
        tl.inline_asm_elementwise("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _crossed():
    tl.inline_asm_elementwise("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [],
                              dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def share1(a, sharers: tl.constexpr, at: tl.constexpr, first: tl.constexpr):
    """The runs of numbers `a` (i32, f32, i64) of all programs of the cluster, a row each, by way of the room from byte `at` on. `first`: it is the
    kernel's first exchange."""
    _joined(first)
    _handed(a, sharers, at)
    _crossed()
    return _taken(a, sharers, at)


@triton.jit
def share2(a, b, sharers: tl.constexpr, at: tl.constexpr, first: tl.constexpr):
    """`share1` of two runs at once."""
    step: tl.constexpr = sharers * a.shape[0] * 8
    _joined(first)
    _handed(a, sharers, at)
    _handed(b, sharers, at + step)
    _crossed()
    return _taken(a, sharers, at), _taken(b, sharers, at + step)


@triton.jit
def share3(a, b, c, sharers: tl.constexpr, at: tl.constexpr, first: tl.constexpr):
    """`share1` of three runs at once."""
    step: tl.constexpr = sharers * a.shape[0] * 8
    _joined(first)
    _handed(a, sharers, at)
    _handed(b, sharers, at + step)
    _handed(c, sharers, at + 2 * step)
    _crossed()
    return _taken(a, sharers, at), _taken(b, sharers, at + step), _taken(c, sharers, at + 2 * step)


@triton.jit
def share4(a, b, c, d, sharers: tl.constexpr, at: tl.constexpr, first: tl.constexpr):
    """`share1` of four runs at once."""
    step: tl.constexpr = sharers * a.shape[0] * 8
    _joined(first)
    _handed(a, sharers, at)
    _handed(b, sharers, at + step)
    _handed(c, sharers, at + 2 * step)
    _handed(d, sharers, at + 3 * step)
    _crossed()
    return _taken(a, sharers, at), _taken(b, sharers, at + step), _taken(c, sharers, at + 2 * step), _taken(d, sharers, at + 3 * step)


# -- sums of tiles ------------------------------------------------------------------------------------------------------------
@triton.constexpr_function
def _sends_part(at, part):
    """Assembly that hands the number $1 to program $2 of the cluster, to place $3 of its slot for this program."""
    return " ".join(["{ .reg .b32 rank, there;", "mov.u32 rank, %cluster_ctarank;", "mov.u32 there, tk_shared;",
                     f"mad.lo.u32 there, rank, {part}, there;", "mad.lo.u32 there, $3, 4, there;", f"add.u32 there, there, {at};",
                     "mapa.shared::cluster.u32 there, there, $2;", "st.shared::cluster.b32 [there], $1;", "mov.u32 $0, 0; }"])


@triton.constexpr_function
def _adds_parts(sharers, at, part):
    """Assembly that adds up what all programs have handed to place $1, in their order."""
    lines = ["{ .reg .b32 here; .reg .f32 t;", "mov.u32 here, tk_shared;", "mad.lo.u32 here, $1, 4, here;", f"ld.shared.f32 $0, [here+{at}];"]
    for n in range(1, sharers):
        lines += [f"ld.shared.f32 t, [here+{at + n * part}];", "add.f32 $0, $0, t;"]
    return " ".join(lines) + " }"


@triton.jit
def summed_part(x, sharers: tl.constexpr, at: tl.constexpr, step: tl.constexpr, first: tl.constexpr):
    """Of the sum of the tiles `x` [m, n] (f32) of all programs of the cluster, in their order, the m / sharers rows that are this program's: by way
    of the room from byte `at` on, rows `step` numbers apart. `first`: it is the kernel's first exchange."""
    m: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    rows: tl.constexpr = m // sharers
    part: tl.constexpr = rows * step * 4
    _joined(first)
    row = tl.broadcast_to(tl.arange(0, m)[:, None], [m, n])
    place = (tl.arange(0, m) % rows * step)[:, None] + tl.arange(0, n)[None, :]
    tl.inline_asm_elementwise(_sends_part(at, part), "=r,r,r,r", [x, row // rows, place], dtype=tl.int32, is_pure=False, pack=1)
    _crossed()
    mine = (tl.arange(0, rows) * step)[:, None] + tl.arange(0, n)[None, :]
    return tl.inline_asm_elementwise(_adds_parts(sharers, at, part), "=f,r", [mine], dtype=tl.float32, is_pure=False, pack=1)


# -- exchanges in a loop -----------------------------------------------------------------------------------------------------
ROOM = 2 * 8 + 2 * 4 * MOST * 8         # bytes of a swap: two barriers, and for each of two turns slots of four values


@triton.constexpr_function
def _met(swaps):
    lines = [f".shared .align 16 .b8 tk_room[{swaps * ROOM}];", "{ .reg .b32 t; .reg .pred leads;", "mov.u32 t, %tid.x;", "setp.eq.u32 leads, t, 0;"]
    for n in range(swaps):
        lines += [f"@leads mbarrier.init.shared::cta.b64 [tk_room+{n * ROOM}], 1;",
                  f"@leads mbarrier.init.shared::cta.b64 [tk_room+{n * ROOM + 8}], 1;"]
    return " ".join(lines + ["@leads fence.mbarrier_init.release.cluster;", "barrier.cluster.arrive.release.aligned;",
                             "barrier.cluster.wait.acquire.aligned;", "mov.u32 $0, 0; }"])


@triton.jit
def meet(swaps: tl.constexpr):
    """Once, before a loop with so many `swap`s: makes room for them, and waits until all programs of the cluster have."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(_met(swaps), "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _swap(bits, sharers, number):
    """Assembly of swap `number`: hands values to every program and waits for those of all. All threads have read those of the turn before last when
    the first sends again: between lies a barrier of the program."""
    n, size = len(bits), sum(bits) // 8
    lines = ["{ .reg .b32 t, rank, turn, phase, room, bar, here, there; .reg .pred sends, leads, done;", "mov.u32 t, %tid.x;",
             f"setp.lt.u32 sends, t, {sharers};", "setp.eq.u32 leads, t, 0;", "mov.u32 rank, %cluster_ctarank;", f"and.b32 turn, ${2 * n + 1}, 1;",
             f"shr.u32 phase, ${2 * n + 1}, 1;", "and.b32 phase, phase, 1;", "mov.u32 room, tk_room;", f"add.u32 room, room, {number * ROOM};",
             "mad.lo.u32 bar, turn, 8, room;", f"mad.lo.u32 room, turn, {4 * MOST * 8}, room;", "bar.sync 0;",
             f"@leads mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {size * sharers};"]
    for i, b in enumerate(bits):
        lines += [f"mad.lo.u32 here, rank, {b // 8}, room;", f"add.u32 here, here, {16 + i * MOST * 8};",
                  "@sends mapa.shared::cluster.u32 here, here, t;",
                  "@sends mapa.shared::cluster.u32 there, bar, t;",
                  f"@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.b{b} [here], ${n + i}, [there];"]
    lines += ["again:", "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [bar], phase;", "@!done bra again;"]
    for i, b in enumerate(bits):
        lines += [f"mad.lo.u32 here, ${2 * n}, {b // 8}, room;", f"ld.shared.b{b} ${i}, [here+{16 + i * MOST * 8}];"]
    return " ".join(lines) + " }"


@triton.constexpr_function
def _swap_constraints(bits):
    return _constraints(bits) + ",r"


@triton.jit
def swap1(a, lanes, turn, sharers: tl.constexpr, number: tl.constexpr):
    """As `exchange1`, in a loop that `turn` counts, from 0 on; the `number`th of the loop's."""
    bits: tl.constexpr = (a.dtype.primitive_bitwidth,)
    return tl.inline_asm_elementwise(_swap(bits, sharers, number), _swap_constraints(bits), [a, lanes, turn], dtype=a.dtype, is_pure=False, pack=1)


@triton.jit
def swap2(a, b, lanes, turn, sharers: tl.constexpr, number: tl.constexpr):
    """`swap1` of two numbers at once."""
    bits: tl.constexpr = (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth)
    return tl.inline_asm_elementwise(_swap(bits, sharers, number), _swap_constraints(bits), [a, b, lanes, turn], dtype=(a.dtype, b.dtype),
                                     is_pure=False, pack=1)


@triton.jit
def swap3(a, b, c, lanes, turn, sharers: tl.constexpr, number: tl.constexpr):
    """`swap1` of three numbers at once."""
    bits: tl.constexpr = (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth, c.dtype.primitive_bitwidth)
    return tl.inline_asm_elementwise(_swap(bits, sharers, number), _swap_constraints(bits), [a, b, c, lanes, turn], dtype=(a.dtype, b.dtype, c.dtype),
                                     is_pure=False, pack=1)


@triton.jit
def swap4(a, b, c, d, lanes, turn, sharers: tl.constexpr, number: tl.constexpr):
    """`swap1` of four numbers at once."""
    bits: tl.constexpr = (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth, c.dtype.primitive_bitwidth, d.dtype.primitive_bitwidth)
    return tl.inline_asm_elementwise(_swap(bits, sharers, number), _swap_constraints(bits), [a, b, c, d, lanes, turn],
                                     dtype=(a.dtype, b.dtype, c.dtype, d.dtype), is_pure=False, pack=1)
