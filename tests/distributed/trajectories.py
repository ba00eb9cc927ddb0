"""Training on batches of graphs that processes share, compared with one process on whole batches: what each runs.

The models draw no random numbers and keep no statistics of batches while they train. Each is behind learned points in a
space whose curvature learns.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from holonomy.distributed import GraphBatchSampler, mean_over_processes
from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam, RiemannianSGD
from holonomy.structures import join_graphs
from tests.distributed.tables import error
from tests.registry.case import shaken
from tests.registry.graphs import BATCHED, FEATURES, MODELS, drawn_graph

D = torch.float64
ATOMS, EPOCHS = 5, 2
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def sampler_of(world: int, rank: int) -> GraphBatchSampler:
    return GraphBatchSampler(SIZES, max(5, world), num_replicas=world, rank=rank)


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return RiemannianAdam(parameters, lr=0.02)


class Shared(NamedTuple):
    """A model of graphs, its optimizer, and how processes share it."""

    model: str
    optimizer: Optimizer = adam
    how: str = "DistributedDataParallel"
    options: dict[str, Any] = {}  # noqa: RUF012


def _descent(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return RiemannianSGD(parameters, lr=0.02, momentum=0.9, nesterov=True)


CASES = {
    "Hypformer": Shared("Hypformer"),
    "HGCN": Shared("HGCN, Lorentzian"),
    "HOT": Shared("HOT"),
    "IGN": Shared("IGN"),
    "CGT": Shared("CGT", options={"norm": "layer"}),
    "descent": Shared("Hypformer", _descent),
    "ZeRO": Shared("Hypformer", how="ZeRO"),
    "FSDP2": Shared("Hypformer", how="fully_shard"),
}


class Molecules(nn.Module):
    """Learned points for kinds of atoms before a model of graphs."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.atoms = LorentzEmbedding(ATOMS, FEATURES, Lorentz(-0.7, learnable=True, dtype=D), dtype=D)
        self.model, self.edges = BATCHED[name](**options, dtype=D), name in MODELS

    def forward(self, x: Tensor, edge_attr: Tensor, **graphs: Any) -> Tensor:
        if self.edges:
            graphs["edge_attr"] = edge_attr
        return self.model(self.atoms.manifold.logmap0(self.atoms(x))[:, 1:], **graphs)


def drawn(seed: int) -> dict[str, Tensor]:
    graph = drawn_graph(seed, nodes=8, batched=False, dtype=D)
    kinds, label = torch.randint(ATOMS, (len(graph.x),)), torch.randint(2, ())
    return {"x": kinds, "edge_index": graph.edge_index, "edge_attr": graph.edge_attr, "y": label}


GRAPHS = [drawn(seed) for seed in range(14)]
SIZES = [len(graph["x"]) for graph in GRAPHS]


def model_of(case: Shared) -> Molecules:
    torch.manual_seed(0)
    return shaken(Molecules(case.model, **case.options))


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = dict(batch)
    y = inputs.pop("y")
    return cross_entropy(model(**inputs, num_graphs=len(y)), y, reduction="none")


def step(optimizer: torch.optim.Optimizer, loss: Tensor, apart: Iterable[Tensor] = ()) -> float:
    """One step, before which gradients that torch leaves apart are averaged over the processes."""
    optimizer.zero_grad()
    loss.backward()
    for parameter in apart:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return loss.item()


def on_one(model: nn.Module, optimizer: torch.optim.Optimizer, world: int, epochs: range) -> list[float]:
    """The losses of one process that takes what several of them take."""
    samplers = [sampler_of(world, rank) for rank in range(world)]
    found = []
    for epoch in epochs:
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for shares in zip(*samplers, strict=True):
            batch = join_graphs([GRAPHS[graph] for graph in sorted(chain(*shares))])
            found.append(step(optimizer, losses_of(model, batch).mean()))
    return found


def on_several(
    model: nn.Module, optimizer: torch.optim.Optimizer, apart: Iterable[Tensor], *, own_means: bool = False
) -> list[float]:
    """The losses of this process and the others."""
    sampler = sampler_of(dist.get_world_size(), dist.get_rank())
    loader = DataLoader(GRAPHS, batch_sampler=sampler, collate_fn=join_graphs)
    found = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            losses = losses_of(model, batch)
            mean = mean_over_processes(losses, dist.group.WORLD)
            # What is common and wrong: the gradient of the own mean, and the loss of all to be compared.
            wrong = losses.mean() + (mean - losses.mean()).detach()
            found.append(step(optimizer, wrong if own_means else mean, apart))
    return found


def shared(case: Shared) -> tuple[Molecules, nn.Module, torch.optim.Optimizer, list[Tensor]]:
    """The model, what is called in its place, the optimizer, and the parameters that torch leaves apart."""
    model = model_of(case)
    if case.how == "fully_shard":
        apart = [model.atoms.unit]
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params={*apart})
        return model, model, case.optimizer(model.parameters()), apart
    called = DistributedDataParallel(model)
    if case.how == "ZeRO":
        # The import warns of what torch deprecated, which is an error in the suite's own process.
        zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        return model, called, zero(model.parameters(), RiemannianAdam, lr=0.02), []
    return model, called, case.optimizer(model.parameters()), []


def compare_all(rank: int, world: int, folder: Path) -> dict[str, dict[str, Any]]:
    """The losses of each case, beside those of one process on the first, and errors of points and curvatures."""
    found: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        model, called, optimizer, apart = shared(case)
        found[name] = {"losses": on_several(called, optimizer, apart)}
        learned = {
            key: copy.deepcopy(getattr(value, "full_tensor", lambda value=value: value)().detach())
            for key, value in model.named_parameters()
            if value.requires_grad and key.endswith(("unit", "log_ratio"))
        }
        if name == "FSDP2":
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            checkpoint.save(states, checkpoint_id=folder / f"checkpoint {world}")
        if rank == 0:
            whole, start = model_of(case), dict(model_of(case).named_parameters())
            steps = case.optimizer(whole.parameters())
            found[name]["of one"] = on_one(whole, steps, world, range(EPOCHS))
            found[name]["errors"] = {
                key: error(value, whole.get_parameter(key).detach()) for key, value in learned.items()
            }
            found[name]["moved"] = {key: error(value, start[key].detach()) for key, value in learned.items()}
            if name == "FSDP2":
                found["resumed"] = {"losses": on_one(whole, steps, world, range(EPOCHS, EPOCHS + 1))}
    # By gradient descent: Adam's first step, the only one that eight processes are compared after, sees no lengths.
    _, called, optimizer, _ = shared(CASES["descent"])
    found["own means"] = {"losses": on_several(called, optimizer, [], own_means=True)}
    return found


def resumed(world: int, folder: Path) -> list[float]:
    """The losses of one process that goes on where several stopped."""
    model = model_of(CASES["FSDP2"]._replace(options={}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    optimizer = adam(model.parameters())
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(states, checkpoint_id=folder / f"checkpoint {world}")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return on_one(model, optimizer, world, range(EPOCHS, EPOCHS + 1))
