"""Every benchmark at a small size: its contenders are there, do the same work, and are those its lines speak of."""

from __future__ import annotations

import pytest
import torch

from benchmarks import measure
from benchmarks.__main__ import chosen
from benchmarks.case import Figure, Growth

ALL = chosen([])


def test_names_are_told_apart() -> None:
    assert len({case.name for case in ALL}) == len(ALL)


def test_a_wrong_name_gets_a_sentence() -> None:
    with pytest.raises(SystemExit, match="NAME must begin the name of a case, got 'nothing'"):
        chosen(["nothing"])


# Compiling takes minutes; tests/laws compile every class.
@pytest.mark.parametrize("case", [case for case in ALL if not case.name.startswith("compile")], ids=lambda c: c.name)
def test_contenders_do_the_same_work(case, device) -> None:
    if device.type not in case.devices:
        pytest.skip(f"measured on {' and '.join(case.devices)} only")
    contenders = case.contenders(case.small, device)
    for line in case.lines:
        if not isinstance(line, Figure):
            named = {line.of} if isinstance(line, Growth) else {line.above, line.below}
            assert named <= set(contenders)
    for group in case.equal:
        assert set(group) <= set(contenders)
        measure.check_equal(case, case.small, [(name, contenders[name]) for name in group])
    for step in contenders.values():
        assert all(bool(torch.isfinite(x).all()) for x in step())
