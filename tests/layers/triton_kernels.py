"""The Triton kernels against the chunked forms and the loops. test_triton.py runs this file in a process of its own.

On a CPU Triton's interpreter runs them, in float64, in blocks so small that there are several; on CUDA they are
compiled, in float32. What they replace is called with a tile, which is never Triton's.
"""

from __future__ import annotations

import pytest
import torch

from holonomy.layers import simplicial_attention
from holonomy.ops import simplicial_attention as simplicial
from holonomy.ops.simplicial_attention import triton as triton_simplicial
from holonomy.ops.simplicial_attention.reference import factors_of, simplicial_attention_reference
from holonomy.ops.simplicial_attention.simplexes import list_simplexes
from tests.reference.simplicial import attention as by_loops
from tests.reference.simplicial import near


@pytest.fixture
def exact(device):
    """The dtype to compare in, and how close."""
    return (torch.float64, 1e-10) if device.type == "cpu" else (torch.float32, 1e-4)


@pytest.fixture
def launched(monkeypatch, device):
    """Let kernels serve however few tokens, on any device, and list those that ran."""
    names: list[str] = []
    launch = triton_simplicial._launch

    def listed(kernel, *arguments):
        names.append(kernel.__name__)
        launch(kernel, *arguments)

    monkeypatch.setattr(triton_simplicial, "_launch", listed)
    monkeypatch.setattr(simplicial, "STORED", 0)
    monkeypatch.setattr(simplicial, "TILE", 1)
    if device.type == "cpu":
        monkeypatch.setattr(simplicial, "supports_triton", lambda *tensors: True)
    return names


def drawn(order, *shape, values, device, dtype):
    keys = [torch.randn(*shape, dtype=dtype, device=device, requires_grad=True) for _ in range(order + 1)]
    mixed = [torch.randn(*shape[:-1], values, dtype=dtype, device=device, requires_grad=True) for _ in range(order)]
    return keys, mixed


def assert_same(ours, theirs, tensors, close):
    torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
    weights = torch.linspace(-1, 2, ours.numel(), dtype=ours.dtype, device=ours.device).reshape(ours.shape)
    found, wanted = (torch.autograd.grad((result * weights).sum(), tensors) for result in (ours, theirs))
    for index, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(mine, other, rtol=close, atol=10 * close, msg=lambda m, i=index: f"input {i}: {m}")


@pytest.mark.parametrize(
    ("shape", "values", "form", "causal", "window", "padded"),
    [
        ((2, 5, 8), 16, "product", False, None, True),
        ((2, 2, 5, 16), 8, "determinant", True, None, False),
        ((1, 17, 24), 8, "product", True, None, True),
        ((17, 8), 24, "product", False, (6, 3), False),
        ((17, 8), 8, "determinant", False, 4, False),
        ((1, 18, 8), 8, "product", True, (5, 17), True),
        ((33, 8), 8, "product", False, (3, 2), False),
    ],
)
def test_simplicial_attention_is_that_of_chunks(shape, values, form, causal, window, padded, device, exact, launched):
    keys, mixed = drawn(2, *shape, values=values, device=device, dtype=exact[0])
    options = {"form": form, "causal": causal, "window": window}
    if padded:
        there = torch.rand(shape[0], *(1,) * (len(shape) - 2), shape[-2], device=device) > 0.3
        there[0, ..., 0] = False  # so that, where causal, the first query has no key at all
        options["pair_mask"] = there
    ours = simplicial_attention(keys, mixed, **options)
    if padded and causal:
        assert torch.equal(ours[0, ..., 0, :], torch.zeros_like(ours[0, ..., 0, :]))
    theirs = simplicial_attention(keys, mixed, tile=300, **options)
    assert_same(ours, theirs, keys + mixed, exact[1])
    assert launched == ["_forward", "_of_queries", "_of_first_keys", "_of_others"]


@pytest.mark.parametrize(
    ("order", "form", "causal", "window"),
    [
        (2, "product", False, None),
        (2, "determinant", True, 2),
        (3, "product", True, (3, 2, 4)),
        (3, "determinant", False, None),
    ],
)
def test_simplicial_attention_is_that_of_loops(order, form, causal, window, device, exact, launched):
    keys, values = drawn(order, 4, 8, values=3, device=device, dtype=exact[0])
    there = torch.tensor([True, True, False, True], device=device)

    def takes(i, simplex):
        return all(bool(there[k]) and (k <= i or not causal) for k in simplex) and near(window, i, simplex)

    ours = simplicial_attention(keys, values, pair_mask=there, causal=causal, window=window, form=form)
    theirs = by_loops(keys, values, takes, form=form)
    assert_same(ours, theirs, keys + values, exact[1])
    assert len(launched) == 4


@pytest.mark.parametrize(("causal", "window", "last"), [(True, None, 1), (True, (6, 3), 5), (False, 4, 3)])
def test_fewer_queries_are_the_last_of_the_keys(causal, window, last, device, exact, launched):
    keys, values = drawn(2, 2, 17, 8, values=8, device=device, dtype=exact[0])
    some, there = [keys[0][:, -last:], *keys[1:]], torch.rand(2, 1, 17, device=device) > 0.3
    options = {"causal": causal, "window": window, "pair_mask": there}
    ours = simplicial_attention(some, values, **options)
    theirs = simplicial_attention(keys, values, tile=300, **options)[:, -last:]
    assert_same(ours, theirs, keys + values, exact[1])
    assert len(launched) == 4


@pytest.mark.parametrize("form", ["product", "determinant"])
def test_one_token(form, device, exact, launched):
    """Of which there are too few for tiles: the kernels are called by name."""
    keys, values = drawn(2, 1, 8, values=8, device=device, dtype=exact[0])
    alone = list_simplexes((1, 1, 1), torch.Size(), device)
    factors = factors_of(keys, values, alone, form=form, scale=0.5)
    (ours, mass), (theirs, expected) = (
        triton_simplicial.triton_attention(factors, alone),
        simplicial_attention_reference(factors),
    )
    torch.testing.assert_close(mass, expected)
    assert_same(ours, theirs, values, exact[1])
    assert len(launched) == 4


def test_all_orders_in_one_softmax(device, exact, launched):
    """The logarithms of the masses have gradients, too."""
    keys, values = drawn(2, 5, 8, values=3, device=device, dtype=exact[0])
    ours = simplicial_attention(keys, values, lower_orders=True, causal=True)
    assert_same(ours, by_loops(keys, values, lambda i, s: max(s) <= i, lower_orders=True), keys + values, exact[1])
    assert "_of_others" in launched


def test_large_logits_that_are_equal_share_the_weight(device, exact, launched):
    """Of whole numbers, whose logits are exact: beside them the logarithm of a sum has no digits."""
    keys, values = drawn(2, 17, 8, values=8, device=device, dtype=exact[0])
    size = 2.0**18 if exact[0] == torch.float64 else 2.0**8
    keys = [size * key.detach().round() for key in keys]
    ours, theirs = (simplicial_attention(keys, values, tile=tile, scale=1.0) for tile in (None, 17**3))
    assert_same(ours, theirs, values, exact[1])
    assert len(launched) == 4


def test_keys_of_several_lengths(device, exact, launched):
    keys = [torch.randn(n, 8, dtype=exact[0], device=device, requires_grad=True) for n in (3, 17, 5)]
    values = [torch.randn(n, 8, dtype=exact[0], device=device, requires_grad=True) for n in (17, 5)]
    ours = simplicial_attention(keys, values)
    assert_same(ours, simplicial_attention(keys, values, tile=50), keys + values, exact[1])
    assert len(launched) == 4


def test_no_query_has_a_key(device, exact, launched):
    keys, values = drawn(2, 3, 8, values=8, device=device, dtype=exact[0])
    nowhere = torch.zeros(1, 3, dtype=torch.bool, device=device)
    result = simplicial_attention(keys, values, pair_mask=nowhere)
    for found in (result, *torch.autograd.grad(result.sum(), keys + values)):
        assert torch.equal(found, torch.zeros_like(found))
    assert len(launched) == 4


def test_logits_of_ten_thousand_pick_the_largest(device, launched):
    keys, values = drawn(2, 17, 8, values=8, device=device, dtype=torch.float32)
    big = [1e4 * keys[0], keys[1], keys[2]]
    best = torch.einsum("id,jd,kd->ijk", *big).flatten(1).argmax(1)
    expected = values[0][best // 17] * values[1][best % 17]
    result = simplicial_attention(big, values)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(result.sum(), keys + values))
    assert len(launched) == 4


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_of_sixteen_bits(short, device, launched):
    keys, values = drawn(2, 5, 8, values=8, device=device, dtype=short)
    ours = simplicial_attention(keys, values, causal=True)
    wide = simplicial_attention([x.double() for x in keys], [x.double() for x in values], causal=True, tile=25)
    assert ours.dtype == short
    torch.testing.assert_close(ours.double(), wide, rtol=2e-2, atol=2e-2)
    mine, theirs = (torch.autograd.grad(result.sum(), keys + values) for result in (ours, wide))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-2, atol=4e-2)
    assert len(launched) == 4


def test_two_runs_give_the_same_bits(device, launched):
    keys, values = drawn(2, 17, 8, values=8, device=device, dtype=torch.float32)
    first, second = (
        torch.autograd.grad(simplicial_attention(keys, values, window=5).sum(), keys + values) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert len(launched) == 8


def test_gradcheck_and_no_second_derivative(device, launched):
    if device.type == "cpu":  # float64 is the interpreter's
        keys, values = drawn(2, 3, 2, values=2, device=device, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda *x: simplicial_attention(x[:3], x[3:], causal=True), (*keys, *values), fast_mode=True
        )
    keys, values = drawn(2, 3, 2, values=2, device=device, dtype=torch.float32)
    (first,) = torch.autograd.grad(simplicial_attention(keys, values).sum(), keys[0], create_graph=True)
    with pytest.raises(RuntimeError, match="in tiles has no second derivative"):
        first.square().sum().backward()
    assert launched


def test_what_the_kernels_do_not_serve_is_chunked(device, launched):
    keys, values = drawn(2, 4, 8, values=8, device=device, dtype=torch.float32)
    square = torch.ones(4, 4, dtype=torch.bool, device=device)
    cube = torch.ones(4, 4, 4, dtype=torch.bool, device=device)
    whole = simplicial_attention(keys, values, tile=4)
    for options in ({"pair_mask": square}, {"mask": cube}, {"tile": 64}):
        torch.testing.assert_close(simplicial_attention(keys, values, **options), whole)
    assert launched == []


@pytest.mark.usefixtures("without_decorators")
def test_kernels_compile_without_a_graph_break(device, exact, launched):
    keys, values = drawn(2, 2, 3, 4, values=4, device=device, dtype=exact[0])

    def by_simplex(keys, values):
        return simplicial_attention(keys, values, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(by_simplex, fullgraph=True, backend="aot_eager")
    assert_same(compiled(keys, values), by_simplex(keys, values), keys + values, exact[1])
    assert len(launched) == 8
