"""Device functions that Triton kernels call, as `tk.NAME`: what the rows of `ir.ops.OPS`, the folds and the casts need beyond Triton's own operators.

Arguments are Triton tensors (scalars or blocks) of the compute types; two arguments broadcast as operators do. Which function serves which
row is told by `triton_ops`. A name that ends in 64 is for f64, its namesake for f32; the others take what their rows take.
"""
from .triton_base import *    # noqa: F401,F403
from .triton_circular import *  # noqa: F401,F403
from .triton_dot import *     # noqa: F401,F403
from .triton_fold import *    # noqa: F401,F403
from .triton_math import *    # noqa: F401,F403
from .triton_math64 import *  # noqa: F401,F403
from .triton_order import *   # noqa: F401,F403
from .triton_rem import *     # noqa: F401,F403
from .triton_share import again, arrive, exchange1, exchange2, exchange3, exchange4, meet, packed, room, swap1, swap2, swap3, swap4    # noqa: F401
from .triton_share import share1, share2, share3, share4, summed_part, widened    # noqa: F401
from .triton_special import *  # noqa: F401,F403
from .triton_update import *  # noqa: F401,F403
