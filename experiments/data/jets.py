"""Jets of particles: which tracks come from the same vertex (HOT section 5, table 3; Shlomi et al. 2020).

The published files are three ROOT files, ``training_data.root``, ``valid_data.root`` and ``test_data.root`` of Zenodo
record 4044628, a row of the tree ``tree`` for each jet: numbers of the jet, and for each number of a track a list.
``uproot`` reads them. ``generated`` draws jets with the same columns: tracks that start at the collision, and at the
points where one or two heavy particles decayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.engine.options import RefusedError

OF_TRACKS = ("trk_d0", "trk_z0", "trk_phi", "trk_ctgtheta", "trk_pt", "trk_charge")
OF_JETS = ("jet_pt", "jet_eta", "jet_phi", "jet_M")
VERTEX, FLAVOUR = "trk_vtx_index", "jet_flav"
COLUMNS = (*OF_TRACKS, *OF_JETS, VERTEX, FLAVOUR)
FILES = {"train": "training_data.root", "val": "valid_data.root", "test": "test_data.root"}
FLAVOURS = {5: "b", 4: "c", 0: "light"}
Columns = Mapping[str, Any]


class Jets(NamedTuple):
    """Jets of at least two tracks, padded to one size.

    Attributes:
        tracks: (jets, n, 10), numbers of the track and of its jet; zero where there is no track.
        mask: (jets, n), true where there is one.
        joined: (jets, n, n), true where two tracks have the same vertex.
        flavour: (jets,), 5 of a bottom quark, 4 of a charm quark, 0 of a light one.
    """

    tracks: Tensor
    mask: Tensor
    joined: Tensor
    flavour: Tensor


def read(folder: Path, part: str, most: int | None = None) -> Columns:
    """Read the columns of the first jets of ``"train"``, ``"val"`` or ``"test"``: arrays, of tracks arrays of arrays.

    Raises:
        FileNotFoundError: if the file is not there.
        ValueError: if ``uproot`` is not installed, or the file has not these columns.
    """
    try:
        import uproot  # noqa: PLC0415
    except ImportError:
        raise RefusedError("jets lie in files of ROOT, which uproot reads: pip install 'holonomy[jets]'") from None
    path = folder / FILES[part]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: it is published as record 4044628 of Zenodo")
    with uproot.open(path) as file:
        if missing := [name for name in COLUMNS if name not in file["tree"]]:
            raise RefusedError(f"{path} must have the columns of the published files, got none named {missing[0]}")
        return file["tree"].arrays(list(COLUMNS), entry_stop=most, library="np")


def padded(columns: Columns) -> Jets:
    """Lay jets out as tensors; those of one track, in which there is nothing to ask, are left out."""
    counts = np.array([len(vertices) for vertices in columns[VERTEX]])
    kept = np.flatnonzero(counts > 1)
    if not len(kept):
        raise RefusedError(f"jets must have two tracks or more, got {len(counts)} jets, none of which has")
    mask = np.arange(counts[kept].max()) < counts[kept, None]

    def laid(name: str, fill: float) -> np.ndarray[Any, Any]:
        out = np.full(mask.shape, fill)
        out[mask] = np.concatenate([columns[name][jet] for jet in kept])
        return out

    of_jets = [np.where(mask, np.asarray(columns[name])[kept, None], 0.0) for name in OF_JETS]
    tracks = np.stack([*(laid(name, 0.0) for name in OF_TRACKS), *of_jets], axis=-1)
    vertex = laid(VERTEX, np.nan)  # equal to nothing, itself included
    joined = vertex[:, :, None] == vertex[:, None, :]
    flavour = torch.from_numpy(np.asarray(columns[FLAVOUR])[kept].astype(np.int64))
    return Jets(torch.from_numpy(tracks).float(), torch.from_numpy(mask), torch.from_numpy(joined), flavour)


def scaled(jets: Jets, like: Jets) -> Jets:
    """Give every number mean 0 and deviation 1 over the tracks of other jets."""
    rows = like.tracks[like.mask].double()
    mean, deviation = rows.mean(dim=0), rows.std(dim=0).clamp(min=1e-6)
    return jets._replace(tracks=((jets.tracks - mean) / deviation).float() * jets.mask[..., None])


def generated(count: int, *, seed: int) -> Columns:
    """Draw the columns of some jets; a third each of bottom, charm and light ones.

    A light jet has its tracks from the collision; in a charm jet one particle flies some millimetres before it decays
    into two to four tracks, in a bottom jet one flies farther and its daughter decays once more. A track from a point
    p in the direction (phi, theta) passes the beam at ``d0 = p_x sin(phi) - p_y cos(phi)`` and
    ``z0 = p_z - (p_x cos(phi) + p_y sin(phi)) / tan(theta)``, known to 0.02 mm.
    """
    rng = np.random.default_rng(seed)
    jets = [_drawn(rng, flavour) for flavour in rng.choice(list(FLAVOURS), size=count)]
    out: dict[str, Any] = {name: np.array([jet[name] for jet in jets]) for name in (*OF_JETS, FLAVOUR)}
    for name in (*OF_TRACKS, VERTEX):
        out[name] = np.empty(count, dtype=object)
        out[name][:] = [jet[name] for jet in jets]
    return out


def _drawn(rng: np.random.Generator, flavour: int) -> dict[str, Any]:
    """Draw one jet."""
    phi, eta = rng.uniform(-np.pi, np.pi), rng.uniform(-2, 2)
    axis = np.array([np.cos(phi), np.sin(phi), np.sinh(eta)])
    # Flights, in millimetres along the jet.
    lengths = {5: [4.0, 8.0], 4: [3.0], 0: []}[int(flavour)]
    points = np.cumsum([0.0, *(rng.exponential(length) for length in lengths)])
    sizes = [rng.integers(2, 6), *(rng.integers(2, 5) for _ in lengths)]
    vertex = np.repeat(np.arange(len(sizes)), sizes)
    x, y, z = points[vertex] * axis[:, None]
    angle = phi + rng.normal(0, 0.15, len(vertex))
    cotangent = np.sinh(eta + rng.normal(0, 0.15, len(vertex)))
    order = rng.permutation(len(vertex))
    tracks = {
        "trk_d0": x * np.sin(angle) - y * np.cos(angle) + rng.normal(0, 0.02, len(vertex)),
        "trk_z0": z - (x * np.cos(angle) + y * np.sin(angle)) * cotangent + rng.normal(0, 0.02, len(vertex)),
        "trk_phi": angle,
        "trk_ctgtheta": cotangent,
        "trk_pt": rng.exponential(5.0, len(vertex)) + 0.5,
        "trk_charge": rng.choice([-1.0, 1.0], len(vertex)),
        VERTEX: vertex,
    }
    momentum = float(tracks["trk_pt"].sum())
    jet = {"jet_pt": momentum, "jet_eta": eta, "jet_phi": phi, "jet_M": 0.15 * momentum, FLAVOUR: int(flavour)}
    kinds = {name: np.int32 if name == VERTEX else np.float32 for name in tracks}
    return {**{name: values[order].astype(kinds[name]) for name, values in tracks.items()}, **jet}
