"""The page of results has the figures of the files that it names."""

from __future__ import annotations

from benchmarks.papers import PAGE, figure, page


def test_the_page_of_results_has_the_figures_of_the_files() -> None:
    """If this fails, run ``python -m benchmarks.papers``."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_figure_has_its_spread_where_there_are_seeds() -> None:
    assert figure("long_range_chains", "hot", "macro F1", 100.0) == "100.0 ± 0.0"
    assert figure("molecules_zinc_500k", "csa-rings", "MAE", 1.0) == "0.250"
    assert figure("hierarchy_mammals_seeds", "learned in 5", "map", 100.0) != figure(
        "hierarchy_mammals_seeds", "learned in 10", "map", 100.0
    )
