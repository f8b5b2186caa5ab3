"""C fragments: Philox4x32-10 random numbers, as `ir.meaning` defines them, and torch's threads."""
from __future__ import annotations

# counter words: low and high half of the counter, 0, 0; key words: low and high half of the seed. `U`: 64-bit lanes, a word in each
_ROUNDS = """\
  U low = (U){0} + 0xffffffffu, c0 = (U)counter & low, c1 = (U)counter >> 32, c2 = {0}, c3 = {0};
  U k0 = (U)seed & low, k1 = (U)seed >> 32;
  for (int round = 0; round < 10; round++) {
    U p0 = c0 * 0xD2511F53ul, p1 = c2 * 0xCD9E8D57ul;
    c0 = p1 >> 32 ^ c1 ^ k0; c1 = p1 & low; c2 = p0 >> 32 ^ c3 ^ k1; c3 = p0 & low;
    k0 = k0 + 0x9E3779B9ul & low; k1 = k1 + 0xBB67AE85ul & low; }
"""


def _philox(lanes: int) -> dict[str, str]:
    """Philox for any counters, a call a lane; and for the numbers of all lanes from a multiple of 4 on, a quarter as many calls."""
    quarter = lanes // 4
    calls, words = ", ".join(map(str, range(quarter))), ", ".join(f"{i}, {quarter + i}" for i in range(quarter))
    return {
        "philox": f"""\
TK void philox(v_u64 seed, v_u64 counter, v_u32 *x0, v_u32 *x1, v_u32 *x2, v_u32 *x3) {{
{_ROUNDS.replace('U', 'v_u64')}  *x0 = __builtin_convertvector(c0, v_u32); *x1 = __builtin_convertvector(c1, v_u32);
  *x2 = __builtin_convertvector(c2, v_u32); *x3 = __builtin_convertvector(c3, v_u32); }}""",
        "philox_run": f"""\
typedef uint64_t q_u64 __attribute__((vector_size(W * 2)));
TK v_u32 philox_run(uint64_t seed_, uint64_t first) {{
  q_u64 seed = (q_u64){{0}} + seed_, counter = ((q_u64){{{calls}}} + (first >> 2)) & (~0ul >> 2);
{_ROUNDS.replace('U', 'q_u64')}  return (v_u32)__builtin_shufflevector(c0 | c1 << 32, c2 | c3 << 32, {words}); }}""",
    }


_NUMBERS = {
    # the words of any numbers, each one of the four of its counter
    "philox_words": """\
static __attribute__((noinline)) void philox_words(const v_i64 *seed, const v_i64 *number, v_u32 *x) {
  v_u32 a, b, c, d; philox((v_u64)*seed, (v_u64)*number >> 2, &a, &b, &c, &d);
  v_u32 at = __builtin_convertvector((v_u64)*number & 3, v_u32), odd = -(at & 1), late = -(at >> 1);
  *x = (((a & ~odd) | (b & odd)) & ~late) | (((c & ~odd) | (d & odd)) & late); }""",
    "philox_uniform": """\
TK v_f32 philox_uniform(v_i64 seed, v_i64 number) {
  v_i64 apart = (number - number[0] - iota()) | (seed ^ seed[0]);
  int run = !(number[0] & 3) & hall(__builtin_convertvector(apart == 0, v_i32));
  v_u32 x; if (run) x = philox_run(seed[0], number[0]); else philox_words(&seed, &number, &x);
  return __builtin_convertvector((v_i32)(x >> 8), v_f32) * 0x1p-24f; }""",
    "philox_normal": """\
TK v_f32 philox_normal(v_i64 seed, v_i64 counter) {
  v_u32 a, b, c, d; philox((v_u64)seed, (v_u64)counter, &a, &b, &c, &d);
  v_f32 u = (__builtin_convertvector((v_i32)(a >> 8), v_f32) + 1.0f) * 0x1p-24f, v = __builtin_convertvector((v_i32)(b >> 8), v_f32) * 0x1p-24f;
  return sqrt_f32(-2.0f * log_f32(u)) * cos_f32(v * 0x1.921fb6p2f); }""",
}

# tk_init receives the addresses of GOMP_parallel and omp_get_thread_num in the libgomp that torch has loaded
_THREADS = {
    "threads": """\
static void *tk_gomp_parallel, *tk_thread_num;
__attribute__((visibility("default"))) void tk_init(void *parallel, void *thread_num) { tk_gomp_parallel = parallel; tk_thread_num = thread_num; }
static void tk_parallel(void (*fn)(void *), void *data, int64_t threads) {
  if (threads <= 1 || !tk_gomp_parallel) fn(data);
  else ((void (*)(void (*)(void *), void *, unsigned, unsigned))tk_gomp_parallel)(fn, data, (unsigned)threads, 0); }
static int tk_thread(void) { return tk_thread_num ? ((int (*)(void))tk_thread_num)() : 0; }""",
}


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    return _philox(lanes) | _NUMBERS | _THREADS
