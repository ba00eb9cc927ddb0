"""Positive divisors that are kept: lines about x / arsinh(x), and what a logarithm is divided by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holonomy.theory.affine.arithmetic import ratios
from holonomy.theory.affine.arithmetic.forms import Form, Noise
from holonomy.theory.affine.arithmetic.squares import bounds

pytestmark = pytest.mark.usefixtures("without_shape_checks")


@pytest.mark.parametrize("factor", [1.0, 0.9])
@pytest.mark.parametrize("ends", [(0.0, 2.3), (1.0, 1.2), (2.5, 9.0), (40.0, 41.0), (1.0, 6.0), (0.0, 9.0)])
def test_lines_are_on_their_side_and_nine_tenths_of_what_they_are_off_is_too_little(
    ends: tuple[float, float], factor: float
) -> None:
    lower, upper = (torch.tensor([end]).double() for end in ends)
    x = torch.linspace(*ends, 1001).double()
    truth = ratios.stretch(x)
    torch.testing.assert_close(truth, x / x.asinh() if ends[0] else torch.cat([truth[:1], x[1:] / x[1:].asinh()]))
    (below, above) = ratios.lines_of_stretch(lower, upper)
    # The function is off a line between them by less than nine tenths of what the lines are, unless it touches both.
    off = torch.stack([truth - below[0] * x - below[1], above[0] * x + above[1] - truth])
    gap = off.sum(0)
    assert bool((off >= (1 - factor) * gap / 2 - 1e-12).all()) is (factor == 1.0)
    width = ends[1] - ends[0]
    assert gap.amax() <= min(width**2 / 4, 0.045 * width) + 1e-12


def test_lines_hold_on_short_and_long_intervals_near_zero_about_the_turn_and_far_out() -> None:
    generator = torch.Generator().manual_seed(0)
    start, length = torch.tensor([0.0, 1e-3, 1.0, 2.37, 10.0]).double(), 10.0 ** torch.arange(-6.0, 4.0).double()
    lower = (start[:, None] * (1 + torch.rand(5, 300, generator=generator))).reshape(-1, 1)
    upper = lower + length[torch.randint(10, lower.shape, generator=generator)] * torch.rand(
        lower.shape, generator=generator
    )
    below, above = ratios.lines_of_stretch(lower, upper)
    x = lower + (upper - lower) * torch.linspace(0, 1, 2001).double()
    truth = ratios.stretch(x)
    assert (below[0] * x + below[1] <= truth).all()
    assert (truth <= above[0] * x + above[1]).all()


@pytest.mark.parametrize("k", [0.5, 2.0])
@pytest.mark.parametrize("squares", [False, True])
def test_the_stretch_of_a_ratio_is_enclosed_and_linear_for_small_balls(k: float, *, squares: bool) -> None:
    """The longest quotient that is known cuts off what the enclosure allows."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    center, columns = draw(20, 4), draw(20, 5, 3)
    under = 1 + draw(20, 1).abs()
    point = torch.nn.functional.normalize(draw(500, 3), dim=-1) * draw(500, 1).abs().clamp(max=1)
    for size in (2.0**-10, 0.1, 0.4):
        noise = Noise.of(20, 3, center, squares=squares)
        over = Form(noise, center, size * columns[:, :4], torch.zeros_like(center))
        below = Form(noise, under, 0.3 * size * columns[:, 4:].clamp(-1, 1), torch.zeros_like(under))
        moved = center[:, None] + torch.einsum("pec,dc->pde", over.columns, point)
        divisor = under + torch.einsum("pec,dc->pd", below.columns, point)
        longest = (moved.norm(dim=-1) / divisor).amax()
        ratio = ratios.Ratio(over, below, divisor.amin(1, keepdim=True))
        lines = ratio.stretched(torch.tensor(k).double(), longest)
        truth = divisor * ratios.stretch(k * moved.norm(dim=-1) / divisor)
        assert (bounds(lines[0])[0] <= truth).all()
        assert (truth <= bounds(lines[1])[1]).all()
        if size < 0.01:
            for form in lines:
                linear = form.center + torch.einsum("pec,dc->pd", form.gradient, point)
                assert (truth - linear).abs().amax() < 30 * size**2
