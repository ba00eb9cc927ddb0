r"""Attention of one equivalence class between the strata of hyperedges: HOT eqs. 16-17, and 18-21 in linear time.

A stratum is the hyperedges of one exact pattern, written as tuples of different nodes. Features are ``(rows, heads,
dim)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from holonomy._shapes import Float, Int
from holonomy.layers.equivariant.basis.orbits import (
    InputPattern,
    Orbit,
    OrbitGroup,
    OutputPattern,
    Term,
    extensions,
    free_axes,
)
from holonomy.layers.equivariant.higher_order.dense import quotient, quotient_of_terms, with_count
from holonomy.layers.equivariant.higher_order.maps import GatherPlan
from holonomy.layers.equivariant.higher_order.packing import Blocks, class_blocks
from holonomy.layers.equivariant.linear import sparse
from holonomy.ops.performer import log_features
from holonomy.ops.segments import block_sum, contract, outer_sum
from holonomy.structures import HyperedgePlan
from holonomy.structures.padded import place_in_run

# Rows of a chunk: what is made of them fits the cache of a core.
_CHUNK = 2**11


def matching_rows(
    keys: HyperedgePlan, queries: HyperedgePlan, orbit: Orbit
) -> tuple[Int[Tensor, " matches"], Int[Tensor, " matches"]]:
    """Join two strata: all pairs of a key and a query that belong to the class."""

    def make() -> tuple[Tensor, Tensor]:
        kept, places = orbit.reads.kept, orbit.writes.places
        if kept:
            of_key = sparse.tuple_codes(keys.indices, kept, keys.num_nodes)
            of_query = sparse.tuple_codes(queries.indices, places, keys.num_nodes)
        else:
            of_key, of_query = keys.graphs, queries.graphs
        # Sort-merge join: each query matches a run of the sorted keys.
        ordered, order = of_key.sort(stable=True)
        start = torch.searchsorted(ordered, of_query)
        counts = torch.searchsorted(ordered, of_query, right=True) - start
        query_rows = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)
        key_rows = order[start[query_rows] + place_in_run(query_rows, counts)]
        free_in, free_out = free_axes(orbit)
        # Free nodes of key and query differ; equal ones belong to another class.
        apart = torch.ones_like(key_rows, dtype=torch.bool)
        for a in free_in:
            for b in free_out:
                apart &= keys.indices[key_rows, a] != queries.indices[query_rows, b]
        return key_rows[apart], query_rows[apart]

    return keys.computed(("join", orbit), make, queries)


def softmax_class(
    orbit: Orbit,
    keys: HyperedgePlan,
    queries: HyperedgePlan,
    query: Float[Tensor, "queries heads dim"],
    key: Float[Tensor, "keys heads dim"],
    value: Float[Tensor, "keys heads values"],
) -> Float[Tensor, "queries heads values"]:
    """Average the values of a class over the keys that are there, HOT eqs. 16-17, stabilised by the row maximum."""
    key_rows, query_rows = matching_rows(keys, queries, orbit)
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(wide), key.to(wide)
    logits = (query.index_select(0, query_rows) * key.index_select(0, key_rows)).sum(-1) / math.sqrt(query.shape[-1])
    where = query_rows[:, None].expand_as(logits)
    # The row maximum cancels in the quotient; without it the exponential overflows.
    top = torch.full_like(query[..., 0], -math.inf).scatter_reduce(0, where, logits.detach(), "amax")
    weights = (logits - top.index_select(0, query_rows)).exp()
    mass = torch.zeros_like(query[..., 0]).index_add(0, query_rows, weights)
    weighted = weights[..., None].to(value.dtype) * value.index_select(0, key_rows)
    mixed = value.new_zeros(query.shape[0], *value.shape[1:]).index_add(0, query_rows, weighted)
    return mixed / torch.where(mass > 0, mass, 1)[..., None].to(value.dtype)


def kernel_class(
    terms: Sequence[Term],
    keys: HyperedgePlan,
    queries: HyperedgePlan,
    query: Float[Tensor, "queries heads dim"],
    key: Float[Tensor, "keys heads dim"],
    value: Float[Tensor, "keys heads values"],
    projection: Float[Tensor, "features dim"],
) -> Float[Tensor, "queries heads values"]:
    """The same by random features, HOT eqs. 18-21, linear in the hyperedges; see ``kernel_class`` of ``dense``."""
    if query.shape[0] == 0 or key.shape[0] == 0:
        return value.new_zeros(query.shape[0], *value.shape[1:])
    logs = _log_features(keys.graphs, queries.graphs, keys.num_graphs, query, key, projection)
    features = with_count(terms, *logs, value)
    return quotient_of_terms(terms, lambda term: _term(term, keys, queries, *features)).to(value.dtype)


def _term(
    term: Term, keys: HyperedgePlan, queries: HyperedgePlan, phi_q: Tensor, phi_k: Tensor, counted: Tensor
) -> Tensor:
    """Sum over the keys that share at least the matching's nodes with a query."""
    source = InputPattern(tuple(range(keys.order)), term.kept)
    target = OutputPattern(tuple(range(queries.order)), term.places)
    group = OrbitGroup(len(term.kept), (source,), (target,), ((0,),))
    [planned] = sparse.group_plans(keys, queries, (group,))
    [ins], [outs] = planned.inputs, planned.outputs
    # Sum phi(k) v^T by slot, then contract with phi(q). A key may have a slot that no query has.
    if len(term.kept) < keys.order:
        table = outer_sum(ins.taken(phi_k), ins.taken(counted), ins.slots, planned.size)
        return contract(phi_q, table, outs.slots)
    # A slot holds one key at most: no outer product is needed.
    row = torch.full((planned.size,), -1, device=ins.slots.device).index_copy(0, ins.slots, ins.rows)[outs.slots]
    met = (row >= 0)[:, None]
    row = row.clamp_min(0)
    weight = ((phi_q * phi_k.index_select(0, row)).sum(-1) * met)[..., None]
    return weight * counted.index_select(0, row)


def coupled_class(
    orbit: Orbit,
    edges: HyperedgePlan,
    keys: GatherPlan,
    queries: GatherPlan,
    query: Float[Tensor, "queries heads dim"],
    key: Float[Tensor, "keys heads dim"],
    value: Float[Tensor, "keys heads values"],
    projection: Float[Tensor, "features dim"],
) -> Float[Tensor, "queries heads values"]:
    """:func:`kernel_class` of the exact class, with what keys and queries share multiplied out in small blocks."""
    # A class that shares nodes sums over the pairs that meet at them; one that shares none is the sum over the graph
    # less the pairs that meet anywhere. It is half of the work of tables at a few edges a node, and loses fewer digits.
    if query.shape[0] == 0 or key.shape[0] == 0:
        return value.new_zeros(query.shape[0], *value.shape[1:])
    blocks, heavy, heavy_queries = _meetings(orbit, edges, keys, queries)
    slots = blocks[0] if orbit.reads.kept else None
    # Only the class without shared nodes subtracts. The others keep their dtype, relative to the largest key at their
    # nodes.
    if slots is None:
        ends = keys.graphs, queries.graphs, edges.num_graphs
    else:
        ends = slots.of_keys, slots.of_queries, slots.count
    phi_q, phi_k = (logs.exp() for logs in _log_features(*ends, query, key, projection))
    counted = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    wide = phi_q.dtype if slots is not None else torch.float64
    met = [block_sum(phi_q, phi_k, counted, part.query_rows, part.key_rows, part.mask, wide) for part in blocks]
    if slots is not None:
        mixed = quotient(met[0], met[0][..., -1:]).to(value.dtype)
    else:
        table = outer_sum(phi_k.to(wide), counted.to(wide), keys.graphs, edges.num_graphs)
        every = contract(phi_q.to(wide), table, queries.graphs)
        mixed = quotient(every - sum(met[1:], start=met[0]) if met else every, every[..., -1:]).to(value.dtype)
    if heavy.shape[0] == 0:
        return mixed
    # Queries that meet too many keys for a block are computed by tables instead.
    few = query.index_select(0, heavy)
    few = kernel_class(extensions(orbit), keys.tuples, heavy_queries, few, key, value, projection)
    return mixed.index_copy(0, heavy, few)


def largest_logarithms(
    key: Float[Tensor, "keys heads dim"], graphs: Int[Tensor, " keys"], num_graphs: int, projection: Tensor
) -> Float[Tensor, "graphs heads features"]:
    """The largest logarithm of each feature in each graph, zero where a graph has no key."""
    top = projection.new_full((num_graphs, key.shape[1], projection.shape[0]), -math.inf)
    top = top.to(torch.promote_types(key.dtype, projection.dtype))
    for rows, here in zip(key.split(_CHUNK), graphs.split(_CHUNK), strict=True):
        top = _raised(top, log_features(rows, projection), here)
    return torch.where(top.isfinite(), top, 0)


def _raised(top: Tensor, logs: Tensor, graphs: Tensor) -> Tensor:
    """The largest logarithms of each graph, with those of some more keys."""
    if len(top) == 1 and len(logs):
        return torch.maximum(top, logs.amax(0, keepdim=True))
    return top.scatter_reduce(0, graphs[:, None, None].expand_as(logs), logs, "amax")


def _meetings(
    orbit: Orbit, edges: HyperedgePlan, keys: GatherPlan, queries: GatherPlan
) -> tuple[list[Blocks], Tensor, HyperedgePlan]:
    """Where keys and queries of a class meet, and the queries that are left to tables, by rows and as tuples."""

    def make() -> tuple[list[Blocks], Tensor, HyperedgePlan]:
        free = [(a, b) for a in free_axes(orbit)[0] for b in free_axes(orbit)[1]]
        if orbit.reads.kept:
            asked = [(orbit.reads.kept, orbit.writes.places, tuple(free))]
        else:
            # A pair that meets at several nodes counts at the first.
            asked = [((a,), (b,), tuple(free[:rank])) for rank, (a, b) in enumerate(free)]
        ends = keys.tuples.indices, queries.tuples.indices
        made = [class_blocks(*ends, *shared, edges.num_nodes) for shared in asked]
        empty = keys.rows.new_zeros(0)
        heavy = torch.cat([empty, *(blocks.heavy for blocks in made)]).unique()
        return made, heavy, edges.at(queries.tuples.indices[heavy])

    return keys.tuples.computed(("meetings", orbit), make, queries.tuples)


def _log_features(
    graphs_in: Tensor, graphs_out: Tensor, num_graphs: int, query: Tensor, key: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor]:
    """Logarithms of features: of keys less their maximum in the graph, of queries with it and less their own."""
    root = projection.shape[1] ** -0.25
    log_q, log_k = log_features(query * root, projection, of_query=True), log_features(key * root, projection)
    top = _raised(log_k.new_full((num_graphs, *log_k.shape[1:]), -math.inf), log_k.detach(), graphs_in)
    top = torch.where(top.isfinite(), top, 0)
    of_query, of_key = (top, top) if num_graphs == 1 else (top[graphs_out], top[graphs_in])
    # e^(l_q + t) e^(l_k - t) = e^(l_q + l_k); a factor common to all features of a query cancels in the quotient.
    log_q = log_q + of_query
    return log_q - log_q.detach().amax(-1, keepdim=True), log_k - of_key
