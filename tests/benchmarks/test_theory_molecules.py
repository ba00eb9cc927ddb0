"""The shares of QM9: a part of the molecules never replaces the result on all of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import theory_molecules
from holonomy.theory import verify
from holonomy.theory.claims.molecules import read_molecules


@pytest.fixture
def data(tmp_path):
    """Water, ethane and a ring of five atoms without hydrogens."""
    arrays = {
        "num_nodes": [1, 2, 5],
        "num_bonds": [0, 1, 5],
        "atom_feat": [[8, 0, 2], *[[6, 0, 3]] * 2, *[[7, 0, 0]] * 5],
        "bond_index": [[0, 0, 1, 2, 3, 4], [1, 1, 2, 3, 4, 0]],
    }
    np.savez(tmp_path / "qm9_graphs.npz", **{name: np.array(part, "uint8") for name, part in arrays.items()})
    return tmp_path


def test_a_part_goes_to_a_file_named_after_it(data, monkeypatch):
    whole = data / "theory_molecules.json"
    monkeypatch.setattr(theory_molecules, "RESULTS", whole)
    theory_molecules.main(["--data", str(data)])
    before = whole.read_text()
    theory_molecules.main(["--data", str(data), "--every", "2"])
    assert whole.read_text() == before
    part = json.loads((data / "theory_molecules_every_2.json").read_text())
    assert (part["every"], part["with hydrogens"]["augmented"]["graphs"]) == (2, 2)
    with pytest.raises(SystemExit):
        theory_molecules.main(["--data", str(data), "--every", "2", "--json", str(whole)])
    assert whole.read_text() == before


def test_claims_say_on_which_molecules_they_were_judged(data):
    molecules = read_molecules(np.load(data / "qm9_graphs.npz"))
    (read,), (generated,) = (
        verify(["curvature.mean_augmented"], molecules=given, budget=0.2) for given in (molecules, None)
    )
    assert read.judged_on == "3 molecules of QM9"
    assert generated.judged_on == "20 generated molecules"
    assert "larger in 66.6667%, larger or equal in 100.0000%" in read.note
