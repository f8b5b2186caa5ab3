"""What shares a kernel on a GPU, and what does not."""
from __future__ import annotations

from tokamak.fuse.axes import Group
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.target import target

GPU = target("cpu", interpret=True)


def test_readers_of_one_table_share_a_kernel_only_where_a_value_has_all_axes():
    """Rotary embeddings of 32 query and 8 key heads: in one kernel each program would make all of one for every step along the other."""
    graph = parse_graph("""graph rotary {
  input %q: bf16[4, 1024, 32, 64](2097152, 2048, 64, 1)
  input %k: bf16[4, 1024, 8, 64](524288, 512, 64, 1)
  input %angle: f32[4, 1024, 64](65536, 64, 1)
  %cos: f32[4, 1024, 64](65536, 64, 1) = cos(%angle[i0, i1, i2])
  %a: bf16[4, 1024, 32, 64](2097152, 2048, 64, 1) = bf16(mul(f32(%q[i0, i1, i2, i3]), %cos[i0, i1, i3]))
  %b: bf16[4, 1024, 8, 64](524288, 512, 64, 1) = bf16(mul(f32(%k[i0, i1, i2, i3]), %cos[i0, i1, i3]))
  return %a, %b
}""")
    kernels = [s for s in plan(graph, GPU).steps if isinstance(s, Group)]
    assert len(kernels) == 2 and all(any(set(k.axes) <= m.free for m in k.members) for k in kernels)


def test_what_is_made_of_sums_beside_a_matrix_and_a_vector_stays_with_them():
    """Backward of a norm: x . w along each row, sums of the columns beside it; their casts are no kernel of their own."""
    graph = parse_graph("""graph backward {
  input %x: f16[16384, 1024](1024, 1)
  input %w: f16[1024](1)
  %rows: f32[16384](1) for i1<1024 = sum[i1](mul(f32(%x[i0, i1]), f32(%w[i1])))
  %out: f16[16384, 1024](1024, 1) = f16(mul(f32(%x[i0, i1]), %rows[i0]))
  %columns: f32[1024](1) for i1<16384 = sum[i1](mul(f32(%x[i1, i0]), %rows[i1]))
  %cast: f16[1024](1) = f16(%columns[i0])
  return %out, %cast
}""")
    assert sum(isinstance(s, Group) for s in plan(graph, GPU).steps) == 1
