"""C fragments: Philox4x32-10 random numbers, as `ir.meaning` defines them, and torch's threads."""
from __future__ import annotations

_PHILOX = {
    # counter words: low and high half of the counter, 0, 0; key words: low and high half of the seed
    "philox": """\
TK void philox(v_i64 seed, v_i64 counter, v_u32 *x0, v_u32 *x1) {
  v_u64 low = (v_u64){0} + 0xffffffffu, c0 = (v_u64)counter & low, c1 = (v_u64)counter >> 32, c2 = {0}, c3 = {0};
  v_u64 k0 = (v_u64)seed & low, k1 = (v_u64)seed >> 32;
  for (int round = 0; round < 10; round++) {
    v_u64 p0 = c0 * 0xD2511F53ul, p1 = c2 * 0xCD9E8D57ul;
    c0 = p1 >> 32 ^ c1 ^ k0; c1 = p1 & low; c2 = p0 >> 32 ^ c3 ^ k1; c3 = p0 & low;
    k0 = k0 + 0x9E3779B9ul & low; k1 = k1 + 0xBB67AE85ul & low; }
  *x0 = __builtin_convertvector(c0, v_u32); *x1 = __builtin_convertvector(c1, v_u32); }""",
    "philox_uniform": """\
TK v_f32 philox_uniform(v_i64 seed, v_i64 counter) {
  v_u32 a, b; philox(seed, counter, &a, &b);
  return __builtin_convertvector((v_i32)(a >> 8), v_f32) * 0x1p-24f; }""",
    "philox_normal": """\
TK v_f32 philox_normal(v_i64 seed, v_i64 counter) {
  v_u32 a, b; philox(seed, counter, &a, &b);
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
    return _PHILOX | _THREADS
