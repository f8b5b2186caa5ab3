"""The C function that takes the steps of a run of products and kernels through the caches together, a block of rows after the other.

    words ::= count of steps, batches, rows of a batch, rows of a block, floats of a buffer; each step
    step  ::= 0, product | 1, kernel

What lies between two steps is a buffer of each thread that holds one block. A product packs its right factor once, or once a batch, into panels that
are two registers wide, with zeros behind the last column; SIDE rows by one panel of the result stay in registers along the depth. A sum is carried in
f32 for DEPTH terms, then in memory. A kernel is called as any other, with one thread, as if the block were all its rows.
"""
from __future__ import annotations

from functools import cache
from hashlib import sha256

from ..runtime.build import Unit
from .c import JOB, NO_MEMORY
from .c_prelude import fragments_in, pieces

PRODUCT = 17            # words of a product
STEPS, WORDS, OUTER = 8, 48, 4      # steps of a run, words of a kernel in it and outer extents of that, at most
DEPTH = 512             # terms of a sum that one register carries
SHARES = 4              # shares of the blocks for each thread: what one loses to another program the others take over

_TYPES = """
typedef struct {
  int64_t N, K, buffer, lda, abatch, bk, bn, bbatch, into, ldc, cbatch, relu; const float *a, *b, *bias; float *c, *packed; } tk_product;
extern void *memcpy(void *, const void *, unsigned long);
"""

# rows i .. i + R of one panel: sums of k0 .. k1 on top of the bias, or of what is there
_TILE = """
static __attribute__((noinline)) void tk_tile@(int64_t depth, const float *a, int64_t lda, const float *b, float *c, int64_t ldc, const float *bias,
                                               int relu) {
  v_f32 s[@][2];
  for (int i = 0; i < @; i++) for (int j = 0; j < 2; j++) s[i][j] = *(const u_f32 *)((bias ? bias : c + i * ldc) + j * W);
  for (int64_t k = 0; k < depth; k++) {
    const v_f32 l = *(const u_f32 *)(b + 2 * W * k), h = *(const u_f32 *)(b + 2 * W * k + W);
#pragma GCC unroll 16
    for (int i = 0; i < @; i++) { const v_f32 x = splat_f32(a[i * lda + k]); s[i][0] += x * l; s[i][1] += x * h; }
  }
  for (int i = 0; i < @; i++) for (int j = 0; j < 2; j++) {
    v_f32 x = s[i][j];
    if (relu) x = (v_f32)(~(x < (v_f32){0}) & (v_i32)x);
    *(u_f32 *)(c + i * ldc + j * W) = x; } }
"""

_PRODUCT = """
TK void tk_rows_of(int64_t rows, int64_t depth, const float *a, int64_t lda, const float *b, float *c, int64_t ldc, const float *bias, int relu) {
  int64_t i = 0;
  @
}
/* the last columns of a panel that is not full go through `edge` */
static void tk_multiply(const tk_product *p, int64_t rows, const float *a, float *c) {
  float edge[SIDE * 2 * W] __attribute__((aligned(64)));
  const int64_t panels = (p->N + 2 * W - 1) / (2 * W); const float *bias = p->packed + panels * 2 * W * p->K;
  for (int64_t k = 0; k < p->K; k += DEPTH) {
    const int64_t depth = tk_min(DEPTH, p->K - k); const int relu = p->relu && k + depth == p->K;
    for (int64_t i = 0; i < rows; i += SIDE) for (int64_t j = 0; j < p->N; j += 2 * W) {
      const int64_t m = tk_min(SIDE, rows - i), n = tk_min(2 * W, p->N - j);
      const float *x = a + i * p->lda + k, *y = p->packed + j * p->K + k * 2 * W, *z = k ? 0 : bias + j; float *at = c + i * p->ldc + j;
      if (n == 2 * W) { tk_rows_of(m, depth, x, p->lda, y, at, p->ldc, z, relu); continue; }
      if (k) for (int64_t r = 0; r < m; r++) memcpy(edge + r * 2 * W, at + r * p->ldc, n * 4);
      tk_rows_of(m, depth, x, p->lda, y, edge, 2 * W, z, relu);
      for (int64_t r = 0; r < m; r++) memcpy(at + r * p->ldc, edge + r * 2 * W, n * 4); } } }
static int64_t tk_packed_size(const tk_product *p) { return (p->N + 2 * W - 1) / (2 * W) * 2 * W * (p->K + 1); }
static void tk_pack(const tk_product *p, const float *b) {
  float *to = p->packed;
  for (int64_t j = 0; j < p->N; j += 2 * W) {
    const int64_t n = tk_min(2 * W, p->N - j); int64_t k = 0;
    if (p->bk == 1 && n == 2 * W) for (; k + W <= p->K; k += W, to += 2 * W * W) for (int h = 0; h < 2 * W; h += W) {
      v_f32 r[W];
      for (int l = 0; l < W; l++) r[l] = *(const u_f32 *)(b + k + (j + h + l) * p->bn);
      transpose_32(r);
      for (int l = 0; l < W; l++) *(u_f32 *)(to + l * 2 * W + h) = r[l]; }
    for (; k < p->K; k++, to += 2 * W) {
      const float *from = b + k * p->bk + j * p->bn;
      if (p->bn == 1 && n == 2 * W) memcpy(to, from, 8 * W);
      else for (int64_t l = 0; l < 2 * W; l++) to[l] = l < n ? from[l * p->bn] : 0; } }
  for (int64_t j = 0; j < tk_packed_size(p) / (p->K + 1); j++) to[j] = p->bias && j < p->N ? p->bias[j] : 0; }
"""

# kernel: function, words, outer extents (their count first), batches and steps of a row that the inner one runs through; each word: kind, value,
# bytes a row, bytes a step of each outer extent. Kinds: 0 as it is, 1 moves, 2 one, 3 the rows, 4 a buffer
_KERNEL = """
static int64_t tk_kernel(const int64_t *s, int64_t batch, int64_t row, int64_t rows, int64_t all, float *const *buffer) {
  const int64_t count = s[1], outer = s[2], within = s[3 + outer], unit = s[4 + outer], *word = s + 5 + outer;
  int64_t given[WORDS], step[OUTER];
  for (int64_t o = outer, rest = batch / within; o-- > 0; rest /= s[3 + o]) step[o] = rest % s[3 + o];
  const int64_t first = batch % within * all + row;
  for (int64_t n = 0; n < count; n++, word += 3 + outer) {
    given[n] = word[1];
    if (word[0] == 1) { given[n] += first * word[2]; for (int64_t o = 0; o < outer; o++) given[n] += step[o] * word[3 + o]; }
    if (word[0] == 2) given[n] = 1;
    if (word[0] == 3) given[n] = rows * unit;
    if (word[0] == 4) given[n] = (int64_t)buffer[word[1]]; }
  return ((int64_t (*)(const int64_t *, int64_t))s[0])(given, 1); }
"""

_RUN = """
static void NAME_0(void *data) {
  tk_job *job = data; const int64_t *w = job->w, steps = w[0], batches = w[1], rows = w[2], size = w[3], *at = w + 5;
  const int64_t blocks = (rows + size - 1) / size, total = batches * blocks;
  tk_product p[STEPS]; const int64_t *kernel[STEPS]; int64_t need = 2 * w[4], held = -1;
  for (int64_t n = 0; n < steps; n++) {
    kernel[n] = 0;
    if (*at == 1) { kernel[n] = at + 1; at += 6 + at[3] + at[2] * (3 + at[3]); continue; }
    p[n] = (tk_product){at[1], at[2], at[3], at[5], at[6], at[8], at[9], at[10], at[12], at[14], at[15], at[16],
                        (const float *)at[4], (const float *)at[7], (const float *)at[11], (float *)at[13], 0};
    need += tk_packed_size(p + n); at += PRODUCT; }
  float *own = aligned_alloc(64, tk_lines(need * 4)), *buffer[2] = {own, own + w[4]}, *next = own + 2 * w[4];
  if (!own) { __atomic_fetch_or(&job->error, NO_MEMORY, __ATOMIC_RELAXED); return; }
  for (int64_t n = 0; n < steps; n++) if (!kernel[n]) { p[n].packed = next; next += tk_packed_size(p + n); }
  for (int64_t ticket; (ticket = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->tickets;)
    for (int64_t block = total * ticket / job->tickets; block < total * (ticket + 1) / job->tickets; block++) {
      const int64_t batch = block / blocks, row = block % blocks * size, m = tk_min(size, rows - row);
      for (int64_t n = 0; n < steps; n++) {
        if (kernel[n]) {
          if (tk_kernel(kernel[n], batch, row, m, rows, buffer)) __atomic_fetch_or(&job->error, NO_MEMORY, __ATOMIC_RELAXED);
          continue; }
        if (held != batch && (held < 0 || p[n].bbatch)) tk_pack(p + n, p[n].b + batch * p[n].bbatch);
        const float *a = p[n].buffer >= 0 ? buffer[p[n].buffer] : p[n].a + batch * p[n].abatch + row * p[n].lda;
        float *c = p[n].into >= 0 ? buffer[p[n].into] : p[n].c + batch * p[n].cbatch + row * p[n].ldc;
        tk_multiply(p + n, m, a, c); }
      held = batch; }
  free(own); }
__attribute__((visibility("default"))) int64_t NAME(const int64_t *w, int64_t threads) {
  tk_job job = {w}; const int64_t total = w[1] * ((w[2] + w[3] - 1) / w[3]);
  job.tickets = tk_max(1, tk_min(threads * SHARES, total));
  if (total > 0) tk_parallel(NAME_0, &job, tk_min(threads, job.tickets));
  return job.error ? 1 + __builtin_ctzll(job.error) : 0; }
"""


_SIDES = ((12, 8, 4, 2, 1), (6, 4, 2, 1))       # rows that are in registers at a time; with 16 registers


@cache
def unit(lanes: int) -> Unit:
    """The function for registers of `lanes` lanes."""
    call = "for (; i + @ <= rows; i += @) tk_tile@(depth, a + i * lda, lda, b, c + i * ldc, ldc, bias, relu);\n  "
    each = lambda text, sides: "".join(text.replace("@", str(r)) for r in sides)
    made = lambda sides: f"#define SIDE {sides[0]}\n{each(_TILE, sides)}{_PRODUCT.replace('@', each(call, sides))}"
    numbers = {"DEPTH": DEPTH, "SHARES": SHARES, "PRODUCT": PRODUCT, "STEPS": STEPS, "WORDS": WORDS, "OUTER": OUTER, "NO_MEMORY": NO_MEMORY}
    wide, narrow = map(made, _SIDES)
    text = "".join(("".join(f"#define {k} {v}\n" for k, v in numbers.items()), _TYPES, "#if defined(__AVX512F__) || defined(__aarch64__)\n", wide,
                    "#else\n", narrow, "#endif\n", _KERNEL, _RUN))
    whole = "".join((*pieces({"threads", *fragments_in(text, lanes)}, lanes), JOB, text))
    name = "r" + sha256(whole.encode()).hexdigest()[:16]
    return Unit(name, whole.replace("NAME", name))
