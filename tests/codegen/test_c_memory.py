"""Loads, stores, folds, prefixes, transposes, random numbers and threads of the C vocabulary, against NumPy; nothing outside the lanes asked for
is read or written."""
import ctypes
import mmap
import platform
import re
import subprocess

import numpy as np
import pytest
import torch

from tests.codegen.c_harness import FLAGS, build
from tokamak.ir import meaning
from tokamak.ir.dtype import ALL, BF16, BOOL, F16, F32, F64
from tokamak.codegen.c_memory import register
from tokamak.codegen.c_prelude import fragments_in, prelude

LANES = (16, 4)
FOLDED = [d for d in ALL if d is not BOOL and not d.is_half]


def memory_functions(d) -> str:
    v, c = register(d), d.c
    return f"""
void whole_{d}(const {c} *a, {c} *o) {{ store_{d}(o, load_{d}(a)); }}
void first_{d}(const {c} *a, {c} *o, int64_t n) {{ storen_{d}(o, loadn_{d}(a, n), n); }}
void filled_{d}(const {c} *a, {c} *o, int64_t n) {{ store_{d}(o, loadn_{d}(a, n)); }}
void strided_{d}(const {c} *a, {c} *o, int64_t s, int64_t t) {{ stores_{d}(o, t, loads_{d}(a, s)); }}
void firsts_{d}(const {c} *a, {c} *o, int64_t s, int64_t t, int64_t n) {{ storesn_{d}(o, t, loadsn_{d}(a, s, n), n); }}
void gather_{d}(const {c} *a, const int64_t *i, {c} *o) {{ store_{d}(o, loadi_{d}(a, load_i64(i))); }}
void near_{d}(const {c} *a, const int64_t *i, {c} *o) {{ store_{d}(o, loadw_{d}(a, load_i64(i))); }}
void nearn_{d}(const {c} *a, const int64_t *i, {c} *o, int64_t n) {{ storen_{d}(o, loadwn_{d}(a, load_i64(i), n), n); }}
void gathern_{d}(const {c} *a, const int64_t *i, {c} *o, int64_t n) {{ storen_{d}(o, loadin_{d}(a, load_i64(i), n), n); }}
void gatherg_{d}(const {c} *a, const int64_t *i, const uint8_t *m, {c} *o) {{
  {v} before = load_{d}(o); store_{d}(o, loadgi_{d}(a, load_i64(i), load_bool(m), before)); }}
void masked_{d}(const {c} *a, const uint8_t *m, {c} *o) {{ {v} before = load_{d}(o); store_{d}(o, loadgu_{d}(a, load_bool(m), before)); }}
void maskeds_{d}(const {c} *a, const uint8_t *m, {c} *o, int64_t s) {{
  {v} before = load_{d}(o); store_{d}(o, loadg_{d}(a, s, load_bool(m), before)); }}
void scatter_{d}(const {c} *a, const int64_t *i, {c} *o) {{ storei_{d}(o, load_i64(i), load_{d}(a)); }}
void scattern_{d}(const {c} *a, const int64_t *i, {c} *o, int64_t n) {{ storein_{d}(o, load_i64(i), load_{d}(a), n); }}
void around_{d}(const {c} *a, {c} *o, int64_t at, int64_t turn) {{ store_{d}(o, loada_{d}(a, at, turn)); }}
void aroundn_{d}(const {c} *a, {c} *o, int64_t at, int64_t turn, int64_t n) {{ store_{d}(o, loadan_{d}(a, at, turn, n)); }}
void splat_of_{d}(const {c} *a, {c} *o) {{ store_{d}(o, loadb_{d}(a)); }}
void one_{d}(const {c} *a, {c} *o) {{ store1_{d}(o, load_{d}(a)); }}
"""


def fold_functions(d) -> str:
    text = []
    for m in ("sum", "prod", "max", "min", *(("logsumexp",) if d.is_float else ())):
        text.append(f"void h{m}_of_{d}(const {d.c} *a, {d.c} *o) {{ *o = h{m}_{d}(load_{d}(a)); }}\n"
                    f"void scan{m}_of_{d}(const {d.c} *a, {d.c} *o) {{ store_{d}(o, scan{m}_{d}(load_{d}(a))); }}\n")
    for m in ("argmax", "argmin"):
        text.append(f"void h{m}_of_{d}(const {d.c} *a, int64_t *o) {{ *o = h{m}_{d}(load_{d}(a), iota()); }}\n")
    return "".join(text)


OTHERS = """
void divided(const int64_t *a, int64_t *q, int64_t *r, int64_t b) {
  store_i64(q, lanes_div(load_i64(a), b)); store_i64(r, lanes_mod(load_i64(a), b)); }
void any_of(const uint8_t *a, int64_t *o) { o[0] = hany(load_bool(a)); o[1] = hall(load_bool(a)); }
void transpose_f32(const float *a, float *o) {
  v_f32 r[W]; for (int k = 0; k < W; k++) r[k] = load_f32(a + k * W);
  transpose_32(r); for (int k = 0; k < W; k++) store_f32(o + k * W, r[k]); }
void transpose_f64(const double *a, double *o) {
  v_f64 r[W]; for (int k = 0; k < W; k++) r[k] = load_f64(a + k * W);
  transpose_64(r); for (int k = 0; k < W; k++) store_f64(o + k * W, r[k]); }
void random_of(const int64_t *seed, const int64_t *counter, float *uniform, float *normal) {
  store_f32(uniform, philox_uniform(loadb_i64(seed), load_i64(counter))); store_f32(normal, philox_normal(loadb_i64(seed), load_i64(counter))); }
static void visit(void *data) { __atomic_fetch_add((int64_t *)data, 1 + tk_thread() * 0, __ATOMIC_RELAXED); }
void spread(int64_t *data, int64_t threads) { tk_parallel(visit, data, threads); }
"""


@pytest.fixture(scope="module", params=LANES)
def library(request, tmp_path_factory):
    text = "".join(memory_functions(d) for d in ALL) + "".join(fold_functions(d) for d in FOLDED) + "\n/* threads */" + OTHERS
    built = build(text, tmp_path_factory.mktemp("memory"), request.param)
    built.lanes = request.param
    return built


def run(library, name: str, *args) -> None:
    """Calls a function on arrays (their first element) and integers."""
    getattr(library, name)(*(ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int64(a) for a in args))


def fenced(array: np.ndarray) -> np.ndarray:
    """A copy of `array` that ends where an unreadable page begins."""
    page = mmap.PAGESIZE
    block = mmap.mmap(-1, 4 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 3 * page), ctypes.c_size_t(page), 0)
    view = np.frombuffer(block, np.uint8, array.nbytes, 3 * page - array.nbytes).view(array.dtype)
    view[:] = array
    return view


def stored(d, count: int, seed: int = 0) -> np.ndarray:
    """Random values of a type in storage form."""
    rng = np.random.default_rng(seed)
    if d is BOOL:
        return rng.integers(0, 2, count).astype(np.uint8)
    if d is BF16:
        return (rng.normal(size=count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if d.is_float:
        return rng.normal(size=count).astype(d.numpy)
    return rng.integers(np.iinfo(d.numpy).min, np.iinfo(d.numpy).max, count).astype(d.numpy)


@pytest.mark.parametrize("d", ALL, ids=str)
def test_contiguous_and_strided(library, d):
    w = library.lanes
    for n in range(1, w):
        a, o = fenced(stored(d, n, n)), fenced(np.zeros(n, stored(d, 1).dtype))
        run(library, f"first_{d}", a, o, n)
        assert (a == o).all()
        filled = np.ones(w, a.dtype)
        run(library, f"filled_{d}", a, filled, n)
        assert (filled[:n] == a).all() and not filled[n:].any()
        a, o = fenced(stored(d, 3 * (n - 1) + 1, n)), np.zeros(2 * w, a.dtype)
        run(library, f"firsts_{d}", a, o, 3, 2, n)
        assert (o[:2 * n:2] == a[::3]).all() and not o[1::2].any() and not o[2 * n:].any()
    a, o = fenced(stored(d, w)), fenced(np.zeros(w, stored(d, 1).dtype))
    run(library, f"whole_{d}", a, o)
    assert (a == o).all()
    run(library, f"splat_of_{d}", a[1:], o)
    assert (o == a[1]).all()
    run(library, f"one_{d}", a, o[-1:])
    assert o[-1] == a[0]
    a, o = stored(d, 5 * w), np.zeros(5 * w, o.dtype)
    run(library, f"strided_{d}", a[-1:], o, -3, 5)
    assert (o[::5] == a[::-3][:w]).all()
    for stride in (2, 3, 4, 5):
        a, o = fenced(stored(d, stride * (w - 1) + 1, stride)), np.zeros(w, o.dtype)
        run(library, f"strided_{d}", a, o, stride, 1)
        assert (o == a[::stride]).all()
        kept = stored(d, stride * (w - 1) + 1, 9)
        o = fenced(kept.copy())
        run(library, f"strided_{d}", a[:w].copy(), o, 1, stride)
        beside = np.arange(len(o)) % stride != 0
        assert (o[::stride] == a[:w]).all() and (o[beside] == kept[beside]).all()


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("d", ALL, ids=str)
def test_strided_under_a_mask(library, d, stride):
    """Of the lanes that count, no more than the last is read."""
    w, rng = library.lanes, np.random.default_rng(stride)
    for last in range(1, w + 1):
        a, kept = fenced(stored(d, stride * (last - 1) + 1, last)), stored(d, w, 7)
        for holds in (np.arange(w) < last, (np.arange(w) < last) & (rng.random(w) < 0.5), np.zeros(w, bool)):
            o = kept.copy()
            run(library, f"maskeds_{d}", a, holds.astype(np.uint8), o, stride)
            assert (o[holds] == a[::stride][holds[:last]]).all() and (o[~holds] == kept[~holds]).all()


@pytest.mark.parametrize("d", ALL, ids=str)
def test_around_the_end(library, d):
    """From any element on, and from the first again: within one register, and where memory is shorter than one."""
    w = library.lanes
    for turn in (1, 3, w - 1, w, w + 1, 3 * w):
        a = fenced(stored(d, turn, turn))
        for at in range(turn):
            wanted = a[(at + np.arange(w)) % turn]
            o = np.zeros(w, a.dtype)
            run(library, f"around_{d}", a, o, at, turn)
            assert (o == wanted).all()
            for n in (1, w - 1):
                o = np.ones(w, a.dtype)
                run(library, f"aroundn_{d}", a, o, at, turn, n)
                assert (o[:n] == wanted[:n]).all() and not o[n:].any()


@pytest.mark.parametrize("d", ALL, ids=str)
def test_gathers_of_near_lanes(library, d):
    """Every element in turn, every third, each twice, backward, there and back, one far away: nothing beside those asked for is read, wherever the
    memory ends."""
    w = library.lanes
    k = np.arange(w)
    kinds = {"in turn": k, "apart": 3 * k, "twice": k // 2, "backward": w - 1 - k, "back": np.abs(k - 2), "one": 0 * k,
             "far": np.where(k == 1, 3 * w, k), "resized": k * 31 // 17}
    for i in kinds.values():
        a = fenced(stored(d, int(i.max()) + 1))
        o = np.zeros(w, a.dtype)
        run(library, f"near_{d}", a, i.astype(np.int64), o)
        assert (o == a[i]).all()
        for n in (1, 2, w - 1):
            a, o = fenced(stored(d, int(i[:n].max()) + 1)), np.zeros(w, a.dtype)
            run(library, f"nearn_{d}", a, np.where(k < n, i, 2**60), o, n)
            assert (o[:n] == a[i[:n]]).all() and not o[n:].any()


@pytest.mark.parametrize("d", ALL, ids=str)
def test_gather_and_scatter(library, d):
    w = library.lanes
    a = stored(d, 40)
    i = np.random.default_rng(1).integers(0, 40, w)
    o = np.zeros(w, a.dtype)
    run(library, f"gather_{d}", a, i, o)
    assert (o == a[i]).all()
    for n in range(1, w):
        i[n:] = 2**60
        o = fenced(np.zeros(n, a.dtype))
        run(library, f"gathern_{d}", a, fenced(i), o, n)
        assert (o == a[i[:n]]).all()
        i = np.random.default_rng(n).integers(0, 8, w)      # duplicates: the last lane's value stays
        i[n:] = 2**60
        m, before = np.arange(w) % 3 < n % 3, stored(d, w)
        o, j = before.copy(), np.where(m, np.arange(w) % 40, 2**60)
        run(library, f"gatherg_{d}", a, j, m.astype(np.uint8), o)
        assert (o == np.where(m, a[np.arange(w) % 40], before)).all()
        o, m = before.copy(), np.arange(w) < n
        run(library, f"masked_{d}", fenced(a[:n]), m.astype(np.uint8), o)
        assert (o == np.where(m, a[:w], before)).all()
        o, wanted = np.zeros(8, a.dtype), np.zeros(8, a.dtype)
        run(library, f"scattern_{d}", a, i, o, n)
        for k in range(n):
            wanted[i[k]] = a[k]
        assert (o == wanted).all()
        i = np.random.default_rng(n).integers(0, 40, w)


@pytest.mark.parametrize("d", [F16, BF16], ids=str)
def test_all_16_bit_patterns_survive(library, d):
    a = np.arange(2**16, dtype=np.uint16)
    o = np.zeros_like(a)
    for k in range(0, len(a), library.lanes):
        run(library, f"whole_{d}", a[k:], o[k:])
    kind = torch.float16 if d is F16 else torch.bfloat16
    nan = torch.from_numpy(a).view(kind).isnan().numpy()
    assert (a == o)[~nan].all() and torch.from_numpy(o).view(kind).isnan().numpy()[nan].all()


@pytest.mark.parametrize("d", FOLDED, ids=str)
def test_folds_and_prefixes(library, d):
    w = library.lanes
    folds = {"sum": np.cumsum, "prod": np.cumprod, "max": np.maximum.accumulate, "min": np.minimum.accumulate}
    if d.is_float:
        folds["logsumexp"] = np.logaddexp.accumulate
    for seed in range(20):
        a = stored(d, w, seed)
        if d.is_float and seed > 10:
            a[seed % w] = [np.nan, np.inf, -np.inf][seed % 3]
        for name, fold in folds.items():
            with np.errstate(all="ignore"):
                wanted = fold(a, dtype=d.numpy) if name in ("sum", "prod") else fold(a)
            one, many = np.zeros(1, d.numpy), np.zeros(w, d.numpy)
            run(library, f"h{name}_of_{d}", a, one)
            run(library, f"scan{name}_of_{d}", a, many)
            close = dict(rtol=1e-5 if d is F32 else 1e-13, atol=1e-5 if d is F32 else 1e-13) if d.is_float else dict(rtol=0, atol=0)
            np.testing.assert_allclose(many, wanted, err_msg=name, **close)
            np.testing.assert_allclose(one[0], wanted[-1], err_msg=name, **close)


@pytest.mark.parametrize("d", FOLDED, ids=str)
def test_argmax_takes_the_first(library, d):
    w, found = library.lanes, np.zeros(1, np.int64)
    for seed in range(60):
        a = (stored(d, w, seed) if seed % 3 else np.random.default_rng(seed).integers(0, 3, w)).astype(d.numpy)
        if d.is_float and seed % 4 == 0:
            a[np.random.default_rng(seed).integers(0, w, 2)] = np.nan
        for name, fold in (("argmax", np.argmax), ("argmin", np.argmin)):
            run(library, f"h{name}_of_{d}", a, found)
            assert found[0] == fold(a), (name, a)


def test_indices_are_divided_exactly(library):
    w, rng = library.lanes, np.random.default_rng(0)
    for b in (1, 2, 3, 7, 19, 2**31 - 1, 10**9 + 7):
        for near in (0, 5, -3, 10**6, 2**40, -2**50, 2**51):
            a = near // b * b + rng.integers(-2, 3, w) * b + np.resize([-1, 0, 1, b - 1], w)
            q, r = np.zeros(w, np.int64), np.zeros(w, np.int64)
            run(library, "divided", a, q, r, b)
            assert (q == a // b).all() and (r == a % b).all()


def test_any_all_transpose(library):
    w, found = library.lanes, np.zeros(2, np.int64)
    for a in (np.zeros(w), np.ones(w), np.arange(w) == w - 1, np.arange(w) != 1):
        run(library, "any_of", a.astype(np.uint8), found)
        assert tuple(found) == (a.any(), a.all())
    for d in (F32, F64):
        a = np.arange(w * w, dtype=d.numpy).reshape(w, w)
        o = np.zeros_like(a)
        run(library, f"transpose_{d}", a, o)
        assert (o == a.T).all()


def test_random_numbers_are_the_references(library):
    w = library.lanes
    for seed, start in ((0, 0), (-1, 2**32 - 3), (2**62 + 12345, -5), (1234567890123, 10**12), (-7, 2**34 - 8), (3, -8), (3, 6), (3, 1)):
        for step in (1, 3, -1, 0):
            counter = start + step * np.arange(w, dtype=np.int64)
            uniform, normal = np.zeros(w, np.float32), np.zeros(w, np.float32)
            run(library, "random_of", np.array([seed], np.int64), counter, uniform, normal)
            assert (uniform == meaning.random("uniform", np.int64(seed), counter)).all()
            np.testing.assert_allclose(normal, meaning.random("normal", np.int64(seed), counter), rtol=2e-6, atol=1e-6)


def test_threads_of_torch(library):
    count = np.zeros(1, np.int64)
    run(library, "spread", count, 2)
    assert count[0] == 1      # no library of threads yet: one call
    gomp = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line))
    library.tk_init(ctypes.cast(gomp.GOMP_parallel, ctypes.c_void_p), ctypes.cast(gomp.omp_get_thread_num, ctypes.c_void_p))
    for threads in (1, 2):
        count[:] = 0
        run(library, "spread", count, threads)
        assert count[0] == threads


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is x86's")
def test_64_bit_lanes_stay_in_registers(tmp_path):
    """Gathered and compared indices with AVX-512: one gather for eight lanes, and no lane goes through memory by itself."""
    text = "void f(const float *a, const int64_t *i, float *o, int64_t n, int64_t *e) {\n" \
           "  v_i64 at = tk_indices(loadb_i64(i + 1) + load_i64(i), n, ~(v_bool){0}, e, 1);\n" \
           "  store_f32(o, loadi_f32(a, at + splat_i64(n))); }\n"
    source = tmp_path / "f.c"
    source.write_text(prelude(fragments_in(text, 16), 16) + text)
    flags = [f.replace("native", "skylake-avx512") for f in FLAGS if f != "-shared"]
    made = subprocess.run(["gcc", *flags, "-S", "-o", "-", str(source)], capture_output=True, text=True, check=True).stdout
    assert made.count("vgatherqps") == 2 and not re.search(r"\tv?mov\w+\t%(r|ymm)\w+, -?\d*\(%rsp\)", made)
