"""Gradients of weights that every process holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from holonomy._parts import check_processes
from holonomy.distributed.table import ShardedLorentzEmbedding


@torch.no_grad()
def sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    r"""Add up, over all processes, the gradients of the weights that each of them holds.

    With :math:`L = \sum_p L_p` the sum of the processes' losses, ``backward()`` gives each process
    :math:`\partial L / \partial w` through its own rows, and the sum over processes is the gradient of L. Call it
    between ``backward()`` and ``step()``. All gradients of one dtype travel in one all-reduce. A weight without a
    gradient on a process counts as zero there; one that has none on any process keeps none, so that optimizers leave it
    alone. ``DistributedDataParallel``, which takes means, gives the same where each loss is multiplied by the number of
    processes.

    Args:
        module: what is trained. Rows of a :class:`ShardedLorentzEmbedding` within it are left alone: each lies on one
            process only.
        group: the processes.

    Raises:
        TypeError: if ``group`` is not a process group.
        ValueError: if another gradient is sparse.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layer = nn.Linear(2, 1)
    >>> layer(torch.ones(3, 2)).sum().backward()
    >>> sum_gradients(layer, dist.group.WORLD)
    >>> layer.weight.grad.tolist()
    [[3.0, 3.0]]
    >>> dist.destroy_process_group()
    """
    check_processes(group)
    own = {id(part.unit) for part in module.modules() if isinstance(part, ShardedLorentzEmbedding)}
    by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad and id(parameter) not in own:
            grad = parameter.grad
            if grad is not None and grad.layout != torch.strided:
                raise ValueError(
                    "module must have dense gradients, or its tables be ShardedLorentzEmbedding, got one of layout "
                    f"{grad.layout} for a parameter of shape {tuple(parameter.shape)}."
                )
            by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for (device, dtype), parameters in by_kind.items():
        given = torch.tensor([each.grad is not None for each in parameters], dtype=dtype, device=device)
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        flat = torch.cat([given, *(each.flatten() for each in gradients)])
        dist.all_reduce(flat, group=group)
        given, *totals = flat.split([len(parameters), *(each.numel() for each in gradients)])
        for parameter, grad, total, some in zip(parameters, gradients, totals, given.tolist(), strict=True):
            if some:
                parameter.grad = grad.copy_(total.view_as(grad))
