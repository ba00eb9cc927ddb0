"""Jets: the published columns are read and laid out, generated ones have the same form and obey geometry."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data import jets
from experiments.data.jets import COLUMNS, FILES, OF_JETS, OF_TRACKS, VERTEX, generated, padded, scaled
from experiments.set_to_graph import Settings, load


def test_jets_are_laid_out_as_loops_say_and_single_tracks_are_left_out() -> None:
    columns = generated(12, seed=3)
    columns = {**columns, **{name: columns[name].copy() for name in (*OF_TRACKS, VERTEX)}}
    for name in (*OF_TRACKS, VERTEX):
        columns[name][4] = columns[name][4][:1]
    found, kept = padded(columns), [jet for jet in range(12) if jet != 4]
    assert len(found.tracks) == len(kept)
    for row, jet in enumerate(kept):
        size = len(columns[VERTEX][jet])
        assert found.mask[row].tolist() == [track < size for track in range(found.mask.shape[1])]
        assert found.flavour[row] == columns["jet_flav"][jet]
        assert not found.tracks[row, size:].any()
        assert not found.joined[row, size:].any()
        for track in range(size):
            wanted = [columns[name][jet][track] for name in OF_TRACKS] + [columns[name][jet] for name in OF_JETS]
            torch.testing.assert_close(found.tracks[row, track], torch.tensor(wanted, dtype=torch.float32))
            mates = [bool(other == columns[VERTEX][jet][track]) for other in columns[VERTEX][jet]]
            assert found.joined[row, track, :size].tolist() == mates
    alone = {**columns, VERTEX: columns[VERTEX][4:5]}
    with pytest.raises(ValueError, match="jets must have two tracks or more, got 1 jets, none of which has"):
        padded(alone)


def test_tracks_of_a_vertex_meet_in_a_point() -> None:
    """Each track passes the beam as a straight line would that starts at the vertex, but for 0.02 mm."""
    columns, far = generated(60, seed=0), []
    for jet in range(60):
        d0, z0, phi, cotangent, vertex = (columns[name][jet] for name in (*OF_TRACKS[:4], VERTEX))
        for number in set(vertex.tolist()):
            angle, own = phi[vertex == number], vertex == number
            rows = np.stack([np.sin(angle), -np.cos(angle), 0 * angle], axis=1)
            along = np.stack([-np.cos(angle) * cotangent[own], -np.sin(angle) * cotangent[own], 1 + 0 * angle], axis=1)
            measured = np.concatenate([d0[own], z0[own]])
            point, *_ = np.linalg.lstsq(np.concatenate([rows, along]), measured, rcond=None)
            off = np.concatenate([rows, along]) @ point - measured
            assert np.abs(off).max() < 0.1
            far.append(np.linalg.norm(point) > 1.0)
            assert number > 0 or np.abs(d0[own]).max() < 0.1
    assert 0.2 < np.mean(far) < 0.6


def test_numbers_are_scaled_by_the_training_jets() -> None:
    data = load("jets-generated", None, Settings(train=40, tests=10), 0)
    rows = data.train.points[data.train.mask]
    torch.testing.assert_close(rows.mean(dim=0), torch.zeros(10), atol=1e-4, rtol=0)
    torch.testing.assert_close(rows.std(dim=0), torch.ones(10), atol=1e-4, rtol=0)
    raw = [padded(generated(count, seed=seed)) for seed, count in ((2, 10), (0, 40))]
    assert torch.equal(scaled(*raw).tracks, data.test.points)
    assert not data.test.points[~data.test.mask].any()
    assert set(data.train.flavour.tolist()) == {0, 4, 5}


def test_what_is_not_there_has_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="say where it lies with --data FOLDER"):
        load("jets", None, Settings(train=4, tests=4), 0)
    monkeypatch.setitem(sys.modules, "uproot", None)
    with pytest.raises(ValueError, match=r"which uproot reads: pip install 'holonomy\[jets\]'"):
        jets.read(tmp_path, "train")


def test_files_of_the_published_form_are_read(tmp_path: Path) -> None:
    uproot = pytest.importorskip("uproot", reason="the extra jets is not installed")
    written = {
        part: generated(count, seed=seed)
        for seed, (part, count) in enumerate({"train": 9, "val": 5, "test": 4}.items())
    }
    with pytest.raises(FileNotFoundError, match=r"training_data\.root is not there"):
        jets.read(tmp_path, "train")
    for part, columns in written.items():
        with uproot.recreate(tmp_path / FILES[part]) as file:
            file["tree"] = {
                name: list(columns[name]) if columns[name].dtype == object else columns[name] for name in COLUMNS
            }
    found = jets.read(tmp_path, "train", 7)
    assert set(found) == set(COLUMNS)
    for name in COLUMNS:
        assert len(found[name]) == 7
        for one, other in zip(found[name], written["train"][name], strict=False):
            assert np.array_equal(one, other)
    data = load("jets", tmp_path, Settings(train=0, tests=3), 0)
    assert (len(data.train), len(data.val), len(data.test)) == (9, 3, 3)
    whole = padded(written["train"])
    assert torch.equal(scaled(whole, whole).tracks, data.train.points)
    with uproot.recreate(tmp_path / FILES["val"]) as file:
        file["tree"] = {"jet_pt": np.ones(3)}
    with pytest.raises(ValueError, match="must have the columns of the published files, got none named trk_d0"):
        jets.read(tmp_path, "val")
