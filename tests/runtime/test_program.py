"""Programs of hand-written steps with kernels that are Python functions."""
import ctypes
import gc
import struct

import pytest
import torch

from tests.threads import in_threads
from tokamak.errors import InternalError
from tokamak.runtime.memory import Pool
from tokamak.runtime.program import Alloc, Call, Copy, Drop, Host, Launch, Let, Program, Ref, Return, TensorSpec, assemble, source

F32 = torch.float32


def spec(*shape, strides=None, dtype=F32):
    texts = tuple(str(s) for s in shape)
    if strides is None:
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
    return TensorSpec(texts, tuple(str(s) for s in strides), dtype)


def floats(pointer: int, n: int):
    return (ctypes.c_float * n).from_address(pointer)


def scale(words, threads):
    """y[i] = x[i] * factor, for words (x, y, n, factor)"""
    x, y, n, factor = struct.unpack("=qqqd", words)
    floats(y, n)[:] = [v * factor for v in floats(x, n)]
    return 0


def run(steps, inputs=("x",), errors=(), kernels=None, pool=None, **kw):
    return assemble(Program("test", tuple(inputs), tuple(steps), errors, **kw), kernels or {"scale": scale}, pool)


def test_a_kernel_with_one_output():
    launch = Launch("scale", (("ptr", "x"), ("ptr", "y"), ("int", "4"), ("float", "0.5")))
    fn = run([Alloc("y", spec(4), "16"), launch, Drop("x"), Return((Ref("y"),))])
    args = [torch.arange(4.0)]
    assert fn(args)[0].tolist() == [0, 0.5, 1, 1.5] and args == [] and fn._boxed_call


def test_host_integers_are_text_over_names():
    symbolic = TensorSpec(("s0", "rows"), ("rows", "1"), F32)
    fn = run([Let("rows", "s0*4 - 2"), Alloc("y", symbolic, "4*s0*rows"), Return((Ref("y"), Host("rows + 1"), None, "text"))], inputs=("s0",))
    y, n, nothing, text = fn([3])
    assert y.shape == (3, 10) and n == 11 and nothing is None and text == "text"


def test_a_padded_output_has_exactly_its_strides():
    for pool in (None, Pool()):
        y, = run([Alloc("y", spec(512, 1000, strides=(1024, 1)), str(512 * 1024 * 4)), Return((Ref("y"),))], pool=pool)([torch.ones(1)])
        assert y.stride() == (1024, 1) and y.untyped_storage().nbytes() >= (511 * 1024 + 1000) * 4


def test_a_kernels_error_is_raised_with_its_message():
    errors = ((ValueError, "no"), (IndexError, "line 7: index out of range"))
    fn = run([Launch("bad", ()), Return(())], inputs=(), errors=errors, kernels={"bad": lambda w, t: 2})
    with pytest.raises(IndexError, match="line 7"):
        fn([])
    with pytest.raises(InternalError):
        run([Launch("bad", ()), Return(())], inputs=(), kernels={"bad": lambda w, t: 2})([])


def test_a_pointer_is_taken_once():
    steps = [Launch("k", (("ptr", "x"),)), Launch("k", (("ptr", "x"), ("int", "1"))), Return((Ref("x"),))]
    assert source(Program("test", ("x",), tuple(steps))).count("data_ptr") == 1


def test_windows_of_a_tensor():
    x = torch.arange(12.0)[2:]
    fn = run([Return((Ref("x", ("2", "2"), ("4", "1"), "1"),))])
    y, = fn([x])
    assert y.tolist() == [[3, 4], [7, 8]] and y.data_ptr() == x.data_ptr() + 4


def test_a_call_with_nested_arguments():
    fn = run([Call(torch.ops.aten.cat.default, ([Ref("x"), Ref("x", ("1",), ("1",), "n")], Host("n - 1")), {}, (("y", spec(4)),), True),
              Call(torch.ops.aten.split.Tensor, (Ref("y"), 3), {}, (("a", spec(3)), (None, spec(1))), False), Return((Ref("a"),))], inputs=("x", "n"))
    for _ in range(2):
        assert fn([torch.arange(3.0), 1])[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("text", ["3", "n"])
def test_a_result_with_other_strides_is_made_to_conform_at_every_call(text):
    traced = TensorSpec(("2", text), ("1", "2"), F32)
    fn = run([Call(torch.add, (Ref("x"), 1), {}, (("y", traced),), True), Return((Ref("y"),))], inputs=("x", "n"))
    for x in (torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 2).t()):
        y, = fn([x, 3])
        assert y.stride() == (1, 2) and torch.equal(y, x + 1)


def test_a_result_of_another_shape_is_our_bug():
    fn = run([Call(torch.add, (Ref("x"), 1), {}, (("y", spec(5)),), True), Return((Ref("y"),))])
    with pytest.raises(InternalError, match="traced"):
        fn([torch.ones(4)])


def test_a_kernel_reads_the_traced_type_and_a_call_gets_torchs():
    traced = spec(4)
    call = Call(torch.Tensor.double, (Ref("x"),), {}, (("y", traced),), True)
    seen = []
    launch = [Alloc("z", traced, "16"), Launch("scale", (("ptr", "y"), ("ptr", "z"), ("int", "4"), ("float", "2.0")))]
    fn = run([call, *launch, Call(lambda t: seen.append(t.dtype), (Ref("y"),), {}, ((None, None),), True), Return((Ref("z"),))])
    assert [fn([torch.arange(4.0)])[0].tolist() for _ in range(2)] == [[0, 2, 4, 6]] * 2
    run([call, Call(lambda t: seen.append(t.dtype), (Ref("y"),), {}, ((None, None),), True), Return(())])([torch.ones(4)])
    assert seen == [F32, F32, torch.float64]
    fn = run([*launch, Return((Ref("z"),))], inputs=("y",), dtypes={"y": F32})
    assert [fn([torch.arange(4.0, dtype=torch.float64)])[0].tolist() for _ in range(2)] == [[0, 2, 4, 6]] * 2


def test_copies_into_inputs():
    x = torch.zeros(3)
    run([Call(torch.add, (Ref("x"), 2), {}, (("y", spec(3)),), True), Copy(Ref("x"), Ref("y")), Return(())])([x])
    assert x.tolist() == [2, 2, 2] and x._version == 1


def test_an_input_is_freed_at_its_drop():
    import weakref
    alive = []

    def look(_):
        alive.append(seen() is not None)
        return torch.ones(1)
    steps = [Call(look, (0,), {}, (("a", spec(1)),), True), Drop("x"), Call(look, (0,), {}, (("b", spec(1)),), True), Return((Ref("a"),))]
    args = [torch.ones(3)]
    seen = weakref.ref(args[0])
    run(steps)(args)
    assert alive == [True, False]


def test_constants_are_named_by_steps():
    add = Call(torch.add, (Ref("x"), Ref("constant_c")), {}, (("y", spec(2)),), True)
    fn = run([add, Return((Ref("y"),))], constants={"constant_c": torch.tensor([1.0, 2.0])})
    assert fn([torch.zeros(2)])[0].tolist() == [1, 2]


def test_reserved_names_are_refused():
    with pytest.raises(InternalError):
        run([Let("tk_p_x", "1"), Return(())])
    with pytest.raises(InternalError):
        run([Return(())], inputs=("class",))


def test_a_program_that_is_gone_leaves_no_idle_memory():
    pool = Pool()
    fn = run([Alloc("y", spec(1 << 19), str(4 << 19)), Return((Ref("y"),))], pool=pool)
    kept = [fn([torch.ones(1)]), fn([torch.ones(1)])]
    del kept[0]
    assert pool.held() == (4 << 20, 2 << 20)
    del fn
    gc.collect()
    assert pool.held() == (2 << 20, 0)


def test_many_threads_may_call_one_program():
    copy = Call(torch.Tensor.copy_, (Ref("y"), Ref("x")), {}, ((None, None),), True)
    fn = run([Alloc("y", spec(1 << 19), str(4 << 19)), copy, Return((Ref("y"),))], pool=Pool())
    wrong = []

    def work(value):
        x = torch.full((1 << 19,), float(value))
        for _ in range(50):
            y, = fn([x])
            if not torch.equal(x, y):
                wrong.append(value)
    in_threads(work, [(i,) for i in range(4)])
    assert not wrong
