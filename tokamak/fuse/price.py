"""What contractions cost, in seconds, by the vendor's library and by kernels of ours: fitted once on what was measured of a machine."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..ir.dtype import F32
from ..ir.expr import loads
from ..ir.graph import Compute, Graph, Opaque, Result, is_pointwise, reads
from .beside import MOST, few_rows, is_small, together
from .contraction import LITTLE, PITCH, SIDE, TURNED, Contraction, product_type
from .cost import Hints, node_bytes
from .gradients import GRADIENTS, gradients, in_halves
from .reason import Reason
from .boxes import movable
from .products import PRODUCTS, TF32, fused, micro, ragged
from .sizes import runs_along
from .vendor import Own


@dataclass(frozen=True)
class Rates:
    """Of a machine; pairs are (bytes a second, seconds besides). `copy`, `products`: bytes and operations a second of large copies and the vendor's
    large products; `call`: what one of these takes besides; `step`: a kernel that does next to nothing. `vendor_rows`, `few_rows`, `one_row`: the
    weights where rows are few, by the vendor, by us; `wide`: bytes a second of those of so many columns that each multiprocessor has 64;
    `more_rows`: what rows from 17 to 32 cost us and save the vendor; `few_tiles`: what few tiles cost us besides; `unpacked`: elements of 8 bits or
    fewer a second that we multiply. `narrow_vendor`, `narrow`: narrow layers, a call each by the vendor and two in a kernel of ours, whose operations
    a second are `narrow_products`. `vendor_more`, `more`: as `vendor_rows` (of several the least) and `few_rows`, of 33 to 64 rows, where few columns
    cost `narrow_more` seconds besides if the depth is long. `far`: bytes a second of so many columns' weights of more than FAR bytes, however many
    multiprocessors have none at last; 0 where that was not measured. `means`, `attended`: weighted means by us and by the library, seconds
    (besides, a tile on each multiprocessor, an element of the weights, the same for each element of the width that is multiplied); `few_means`: of
    few rows by us the keys and values at least. `bytes`: of a factor's element; `tile`: columns of a program where those that have none count, of
    `processors`, 0 where they do not."""
    copy: float
    products: float
    call: float
    step: float
    vendor_rows: tuple[float, float]
    few_rows: tuple[float, float]
    one_row: tuple[float, float]
    wide: float
    more_rows: float
    few_tiles: float
    unpacked: float
    narrow_vendor: tuple[float, float]
    narrow: tuple[float, float]
    narrow_products: float
    vendor_more: tuple[tuple[float, float], ...]
    more: tuple[float, float]
    narrow_more: float
    bytes: int = 2
    tile: int = 0
    processors: int = 1
    far: float = 0.0
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    attended: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    few_means: tuple[float, float] = (1.0, 0.0)


# Triton's words for a machine -> its rates. H200, bf16, device time behind a flushed cache, us, ours against the vendor's calls and passes:
#   16 rows and a ReLU, 4096 to 4096: 13.4, 16.1; to 14336: 33.9, 37.9; to 11008: 29.4, 31.1; 14336 to 4096: 37.3, 40.9; 4096 to 1024: 7.0, 8.3
#   queries, keys and values, 4096 to 4096, 1024 and 1024: one row 16.4, 30.4; 16 rows 18.9, 30.9
#   64 rows and a ReLU, 1024 to 4096 6.2, 7.6; to 11008 10.6, 13.0; a residual, 1024 to 14336 13.2, 15.8; 4096 to 14336 38.8, 42.0; 4096 to 11008
#   32.9, 34.1; 11008 to 11008 71.8, 68.8; 14336 to 14336 112.6, 106.2; 14336 to 4096 41.3, 44.2; 14336 to 1024 16.8, 17.6; 4096 to 1024 9.4, 9.9;
#   both of a gate, 1024 to 14336 22.8, 27.6; since then 4096 to 1024 8.4, 9.8 to 10.0; 14336 to 1024 14.9, 17.3; 4096 to 4096 16.4, 16.8
#   32 rows and a ReLU, 4096 to 4096: 14.4, 15.2 to 16.0; GELU MLP of 1024 and 4096: 13.6, 15.8
#   since weights leave the cache first, 37 cases of the grid, ours and the vendor's: 16 rows and a residual, 4096 to 4096 12.1, 17.7; 14336 to 1024
#   12.8, 16.5; a GELU, 14336 to 4096 33.7, 40.6; 32 rows, 4096 to 4096 12.6, 17.5; 14336 to 11008 87.3, 94.1; 64 rows and a ReLU, 1024 to 4096 6.4,
#   7.6; 14336 to 4096 36.7, 40.3; 11008 to 11008 69.4, 71.1; a gate of two, 2 rows, 4096 to 4096 21.7, 31.6; 32 rows, 14336 to 4096 63.1, 74.8
#   one row and a ReLU, 4096 to 4096: 11.8, 16.6; to 14336: 32.4, 37.6; to 1024: 5.4, 7.6; GELU MLP of 1024 and 4096: 9.8, 14.8
#   int8 weights, 4096 to 4096: one row 9.4, 24.1; 16 rows 9.2, 24.4; a scale for each 128: 10.4, 10.5
#   int4 weights, 4096 to 4096: one row 9.1, 30.5; 16 rows 8.0, 31.1; a scale for each 128: 8.7, 9.2, the vendor's 66.5
#   weighted means, f16, heads x length x width: 2560 x 512 x 64 450, the library's attention 422; 256 x 4096 x 64 2392, 2252; 128 x 4096 x 128 2099,
#   1875; 120 x 512 x 64 30.2, 29.3; 320 x 256 x 32 18.6, 23.2; with torch's products and a pass between 1492, 4553, 83, 57 (all but the second)
#   of few rows, bf16, batches x heads of keys of length x width, an einsum by torch's products, keys copied for four heads each by these: 8 of
#   8192 x 128 14.9, 24.0, 90.6; 64 of 4096 x 128 41.7, 48.8, 317; 8 of 32768 x 128 41.8, 72.2, 329; 128 of 4096 x 128, a row each, 75.3, 78.2
#   two layers with a ReLU between, 64, 64 at 262144 rows: 20.5, 47.6; 128, 256 at 131072 rows: 48.4, 83.1; in training 149, 191 and 253, 277
RATES: dict[tuple, Rates] = {
    ("cuda", 90): Rates(copy=4.2e12, products=700e12, call=6e-6, step=1.8e-6, vendor_rows=(3.4e12, 6.2e-6), few_rows=(3.85e12, 3.6e-6),
                        one_row=(3.9e12, 3.1e-6), wide=3.95e12, more_rows=5e-7, few_tiles=1e-6, unpacked=3e12, narrow_vendor=(2.7e12, 2e-6),
                        narrow=(3.5e12, 2e-6), narrow_products=320e12, vendor_more=((3.4e12, 5.3e-6), (4.3e12, 11.6e-6)), more=(3.63e12, 4.1e-6),
                        narrow_more=2e-7, means=(8e-6, 1.1e-6, 1.08e-13, 6.64e-15), attended=(9e-6, 0.8e-6, 1.9e-13, 5.2e-15),
                        few_means=(3.9e12, 6.3e-6))}
# the same of f32 in TF32, us, 4, 32 and 64 rows, and what the vendor's calls and passes take: 1024 to 4096 8.5, 9.1, 10.7; 12.9, 11.8, 11.8;
#   4096 to 1024 9.8, 11.8, 12.6; 12.9, 13.6, 13.9; 1024 to 14336 22.2, 23.8, 23.5; 25.8, 28.2, 27.0; 14336 to 1024 23.3, 25.6, 28.6; 26.7, 27.4,
#   28.4; 4096 to 11008 54.8, 62.1, 60.2; 56.3, 58.6, 57.8; 14336 to 14336 209.9, 216.5, 226.7; 207.6, 227.9, 257.6
#   14336 to 11008, 16 and 32 rows, 157 and 165, the vendor's call with a bias, 32 rows, 192
#   one row: 14336 to 4096 60.8; 64.0; 1024 to 11008 14.3; 21.4; 11008 to 1024 14.8; 17.5
RATES_TF32: dict[tuple, Rates] = {
    ("cuda", 90): replace(RATES["cuda", 90], products=350e12, vendor_rows=(3.8e12, 7.6e-6), few_rows=(4.7e12, 5.5e-6), one_row=(4.1e12, 3.5e-6),
                          wide=4.7e12, more_rows=9e-7, few_tiles=5e-7, vendor_more=((3.42e12, 6.7e-6),), more=(4.32e12, 7.8e-6), narrow_more=0.0,
                          bytes=4, tile=64, far=4.1e12)}
WEIGHTS = 1 << 20       # elements of weights below which nothing was measured; of more than 32 rows four times as many: 64 rows of TF32, 1024 to 1024
                        # 13.0 us, the vendor 8.5
FAMILY = 1 << 16        # the same of several side by side, which take a launch where the vendor's take one each
TILES = 128 * SIDE      # columns below which programs share the depth of a tile
MEAN_ROWS = 128         # of a tile of weighted means
LONG = 2048             # depth from which on they do
FAR = 256 << 20         # bytes of weights from which on what multiprocessors without a tile lose at last counts for little
MANY = 96               # rows and columns from which on results are made in tiles of 128
WIDE = 64 * 132         # columns from which on each multiprocessor has a tile of 64
UNALIGNED = {1: 96e12, 2: 245e12, 4: 262e12}     # operations a second of the vendor's products of other rows, by the power of two that divides the
                        # extents, where the rate is 700e12: products of 4096 x 1024 x 50257 in 4.40 ms forward, 3.06 and 2.88 backward, 0.58, 0.53
                        # and 0.55 in whole words; x 30522: 1.04, 0.96, 1.09; 0.35, 0.32, 0.35
                        # x 50258 and x 50260: 1.60, x 50264: 0.56; 4096 x 4092 x 4096: 0.53, 4096 x 4096 x 4092: 0.49, x 4096: 0.17
LEAST = 0.93            # of the vendor's time: a kernel must promise more than estimates are off by


@dataclass(frozen=True, eq=False)
class Site:
    """A graph with its contractions; `fronts`: what each can take in that is computed in front of it; `pairs`: narrow
    ones, with those in front of them, see `contract.back_to_back`; `behind`: what the vendor makes behind some; `whole`: of those that are parts
    of one call (`packed`) the contraction that the vendor makes; `means`: weighted means, with what their weights are made of; `attended`:
    the scale between the products of those that the library makes."""
    graph: Graph
    found: dict[Opaque, Contraction]
    fronts: dict[Opaque, tuple[Compute, ...]]
    pairs: dict[Opaque, tuple[Opaque, bool]]
    behind: Mapping[Opaque, Own]
    whole: Mapping[Opaque, Contraction] = field(default_factory=dict)
    means: Mapping[Opaque, Opaque] = field(default_factory=dict)
    attended: Mapping[Opaque, float] = field(default_factory=dict)


def measured(target) -> bool:
    """Are prices of such a machine known? Elsewhere all contractions are the vendor's."""
    return target.arch[:2] in RATES


def unprofitable(site: Site, hints: Hints, target) -> dict[Opaque, Reason | None]:
    """Why each of the contractions is better left to the vendor; None where it is not."""
    if not measured(target):
        return {n: Reason("vendor", "not attempted", "no kernel was measured on such a machine") for n in site.found}
    rates = RATES[target.arch[:2]]
    paired, whole = {*site.means, *site.means.values()}, site
    site = replace(site, found={n: c for n, c in site.found.items() if n not in paired})
    reasons = {n: _alone(site, n, c, hints, rates_of(c, target)) for n, c in site.found.items()}
    for wide in (False, True):
        large = lambda c: (product_type(c) is F32) == wide and min(c.sizes(hints)[1:3]) > MANY
        many = {n: c for n, c in site.found.items() if large(c) and movable(c, hints, joined=True)}
        reasons.update(fused((TF32 if wide else PRODUCTS)[target.arch[:2]], target.threads, site.graph, many, site.behind, hints, site.whole))
    reasons.update((n, None) for n, c in site.found.items() if reasons[n] is not None and writes_any_row(c, target, hints))
    for calls in _families(site, hints):
        if any(reasons[n] is not None for n in calls) and _side_by_side(site, calls, hints, target):
            reasons.update(dict.fromkeys(calls))
    for last, (first, stored) in site.pairs.items():
        reasons[last] = reasons[first] = _narrow_layers(site.found[first], site.found[last], stored, hints, rates)
    for last, first in site.means.items():
        rates = rates_of(whole.found[last], target)
        reasons[first], reasons[last] = _weighted_mean(whole.found[first], whole.found[last], last in site.attended, hints, rates)
    sums = gradients(GRADIENTS[target.arch[:2]], site.graph, site.found, site.pairs, reasons, hints)
    for last, (first, _) in site.pairs.items():
        if reasons[last] is None and in_halves(site.found, first, last, sums, hints):
            reasons[last] = _behind_gradients(site.found[first], site.found[last], hints, RATES[target.arch[:2]])
    return reasons | sums


def rates_of(c: Contraction, target) -> Rates:
    """What is known of contractions of a type on a machine that was measured."""
    return replace((RATES_TF32 if product_type(c) is F32 else RATES)[target.arch[:2]], processors=target.threads)


def vendor_time(c: Contraction, hints: Hints, rates: Rates) -> float:
    """Seconds of the vendor's kernel."""
    b, m, n, k = c.sizes(hints)
    if b == 1 and min(m, n) <= TURNED:
        lines = rates.vendor_more if min(m, n) > LITTLE else (rates.vendor_rows,)
        return min(rates.bytes * k * max(m, n) / rate + besides for rate, besides in lines) - rates.more_rows * (SIDE < min(m, n) <= LITTLE)
    return max(2 * b * m * n * k / rates.products, rates.bytes * b * (m * k + k * n + m * n) / rates.copy) + rates.call


def writes_any_row(c: Contraction, target, hints: Hints) -> bool:
    """Are rows of the result such that the vendor's fast kernels do not write them, and a kernel of ours is faster than its others?"""
    b, m, n, k = c.sizes(hints)
    if product_type(c) is F32 or c.batch or min(m, n) <= MANY or not movable(c, hints, joined=True):
        return False
    if n % PITCH == 0 or hints.exactly(c.columns[0].extent) is None:
        return False
    return ragged(PRODUCTS[target.arch[:2]], target.threads, (b, m, n, k)) < LEAST * 2 * b * m * n * k / UNALIGNED[n & -n]


def _alone(site: Site, call: Opaque, c: Contraction, hints: Hints, rates: Rates) -> Reason | None:
    """The vendor's kernel with the passes in front and behind, against one kernel of ours for few rows."""
    b, m, n, k = c.sizes(hints)
    vendor = vendor_time(c, hints, rates)
    if b > 1 or min(m, n) > TURNED or k * max(m, n) < WEIGHTS * (4 if min(m, n) > LITTLE else 1):
        return Reason("vendor", "not attempted", f"{micro(vendor)}")
    if not _along_depth(c, m <= n):
        return Reason("vendor", "not attempted", f"{micro(vendor)}; weights that are not contiguous along the depth")
    ours, theirs = few(site, dict.fromkeys(_parts_of_one(site, call), rates), hints)
    prices = f"{micro(ours)} in one kernel, the vendor {micro(vendor)} and {micro(theirs - vendor)} around it"
    return None if ours < LEAST * theirs else Reason("vendor", "unprofitable", prices)


def _weighted_mean(first: Contraction, last: Contraction, attended: bool, hints: Hints, rates: Rates) -> tuple[Reason | None, Reason | None]:
    """Two products and what makes weights of the first one's result, in one kernel or by the library's own where it can (`attended`; then the second
    has a reason and the first has none), against the vendor's products and a pass between them."""
    b, m, n, k = first.sizes(hints)
    width, little = sum(1 << (n - 1).bit_length() for n in (k, hints.count(last.columns))) / 2, m <= TURNED
    tiles, whole = max(1.0, b * -(-m // MEAN_ROWS) / rates.processors), b * -(-m // (MEAN_ROWS // 2))
    seconds = lambda tiled, besides, each, element, product: besides + tiles * each + n * tiled * MEAN_ROWS // 2 * (element + width * product)
    ours, own = seconds(whole if little else max(whole, rates.processors), *rates.means), seconds(max(whole, rates.processors), *rates.attended)
    if little:
        rate, besides = rates.few_means
        ours = max(ours, rates.bytes * b * n * (k + hints.count(last.columns)) / rate + besides)
    between = 2 * rates.bytes * b * m * n / rates.copy + rates.step
    vendor = vendor_time(first, hints, rates) + vendor_time(last, hints, rates)
    prices = f"{micro(ours)} in one kernel, the vendor's products {micro(vendor)} and {micro(between)} between them"
    if ours >= (vendor + between) * (1 if little else LEAST):
        return (Reason("vendor", "unprofitable", prices),) * 2
    return None, Reason("vendor", "unprofitable", f"{prices}; its own attention {micro(own)}") if attended and own < ours else None


def _parts_of_one(site: Site, call: Opaque) -> list[Opaque]:
    """`call`, with the other parts of the call that it is a part of."""
    whole = site.whole.get(call)
    return [n for n in site.found if site.whole.get(n) is whole] if whole is not None else [call]


def few(site: Site, calls: Mapping[Opaque, Rates], hints: Hints) -> tuple[float, float]:
    """Seconds of one launch of ours that makes contractions of few rows, and of the vendor's calls for them with the passes around these."""
    ours = [_few_rows(site, n, site.found[n], hints, rates) for n, rates in calls.items()]
    vendor = sum(_by_vendor(site, n, hints, rates) for n, rates in _once(site, calls).items())
    return sum(moving for moving, _ in ours) + min(besides for _, besides in ours), vendor


def _once(site: Site, calls: Mapping[Opaque, Rates]) -> dict[Opaque, Rates]:
    """`calls`, of parts of one call the first alone."""
    seen = {site.whole.get(n, n): n for n in reversed(calls)}
    return {n: rates for n, rates in calls.items() if n in seen.values()}


def _by_vendor(site: Site, call: Opaque, hints: Hints, rates: Rates) -> float:
    """Seconds of the vendor's call, all of it where this is a part, with the passes around it."""
    return vendor_time(site.whole.get(call, site.found[call]), hints, rates) + _around(site, call, hints, rates)


def _around(site: Site, call: Opaque, hints: Hints, rates: Rates) -> float:
    """Seconds of the passes in front of a call and behind it that a kernel of ours spares."""
    made = site.fronts.get(call, ())
    front = sum((node_bytes(x, hints) + sum(node_bytes(r, hints) for r in reads(x))) / rates.copy + rates.step for x in made)
    return front + (rates.step if _pass_behind(site, call) else 0.0)


def _few_rows(site: Site, call: Opaque, c: Contraction, hints: Hints, rates: Rates) -> tuple[float, float]:
    """Seconds of our kernel for few rows: for the weights, and besides."""
    (_, m, n, k), taken = c.sizes(hints), site.fronts.get(call, ())
    few, many = min(m, n), max(m, n)
    moved = sum(node_bytes(r, hints) for x in taken for r in {e.node for e in loads(x.expr)}) if taken else rates.bytes * k * many
    rate, besides = rates.one_row if few == 1 else rates.few_rows if few <= LITTLE else rates.more
    rate = rates.wide if 1 < few <= LITTLE and many >= WIDE and not taken else rate
    besides += rates.more_rows * (SIDE < few <= LITTLE) + rates.few_tiles * (few > 1 and many < TILES and k > LONG)
    besides += rates.narrow_more * (few > LITTLE and many < WIDE and k > LONG)
    far = rates.far and moved > FAR and 1 < few <= LITTLE and many >= WIDE
    reading = moved / rates.far if far else moved / rate / _busy(few, many, rates)
    return max(reading, k * many / rates.unpacked if taken else 0.0), besides


def _busy(few: int, columns: int, rates: Rates) -> float:
    """The part of the machine's bytes a second that is reached where some multiprocessors have no tile at last: the others have its memory for
    themselves then, so less is lost than are idle. 8 rows of TF32, 4096 to 11008, 65% of them busy all the time, 55.6 us, to 4096, 97%, 25.0."""
    if not rates.tile or few == 1:
        return 1.0
    tiles = -(-columns // rates.tile)
    programs = tiles * max(1, rates.processors // tiles)
    return (programs / (-(-programs // rates.processors) * rates.processors)) ** 0.5


def _families(site: Site, hints: Hints) -> list[list[Opaque]]:
    """Calls whose kernels would be one launch: that read the same few rows, or are small and do not need each other."""
    found: dict = {}
    for n, c in site.found.items():
        key = few_rows(c, hints) if _along_depth(c, hints.count(c.rows) <= hints.count(c.columns)) else None
        if key is not None:
            found.setdefault(key, []).append(n)
    same = [calls[:MOST] for calls in found.values() if len(calls) > 1]
    few = [n for n, c in site.found.items() if is_small(c, hints) and _along_depth(c, hints.count(c.rows) <= hints.count(c.columns))]
    needs, bit = _needs(site.graph, few), {n: 1 << i for i, n in enumerate(few)}
    apart = lambda line, n: not any(needs[n] & bit[m] or needs[m] & bit[n] for m in line)
    return same + [calls for calls in together(few, apart) if len(calls) > 1]


def _needs(graph: Graph, calls: list[Opaque]) -> dict:
    """Node -> the numbers, as bits, of those of `calls` that it needs, itself included."""
    bits, found = {n: 1 << i for i, n in enumerate(calls)}, {}
    for n in graph.nodes:
        found[n] = bits.get(n, 0)
        for r in reads(n):
            found[n] |= found.get(r, 0)
    return found


def _side_by_side(site: Site, calls: list[Opaque], hints: Hints, target) -> bool:
    """Is one launch of ours for all of them faster than the vendor's, with the passes around them?"""
    ours, vendor = few(site, {n: rates_of(site.found[n], target) for n in calls}, hints)
    many = sum(max(site.found[n].sizes(hints)[1:3]) * site.found[n].sizes(hints)[3] for n in calls)
    return many >= FAMILY and ours < LEAST * vendor


def _along_depth(c: Contraction, few_rows: bool) -> bool:
    """Do the weights, or what they are computed from, lie contiguously along the depth, as all that was measured did?"""
    weights = [e for e in loads(c.right if few_rows else c.left) if c.depth in e.free]
    return all(runs_along(e, c.depth) for e in weights)


def _pass_behind(site: Site, call: Opaque) -> bool:
    """Is there one kernel that reads the call's result pointwise, which the vendor cannot spare?"""
    results = [r for r in site.graph.nodes if isinstance(r, Result) and r.opaque is call]
    readers = [x for x in site.graph.nodes if any(r in reads(x) for r in results)]
    return len(readers) == 1 and is_pointwise(readers[0]) and call not in site.behind


def _narrow_layers(first: Contraction, last: Contraction, stored: bool, hints: Hints, rates: Rates) -> Reason | None:
    """Two of the vendor's calls, the first with what lies between them, against one kernel, which writes that too where it is `stored`."""
    (_, m, hidden, inner), (_, _, columns, _) = first.sizes(hints), last.sizes(hints)
    calls = _narrow_call(m, inner, hidden, rates) + _narrow_call(m, hidden, columns, rates)
    ours = _in_one(m, hidden, inner, columns, stored, rates)
    prices = f"two layers {micro(ours)} in one kernel, by the vendor {micro(calls)}"
    return None if ours < LEAST * calls else Reason("vendor", "unprofitable", prices)


def _behind_gradients(first: Contraction, last: Contraction, hints: Hints, rates: Rates) -> Reason | None:
    """The vendor's product of what a kernel of gradients makes and stores, against one kernel that makes it again. 131072 rows of 128 to 256 to 128,
    H100: the gradients' kernel takes 70 us whatever it stores, the vendor 40, one kernel 68."""
    (_, m, hidden, inner), (_, _, columns, _) = first.sizes(hints), last.sizes(hints)
    vendor, made, ours = _narrow_call(m, hidden, columns, rates), 2 * m * hidden / rates.copy, _in_one(m, hidden, inner, columns, False, rates)
    prices = f"{micro(ours)} where what it multiplies is made again, by the vendor {micro(vendor)}, and {micro(made)} to store that"
    return None if ours < LEAST * (vendor + made) else Reason("vendor", "unprofitable", prices)


def _narrow_call(m: int, inner: int, columns: int, rates: Rates) -> float:
    """Seconds of the vendor's call of a narrow layer of `m` rows."""
    return 2 * m * (inner + columns) / rates.narrow_vendor[0] + rates.narrow_vendor[1]


def _in_one(m: int, hidden: int, inner: int, columns: int, stored: bool, rates: Rates) -> float:
    """Seconds of our kernel of two narrow layers."""
    moved, flops = 2 * (m * (inner + columns + hidden * stored) + hidden * (inner + columns)), 2 * m * hidden * (inner + columns)
    return max(moved / rates.narrow[0], flops / rates.narrow_products) + rates.narrow[1]
