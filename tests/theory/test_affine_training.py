"""Bounds to train with: they are the certificate's, their gradient is a gradient, and training with them certifies."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from holonomy.models import Hypformer
from holonomy.theory import NotCoveredError, certified_accuracy, certify_node, margin_bounds
from holonomy.theory.affine.enclosure import Enclosure
from tests.theory.test_affine_certificate import EDGES, FEATURES, NODES, trained

pytestmark = pytest.mark.usefixtures("without_shape_checks")


def least(model: Hypformer, x: Tensor, radius: float, target: int, threat: str = "node") -> Tensor:
    return margin_bounds(model, x, EDGES, [4], radius, torch.tensor([target]), threat=threat).amin()


# Every operation is in one of them.
ASKED = [("heads, cubes", "node"), ("power 1.5", "node"), ("residual GCN", "node"), ("propagation", "each"),
         ("midpoint average", "node"), ("hyperplanes", "node"), ("prototypes", "node"), ("softmax", "frobenius"),
         ("distances", "node"), ("two blocks, midpoint", "node")]  # fmt: skip


@pytest.mark.parametrize(("name", "threat"), ASKED)
def test_the_gradient_is_that_of_the_bound(name: str, threat: str) -> None:
    model, x = trained(name)
    model, target = deepcopy(model), int(model(x, EDGES)[4].argmax())
    parameters = [each for each in model.parameters() if each.requires_grad]
    along = [torch.randn(each.shape, generator=torch.Generator().manual_seed(i)).to(each)
             for i, each in enumerate(parameters)]  # fmt: skip
    bound = least(model, x, 0.05, target, threat)
    gradients = torch.autograd.grad(bound, parameters)
    slope = sum((a * b).sum().item() for a, b in zip(gradients, along, strict=True))

    def moved(step: float) -> float:
        with torch.no_grad():
            for each, one in zip(parameters, along, strict=True):
                each.add_(step * one)
        return least(model, x, 0.05, target, threat).item()

    step = 1e-6
    ahead = moved(step)
    behind = moved(-2 * step)
    assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("threat", ["node", "each"])
def test_a_bound_is_the_certificate(threat: str) -> None:
    """Or less, by what the certificate of one node gains with products of features."""
    model, x = trained("residual GCN")
    target = torch.tensor([2, 0, 1])
    found = margin_bounds(model.float(), x.float(), EDGES, [1, 4, 7], 0.03, target, threat=threat)
    for node, label, row in zip((1, 4, 7), target.tolist(), found, strict=True):
        known = certify_node(model, x.float(), EDGES, node, 0.03, target=label, threat=threat)
        others = torch.arange(3) != label
        gain = (known.margins - row)[others]
        assert gain.min() >= -1e-8
        assert gain.max() <= (1e-2 if threat == "node" else 1e-8)
    model.double()


def test_the_ball_is_not_smaller_than_the_radius() -> None:
    """In float32 0.03 is less by 7e-10, of which the bounds of a model in float64 were."""
    model, x = trained("alone")
    target = torch.tensor([0])
    found = margin_bounds(model, x, EDGES, [4], 0.03, target)
    wanted = Enclosure(model, x, EDGES, differentiable=True)
    radius = torch.tensor([0.03], dtype=torch.float64)
    torch.testing.assert_close(
        found, wanted.margins(torch.tensor([4]), torch.tensor([4]), radius, target).best, rtol=0, atol=0
    )


def test_a_model_in_float32_learns_in_float32() -> None:
    model = deepcopy(trained("hyperplanes")[0]).float()
    margin_bounds(model, trained("hyperplanes")[1].float(), EDGES, [0], 0.1, torch.tensor([0]))[0, 1:].sum().backward()
    assert {each.grad.dtype for each in model.parameters() if each.grad is not None} == {torch.float32}
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


def test_features_wider_than_what_is_read_have_the_gradient_of_the_whole() -> None:
    torch.manual_seed(1)
    model = Hypformer(60, 4, 2, layers=1, graph_encoder=None).double().eval()
    x = torch.randn(6, 60).double()
    weight = model.encoder.embedding.weight
    (gradient,) = torch.autograd.grad(margin_bounds(model, x, None, [2], 0.3, torch.tensor([0]))[0, 1], weight)
    along, step = torch.randn_like(weight), 1e-6
    ends = []
    for sign in (1, -2):
        with torch.no_grad():
            weight.add_(sign * step * along)
        ends.append(margin_bounds(model, x, None, [2], 0.3, torch.tensor([0]))[0, 1].item())
    assert (gradient * along).sum().item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


def taught(share: float) -> list[float]:
    """The accuracy of a small model, and what is certified of it, trained with a share of the bound in its loss."""
    torch.manual_seed(1)
    labels, radius = torch.arange(NODES) % 3, 0.4
    x = 2 * nn.functional.one_hot(labels, FEATURES).double() + 0.3 * torch.randn(NODES, FEATURES).double()
    model = Hypformer(FEATURES, 4, 3, layers=1, graph_encoder=None).double().eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(50):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        if share and step >= 20:
            # The ball grows: a bound on one that is far too large teaches a constant.
            bounds = margin_bounds(model, x, None, torch.arange(NODES), radius * (step - 19) / 30, labels)
            loss = loss + share * torch.relu(0.5 - bounds.amin(-1)).mean()
        loss.backward()
        optimizer.step()
    return certified_accuracy(model, x, None, torch.arange(NODES), labels, torch.tensor([0.0, radius])).tolist()


def test_training_with_a_bound_certifies_more() -> None:
    without, with_it = taught(0.0), taught(1.0)
    assert with_it[0] >= without[0]
    assert with_it[1] >= without[1] + 0.2


def test_what_is_not_covered_is_refused() -> None:
    model, x = trained("alone")
    label = torch.tensor([0])
    with pytest.raises(NotCoveredError, match="edges"):
        margin_bounds(model, x, EDGES, [0], 0.1, label, threat="edges")
    with pytest.raises(ValueError, match="nodes must lie in"):
        margin_bounds(model, x, EDGES, [NODES], 0.1, label)
    with pytest.raises(ValueError, match="radius"):
        margin_bounds(model, x, EDGES, [0], -0.1, label)
    with pytest.raises(ValueError, match="target"):
        margin_bounds(model, x, EDGES, [0], 0.1, torch.tensor([3]))
