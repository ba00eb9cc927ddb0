"""``torch.library.opcheck`` over every operator registered with torch, on the arguments of real calls."""

from __future__ import annotations

from holonomy.ops.triton_support import TRITON
from tests.layers.test_triton import alone

# What an operator is called with is recorded below autograd, where torch.compile meets it. The kernels of Triton run in
# its interpreter, which is chosen before Triton is imported: hence a process of its own.
CHECKED = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from holonomy.manifolds import Lorentz
from holonomy.ops import simplicial_attention as simplicial
from holonomy.ops.triton_support import TRITON

simplicial.STORED, simplicial.TILE, simplicial.supports_triton = 0, 1, lambda *tensors: TRITON
calls = {}

class Recorded(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "holonomy":
            calls.setdefault(op, []).append([a.detach().clone() if torch.is_tensor(a) else a for a in args])
        return op(*args, **(kwargs or {}))

def drawn(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]

torch.manual_seed(0)
with Recorded():
    keys = drawn(*[(1, 3, 4)] * 5)
    simplicial.simplicial_attention(keys[:3], keys[3:], causal=True).sum().backward()
    for products in (True, False):
        x, y, scale = drawn((2, 5, 3), (2, 4, 3), ())
        torch.ops.holonomy.pairwise_distance(x, y, scale, products).sum().backward()

known = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("holonomy::")}
assert known == {op.name() for op in calls}, known
for op, arguments in calls.items():
    for number, one in enumerate(arguments):
        report = torch.library.opcheck(op, tuple(one))
        assert set(report.values()) == {"SUCCESS"}, (op, number, report)
        print(op.name())
x, y, scale = drawn((5, 3), (4, 3), ())
torch.library.opcheck(torch.ops.holonomy.pairwise_distance.default, (x, y, scale, True))
"""


def test_every_custom_operator_keeps_the_promises_of_its_registration() -> None:
    """Schemas, shapes without data, gradients, and the same under the compiler; a new operator without a call fails."""
    checked = alone(["-W", "ignore", "-c", CHECKED], TRITON_INTERPRET="1").split()
    assert len(set(checked)) == (4 if TRITON else 2)
    assert len(checked) >= 4
