"""Every result holds the command that made it, new ones the commit too, and the pages name results that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.rglob("*.json"))
# Made before results held the commit. A file that is made again leaves this list; none joins it.
NAMES = """
    attention_in_colors_zinc equivariant_basis_dense equivariant_basis_sparse
    equivariant_basis_sparse_20_nodes hierarchy_mammals
    hierarchy_mammals_2d hierarchy_mammals_seeds hierarchy_nouns hierarchy_tree hyperedge_prediction_drug
    hyperedge_prediction_gps hyperedge_prediction_movielens long_range_chains molecules_esol molecules_zinc
    molecules_zinc_500k molecules_zinc_500k_lr_0.001 molecules_zinc_all node_classification/airport-clean
    node_classification/airport-leaky node_classification/citeseer-public
    node_classification/citeseer-public-released-budget node_classification/citeseer-random
    node_classification/citeseer-random-average node_classification/citeseer-random-graph-weight
    node_classification/citeseer-random-released-budget node_classification/cora-public
    node_classification/cora-public-released-budget node_classification/cora-random
    node_classification/cora-random-graph-weight node_classification/cora-random-released-budget
    node_classification/cora-random-softmax node_classification/disease_lp node_classification/disease_lp-average
    node_classification/disease_lp-decay node_classification/disease_lp-graph-weight
    node_classification/disease_lp-softmax node_classification/pubmed-public node_classification/pubmed-random
    node_classification/pubmed-random-graph-weight node_classification/pubmed-random-no-transformer
    node_tokens_chameleon node_tokens_chameleon_search set_to_graph_20_80 set_to_graph_20_80_1500 set_to_graph_50
    set_to_graph_50_12_epochs set_to_graph_50_1500 set_to_graph_50_5000 set_to_graph_50_64_features
    stochastic_blocks_cluster stochastic_blocks_pattern theory theory_molecules theory_open triples_match3
    triples_match3_10_steps triples_match3_distinct triples_parity triples_sorting
"""
WITHOUT_COMMIT = set(NAMES.split())


def name_of(path: Path) -> str:
    return str(path.relative_to(RESULTS).with_suffix(""))


def commits(document: dict[str, Any]) -> list[str]:
    """Every commit that a result names: its own, that of its versions, those of its cases."""
    holders = [document, document.get("versions") or {}, *(document.get("cases") or {}).values()]
    return [holder["commit"] for holder in holders if isinstance(holder, dict) and "commit" in holder]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_result_holds_its_command_and_its_commit(path: Path) -> None:
    document = json.loads(path.read_text("utf-8"))
    said = document["command"]
    commands = said if isinstance(said, list) else [said]
    assert commands
    assert all(re.match(r"(OMP_NUM_THREADS=1 )?(python -m|make) \w", command) for command in commands)
    if name_of(path) not in WITHOUT_COMMIT:
        assert commits(document)
        assert all(re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit) for commit in commits(document))


def test_the_list_of_old_results_names_results() -> None:
    assert {name_of(path) for path in FILES} >= WITHOUT_COMMIT


def test_pages_name_results_that_are_there_and_every_table_has_one() -> None:
    known = {path.name for path in FILES}
    tasks = (ROOT / "docs" / "tasks.md").read_text("utf-8")
    for page in (tasks, (RESULTS / "README.md").read_text("utf-8")):
        named = set(re.findall(r"`([\w.-]+\.json)`", page)) - {"table.json", "run.json"}
        assert named
        assert named <= known, named - known
    sections = [part for part in re.split(r"^## ", tasks, flags=re.MULTILINE) if "|---" in part]
    assert len(sections) >= 7
    for section in sections:
        assert set(re.findall(r"`([\w.-]+\.json)`", section)) & known, section.partition("\n")[0]
