"""Pictures: the files are there, and what the disk shows is true."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from experiments.engine import plots
from holonomy.manifolds import Lorentz, frechet_mean


def is_picture(path: Path) -> bool:
    with Image.open(path) as picture:
        picture.load()
        # Drawn on: not one colour only.
        return picture.size[0] > 300 and len(picture.convert("RGB").getcolors(maxcolors=10**7)) > 10


@pytest.mark.parametrize("kappa", [-0.25, -1.0, -4.0])
def test_two_dimensions_are_shown_as_they_are(kappa: float) -> None:
    manifold = Lorentz(kappa)
    points = manifold.lift(torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    xy, share = plots.principal_disk(points, manifold)
    assert share == pytest.approx(1.0)
    # In two dimensions nothing is lost: a motion takes the mean to the middle of the disk, and distances from it are
    # kept.
    wanted = manifold.dist(frechet_mean(points, manifold), points)
    got = 2 * torch.atanh(xy.norm(dim=1)) / abs(kappa) ** 0.5
    assert torch.allclose(got, wanted, rtol=1e-6)


def test_the_share_that_is_lost_is_said() -> None:
    vectors = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    kept, share = plots.principal_directions(vectors)
    assert share == pytest.approx(13 / 14)
    assert torch.allclose(kept.norm(dim=1), torch.tensor([3.0, 2.0, 0.0]), atol=1e-6)
    assert plots.principal_directions(torch.zeros(4, 1))[1] == 1.0


def test_geodesics_of_the_disk_bend_towards_its_centre() -> None:
    line = plots.geodesics(torch.tensor([[0.8, 0.0]]), torch.tensor([[0.0, 0.8]]))[0]
    assert torch.allclose(line[[0, -1]], torch.tensor([[0.8, 0.0], [0.0, 0.8]], dtype=torch.float64), atol=1e-6)
    middle = line[len(line) // 2]
    assert middle.norm() < 0.8 / 2**0.5
    # The circle through both ends that meets the rim at right angles: its centre (c, c) has 2 c^2 = 1 + r^2.
    c = (1 + 0.64) / (2 * 0.8)
    radius = (2 * c * c - 1) ** 0.5
    assert torch.allclose((line - c).norm(dim=1), torch.full((len(line),), radius, dtype=torch.float64), atol=1e-6)


def test_every_picture_is_made(tmp_path: Path) -> None:
    histories = [{"loss": [2.0, 1.0, 0.5], "val": [0.1, 0.5, 0.4], "test": [0.2, 0.4, 0.5]}] * 2
    curved = [{"input": [-1.0, -1.1, -1.2], "block 1": [-1.0, -0.9, -0.8]}] * 2
    xy, labels = 0.5 * torch.rand(30, 2), torch.arange(30) % 3
    names = ["a", "b", "c"]
    made = [
        plots.training_curves(histories, [2, 2], tmp_path / "training.png", title="t"),
        plots.curvatures(curved, tmp_path / "curvature.png", title="t"),
        plots.embedding(
            xy, labels, names, tmp_path / "disk.png", title="t", caption="c",
            edges=torch.tensor([[0, 1], [1, 2]]), texts={0: "root"},
        ),
        plots.embedding(xy, labels, names, tmp_path / "plane.png", title="t", disk=False),
        plots.confusion(torch.tensor([[5, 1, 0], [0, 0, 0], [2, 2, 2]]), names, tmp_path / "confusion.png", title="t"),
        plots.comparison({"a": (0.9, 0.01), "b": (0.8, 0.0)}, tmp_path / "table.png", title="t", label="%"),
        plots.comparison({"a": (0.4, 0.01)}, tmp_path / "raw.png", title="t", label="MAE", factor=1.0, digits=3),
        plots.validation_curves({"a": [[0.1, 0.5], [0.2, 0.3]], "b": [[0.3]]}, tmp_path / "val.png", title="t"),
    ]  # fmt: skip
    assert len(set(made)) == 8
    assert all(is_picture(path) for path in made)
