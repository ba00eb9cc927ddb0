r"""Sums over rows of which only a part is at hand: the others lie on other processes, or come later as other chunks.

A layer that mixes rows does so by a few sums over all of them, :math:`y = \sum_p x_p`, the parts p being processes
(a ``torch.distributed.ProcessGroup``) or chunks of a stream (:class:`Parts`). The objective L is the sum of what the
parts compute of y, :math:`L = \sum_q L_q`, so that the gradient of every :math:`x_p` is
:math:`\sum_q \partial L_q / \partial y`: the same sum in the backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holonomy._autograd import apply_function
from holonomy._shapes import Float


class Parts(ABC):
    """The parts of a sum where they are no processes, such as chunks."""

    @abstractmethod
    def scaled_total(self, x: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        """As the function of this name."""


Group = dist.ProcessGroup | Parts


def total(x: Float[Tensor, "..."], group: Group) -> Float[Tensor, "..."]:
    """The sum over all parts."""
    if isinstance(group, Parts):
        return group.scaled_total(x, torch.zeros_like(x))[0]
    return all_reduced(x, group)


def scaled_total(
    x: Float[Tensor, "..."], log_scale: Float[Tensor, "..."], group: Group
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Of parts :math:`x e^s`, s constant and broadcast, the sum over the largest scale, and the logarithm of that."""
    if isinstance(group, Parts):
        return group.scaled_total(x, log_scale)
    largest = log_scale.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, dist.ReduceOp.MAX, check_processes(group))
    return all_reduced(x * (log_scale.detach() - largest).exp(), group), largest


def all_reduced(x: Float[Tensor, "..."], group: dist.ProcessGroup) -> Float[Tensor, "..."]:
    """The sum over all processes, which all of them must ask for; differentiable any number of times."""
    return apply_function(_AllReduce, x, check_processes(group))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad_outputs[0], ctx.group), None


def check_processes(group: object) -> dist.ProcessGroup:
    """Refuse anything but a group of processes."""
    if isinstance(group, dist.ProcessGroup):
        return group
    raise TypeError(
        f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}; the group of all processes is "
        "torch.distributed.group.WORLD, which is None before init_process_group."
    )
