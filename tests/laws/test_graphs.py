"""Laws of everything that is called with graphs or hyperedges: what must not depend on the graph, or on its mates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.registry.graphs import OF_GRAPHS, OF_HYPEREDGES, drawn_graph, drawn_hyperedges, made

ALL = [*OF_GRAPHS, *(f"of hyperedges: {name}" for name in OF_HYPEREDGES)]


def arguments(name, seed, **how):
    """What the module of a case is called with, by name."""
    if name in OF_GRAPHS:
        return drawn_graph(seed, **how).arguments(name)
    return {"x": drawn_hyperedges(seed, **how)}


def values(result: Any) -> Tensor:
    """The numbers of a result: of rows, of hyperedges or of tokens."""
    return result if isinstance(result, Tensor) else result.values


class Wide(TorchFunctionMode):
    """Autocast of a GPU on a CPU: functions that come out in float32 there do so here."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.names:
            args = tuple(x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x for x in args)
        return func(*args, **(kwargs or {}))


MODES = {
    "CPU": (),
    "CUDA": ("exp", "layer_norm", "log", "log_softmax", "norm", "pow", "prod", "rsqrt", "softmax", "softplus", "sum"),
}


@pytest.mark.usefixtures("without_shape_checks")  # which take most of the time
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_the_dtype_of_a_result_does_not_depend_on_the_graph(name, mode):
    """It is that of the arguments and of autocast alone."""
    module, found = made(name), {}
    for seed in range(5):
        given = arguments(name, seed)
        with torch.autocast("cpu", dtype=torch.bfloat16), Wide(*MODES[mode]):
            found[values(module(**given)).dtype] = seed
    assert len(found) == 1, found
