"""Images: a hyperbolic vision transformer on handwritten digits, beside its flat twin, with the same search.

An image of 8 x 8 pixels is 16 patches of 2 x 2, the tokens of a :class:`~holonomy.models.HypTransformer` with a learned
place each. What makes it train as fast as the flat one, beside the model's own defaults: features of length one or so,
since the exponential map makes long ones exponentially longer; and classes that are read off the mean of the space
coordinates, which the last LayerNorm keeps at one scale, where logarithms at the origin would shrink them.

1000 images are to learn from, 200 choose learning rate and epoch, 597 are the test. The digits come with scikit-learn:
``pip install 'holonomy[examples]'``.

    python -m experiments.digits --lr 0.001 0.003 0.01 --seeds 3
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import feature_graphs
from experiments.engine import comparisons
from experiments.engine.options import option
from holonomy.models import HypTransformer
from holonomy.optim import RiemannianAdam

CLASSES, PIXELS, PATCH = 10, 8, 2
TOKENS = (PIXELS // PATCH) ** 2
TRAIN, CHOOSE = 1000, 200


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters."""

    hidden: int = option("width of the model", default=32)
    layers: int = option("blocks", default=2)
    lr: float = option("largest learning rate", default=0.003)
    weight_decay: float = option("weight decay", default=0.0)
    epochs: int = option("epochs", default=8)


def digits() -> tuple[Tensor, Tensor]:
    """Return patches ``(1797, 16, 4)`` of length one or so, and labels, in an order that no seed changes."""
    images, labels = feature_graphs.digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = images[order].view(-1, PIXELS, PIXELS)
    x = (x - x[:TRAIN].mean()) / (PATCH * x[:TRAIN].std())
    patches = x.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(len(x), TOKENS, PATCH**2)
    return patches, labels[order]


class Hyperbolic(nn.Module):
    """Blocks on the hyperboloid, each with curvatures that learn."""

    def __init__(self, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        sizes = {"layers": layers, "heads": heads, "max_tokens": TOKENS}
        self.body = HypTransformer(PATCH**2, width, attention="softmax", dropout=dropout, **sizes)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[..., 1:].mean(-2))


class Flat(nn.Module):
    """The same sizes in flat space, by torch's own transformer."""

    def __init__(self, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Linear(PATCH**2, width)
        self.places = nn.Parameter(torch.randn(TOKENS, width) / 2)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True)
        self.body = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x) + self.places).mean(-2))


KINDS = {"hyperbolic": Hyperbolic, "flat": Flat}
Images = list[list[Tensor]]


def load(_: str, folder: Path | None, settings: Settings, seed: int) -> Images:
    """Patches and labels to train, to validate and to test."""
    del folder, settings, seed  # the images are scikit-learn's, and in one order
    cut = [TRAIN, TRAIN + CHOOSE]
    return [list(part) for part in zip(*(whole.tensor_split(cut) for whole in digits()), strict=True)]


def build(model: str, settings: Settings, _: Images) -> nn.Module:
    """Make a model."""
    return KINDS[model](settings.hidden, settings.layers, settings.heads, settings.dropout)


def loss(network: nn.Module, data: Images, chosen: Tensor) -> Tensor:
    """Cross-entropy of some training images."""
    x, labels = data[0]
    return functional.cross_entropy(network(x[chosen]), labels[chosen])


def right(network: nn.Module, part: list[Tensor]) -> float:
    """The share of images with the right label."""
    return (network(part[0]).argmax(-1) == part[1]).double().mean().item()


QUESTION = comparisons.Question(
    module="experiments.digits",
    text=__doc__ or "",
    models={"hyperbolic": "hyperbolic", "flat": "flat"},
    datasets={"digits": "scikit-learn's handwritten digits"},
    settings=Settings,
    load=load,
    size=lambda data: len(data[0][0]),
    build=build,
    loss=loss,
    validate=lambda network, data: right(network, data[1]),
    test=lambda network, data: {"accuracy": right(network, data[2])},
    score=("accuracy", "right labels (%)"),
    optimizer=RiemannianAdam,
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
