"""The open questions of the theory, with the best ratios reached: the constant of the cubic form, L+ for N >= 2.

    python -m benchmarks.theory_open [--steps 1500] [--json FILE]

For each N = 1, 2, 3 the bracket that is proved of c_N, what one token against so many others reaches, and what ascents
over tokens, their numbers, scale and all matrices reach. Then Theorem L+ over the measured constant for logits b: on
the family of two orthogonal tokens, and after ascents over tokens and matrices. Five minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from experiments.engine.runs import command_line, versions
from holonomy.theory import Draws, Projections, lipschitz_bound
from holonomy.theory.attention.chained_collapse import climb_constant, crowded, cubic_constant
from holonomy.theory.attention.lipschitz import plus_bound
from holonomy.theory.attention.measured import jacobian_norm
from holonomy.theory.attention.projections import as_function
from holonomy.theory.attention.sizes import spectral
from holonomy.theory.claims.search import Comparison, climb, draw_input, draw_layer
from holonomy.theory.claims.statements.lipschitz import orthogonal_family

RESULTS = Path(__file__).parent / "results" / "theory_open.json"


def constant(order: int, steps: int) -> dict[str, object]:
    known = cubic_constant(order)
    climbs = {
        f"d={features}, {places} places": climb_constant(
            order, features, places, torch.Generator().manual_seed(0), starts=32, steps=steps
        )
        for features, places in ((1, 2), (2, 3))
    }
    crowds = {f"{copies:g}": crowded(order, copies) for copies in (59.0, 1e3, 1e6, 1e9, 1e30, 1e100)}
    return {"lower": known.lower, "upper": known.upper, "one against": crowds, "ascent": climbs}


def orthogonal(order: int, logits: float) -> dict[str, float]:
    found = {}
    for tokens in {1: (16, 256), 2: (16, 64, 128), 3: (8, 16, 24)}[order]:
        layer, x = orthogonal_family(order, tokens, logits)
        stretch = jacobian_norm(as_function(layer), x, steps=12)[0]
        found[f"n={tokens}"] = lipschitz_bound(layer, 1.0, tokens=tokens) / stretch
    return found


def at_logits(x: Tensor, layer: Projections, *, logits: float) -> Comparison:
    """Stretch and L+ after the keys are scaled to logits of size b on the ball that the tokens fill."""
    radius = x.norm(dim=1).amax()
    size = layer.scale * spectral(layer.keys).prod() * radius ** (layer.order + 1)
    layer = replace(layer, keys=layer.keys * (logits / size) ** (1 / (layer.order + 1)))
    jacobian = torch.func.jacrev(as_function(layer))(x)
    stretch = spectral(jacobian.reshape(-1, x.numel()))
    return Comparison(stretch, plus_bound(layer, radius, x.shape[0]), torch.zeros_like(stretch))


def climbed(order: int, logits: float) -> float:
    draws, tokens, best = Draws(5), {1: 8, 2: 8, 3: 5}[order], 0.0
    for features, channels in ((2, 1), (3, 2)):
        drawn = [draw_layer(draws, order, features, channels=channels) for _ in range(8)]
        layers = {name: torch.stack([getattr(layer, name) for layer in drawn]) for name in ("keys", "values")}
        x = torch.stack([draw_input(draws, tokens, features) for _ in drawn])
        found = climb(partial(at_logits, logits=logits), x, layers, steps=100, rate=0.1)
        best = max(best, (found.measured / found.bound).amax().item())
    return 1 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = command_line("benchmarks.theory_open", sys.argv[1:])
    document: dict[str, object] = {"command": command, "versions": versions(), "steps": options.steps}
    shares, slack = {}, {}
    for order in (1, 2, 3):
        shares[f"N={order}"] = constant(order, options.steps)
        print(f"N = {order}", shares[f"N={order}"], flush=True)
    for order in (16, 1024):
        shares[f"N={order}"] = cubic_constant(order)._asdict()
    for order in (1, 2, 3):
        slack[f"N={order}"] = {
            "orthogonal": {f"b={b:g}": orthogonal(order, b) for b in (1.0, 3.0, 10.0, 30.0, 100.0)},
            "ascent": {f"b={b:g}": climbed(order, b) for b in (1.0, 3.0, 10.0)},
        }
        print(f"N = {order}", slack[f"N={order}"], flush=True)
    document |= {"share of the cubic form": shares, "L+ over measured": slack}
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
