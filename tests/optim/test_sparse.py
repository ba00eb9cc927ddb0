"""Sparse gradients: the rows that a batch names move as they would by themselves, and no others."""

from __future__ import annotations

import copy

import geoopt
import pytest
import torch

from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam, RiemannianSGD
from tests.optim.problems import deviation, normal, on

KINDS = {
    "adam": (RiemannianAdam, {"lr": 0.05}),
    "amsgrad": (RiemannianAdam, {"lr": 0.05, "amsgrad": True}),
    "sgd": (RiemannianSGD, {"lr": 0.05}),
    "momentum": (RiemannianSGD, {"lr": 0.05, "momentum": 0.7}),
    "nesterov": (RiemannianSGD, {"lr": 0.05, "momentum": 0.7, "nesterov": True}),
}
each_kind = pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS.keys())


def lorentz():
    return on(Lorentz(-1.0, dtype=torch.float64), normal(torch.Generator().manual_seed(0), 9, 4))


def theirs():
    return on(geoopt.Lorentz(torch.tensor(2.5, dtype=torch.float64)), normal(torch.Generator().manual_seed(0), 9, 4))


def sphere():
    return on(geoopt.Sphere(), normal(torch.Generator().manual_seed(0), 9, 4))


def flat():
    return torch.nn.Parameter(normal(torch.Generator().manual_seed(0), 9, 4))


each_table = pytest.mark.parametrize("table", [lorentz, theirs, sphere, flat])


def sparse(rows, table, seed):
    draw = torch.Generator().manual_seed(seed)
    values = normal(draw, len(rows), table.shape[-1])
    return torch.sparse_coo_tensor(torch.tensor(rows)[None], values, table.shape, check_invariants=True)


@each_kind
@each_table
def test_where_every_row_is_named_the_step_is_the_dense_one(kind, options, table):
    a, b = table(), table()
    one, other = kind([a], **options), kind([b], **options)
    for seed in range(10):
        # Rows that occur twice add up.
        a.grad = sparse([*range(9), 3, 3], a, seed)
        b.grad = a.grad.to_dense()
        one.step(), other.step()
    assert deviation([a], [b]) <= 1e-14
    assert deviation([a], [table()]) > 0.01


@each_kind
@each_table
def test_only_the_named_rows_move(kind, options, table):
    a = table()
    optimizer = kind([a], **options)
    a.grad = sparse([1, 4, 5], a, 0)
    optimizer.step()
    before, state = a.detach().clone(), copy.deepcopy(optimizer.state[a])
    a.grad = sparse([4, 7, 4], a, 1)
    optimizer.step()
    still = [row for row in range(9) if row not in (4, 7)]
    assert torch.equal(a.detach()[still], before[still])
    assert bool((a.detach()[[4, 7]] != before[[4, 7]]).any(-1).all())
    for name, value in optimizer.state[a].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value[still], state[name][still]), name


@pytest.mark.parametrize("table", [theirs, sphere])
def test_adam_agrees_with_geoopts_sparse_optimizer(table):
    a, b = table(), table()
    ours, other = RiemannianAdam([a], lr=0.02), geoopt.optim.SparseRiemannianAdam([b], lr=0.02)
    other.param_groups[0].setdefault("stabilize", None)
    for seed in range(60):
        rows = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:4].tolist()
        for parameter in (a, b):
            parameter.grad = sparse(rows, parameter, seed)
        ours.step(), other.step()
    assert deviation([a], [b]) <= 1e-10
    assert deviation([a], [table()]) > 0.1


def test_a_vector_table_moves_as_torchs_sparse_adam_moves_it():
    a, b = flat(), flat()
    ours, other = RiemannianAdam([a], lr=0.02, eps=1e-30), torch.optim.SparseAdam([b], lr=0.02, eps=1e-30)
    for seed in range(60):
        rows = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:4].tolist()
        a.grad = sparse(rows, a, seed)
        b.grad = sparse(rows, b, seed)
        ours.step(), other.step()
    assert deviation([a], [b]) <= 1e-12


@each_kind
def test_a_checkpoint_goes_on_in_the_same_bits(kind, options):
    a = lorentz()
    optimizer = kind([a], **options)

    def run(parameter, stepper, seeds):
        for seed in seeds:
            parameter.grad = sparse([seed % 9, 2, 6], parameter, seed)
            stepper.step()

    run(a, optimizer, range(5))
    b = lorentz()
    with torch.no_grad():
        b.copy_(a)
    other = kind([b], **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(a, optimizer, range(5, 10)), run(b, other, range(5, 10))
    assert torch.equal(a, b)


@each_kind
def test_no_touched_row_and_no_step_are_the_same(kind, options):
    a = lorentz()
    before = a.detach().clone()
    a.grad = sparse([], a, 0)
    kind([a], **options).step()
    assert torch.equal(a, before)


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_what_no_step_is_defined_for_is_refused_before_anything_moves(kind):
    other, table = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(5, 3))
    other.grad = torch.ones(2)
    for grad, options, said in [
        (torch.eye(5, 3).to_sparse(), {}, r"whole rows of a table.* torch.sparse_coo for .* \(5, 3\)"),
        (torch.eye(5, 3).to_sparse(1), {"weight_decay": 0.1}, r"weight_decay must be 0 .* got 0.1"),
    ]:
        optimizer = kind([other, table], lr=0.1, **options)
        table.grad = grad
        with pytest.raises(RuntimeError, match=said):
            optimizer.step()
        assert torch.equal(other, torch.ones(2))
        assert not optimizer.state


@each_kind
@pytest.mark.parametrize("learnable", [False, True])
def test_an_embedding_learns_by_its_rows(kind, options, learnable):
    manifold = Lorentz(-0.7, learnable=learnable)
    table = LorentzEmbedding(20, 3, manifold, sparse=True, padding_idx=-1, generator=torch.Generator().manual_seed(0))
    assert table.padding_idx == 19
    assert float(manifold.dist0(table(torch.tensor(19))).detach()) == 0
    optimizer = kind(table.parameters(), **options)
    before = table.unit.detach().clone()
    looked_up = torch.tensor([[3, 19], [4, 3]])
    for _ in range(3):
        optimizer.zero_grad()
        manifold.dist0(table(looked_up)).sum().backward()
        assert table.unit.grad.is_sparse
        optimizer.step()
    moved = (table.unit != before).any(-1).nonzero().flatten().tolist()
    assert moved == [3, 4]
    assert torch.allclose(table(), manifold.projx(table()))


def test_given_points_are_what_is_looked_up():
    manifold = Lorentz(-0.7, learnable=True)
    points = manifold.random(6, 4).detach()
    state = torch.get_rng_state()
    table = LorentzEmbedding.from_pretrained(points, manifold)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(table(), points)
    torch.testing.assert_close(table(torch.tensor([2, 5])), points[[2, 5]])
    assert not table.unit.requires_grad
    tuned = LorentzEmbedding.from_pretrained(points, manifold, freeze=False, sparse=True, padding_idx=2)
    torch.testing.assert_close(tuned(), points)
    manifold.dist0(tuned()).sum().backward()
    assert not tuned.unit.grad.to_dense()[2].any()
    assert tuned.unit.grad.to_dense()[1].any()


def test_without_amsgrad_the_largest_moments_are_not_used():
    for table in (lorentz, sphere, flat):
        a, b = table(), table()
        one, other = RiemannianAdam([a], lr=0.05), RiemannianAdam([b], lr=0.05)
        for step, size in enumerate([100.0, 1.0, 1.0]):
            # The largest moments are there from the second step on, and are asked for in that one only.
            one.param_groups[0]["amsgrad"] = step == 1
            with torch.no_grad():
                b.copy_(a)
            if step:
                moments = {name: value for name, value in one.state[a].items() if name != "max_exp_avg_sq"}
                other.state[b] = copy.deepcopy(moments)
            a.grad = size * sparse([1, 4], a, step)
            b.grad = a.grad.clone()
            one.step(), other.step()
        assert "max_exp_avg_sq" in one.state[a]
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("theirs_of", "ours_of"),
    [
        (lambda p: on_no_group(geoopt.optim.SparseRiemannianAdam(p, lr=0.1)), lambda p: RiemannianAdam(p, lr=0.5)),
        (lambda p: geoopt.optim.SparseRiemannianSGD(p, 0.1), lambda p: RiemannianSGD(p, 0.5)),
    ],
)
def test_states_of_geoopts_sparse_optimizers_load(theirs_of, ours_of):
    a, b = theirs(), theirs()
    other, ours = theirs_of([a]), ours_of([b])
    for seed in range(6):
        if seed == 3:
            ours.load_state_dict(copy.deepcopy(other.state_dict()))
            with torch.no_grad():
                b.copy_(a)
        a.grad = sparse([1, 4], a, seed)
        b.grad = a.grad.clone()
        other.step()
        if seed >= 3:
            ours.step()
    assert deviation([a], [b]) <= 1e-12


def on_no_group(optimizer):
    """Geoopt's sparse Adam reads an option that its constructor does not set."""
    optimizer.param_groups[0].setdefault("stabilize", None)
    return optimizer


@each_kind
def test_a_copy_takes_more_groups(kind, options):
    optimizer = copy.deepcopy(kind([lorentz()], **options, stabilize=3))
    optimizer.add_param_group({"params": [flat()]})
    assert [group["stabilize"] for group in optimizer.param_groups] == [3, 3]


@each_kind
def test_half_tables(kind, options):
    points = Lorentz(-1.0).random(6, 4, generator=torch.Generator().manual_seed(0)).as_subclass(torch.Tensor).half()
    table = LorentzEmbedding.from_pretrained(points, Lorentz(-1.0), freeze=False, sparse=True)
    torch.testing.assert_close(table(), points)
    assert LorentzEmbedding(6, 3, Lorentz(-1.0), dtype=torch.float16)().dtype == torch.float16
    optimizer, before = kind(table.parameters(), **options), table.unit.detach().clone()
    table.manifold.dist0(table(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    assert (table.unit != before).any(-1).tolist() == [False, True, True, False, False, False]
    assert table().isfinite().all()


@pytest.mark.parametrize("width", [torch.int8, torch.int16, torch.int32])
def test_indices_are_integers_of_any_width(width):
    table = LorentzEmbedding(6, 3, Lorentz(-1.0), sparse=True)
    assert torch.equal(table(torch.tensor([0, 1, 1], dtype=width)), table(torch.tensor([0, 1, 1])))
