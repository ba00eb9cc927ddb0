"""Images: a hyperbolic vision transformer learns handwritten digits.

An image of 8 x 8 pixels is 16 patches of 2 x 2, the tokens of a HypTransformer with a learned place each. Features have
length one or so, because the exponential map makes long ones exponentially longer.

    python -m examples.digits
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from holonomy import RiemannianAdam
from holonomy.models import HypTransformer


class Reader(nn.Module):
    """Blocks on the hyperboloid, each with curvatures that learn; classes are read off the mean of the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = HypTransformer(4, width, layers=2, heads=4, max_tokens=16, attention="softmax")
        self.decoder = nn.Linear(width, 10)

    def forward(self, patches: Tensor) -> Tensor:
        return self.decoder(self.body.manifold_out.space(self.body(patches)).mean(dim=-2))


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder of the score and the picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    images, labels = (torch.from_numpy(part).to(args.device) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), device=args.device)
    images, labels = images[order].view(-1, 8, 8).float(), labels[order]
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)
    patches = (patches - patches[:1200].mean()) / (2 * patches[:1200].std())
    model = Reader(args.width).to(args.device)
    optimizer = RiemannianAdam(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        for chosen in torch.randperm(1200, device=args.device).split(32):
            loss = functional.cross_entropy(model(patches[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        print(f"epoch {epoch:2d}  loss {loss.item():.3f}")

    with torch.no_grad():
        said = model.eval()(patches[1200:]).argmax(-1)
    scores = {"right": (said == labels[1200:]).float().mean().item()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "digits.json").write_text(json.dumps(scores), encoding="utf-8")
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    for axes, image, guess, label in zip(figure.subplots(2, 8).flat, images[1200:], said, labels[1200:], strict=False):
        axes.imshow(image.cpu().numpy(), cmap="gray_r")
        axes.set_title(f"{guess}", color="black" if guess == label else "red")
        axes.set_axis_off()
    figure.savefig(args.out / "digits.png")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
