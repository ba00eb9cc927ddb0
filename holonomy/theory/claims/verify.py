"""All claims, and the one function that measures them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from holonomy import checks
from holonomy.theory.claims.pictures import Picture, attention_pictures
from holonomy.theory.claims.statements import (
    certified_lemmas,
    certified_nodes,
    collapse,
    colouring,
    distances,
    graphs,
    higher_order,
    hyperbolic,
    hyperbolic_attention,
    linear_maps,
    lipschitz,
    printed,
    tokens,
)
from holonomy.theory.claims.verdict import Claim, Draws, Trial, Verdict

CLAIMS: tuple[Claim, ...] = (
    *distances.CLAIMS,
    *hyperbolic.CLAIMS,
    *hyperbolic_attention.CLAIMS,
    *linear_maps.CLAIMS,
    *collapse.CLAIMS,
    *lipschitz.CLAIMS,
    *graphs.CLAIMS,
    *tokens.CLAIMS,
    *higher_order.CLAIMS,
    *colouring.CLAIMS,
    *printed.CLAIMS,
    *certified_nodes.CLAIMS,
    *certified_lemmas.CLAIMS,
)
"""Every claim, family by family; a name is ``"<family>.<claim>"``."""

PICTURES: tuple[Picture, ...] = (
    *distances.PICTURES,
    *hyperbolic_attention.PICTURES,
    *attention_pictures(),
    *tokens.PICTURES,
)
"""What a report draws, beside the ratios of every claim that has an axis."""


def select(claims: Iterable[str] | None = None) -> list[Claim]:
    """Look claims up by their names or families, all if left out, in the order of :data:`CLAIMS`.

    One string is a TypeError, a name that is neither a claim nor a family a ValueError.

    >>> len(select()) == len(CLAIMS)
    True
    """
    if claims is None:
        return list(CLAIMS)
    wanted = set(checks.sequence("claims", claims, "names", str))
    known = {claim.name for claim in CLAIMS} | {_family(claim) for claim in CLAIMS}
    for name in wanted - known:
        near = difflib.get_close_matches(name, known)
        nearest = f", of which {' or '.join(near)} is near" if near else ""
        raise ValueError(f"claims must be among those of python -m holonomy.theory --list{nearest}, got {name!r}.")
    return [claim for claim in CLAIMS if claim.name in wanted or _family(claim) in wanted]


def verify(
    claims: Iterable[str] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    budget: float = 1.0,
    molecules: tuple[tuple[Tensor, int], ...] | None = None,
    watch: Callable[[Claim, Verdict, list[Trial]], None] | None = None,
) -> list[Verdict]:
    """Measure claims.

    Args:
        claims: names (``"collapse.product"``) or families (``"collapse"``); all if left out.
        seed: of the inputs: the same seed gives the same verdicts.
        device: where to compute.
        dtype: in which; a float32 verdict is that of float64, or "below the rounding floor".
        budget: multiplies the number of draws; 1 takes under three minutes on two cores.
        molecules: on which the claims about molecules are judged, from
            :func:`~holonomy.theory.claims.molecules.read_molecules`: four minutes of one core for all of QM9; without
            them generated ones.
        watch: is called after each claim with the claim, its verdict and its trials, for progress and pictures.

    Returns:
        A verdict for each claim.

    Raises:
        ValueError: if a name is unknown or the budget is not positive and finite.

    >>> verify([])
    []
    """
    draws = Draws(seed, device, dtype, budget, molecules)
    verdicts: list[Verdict] = []
    for claim in select(claims):
        verdict, trials = claim.measure(replace(draws))
        verdicts.append(verdict)
        if watch is not None:
            watch(claim, verdict, trials)
    return verdicts


def _family(claim: Claim) -> str:
    return claim.name.partition(".")[0]
