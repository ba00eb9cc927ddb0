"""Every certificate of `holonomy.theory`, attacked: random layers, inputs and radii, and a search for what refutes it.

    python -m benchmarks.certificates [--draws 1012] [--seed 0] [--json FILE]

Draws take the kinds of layers in turn and depend on the seed and their own number alone. Sizes of weights lie far
apart, between layers and rows, and half of the layers have few channels: certificates that compose wrongly fail there.
One kind stretches first and shrinks afterwards. A third of a second a draw on one core. The result holds draws,
violations and the worst ratio of each kind and scope; it is written as it grows, and the same command of the same
commit goes on from it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import geoopt
import torch
from torch import Tensor, nn

from experiments.engine.runs import command_line, commit, write_atomically
from holonomy.layers import (
    HRC,
    HTC,
    ExpMapHTC,
    HypActivation,
    HypBatchNorm,
    HypConcat,
    HypDropout,
    HypLayerNorm,
    HypLinearAttention,
    HypMLR,
    HypPositionalEncoding,
    HypPrototypes,
    HypResidual,
    HypSoftmaxAttention,
    SimplicialAttention,
    TangentLinear,
)
from holonomy.manifolds import Curvature, Lorentz
from holonomy.models import Hypformer, HypformerBlock
from holonomy.ops.softmax_attention import SIMILARITIES
from holonomy.theory import (
    BoundViolatedError,
    Draws,
    Projections,
    assert_lipschitz,
    certify,
    lipschitz_bound,
    local_lipschitz,
)
from holonomy.theory.certificates.stretching import METRICS

__all__ = ["KINDS", "Attacked", "attacked"]

RESULTS = Path(__file__).parent / "results" / "certificates.json"
ACTIVATIONS = (nn.ReLU(), nn.Tanh(), nn.GELU(), nn.SiLU(), nn.ELU(), nn.Softplus())
EVERYWHERE = ("ball", "about", "at")
ANYWHERE = (*EVERYWHERE, "all")


class Attacked(NamedTuple):
    """One certificate after an attack: the largest ratio found over the bound, and whether that refutes it."""

    kind: str
    scope: str
    share: float
    violated: bool


class Together(nn.Module):
    """A layer of several points as one of the tokens of a configuration."""

    def __init__(self, layer: HypConcat | HypResidual) -> None:
        super().__init__()
        self.layer = layer
        self.manifold_in, self.manifold_out = layer.manifold_in, layer.manifold_out

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*x.unbind(-2))[..., None, :]


def pick(draws: Draws, choices: Sequence[Any]) -> Any:
    return choices[draws.integer(0, len(choices) - 1)]


def spoil(model: nn.Module, draws: Draws) -> None:
    """Draw weights whose sizes lie far apart, from tensor to tensor and row to row, or that have few channels.

    Curvatures stay as :func:`manifold` draws them.
    """
    for module in model.modules():
        own = () if isinstance(module, Lorentz | Curvature) else module.parameters(recurse=False)
        for parameter in own:
            if parameter.ndim and not isinstance(parameter, geoopt.ManifoldParameter):
                parameter.copy_(_weights(draws, parameter.shape))
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.copy_(draws.normal(module.num_features))
            module.running_var.copy_(draws.normal(module.num_features).exp())


def _weights(draws: Draws, shape: Sequence[int]) -> Tensor:
    drawn = draws.normal(*shape) * draws.logarithmic(0.03, 30.0)
    kind = draws.integer(0, 3)
    if kind == 1:  # one row larger than the others
        drawn[1:] *= draws.logarithmic(0.01, 1.0)
    elif kind == 2:  # one entry a row
        drawn *= torch.rand(shape, generator=draws.generator).argsort(-1) == 0
    elif kind == 3:  # a multiple of the identity, without time column or bias
        drawn = torch.zeros(shape, dtype=torch.float64)
        if drawn.ndim == 2:
            drawn.diagonal(max(0, shape[1] - shape[0])).fill_(draws.logarithmic(0.03, 30.0))
    return drawn


def manifold(draws: Draws) -> Lorentz:
    return Lorentz(-draws.logarithmic(0.01, 100.0), dtype=torch.float64)


def norm_eps(draws: Draws) -> float:
    return draws.logarithmic(0.01, 1.0) ** 2


def chain(draws: Draws, d: int) -> nn.Sequential:
    """Functions of one refinement; the last of them are always there."""
    inner = [nn.Linear(d, d), pick(draws, ACTIVATIONS), nn.Linear(d, d), nn.LayerNorm(d, eps=norm_eps(draws))]
    return nn.Sequential(*inner[draws.integer(0, 2) :])


def attention(draws: Draws, d: int, m: Lorentz) -> HypSoftmaxAttention:
    heads = pick(draws, [1, d])
    return HypSoftmaxAttention(d, heads, m, similarity=pick(draws, SIMILARITIES))


def block(draws: Draws, d: int, m: Lorentz) -> HypformerBlock:
    options = {"similarity": pick(draws, SIMILARITIES), "norm_eps": norm_eps(draws)}
    return HypformerBlock(d, 1, m, attention="softmax", feedforward=2, **options)


def sequence(draws: Draws, d: int) -> nn.Sequential:
    m = manifold(draws)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: HTC(d, d, m),
        lambda: HTC(d, d, m),
        lambda: HRC(chain(draws, d), m),
        lambda: HypLayerNorm(d, m, eps=norm_eps(draws)),
        lambda: HypActivation(pick(draws, ACTIVATIONS), m),
        lambda: HypPositionalEncoding(d, m, epsilon=0.5),
        lambda: attention(draws, d, m),
        lambda: block(draws, d, m),
    ]
    inner = [pick(draws, kinds)() for _ in range(draws.integer(2, 3))]
    first = [ExpMapHTC(d, d, m)] if draws.integer(0, 3) == 0 else []
    last = [HypMLR(d, 2, m)] if draws.integer(0, 3) == 0 else []
    return nn.Sequential(*first, *inner, *last)


def hypformer(draws: Draws, d: int) -> Hypformer:
    options = {"similarity": pick(draws, SIMILARITIES), "norm_eps": norm_eps(draws), "feedforward": 3}
    size = {"layers": draws.integer(1, 2), "curvature": -draws.logarithmic(0.3, 3.0)}
    return Hypformer(d, 2, 2, attention="softmax", graph_encoder=None, **size, **options)


def there_and_back(draws: Draws, d: int) -> nn.Sequential:
    """A rotation that stretches by a large factor, and one that shrinks by about as much.

    Far from the origin distances are differences of logarithms, which a factor does not change: the second map shrinks
    nothing there, although its constant at the origin is small.
    """
    m, factor = manifold(draws), draws.logarithmic(10.0, 1000.0)
    model = nn.Sequential(HTC(d, d, m, bias=False), HTC(d, d, m, bias=False)).double()
    for layer, size in zip(model, (factor, draws.logarithmic(0.3, 3.0) / factor), strict=True):
        layer.weight.copy_(nn.functional.pad(size * torch.linalg.qr(draws.normal(d, d)).Q, (1, 0)))
    return model


class Kind(NamedTuple):
    """How to draw a layer of so many features, in which scopes it has a certificate, and if its weights are redrawn."""

    make: Callable[[Draws, int], nn.Module]
    scopes: tuple[str, ...] = EVERYWHERE
    redrawn: bool = True


def between(draws: Draws) -> tuple[Lorentz, Lorentz]:
    return manifold(draws), manifold(draws)


KINDS: dict[str, Kind] = {
    "HTC": Kind(lambda draws, d: HTC(d, draws.integer(1, 3), *between(draws)), ANYWHERE),
    "HRC": Kind(lambda draws, d: HRC(chain(draws, d), *between(draws))),
    "HRC linear": Kind(lambda draws, d: HRC(nn.Linear(d, d), *between(draws)), ANYWHERE),
    "HypActivation": Kind(lambda draws, _: HypActivation(pick(draws, ACTIVATIONS), *between(draws)), ANYWHERE),
    "HypBatchNorm": Kind(lambda draws, d: HypBatchNorm(d, *between(draws))),
    "HypDropout": Kind(lambda draws, _: HypDropout(0.5, *between(draws))),
    "HypLayerNorm": Kind(lambda draws, d: HypLayerNorm(d, *between(draws), eps=norm_eps(draws)), ANYWHERE),
    "TangentLinear": Kind(lambda draws, d: TangentLinear(d, 2, *between(draws))),
    "ExpMapHTC": Kind(lambda draws, d: ExpMapHTC(d, 2, *between(draws))),
    "HypPositionalEncoding": Kind(
        lambda draws, d: HypPositionalEncoding(d, manifold(draws), epsilon=draws.logarithmic(0.1, 3.0))
    ),
    "HypMLR": Kind(lambda draws, d: HypMLR(d, 3, manifold(draws)), ANYWHERE),
    "HypPrototypes": Kind(lambda draws, d: HypPrototypes(d, 3, manifold(draws))),
    "HypSoftmaxAttention": Kind(lambda draws, d: attention(draws, d, manifold(draws))),
    "HypLinearAttention": Kind(lambda draws, d: HypLinearAttention(d, 1, manifold(draws)), ("at",)),
    "HypformerBlock": Kind(lambda draws, d: block(draws, d, manifold(draws))),
    "Hypformer": Kind(hypformer, ("at", "at", "at", "about")),
    "Sequential": Kind(sequence, ("ball", "about", "about", "at")),
    "there and back": Kind(there_and_back, redrawn=False),
    "HypConcat": Kind(lambda draws, _: Together(HypConcat(*between(draws))), ("together",)),
    "HypResidual": Kind(
        lambda draws, _: Together(HypResidual(manifold(draws), epsilon=draws.logarithmic(0.1, 9.0))), ("together",)
    ),
    "SimplicialAttention": Kind(
        lambda draws, d: SimplicialAttention(2 * d, 2, order=draws.integer(1, 2), causal=draws.integer(0, 1) == 1),
        ("L+", "local"),
    ),
    "MultiheadAttention": Kind(lambda _, d: nn.MultiheadAttention(2 * d, 2), ("L+", "local")),
    "Projections": Kind(lambda *_: nn.Identity(), ("Simplicial 3.7", "Castin")),
}
"""Every class that has a certificate, by name."""


def attacked(number: int, seed: int = 0, names: Sequence[str] = tuple(KINDS)) -> Attacked:
    """Draw a layer and a scope, certify, and attack: the same for the same numbers."""
    name = names[number % len(names)]
    draws = Draws(1_000_003 * seed + number)
    d, tokens = draws.integer(1, 3), draws.integer(1, 4)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(draws.integer(0, 10**6))
        layer = KINDS[name].make(draws, d).double().eval()
        if KINDS[name].redrawn:
            spoil(layer, draws)
    scope = KINDS[name].scopes[number // len(names) % len(KINDS[name].scopes)]
    how: dict[str, Any] = {"metric": pick(draws, METRICS), "generator": draws.generator}
    source = getattr(layer, "manifold_in", getattr(layer, "manifold", None))
    if isinstance(layer, nn.Sequential):
        source = getattr(layer[0], "manifold_in", getattr(layer[0], "manifold", None))
    flat = isinstance(layer, Hypformer | ExpMapHTC) or (
        isinstance(layer, nn.Sequential) and isinstance(layer[0], ExpMapHTC)
    )
    unit = 1.0 if source is None or flat else math.sqrt(-source.curvature.item())
    radius = draws.logarithmic(0.05, 4.0) / unit
    u = draws.normal(tokens, d)
    u *= radius / u.norm(dim=-1, keepdim=True) * (1.0 if draws.integer(0, 1) else draws.uniform(0.0, 1.0))
    x = u if flat or source is None else source.expmap0(nn.functional.pad(u, (1, 0)))
    small = draws.logarithmic(1e-6, 1.0) / unit
    target: Any = layer
    if scope == "ball":
        how |= {"radius": radius, "features": d, "tokens": tokens}
        bound = certify(layer, radius, tokens=tokens, features=d, metric=how["metric"], starts=0).constant
    elif scope == "about":
        how |= {"x": x, "radius": small}
        bound = certify(layer, small, x=x, metric=how["metric"], starts=0).constant
    elif scope == "at":
        how |= {"x": x}
        bound = certify(layer, x=x, metric=how["metric"], starts=0).constant
    elif scope == "all":
        how |= {"features": d, "tokens": tokens}
        bound = lipschitz_bound(layer, features=d)
    elif scope == "together":
        how |= {"radius": radius, "features": d, "tokens": 2, "metric": "l2" if name == "HypConcat" else "sup"}
        bound = lipschitz_bound(layer.layer, radius)
    else:
        how |= {"metric": "l2"}
        if name == "Projections":
            shape = (1 if scope == "Castin" else draws.integer(1, 2), 1, d, d)
            keys = draws.normal(shape[0] + 1, *shape[1:]) * draws.logarithmic(0.1, 3.0)
            target = Projections(keys, draws.normal(*shape) * draws.logarithmic(0.1, 3.0))
        features = d if name == "Projections" else 2 * d
        if scope == "local":
            how |= {"x": draws.normal(tokens, features)}
            bound = local_lipschitz(target, how["x"]).item()
        else:
            how |= {"radius": radius, "tokens": tokens}
            theorem = {} if scope == "L+" else {"theorem": scope}
            bound = lipschitz_bound(target, radius, tokens=tokens, **theorem)
    try:
        found, violated = assert_lipschitz(target, bound, **how), False
    except BoundViolatedError as error:
        found, violated = error.found.ratio, True
    share = 0.0 if math.isinf(bound) else found / bound if bound else math.inf if violated else 0.0
    return Attacked(name, scope, share, violated)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=1012)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    words = sys.argv[1:] if arguments is None else arguments
    document: dict[str, Any] = {"command": command_line("benchmarks.certificates", words), "commit": commit()}
    document |= {"seed": options.seed, "draws": 0, "violations": 0, "worst": 0.0, "kinds": {}}
    if options.json.exists():
        before = json.loads(options.json.read_text(encoding="utf-8"))
        if all(before[name] == document[name] for name in ("commit", "seed")):
            document = before
    for number in range(document["draws"], options.draws):
        found = attacked(number, options.seed)
        line = document["kinds"].setdefault(f"{found.kind}, {found.scope}", {"draws": 0, "violations": 0, "worst": 0.0})
        line |= {"draws": line["draws"] + 1, "violations": line["violations"] + found.violated}
        line["worst"] = max(line["worst"], round(found.share, 6))
        document["draws"] = number + 1
        document["violations"] += found.violated
        document["worst"] = max(document["worst"], line["worst"])
        if found.violated:
            print(f"draw {number}: {found}", flush=True)
        if document["draws"] in {options.draws, *range(0, options.draws, len(KINDS))}:
            text = json.dumps(document | {"kinds": dict(sorted(document["kinds"].items()))}, indent=1) + "\n"
            write_atomically(options.json, lambda stream, text=text: stream.write(text.encode()))
            shown = f"{document['violations']} violations, worst ratio {document['worst']}"
            print(f"{document['draws']} of {options.draws} draws: {shown}", flush=True)


if __name__ == "__main__":
    main()
