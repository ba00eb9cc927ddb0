r"""Claims on k-WL: the two forms of it, and the models that it bounds."""

from __future__ import annotations

from collections.abc import Iterator

from holonomy.theory.claims.separation import MODELS, bounded_by, missed, random_model, separation
from holonomy.theory.claims.verdict import Claims, Draws, Trial
from holonomy.theory.expressivity.colouring import PAIRS, graph_pair, separated

CLAIMS = Claims()  #: claims of the family ``colouring``

_SMALL = PAIRS[:-1]  # up to 18 nodes
_REACHING = ("gcn", "ign_2", "hot_2", "ign_3", "cgt")


@CLAIMS.add("colouring.forms", "Grohe 2021")
def _forms(draws: Draws) -> Iterator[Trial]:
    """Folklore k-WL separates what oblivious (k+1)-WL does, k = 1, 2."""
    for name in PAIRS:
        pair = graph_pair(name)
        yield Trial(float(separated(*pair, 1) != separated(*pair, 2, "oblivious")), 0.0)
        if name in _SMALL or draws.budget > 1:
            yield Trial(float(separated(*pair, 2) != separated(*pair, 3, "oblivious")), 0.0)


@CLAIMS.add("colouring.bounded", "TokenGT section 3.1, Maron et al. 2019")
def _bounded(draws: Draws) -> Iterator[Trial]:
    """No model separates a pair that its colouring does not, nor a graph and its copy."""
    for name in MODELS:
        bound = bounded_by(name)
        if bound is None:
            continue
        pairs = {pair: graph_pair(pair) for pair in _SMALL}
        equal = {pair for pair, graphs in pairs.items() if not separated(*graphs, *bound)}
        for _ in draws.rounds(2):
            model = random_model(name, draws)
            for pair, (first, second) in pairs.items():
                found = separation(model, first, second, draws.normal(first.shape[0]))
                note = f"{name} on {pair}: {found.between:.1g}, copies {found.copies:.1g}"
                yield Trial(found.between if pair in equal else found.copies, found.threshold, note=note)


@CLAIMS.add("colouring.reached", "TokenGT section 3.1, Maron et al. 2019")
def _reached(draws: Draws) -> Iterator[Trial]:
    """Of four random models one separates what the colouring does, on the classic pairs."""
    for name in _REACHING:
        bound = bounded_by(name) or (1, "folklore")
        pairs = [pair for pair in _SMALL if separated(*graph_pair(pair), *bound)]
        yield from missed(draws, name, 4, pairs, f"{name} does not separate {{}}")


@CLAIMS.add("colouring.ign_folklore", "TokenGT section 3.1, with folklore k-WL", expected=False)
def _folklore(draws: Draws) -> Iterator[Trial]:
    """2-IGN is at least as powerful as folklore 2-WL."""
    pairs = [pair for pair in _SMALL if separated(*graph_pair(pair), 2)]
    yield from missed(draws, "ign_2", 4, pairs, "no 2-IGN separates {}, folklore 2-WL does")


@CLAIMS.add("colouring.identifiers", "TokenGT section 2", expected=False)
def _invariance(draws: Draws) -> Iterator[Trial]:
    """TokenGT with fixed identifiers gives renumbered graphs one output."""
    model = random_model("tokengt_identifiers", draws)
    for pair in _SMALL:
        first, second = graph_pair(pair)
        found = separation(model, first, second, draws.normal(first.shape[0]))
        note = f"{pair}: a renumbered copy differs by {found.copies:.1g}, the other graph by {found.between:.1g}"
        yield Trial(found.copies, found.threshold, note=note)
