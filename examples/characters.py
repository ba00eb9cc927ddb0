"""A small hyperbolic language model beside its flat twin, on texts whose entropy is known.

Texts are nested brackets of two kinds: with probability 0.4 one is opened, else the innermost one is closed. The
entropy is computed while a text is drawn, and no model is below it. Both models have the same sizes, batches and rates
to choose from, by validation texts; the score is that of test texts, in bits for each character.

    python -m examples.characters
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import RiemannianAdam
from holonomy.layers import HypMLR
from holonomy.models import HypTransformer


def drawn(texts: int, length: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Return texts ``(texts, length)`` of four characters, and the bits of chance in a character after the first."""
    found, bits = torch.empty(texts, length, dtype=torch.long), 0.0
    for row in found:
        stack: list[int] = []
        for place, (fate, kind) in enumerate(torch.rand(length, 2, generator=generator).tolist()):
            opens = not stack or fate < 0.4
            chance = (0.0 if not stack else -math.log2(0.4)) + 1.0 if opens else -math.log2(0.6)
            bits += chance if place else 0.0
            if opens:
                stack.append(int(kind < 0.5))
            row[place] = stack[-1] if opens else 2 + stack.pop()
    return found, bits / (texts * (length - 1))


class Hyperbolic(nn.Module):
    def __init__(self, width: int, length: int, layers: int = 2, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, width)
        sizes = {"layers": layers, "heads": heads, "max_tokens": length, "dropout": dropout}
        self.body = HypTransformer(width, width, attention="softmax", **sizes)
        self.head = HypMLR(width, 4, self.body.manifold_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x), is_causal=True))


class Flat(nn.Module):
    def __init__(self, width: int, length: int, layers: int = 2, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(4, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.body(self.embedding(x) + self.positions[: x.shape[1]], mask=mask, is_causal=True))


def bits(model: nn.Module, texts: Tensor, *, bfloat16: bool) -> Tensor:
    """Bits that the model needs for a character, given those before."""
    with torch.autocast(texts.device.type, torch.bfloat16, enabled=bfloat16):
        said = model(texts[:, :-1])
    return functional.cross_entropy(said.float().flatten(0, 1), texts[:, 1:].flatten()) / math.log(2)


def train(model: nn.Module, texts: Tensor, lr: float, args: argparse.Namespace) -> nn.Module:
    optimizer = RiemannianAdam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=args.steps + 1)
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        optimizer.zero_grad()
        batch = texts[torch.randint(len(texts), (args.batch,), generator=generator).to(texts.device)]
        loss = bits(model, batch, bfloat16=args.bfloat16)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  step {step:5d}  {loss.item():.3f} bits")
    return model.eval()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000, help="to train on; a fifth as many to validate and to test")
    parser.add_argument("--length", type=int, default=32, help="characters of a text")
    parser.add_argument("--width", type=int, default=32, help="of both models")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--batch", type=int, default=32, help="texts of a step")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.003, 0.01], help="tried for both models")
    parser.add_argument("--bfloat16", action="store_true", help="autocast")
    parser.add_argument("--seed", type=int, default=0, help="of texts, weights and batches")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/characters"), help="folder of the scores")
    args = parser.parse_args(argv)
    found, chance = drawn(args.texts + 2 * (args.texts // 5), args.length, torch.Generator().manual_seed(args.seed))
    learn, valid, test = found.to(args.device).tensor_split([args.texts, args.texts + args.texts // 5])
    scores = {"chance": chance}
    for kind in (Hyperbolic, Flat):
        runs = []
        for lr in args.lr:
            print(f"{kind.__name__}, learning rate {lr}")
            torch.manual_seed(args.seed)
            model = train(kind(args.width, args.length).to(args.device), learn, lr, args)
            with torch.no_grad():
                runs.append(tuple(bits(model, part, bfloat16=args.bfloat16).item() for part in (valid, test)))
        scores[kind.__name__] = min(runs)[1]
    print("  ".join(f"{name} {score:.3f}" for name, score in scores.items()), "bits for each character")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "characters.json").write_text(json.dumps(scores), encoding="utf-8")
    return scores


if __name__ == "__main__":
    main()
