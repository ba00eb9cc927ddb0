"""Does training with certificates help? What they prove beside attacks and randomized smoothing, over seeds.

A small Hypformer learns the branches of a generated tree by cross-entropy alone, or with a hinge on the differentiable
certificate of some nodes a step. For nodes that trained nothing, by radius: the share that is certified right for every
change of the node's own features; the share that stays right under the smallest changes that an attack found; the share
that randomized smoothing certifies (Cohen et al., ICML 2019, theorem 1), of another classifier, the majority of the
model's answers under noise, with probability 0.999 for each node.

    python -m experiments.certified_training
    python -m examples.certified_nodes       # the training loop, to read
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from experiments.acquired_traits import attacked
from experiments.engine import options, runs, tables
from holonomy import Hypformer
from holonomy.theory import certified_accuracy, margin_bounds

WAYS = {"cross-entropy": 0.0, "certificates too": 0.1}
SHARES, SIGMAS, ALPHA, CLASSES, FEATURES = [0.01, 0.03, 0.1, 0.2], [0.25, 0.5], 0.001, 4, 8
Data = tuple[Tensor, Tensor, Tensor]


def tree(nodes: int, seed: int) -> Data:
    """Return features that say something of the branch, edges in both directions, and the branch of each node."""
    generator, child = torch.Generator().manual_seed(seed), torch.arange(CLASSES, nodes)
    above = CLASSES * (1 + (torch.rand(len(child), generator=generator) * (child // CLASSES)).long())
    down = torch.stack([torch.cat([torch.zeros(CLASSES - 1).long(), child - above]), torch.arange(1, nodes)])
    y = torch.arange(nodes) % CLASSES
    x = 1.5 * one_hot(y, FEATURES) + torch.randn(nodes, FEATURES, generator=generator)
    return x, torch.cat([down, down.flip(0)], dim=1), y


def train(data: Data, learn: Tensor, radius: float, epochs: int, seed: int) -> Hypformer:
    """A model; with a radius above zero, one that is trained to be certified within it."""
    x, edges, y = data
    runs.seed_everything(seed)
    model = Hypformer(FEATURES, 8, CLASSES, layers=1, level="node").eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss = cross_entropy(model(x, edges)[learn], y[learn])
        # The ball grows from a third of the epochs on: a bound on one that is far too large teaches a constant.
        share = min(1.0, 2 * epoch / epochs - 0.6)
        if radius and share > 0:
            some = learn[torch.randperm(len(learn))[:20]]
            bounds = margin_bounds(model, x, edges, some, share * radius, y[some])
            loss = loss + torch.relu(0.5 - bounds.amin(-1)).mean()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def smoothed(model: Hypformer, data: Data, nodes: Tensor, sigma: float, draws: int) -> Tensor:
    """Radii of randomized smoothing (len(nodes),); below zero where it is wrong or unsure."""
    x, edges, y = data
    copies = torch.arange(draws)
    many = (edges[:, None] + len(x) * copies[:, None]).flatten(1)
    votes = []
    for node in nodes.tolist():
        places = copies * len(x) + node
        noisy = x.repeat(draws, 1).index_add(0, places, sigma * torch.randn(draws, FEATURES))
        answers = model(noisy, many, copies.repeat_interleave(len(x)))[places].argmax(-1)
        votes.append(one_hot(answers, CLASSES).view(4, -1, CLASSES).sum(1))
    # A quarter of the draws names the class of the majority, the others bound its share, exactly binomially.
    named, count = torch.stack(votes)[:, 0].argmax(-1), torch.stack(votes)[:, 1:].sum(1)
    ayes = count.gather(1, named[:, None])[:, 0].numpy()
    share = torch.from_numpy(stats.beta.ppf(ALPHA, ayes, 0.75 * draws - ayes + 1)).nan_to_num(0.0)
    sure = (share > 0.5) & (named == y[nodes])
    return torch.where(sure, sigma * torch.from_numpy(stats.norm.ppf(share.numpy())), -1.0)


def measured(way: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one model; shares of its test nodes by radius."""
    data = x, edges, y = tree(arguments.nodes, seed)
    order = torch.randperm(arguments.nodes, generator=torch.Generator().manual_seed(seed))
    test, learn = order.split([arguments.nodes // 3, arguments.nodes - arguments.nodes // 3])
    norm = x.norm(dim=-1).mean().item()
    model, radii = train(data, learn, WAYS[way] * norm, arguments.epochs, seed), norm * torch.tensor(SHARES)
    right = (model(x, edges).argmax(-1) == y)[test]
    curves = {"certified": certified_accuracy(model, x, edges, test, y[test], radii)}
    smallest = attacked(model, x, edges, test)
    curves["attacked"] = (right & (smallest > radii[:, None])).float().mean(1)
    for sigma in SIGMAS:
        reached = smoothed(model, data, test, sigma, arguments.draws)
        curves[f"smoothed {sigma:g}"] = (reached >= radii[:, None]).float().mean(1)
    return {"norm": norm, "clean": right.float().mean().item()} | {name: row.tolist() for name, row in curves.items()}


def text(content: dict[str, Any]) -> str:
    """The table."""
    lines = [f"{'radius / norm of features':34s}" + "".join(f"{share:>8g}" for share in [0, *SHARES])]
    for way, row in content["ways"].items():
        lines.append(f"trained by {way}")
        for name, means in row["means"].items():
            lines.append(f"  {name:32s}" + "".join(f"{mean:8.3f}" for mean in [row["clean"], *means]))
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--seeds", type=int, default=3, metavar="N", help="trees and models 0 .. N-1 (default 3)")
    add("--nodes", type=int, default=120, metavar="N", help="of a tree; a third is for the test (default 120)")
    add("--epochs", type=int, default=120, metavar="N", help="steps of training (default 120)")
    add("--draws", type=int, default=320, metavar="N", help="of noise for each node, a multiple of 4 (default 320)")


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if arguments.draws % 4:
        raise options.RefusedError(f"--draws must be a multiple of 4, got {arguments.draws}")
    return {name: getattr(arguments, name) for name in ("nodes", "epochs", "draws")}


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """Means over seeds for both ways to train."""
    found: dict[str, Any] = {}
    for way in WAYS:
        seeds = []
        for seed in range(arguments.seeds):
            seeds.append(run.part(f"{way.replace(' ', '-')}-{seed}", lambda w=way, s=seed: measured(w, s, arguments)))
            if not arguments.quiet:
                print(f"{way}, seed {seed}: accuracy {seeds[-1]['clean']:.3f}", file=sys.stderr)
        names = [name for name in seeds[0] if isinstance(seeds[0][name], list)]
        means = {name: torch.tensor([one[name] for one in seeds]).mean(0).tolist() for name in names}
        clean = runs.summary([one["clean"] for one in seeds])["mean"]
        found[way] = {"clean": clean, "means": means, "seeds": seeds}
    return {"shares": SHARES, "ways": found}


SCRIPT = tables.Script(
    module="experiments.certified_training",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=text,
    folder="runs/certified_training",
    at_least_one=("seeds", "nodes", "epochs", "draws"),
    cpu_only=True,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return tables.main(SCRIPT, argv)


if __name__ == "__main__":
    sys.exit(main())
