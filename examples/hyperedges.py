"""Which three nodes belong together? The hypergraph of the card game Set.

A card has four attributes of three values each. Three cards are a set if in each attribute they are all alike or all
different. Any two cards are in exactly one set: nothing less than three nodes at once says anything.

    python -m examples.hyperedges
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy.models import HigherOrderTransformer

CARDS = torch.cartesian_prod(*[torch.arange(3)] * 4)  # (81, 4)


def hyperedges() -> Tensor:
    """Return all 1080 sets, as numbers of their cards in ascending order (1080, 3)."""
    triples = torch.combinations(torch.arange(len(CARDS)), 3)
    return triples[(CARDS[triples].sum(dim=1) % 3 == 0).all(dim=1)]


def spoiled(sets: Tensor) -> Tensor:
    """Exchange one card of each set (m, 3) for another one: no set any more, though two of its cards still agree."""
    others = torch.randint(1, len(CARDS), (len(sets), 1), device=sets.device)
    place = torch.randint(3, (len(sets), 1), device=sets.device)
    triples = sets.scatter(1, place, (sets.gather(1, place) + others) % len(CARDS)).sort(dim=1).values
    return triples[(triples.diff(dim=1) > 0).all(dim=1)]


def logits(model: nn.Module, x: Tensor, triples: Tensor) -> Tensor:
    """Score triples (m, 3)."""
    return model(x, to=triples).values[:, 0]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/hyperedges"), help="folder of the score")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    x = functional.one_hot(CARDS, 3).flatten(1).float().to(args.device)
    sets = hyperedges().to(args.device)
    sets = sets[torch.randperm(len(sets), device=args.device)]
    known, held_out = sets[: len(sets) // 2], sets[len(sets) // 2 :]
    # Triples of different nodes, each in one order: no other entry of the result has the same nodes.
    model = HigherOrderTransformer(12, 64, 1, orders=(1, 3), entrywise=True).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for epoch in range(args.epochs):
        for part in known[torch.randperm(len(known), device=args.device)].split(64):
            triples = torch.cat([part, spoiled(part)])
            said = logits(model, x, triples)
            truth = (torch.arange(len(triples), device=args.device) < len(part)).float()
            loss = functional.binary_cross_entropy_with_logits(said, truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 5 == 0:
            print(f"epoch {epoch:2d}  loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        found, wrong = logits(model, x, held_out) > 0, logits(model, x, spoiled(held_out)) > 0
    scores = {"sets found": found.float().mean().item(), "others taken for sets": wrong.float().mean().item()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "hyperedges.json").write_text(json.dumps(scores), encoding="utf-8")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
