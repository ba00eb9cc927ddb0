"""What does a layer attend to? The attention weights of a trained hyperbolic layer, drawn.

Half of the tokens of a sequence show a name and a value, the other half a name only, and are asked for the value. The
layer has to look at the one token that shows it; its weights say whether it does.

    python -m examples.attention_maps
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from holonomy import Lorentz, RiemannianAdam
from holonomy.layers import ExpMapHTC, HypMLR, HypSoftmaxAttention

NAMES, VALUES = 8, 4


def sequences(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (count, 16, 12), the places (count, 8) where the last eight find their answers, and the answers."""
    values = torch.randint(VALUES, (count, NAMES))
    shown = torch.rand(count, NAMES).argsort(dim=1)  # the names of the first eight, each once
    asked = torch.randint(NAMES, (count, NAMES))
    names = functional.one_hot(torch.cat([shown, asked], dim=1), NAMES)
    told = functional.one_hot(values.gather(1, shown), VALUES)
    tokens = torch.cat([names, torch.cat([told, torch.zeros_like(told)], dim=1)], dim=2).float()
    return tokens, shown.argsort(dim=1).gather(1, asked), values.gather(1, asked)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/attention_maps"), help="folder of scores and picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    manifold = Lorentz(-1.0, learnable=True)
    entry, attention = ExpMapHTC(NAMES + VALUES, 32, manifold), HypSoftmaxAttention(32, 2, manifold)
    decoder = HypMLR(32, VALUES, manifold)
    model = nn.Sequential(entry, attention, decoder).to(args.device)
    optimizer = RiemannianAdam(model.parameters(), lr=0.01)
    for step in range(args.steps):
        tokens, _, answers = (part.to(args.device) for part in sequences(32))
        loss = functional.cross_entropy(model(tokens)[:, NAMES:].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")

    tokens, places, answers = (part.to(args.device) for part in sequences(200))
    with torch.no_grad():
        right = (model(tokens)[:, NAMES:].argmax(-1) == answers).float().mean().item()
        weights = attention.weights(entry(tokens)).mean(1)[:, NAMES:]  # (200, 8, 16), the mean of the heads
    looked = weights.gather(2, places[..., None]).mean().item()
    scores = {"right": right, "weight on the answer": looked, "weight by chance": 1 / (2 * NAMES)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "attention_maps.json").write_text(json.dumps(scores), encoding="utf-8")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(weights[0].cpu().numpy(), cmap="cividis", vmin=0)
    axes.scatter(places[0].cpu(), range(NAMES), s=150, facecolors="none", edgecolors="C1", label="where the answer is")
    axes.set(xlabel="token that is looked at", ylabel="token that asks")
    figure.colorbar(shown, label="attention weight")
    figure.legend(loc="outside upper center", frameon=False)
    figure.savefig(args.out / "attention_maps.png")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
