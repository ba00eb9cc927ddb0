"""Images: a hyperbolic vision transformer on handwritten digits, beside its flat twin, at the same learning rates.

An image of 8 x 8 pixels is 16 patches of 2 x 2, the tokens of a :class:`~holonomy.models.HypTransformer` with a learned
place each. What makes it train as fast as the flat one, beside the model's own defaults: features of length one or so,
since the exponential map makes long ones exponentially longer; and classes that are read off the mean of the space
coordinates, which the last LayerNorm keeps at one scale, where logarithms at the origin would shrink them.

The digits come with scikit-learn: ``pip install 'holonomy[examples]'``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from holonomy.models import HypTransformer
from holonomy.optim import RiemannianAdam

CLASSES, PIXELS, PATCH = 10, 8, 2
TOKENS = (PIXELS // PATCH) ** 2
TRAIN, CHOOSE = 1000, 200  # images to learn from, and to choose a learning rate by; the other 597 are the test


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return patches ``(1797, 16, 4)`` of length one or so, and labels, in an order that no seed changes."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415
    except ImportError:
        raise SystemExit("The digits come with scikit-learn: pip install 'holonomy[examples]'.") from None
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = images[order].float().view(-1, PIXELS, PIXELS)
    x = (x - x[:TRAIN].mean()) / (PATCH * x[:TRAIN].std())
    patches = x.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(len(x), TOKENS, PATCH**2)
    return patches, labels[order]


class Hyperbolic(nn.Module):
    """Blocks on the hyperboloid, each with curvatures that learn."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        sizes = {"layers": layers, "heads": heads, "max_tokens": TOKENS}
        self.body = HypTransformer(PATCH**2, width, attention="softmax", **sizes)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[..., 1:].mean(-2))


class Flat(nn.Module):
    """The same sizes in flat space, by torch's own transformer."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(PATCH**2, width)
        self.places = nn.Parameter(torch.randn(TOKENS, width) / 2)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x) + self.places).mean(-2))


def train(kind: type[nn.Module], rate: float, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Train one model, and return its shares of right answers."""
    torch.manual_seed(seed)
    x, labels = (part.to(args.device) for part in digits())
    model = kind(args.width, args.layers, args.heads).to(args.device)
    optimizer = RiemannianAdam(model.parameters(), lr=rate)  # Adam, where no parameter is a point
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loss = torch.zeros(())
    for epoch in range(args.epochs):
        for batch in torch.randperm(TRAIN).split(args.batch):
            loss = functional.cross_entropy(model(x[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        decay.step()
        if not args.quiet:
            print(f"{kind.__name__:>10}  rate {rate:g}  seed {seed}  epoch {epoch + 1:2}  loss {loss:.3f}", flush=True)
    with torch.no_grad():
        right = (model.eval()(x).argmax(-1) == labels).float()
    validation, test = right[TRAIN : TRAIN + CHOOSE].mean(), right[TRAIN + CHOOSE :].mean()
    return {"loss": loss.item(), "validation": float(validation), "test": float(test)}


def kept(file: Path, settings: dict[str, object]) -> dict[str, dict[str, float]]:
    """Return the runs that an interrupted command with the same settings has finished."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found["runs"] if found.get("settings") == settings else {}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.digits", description=(__doc__ or "").splitlines()[0])
    for name, default in (("epochs", 8), ("width", 32), ("layers", 2), ("heads", 4), ("batch", 32), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"(default {default})")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3], metavar="X", help="learning rates")
    parser.add_argument("--json", type=Path, default=Path("runs/digits.json"), help="where the figures go")
    parser.add_argument("--device", default="cpu", help="where models are trained, such as cuda (default cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: torch's choice)")
    parser.add_argument("--quiet", action="store_true", help="no line an epoch")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name not in {"json", "quiet"}}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    part = args.json.with_suffix(".part")
    runs, table = kept(part, settings), {}
    for kind in (Flat, Hyperbolic):
        found = {}
        for rate, seed in itertools.product(args.rates, range(args.seeds)):
            name = f"{kind.__name__}, rate {rate:g}, seed {seed}"
            runs[name] = runs.get(name) or train(kind, rate, seed, args)
            found.setdefault(rate, []).append(runs[name])
            fresh = part.with_suffix(".new")
            fresh.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n", encoding="utf-8")
            fresh.replace(part)
        rate = max(found, key=lambda rate: sum(run["validation"] for run in found[rate]))
        test = [run["test"] for run in found[rate]]
        table[kind.__name__] = {"rate": rate, "test": statistics.mean(test), "spread": statistics.pstdev(test)}
        print("{:>10}  rate {rate:g}  test {test:.3f} +- {spread:.3f}".format(kind.__name__, **table[kind.__name__]))
    result = {"settings": settings, "torch": torch.__version__, "table": table, "runs": runs}
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
