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


def numbers(cell: str) -> list[str]:
    return re.findall(r"[\d.]+(?:e-?\d+)?", cell)


def rounds_to(value: float, shown: str) -> bool:
    """Whether the value has the digits that are shown, two of them where they are followed by a power of ten."""
    digits = len(shown.partition(".")[2])
    return value == pytest.approx(float(shown), rel=0.06 if "e" in shown else 1e-3, abs=0.501 * 10.0**-digits)


def test_the_table_of_claims_has_the_figures_of_their_file() -> None:
    claims = json.loads((RESULTS / "theory.json").read_text("utf-8"))["claims"]
    rows = re.findall(r"^\| `(\w+\.\w+)`([^|]*)\|(.*)\|$", (RESULTS / "README.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 60
    for name, said, row in rows:
        claim, cells = claims[name], [cell.strip() for cell in row.split("|")]
        cells = cells if numbers(cells[0]) else cells[1:]
        assert ("fails" in said + row) == claim["verdict"].startswith("fails"), name
        drawn = claim["all"]
        assert numbers(cells[0]) == [str(drawn["counted"]), str(drawn["draws"] + drawn["climbed"])], name
        orders = ["all"] if len(cells) == 2 else ["N=1", "N=2", "N=3"]
        for order, cell in zip(orders, cells[1:], strict=True):
            found = claim.get(order, drawn)
            for shown, value in zip(numbers(cell), (found["median"], found["worst"]), strict=cell != ""):
                assert rounds_to(value, shown), (name, order, cell)


def spreads(value: Any) -> list[tuple[float, float]]:
    """Every mean and deviation that a result holds."""
    if isinstance(value, list):
        return [pair for part in value for pair in spreads(part)]
    if not isinstance(value, dict):
        return []
    own = [(value["mean"], value["std"])] if {"mean", "std"} <= set(value) else []
    return own + spreads([*value.values()])


@pytest.mark.parametrize("page", ["tasks", "when_hyperbolic"])
def test_means_and_deviations_in_tables_are_those_of_the_files(page: str) -> None:
    """Of the files that a section names, in the unit of the file or in hundredths or thousandths of it."""
    places = {path.name: path for path in FILES}
    seen = 0
    for section in re.split(r"^## ", (ROOT / "docs" / f"{page}.md").read_text("utf-8"), flags=re.MULTILINE):
        named = set(re.findall(r"`([\w.-]+\.json)`", section)) & set(places)
        held = [pair for name in named for pair in spreads(json.loads(places[name].read_text("utf-8")))]
        rows = "\n".join(line for line in section.splitlines() if line.startswith("|"))
        for mean, deviation in re.findall(r"([\d.]+) ± ([\d.]+)", rows):
            seen += 1
            assert any(
                abs(at * unit - float(mean)) <= 0.501 * 10.0 ** -len(mean.partition(".")[2])
                and abs(by * unit - float(deviation)) <= 0.501 * 10.0 ** -len(deviation.partition(".")[2])
                for at, by in held
                for unit in (1.0, 100.0, 1000.0)
            ), (section.partition("\n")[0], mean, deviation)
    assert seen > 50
