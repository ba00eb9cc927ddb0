r"""All rows in chunks, one after the other: the sums of one pass over all of them, with the memory of a chunk.

A model whose layers mix rows by the sums :math:`y_1, y_2, \dots` is run on every chunk as far as its first sum, then,
with :math:`y_1` known, as far as its second one, and so on; the last pass gives the results. On the way back the last
pass leaves the gradients of all :math:`y_l`. From the last to the first, a pass over the chunks takes the gradient of
:math:`y_l`, which is complete by then, to the weights and to the sums before it. L layers of linear attention take L
passes forward, 1 through the whole model forward and backward, and L through a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from holonomy import _parts, checks
from holonomy._parts import Group, Parts
from holonomy._shapes import Float


class _Sum(NamedTuple):
    """A sum over rows, divided by a scale."""

    value: Tensor
    log_scale: Tensor

    def plus(self, other: _Sum) -> _Sum:
        largest = torch.maximum(self.log_scale, other.log_scale)
        return _Sum(self.at(largest) + other.at(largest), largest)

    def at(self, log_scale: Tensor) -> Tensor:
        return self.value * (self.log_scale - log_scale).exp()


class _AskedError(Exception):
    """A pass over a chunk has come to a sum that is not known yet; this is the chunk's part of it."""

    def __init__(self, part: _Sum) -> None:
        super().__init__()
        self.part = part


class _Chunk(Parts):
    """One chunk in a pass that knows the first sums."""

    def __init__(self, known: list[_Sum]) -> None:
        self._known, self._asked = known, 0

    def scaled_total(self, x: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        if self._asked == len(self._known):
            raise _AskedError(_Sum(x, log_scale.detach()))
        self._asked += 1
        return self._known[self._asked - 1]


class _Stream:
    """A function of chunks, whose passes over a chunk draw the same random numbers."""

    def __init__(self, function: Callable[[Any, Group], Tensor], chunks: Iterable[Any], group: Any) -> None:
        checks.function("function", function)
        if isinstance(chunks, Iterator):
            raise TypeError(
                "chunks must be an iterable that gives the chunks anew for each pass, such as a list, got "
                f"the iterator {type(chunks).__name__}."
            )
        self.function, self.chunks = function, chunks
        self.group = None if group is None else _parts.check_processes(group)
        self.seed = int(torch.randint(2**62, ()))

    def each(self, known: list[_Sum], *, grad: bool) -> Iterator[Any]:
        """The result of every chunk, or its part of the first sum that is not known."""
        for place, chunk in enumerate(self.chunks):
            with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad):
                torch.manual_seed(self.seed + place)
                try:
                    found = self.function(chunk, _Chunk(known))
                except _AskedError as asked:
                    found = asked.part
            yield found

    def sums(self) -> list[_Sum]:
        """All sums, each in a pass of its own."""
        known: list[_Sum] = []
        while (total := self._next(known)) is not None:
            known.append(total)
        return known

    def _next(self, known: list[_Sum]) -> _Sum | None:
        total = None
        for part in self.each(known, grad=False):
            if not isinstance(part, _Sum):
                return None
            total = part if total is None else total.plus(part)
        if total is None:
            raise ValueError("chunks must be at least one, which may have no rows, got none.")
        return total if self.group is None else _Sum(*_parts.scaled_total(*total, self.group))


def stream(
    function: Callable[[Any, Group], Tensor], chunks: Iterable[Any], *, group: dist.ProcessGroup | None = None
) -> Iterator[Tensor]:
    """Results for all chunks, each as one pass over all rows gives it, without gradients.

    Args:
        function: of a chunk and a group that it hands to its layers, ``lambda chunk, group: model(chunk[0],
            group=group)``.
        chunks: gives the chunks anew, in one order, whenever it is iterated.
        group: processes that share the rows, of which the chunks hold those of this one.

    Yields:
        The result of each chunk.

    Raises:
        TypeError: if ``chunks`` can be iterated once only, or ``group`` is not a process group.
        ValueError: if there is no chunk.

    >>> from holonomy.models import Hypformer
    >>> model, x = Hypformer(3, 4, 2, graph_encoder=None), torch.randn(10, 3)
    >>> found = torch.cat(list(stream(lambda x, group: model(x, group=group), x.split(4))))
    >>> torch.allclose(found, model(x), atol=1e-5)
    True
    """
    passes = _Stream(function, chunks, group)
    yield from passes.each(passes.sums(), grad=False)


def stream_backward(
    loss: Callable[[Any, Group], Tensor], chunks: Iterable[Any], *, group: dist.ProcessGroup | None = None
) -> Float[Tensor, ""]:
    """The gradients that ``backward()`` of one pass over all rows gives, added to those that are there.

    The objective is the sum of the losses of the chunks: a mean over rows is a sum over those of a chunk divided by the
    number of all. Dropout drops the same entries in each pass over a chunk. With a group, call :func:`sum_gradients`
    afterwards, as without chunks. ``loss`` takes a chunk and a group that it hands to its layers and gives one number;
    the other arguments and errors are those of :func:`stream`. The result is the sum of the losses of the chunks of
    this process.

    >>> from holonomy.models import Hypformer
    >>> model, x = Hypformer(3, 4, 2, graph_encoder=None), torch.randn(10, 3)
    >>> loss = stream_backward(lambda x, group: model(x, group=group).square().sum(), x.split(4))
    >>> torch.allclose(loss, model(x).square().sum(), atol=1e-4)
    True
    >>> model.decoder.weight.grad.shape
    torch.Size([2, 4])
    """
    passes = _Stream(loss, chunks, group)
    known = [_Sum(total.value.requires_grad_(), total.log_scale) for total in passes.sums()]
    objective: Any = 0.0
    for found in passes.each(known, grad=True):
        if found.requires_grad:
            found.backward()
        objective = objective + found.detach()
    for place in reversed(range(len(known))):
        total = known[place]
        grad = torch.zeros_like(total.value) if total.value.grad is None else total.value.grad
        if passes.group is not None:
            dist.all_reduce(grad, group=passes.group)
        for part in passes.each(known[:place], grad=True):
            if part.value.requires_grad:
                part.at(total.log_scale).backward(grad)
    return objective
