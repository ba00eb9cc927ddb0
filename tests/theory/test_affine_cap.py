"""What is known of a norm's result whatever comes in: hand-worked cases in fifty digits, where it is attained."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from mpmath import asinh, mp, mpf, sqrt
from torch import Tensor, nn

from holonomy.layers import HypLayerNorm, HypRMSNorm
from holonomy.layers.hyperbolic.block import Norm
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer
from holonomy.theory.affine import cap, points
from holonomy.theory.affine.arithmetic import forms
from holonomy.theory.affine.arithmetic.forms import Noise

pytestmark = pytest.mark.usefixtures("without_shape_checks")

# Not representable, so that sums and products round.
GAIN, SHIFT, ROW = 0.7, 0.3, 1.1


def encoder_of(features: int, gain: Tensor, shift: Tensor, norm: Norm = "layer") -> HypformerEncoder:
    """An encoder whose last norm has this gain and, if it is a LayerNorm, shift."""
    model = Hypformer(2, features, 2, layers=1, graph_encoder=None, curvature=-0.3, norm=norm).double().eval()
    encoder = cast("HypformerEncoder", model.encoder)
    last = cast("Any", encoder.blocks[-1]).norm_feedforward.function.norm
    with torch.no_grad():
        last.weight.copy_(gain)
        if norm == "layer":
            last.bias.copy_(shift)
    return encoder


def curvature_root(encoder: HypformerEncoder) -> mpf:
    return mpf(points.root(cast("Any", encoder.blocks[-1]).norm_feedforward.manifold_out).item())


def pair(one: float, other: float) -> Tensor:
    return torch.tensor([one, other], dtype=torch.float64)


@torch.no_grad()
def test_the_farthest_logarithm_where_the_shift_lies_along_the_only_direction() -> None:
    """Of two features the results of a LayerNorm are a segment, whose end has the length that is said."""
    encoder = encoder_of(2, pair(GAIN, GAIN), pair(SHIFT, -SHIFT))
    with mp.workdps(50):
        k = curvature_root(encoder)
        truth = asinh(k * sqrt(mpf(2)) * (mpf(GAIN) + mpf(SHIFT))) / k
        assert truth <= mpf(cap.farthest(encoder).item()) <= truth * (1 + mpf("1e-12"))


@pytest.mark.parametrize(
    ("gain", "shift", "row"),
    [
        (GAIN, (SHIFT, -SHIFT), (-ROW, ROW)),  # the farthest point, straight against the row
        (GAIN, (-SHIFT, -SHIFT), (ROW, ROW)),  # a row across the segment: the nearest point
        (0.0, (SHIFT, ROW), (ROW, -SHIFT / 2)),  # one point, before the row
        (0.0, (SHIFT, ROW), (-SHIFT, -ROW)),  # one point, straight behind it
    ],
)
@torch.no_grad()
def test_the_least_product_of_two_features(gain: float, shift: tuple[float, float], row: tuple[float, float]) -> None:
    encoder = encoder_of(2, pair(gain, gain), pair(*shift))
    found = cap.least_products(encoder, pair(*row)[None, None]).item()
    with mp.workdps(50):
        k, ends = curvature_root(encoder), []
        for along in (-mpf(gain), mpf(0), mpf(gain)):
            place = [mpf(shift[0]) + along, mpf(shift[1]) - along]
            length = sqrt(place[0] ** 2 + place[1] ** 2)
            ends.append((place[0] * mpf(row[0]) + place[1] * mpf(row[1])) * asinh(k * length) / (k * length))
        truth = min(ends)
        assert truth - abs(truth) * mpf("1e-12") <= mpf(found) <= truth


@pytest.mark.parametrize("kind", ["layer", "rms"])
@torch.no_grad()
def test_no_result_is_beyond_what_is_said_of_all(kind: Norm) -> None:
    encoder = encoder_of(5, torch.rand(5).double() + 0.5, torch.randn(5).double(), kind)
    norm = cast("Any", encoder.blocks[-1]).norm_feedforward
    gain, shift = points.gain_of(norm)
    drawn = torch.randn(4000, 5).double()
    if kind == "layer":
        drawn = drawn - drawn.mean(-1, keepdim=True)
    y = gain * drawn / drawn.norm(dim=-1, keepdim=True) * math.sqrt(5) + shift
    logs = norm.manifold_out.logmap0(norm.manifold_out.lift(y))[:, 1:]
    assert logs.norm(dim=-1).max() <= cap.farthest(encoder)
    rows = torch.randn(7, 5).double()
    least = cap.least_products(encoder, rows[None])[0]
    assert (least <= (logs @ rows.T).amin(0)).all()
    # Known only from the shortest and the longest result.
    assert (least >= 2 * (logs @ rows.T).amin(0) - 1).all()


def test_nothing_is_known_where_no_layer_norm_is_last() -> None:
    encoder = encoder_of(2, pair(1.0, 1.0), pair(0.0, 0.0))
    cast("Any", encoder.blocks[-1]).norm_feedforward = nn.Identity()
    assert cap.farthest(encoder) == torch.inf
    assert cap.least_products(encoder, torch.ones(1, 3, 2).double()).tolist() == [[-torch.inf] * 3]


@torch.no_grad()
def test_a_form_that_failed_becomes_all_that_the_layer_norm_gives() -> None:
    """And so does one that reaches farther; one within stays as it is."""
    layer = HypLayerNorm(2, Lorentz(-0.3), dtype=torch.float64)
    norm = cast("Any", layer.function).norm
    norm.weight.copy_(pair(GAIN, GAIN))
    norm.bias.copy_(pair(SHIFT, 0.0))
    noise = Noise.of(3, 1, torch.zeros(1).double())
    columns = torch.tensor([0.1, 9.0, 0.1]).double()[:, None, None] * pair(1.0, -1.0)[:, None]
    form = forms.Form(noise, torch.zeros(3, 2).double(), columns, torch.zeros(3, 2).double())
    noise.fail(torch.tensor([False, False, True]))
    found = points.within_sphere(layer, form)
    assert not noise.failed.any()
    sphere = pair(GAIN, GAIN).expand(2, 2)
    torch.testing.assert_close(found.center, torch.stack([pair(0.0, 0.0), *2 * [pair(SHIFT, 0.0)]]))
    torch.testing.assert_close(found.spread(), torch.cat([0.1 * torch.ones(1, 2).double(), sphere]))
    assert (found.spread()[1:] >= sphere).all()
    # The segment itself: nothing along the ones.
    torch.testing.assert_close(found.linear(torch.ones(1, 2).double()).spread()[1:], torch.zeros(2, 1).double())


@torch.no_grad()
def test_an_rms_norm_gives_an_ellipsoid() -> None:
    layer = HypRMSNorm(2, Lorentz(-0.3), dtype=torch.float64)
    cast("Any", layer.function).norm.weight.copy_(pair(GAIN, 2 * GAIN))
    noise = Noise.of(1, 1, torch.zeros(1).double())
    noise.fail(torch.tensor([True]))
    zero = torch.zeros(1, 2).double()
    found = points.within_sphere(layer, forms.Form(noise, zero, zero[..., None], zero))
    torch.testing.assert_close(found.center, zero)
    turns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]).double()
    reached = found.linear(turns).spread()[0]
    truth = math.sqrt(2) * (turns * pair(GAIN, 2 * GAIN)).norm(dim=-1)
    assert (truth <= reached).all()
    torch.testing.assert_close(reached, truth)
