"""The drawings of the concept pages and the pictures of the tutorials: ``python docs/pictures.py``.

Lines of drawings are grey, so that they are seen on light pages and on dark ones. A test compares their files with what
this writes. Pictures are those that the lines of a tutorial save.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch

from holonomy.manifolds import Lorentz

__all__ = ["disk", "hyperboloid", "run"]

_GREY, _BLUE, _RED = "#888888", "#3b82c4", "#d1603d"


def _svg(width: int, height: int, parts: list[str]) -> str:
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    return f'{head} font-family="sans-serif" font-size="14">\n{body}\n</svg>\n'


def _path(points: list[tuple[float, float]], colour: str, width: float = 1.5, more: str = "") -> str:
    text = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{text}" fill="none" stroke="{colour}" stroke-width="{width}" {more}/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _label(x: float, y: float, text: str, colour: str = _GREY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{text}</text>'


def hyperboloid() -> str:
    """The sheet from the side: time upwards, one coordinate of space, and the projection onto the disk."""
    scale, middle, ground = 70.0, 240.0, 250.0

    def at(space: float, time: float) -> tuple[float, float]:
        return middle + scale * space, ground - scale * time

    sheet = [at(s / 20, math.hypot(1.0, s / 20)) for s in range(-60, 61)]
    point, eye = (2.0, math.hypot(1.0, 2.0)), (0.0, -1.0)
    shadow = (point[0] / (1 + point[1]), 0.0)
    dashed = 'stroke-dasharray="4 4"'
    return _svg(
        480,
        340,
        [
            _path([at(-3.2, 0), at(3.2, 0)], _GREY, 1),
            _path([at(0, -1.2), at(0, 3.4)], _GREY, 1),
            _path([at(-3.2, 3.2), at(0, 0), at(3.2, 3.2)], _GREY, 1, dashed),
            _path([at(-1, 0), at(1, 0)], _RED, 4),
            _path(sheet, _BLUE, 3),
            _path([at(*eye), at(*point)], _GREY, 1, dashed),
            *(
                _dot(*at(*place), colour)
                for place, colour in ((point, _BLUE), (shadow, _RED), (eye, _GREY), ((0, 1), _BLUE))
            ),
            _label(at(*point)[0] + 10, at(*point)[1] + 14, "x", _BLUE),
            _label(at(0, 1)[0] + 8, at(0, 1)[1] + 18, "origin", _BLUE),
            _label(at(shadow[0], 0)[0] + 14, at(0, 0)[1] + 18, "its image in the disk", _RED),
            _label(at(*eye)[0] + 10, at(*eye)[1] + 4, "-1"),
            _label(at(0, 3.3)[0] + 8, at(0, 3.3)[1], "time"),
            _label(at(2.75, 0)[0], at(0, 0)[1] - 6, "space"),
        ],
    )


def disk() -> str:
    """A tree in the Poincaré disk: each child at distance 1.2 from its parent, three geodesics between leaves."""
    manifold = Lorentz(-1.0, dtype=torch.float64)
    middle, scale, step = 210.0, 195.0, 1.2

    def at(point: torch.Tensor) -> tuple[float, float]:
        x, y = manifold.to_poincare(point).tolist()
        return middle + scale * x, middle - scale * y

    def geodesic(x: torch.Tensor, y: torch.Tensor) -> list[tuple[float, float]]:
        u = manifold.logmap(x, y)
        return [at(manifold.expmap(x, s / 24 * u)) for s in range(25)]

    def leg(point: torch.Tensor, towards: float) -> torch.Tensor:
        x_t, a, b = point.tolist()
        radius = math.hypot(a, b)
        turn = math.atan2(b, a) if radius else 0.0
        along, across = math.cos(towards), math.sin(towards)
        u = [
            radius * along,
            *(
                x_t * along * f + across * g
                for f, g in ((math.cos(turn), -math.sin(turn)), (math.sin(turn), math.cos(turn)))
            ),
        ]
        return manifold.expmap(point, step * torch.tensor(u, dtype=torch.float64))

    root = manifold.origin(3, dtype=torch.float64).as_subclass(torch.Tensor)
    level, edges, everything = [root], [], [root]
    for depth in range(4):
        following = []
        for point in level:
            angles = [k * 2 * math.pi / 3 + math.pi / 2 for k in range(3)] if depth == 0 else [-0.9, 0.9]
            children = [leg(point, angle) for angle in angles]
            edges += [(point, child) for child in children]
            following += children
        level = following
        everything += level
    far = [(level[1], level[9]), (level[10], level[17]), (level[3], level[20])]
    return _svg(
        420,
        420,
        [
            f'<circle cx="{middle}" cy="{middle}" r="{scale}" fill="none" stroke="{_GREY}"/>',
            *(_path(geodesic(x, y), _RED, 1.5, 'stroke-dasharray="5 4"') for x, y in far),
            *(_path(geodesic(x, y), _BLUE, 1.5) for x, y in edges),
            *(_dot(*at(point), _BLUE).replace('r="4"', 'r="3"') for point in everything),
        ],
    )


def run(page: Path, script: str) -> Path:
    """The picture that the script of a page saves under the page's name."""
    folder = tempfile.mkdtemp()
    with mock.patch("tempfile.mkdtemp", return_value=folder):
        exec(compile(script, page.name, "exec"), {})  # noqa: S102 - a page of this folder
    return Path(folder, f"{page.stem}.png")


if __name__ == "__main__":
    from conf import script_of

    static = Path(__file__).with_name("_static")
    for picture in (hyperboloid, disk):
        static.joinpath(f"{picture.__name__}.svg").write_text(picture(), encoding="utf-8")
    for tutorial in sorted(Path(__file__).with_name("guide").glob("*.md")):
        shutil.copy(run(tutorial, script_of(tutorial.read_text("utf-8"))), static / "guide")
