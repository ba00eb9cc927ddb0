"""The page of results: the papers' figures beside those of ``benchmarks/results``, ``python -m benchmarks.papers``.

A test compares docs/results.md with what this writes, so that no figure is copied by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks import orders

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"


class Row(NamedTuple):
    """A question, the paper's figure for it, our model's, and those of others on the same data and budget."""

    question: str
    paper: str
    score: str
    ours: tuple[str, str]
    beside: dict[str, tuple[str, str]]
    budget: str
    factor: float = 100.0


NODES = "node_classification/"
LINE = "|---|---|---|---|---|"
TABLES = {
    "Hypformer, table 2: nodes of graphs": (
        "accuracy in %",
        [
            Row("cora, random split", "85.0", "test", (f"{NODES}cora-random-graph-weight", "hypformer"),
                {"Euclidean twin": (f"{NODES}cora-random-graph-weight-twin", "euclidean"),
                 "GCN": (f"{NODES}cora-random-released-budget-gcn", "gcn")}, ""),
            Row("citeseer, random split", "73.3", "test", (f"{NODES}citeseer-random-graph-weight", "hypformer"),
                {"Euclidean twin": (f"{NODES}citeseer-random-released-budget", "euclidean"),
                 "GCN": (f"{NODES}citeseer-random-released-budget", "gcn")}, ""),
            Row("pubmed, random split", "81.3", "test", (f"{NODES}pubmed-random-graph-weight", "hypformer"),
                {"GCN": (f"{NODES}pubmed-random", "gcn")}, ""),
            Row("airport, the released (leaky) split", "95.0", "test", (f"{NODES}airport-leaky", "hypformer"),
                {"Euclidean twin": (f"{NODES}airport-leaky", "euclidean"), "GCN": (f"{NODES}airport-leaky", "gcn")},
                ""),
            Row("airport, a clean split", "", "test", (f"{NODES}airport-clean", "hypformer"),
                {"Euclidean twin": (f"{NODES}airport-clean", "euclidean"), "GCN": (f"{NODES}airport-clean", "gcn")},
                ""),
        ],
        "Hypformer reaches the paper's accuracy on cora and airport, not on citeseer and pubmed (1.2 and 0.3 less).",
    ),
    "Hierarchies: reconstruction of WordNet": (
        "mean average precision in %",
        [
            Row("mammals, 2 dimensions", "", "map", ("hierarchy_mammals_2d", "learned in 2"),
                {"curvature -1": ("hierarchy_mammals_2d", "fixed in 2"),
                 "Euclidean": ("hierarchy_mammals_2d", "euclidean in 2"),
                 "Euclidean with a bias": ("hierarchy_mammals_controls_2d", "euclidean-bias in 2")}, ""),
            Row("mammals, 5 dimensions", "", "map", ("hierarchy_mammals_seeds", "learned in 5"),
                {"curvature -1": ("hierarchy_mammals_seeds", "fixed in 5"),
                 "Euclidean": ("hierarchy_mammals_seeds", "euclidean in 5"),
                 "Euclidean with a bias": ("hierarchy_mammals_controls", "euclidean-bias in 5")}, ""),
            Row("all nouns, 5 dimensions", "", "map", ("hierarchy_nouns", "learned in 5"),
                {"Euclidean": ("hierarchy_nouns", "euclidean in 5")}, "8 epochs"),
            Row("all nouns, 10 dimensions", "", "map", ("hierarchy_nouns_10d", "learned in 10"),
                {"with a bias": ("hierarchy_nouns_10d", "learned-bias in 10"),
                 "Euclidean with a bias": ("hierarchy_nouns_10d", "euclidean-bias in 10")}, "24 epochs"),
        ],
        "By distances alone hyperbolic space is far ahead. With a bias flat space is level in two and ahead in more.",
    ),
    "Link prediction by HGCN's protocol": (
        "ROC AUC in %",
        [
            Row(name, "", "auc", (f"link_prediction_{name}", "hgcn"),
                {"LGCN": (f"link_prediction_{name}", "lgcn"), "HGCN's flat twin": (f"link_prediction_{name}", "twin"),
                 "GAT": (f"link_prediction_{name}", "gat"), "MLP": (f"link_prediction_{name}", "mlp")}, "")
            for name in ("disease_lp", "airport", "cora")
        ] + [
            Row("pubmed", "", "auc", ("link_prediction_pubmed", "hgcn"),
                {"HGCN's flat twin": ("link_prediction_pubmed_twin", "twin"),
                 "GAT": ("link_prediction_pubmed", "gat"), "MLP": ("link_prediction_pubmed", "mlp")}, ""),
        ],
        "HGCN is within two points of its flat twin; the MLP, which does not see the graph, is ahead on all but cora.",
    ),
    "HOT, tables 1, 3 and 4": (
        "macro F1, F1 and AUC in %",
        [
            Row("chains of 200 nodes", "100.0", "macro F1", ("long_range_chains", "hot"),
                {"IGN": ("long_range_chains", "ign"), "GCN": ("long_range_chains", "gcn")}, "reduced"),
            Row("Delaunay triangulation, 50 points", "97.4", "f1", ("set_to_graph_50", "hot"),
                {"S2G": ("set_to_graph_50", "ign"), "GIN": ("set_to_graph_50", "gnn5")}, "a tenth"),
            Row("the same, 20 to 80 points", "97.1", "f1", ("set_to_graph_20_80", "hot"),
                {"S2G": ("set_to_graph_20_80", "ign")}, "a tenth"),
            Row("hyperedges, gps", "95.2", "AUC", ("hyperedge_prediction_gps", "hot"),
                {"S2G+": ("hyperedge_prediction_gps", "ign"), "MLP": ("hyperedge_prediction_gps", "mlp")}, "reduced"),
            Row("hyperedges, movielens", "92.3", "AUC", ("hyperedge_prediction_movielens", "hot"),
                {"S2G+": ("hyperedge_prediction_movielens", "ign"), "MLP": ("hyperedge_prediction_movielens", "mlp")},
                "reduced"),
            Row("hyperedges, drug", "96.4", "AUC", ("hyperedge_prediction_drug", "hot"),
                {"S2G+": ("hyperedge_prediction_drug", "ign"), "MLP": ("hyperedge_prediction_drug", "mlp")}, "reduced"),
        ],
        "HOT is ahead of S2G on chains and sets, as in the paper. On hyperedges an MLP (not in the paper) is ahead.",
    ),
    "TokenGT, table 1: the basis of equivariant maps": (
        "squared error; less is better",
        [
            Row("orthogonal identifiers and types, sparse tokens", "", "test L2",
                ("equivariant_basis_sparse", "orf-types"),
                {"without types": ("equivariant_basis_sparse", "orf"),
                 "types alone": ("equivariant_basis_sparse", "types"),
                 "neither": ("equivariant_basis_sparse", "none")}, "reduced", 1.0),
        ],
        "A transformer needs both node identifiers and types to learn the basis.",
    ),
    "CSA, table 1: molecules": (
        "mean absolute error; less is better",
        [
            Row("zinc, walks and rings", "0.056", "MAE", ("molecules_zinc_500k", "csa-rings"),
                {"GIN": ("molecules_zinc_500k_lr_0.001", "gin"), "GCN": ("molecules_zinc_500k_lr_0.001", "gcn")},
                "16 epochs of 2000", 1.0),
            Row("zinc, walks", "0.070", "MAE", ("molecules_zinc_500k_lr_0.001", "csa"),
                {"one filter a head": ("molecules_zinc_500k_lr_0.001", "mono")}, "16 epochs of 2000", 1.0),
        ],
        "The order of the models is that of the paper, after a hundredth of its training.",
    ),
    "Simplicial: a task on triples": (
        "accuracy in %",
        [
            Row("Match-3: do two tokens and this one add up to zero?", "", "accuracy", ("triples_match3", "simplicial"),
                {"along paths": ("triples_match3", "paths"), "pairwise": ("triples_match3", "pairwise")}, ""),
        ],
        "",
    ),
    "Sequences: a language model of 10,000 steps": (
        "bits per character, of which 1.305 are the entropy; less is better",
        [
            Row("nested brackets, float32", "", "bits", ("characters", "hyperbolic"),
                {"flat twin": ("characters", "flat")}, "", 1.0),
            Row("the same, bfloat16 autocast", "", "bits", ("characters", "hyperbolic-bfloat16"),
                {"flat twin": ("characters", "flat-bfloat16")}, "", 1.0),
        ],
        "Both reach the entropy of the texts; every loss is finite. A hyperbolic step takes as long as ten flat ones.",
    ),
    "Images: scikit-learn's digits": (
        "accuracy in %",
        [
            Row("597 test images after 8 epochs", "", "accuracy", ("digits", "hyperbolic"),
                {"flat twin": ("digits", "flat")}, ""),
        ],
        "A hyperbolic vision transformer trains in as few epochs as its flat twin, and is not ahead.",
    ),
}  # fmt: skip


def figure(file: str, model: str, score: str, factor: float) -> str:
    """Mean and deviation of a score, with as many digits as the factor asks for."""
    read = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    rows = read.get("rows", [])
    entries = read.get("models") or {
        row["model"] if "settings" not in row else f"{row['model']} in {row['settings']['dim']}": row for row in rows
    }
    found = entries[model]["summary"][score]
    digits = 1 if factor == 100.0 else 3
    spread = f" ± {factor * found['std']:.{digits}f}" if found["n"] > 1 else ""
    return f"{factor * found['mean']:.{digits}f}{spread}"


def table(title: str) -> str:
    score, rows, conclusion = TABLES[title]
    lines = [f"## {title}", "", f"{score[0].upper()}{score[1:]}.", ""]
    lines += ["| | paper | **holonomy** | other models | budget, if reduced |", LINE]
    for row in rows:
        others = ", ".join(f"{name} {figure(*where, row.score, row.factor)}" for name, where in row.beside.items())
        ours = figure(*row.ours, row.score, row.factor)
        lines.append(f"| {row.question} | {row.paper} | **{ours}** | {others} | {row.budget} |")
    return "\n".join([*lines, *(["", conclusion] if conclusion else [])])


def claims() -> str:
    judged, attacked = (
        json.loads((RESULTS / name).read_text("utf-8")) for name in ("theory.json", "certificates.json")
    )
    verdicts = [claim["verdict"] for claim in judged["claims"].values()]
    holds = sum(verdict.startswith("holds") for verdict in verdicts)
    fails = len(verdicts) - holds
    return (
        "## Claims and certificates\n\n"
        f"Of {len(verdicts)} claims {holds} hold on all inputs that were searched, and {fails} are known to fail, most "
        f"of them statements of\nthe papers. {attacked['draws']} attacks on certificates of layers and models found "
        f"{attacked['violations']} violations."
    )


INTRO = """# Results

The papers' figures and those of this library. Each figure is read from a file of `benchmarks/results/`, which has the
command, the versions and every seed. Rows with an entry in the last column ran on two processor cores for a part of the
paper's epochs: they compare models and do not show what each can reach. The settings that were searched and all other
rows are on the pages [tasks](tasks.md) (each experiment), [the laboratory book](results_book.md) (nodes, hierarchies,
fuzz, mutations and every claim) and [benchmarks](benchmarks.md) (time and memory)."""


def page() -> str:
    return "\n\n".join([INTRO, *map(table, TABLES), claims(), orders.section()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
