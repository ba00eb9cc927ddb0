"""Constructors and forward passes of the public classes, from the cases that the laws run over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from holonomy.layers import HypConcat
from holonomy.layers.hyperbolic.attention.softmax import KeyValueState
from holonomy.manifolds import Curvature, Lorentz, Sphere
from holonomy.ops.linear_attention.causal import LinearState
from holonomy.ops.performer.causal import PerformerState
from tests.cases import CASES, Case, Setting
from tests.fuzz import domains
from tests.fuzz.calls import Target, settle
from tests.fuzz.domains import Change, Kind, Scene, laid_out
from tests.fuzz.judge import Call
from tests.fuzz.source import Source
from tests.laws.laws import named

__all__ = [
    "CONSTRUCTOR",
    "WITHOUT_CASES",
    "KeyValueState",
    "LinearState",
    "PerformerState",
    "built",
    "constructor",
    "forward",
    "steps",
    "wrong_calls",
]


def _unused(scene: Scene) -> Any:
    """Arguments are those of the cases."""
    raise NotImplementedError


# What the arguments of constructors must not be, by their names.
_CONSTRUCTOR: tuple[tuple[str, Mapping[str, Change]], ...] = (
    (
        (
            "in_features out_features hidden hidden_features features heads layers num dim num_embeddings "
            "embedding_dim classes capacity feedforward random_features identifier_dim query_features value_features "
            "head_features pair_features edge_types k order max_tokens max_degree count RandomWalkNodeEncoder.steps"
        ),
        domains.SIZE,
    ),
    # Zero is documented as "none".
    (
        (
            "edge_features order_in order_out type_features steps limit walk_features TokenGT.in_features "
            "HypTokenGT.in_features GraphTokenizer.in_features HyperedgeTokenizer.in_features VirtualNode.edge_types"
        ),
        domains.COUNT,
    ),
    (
        (
            "p dropout attention_dropout output_dropout stochastic_depth eigenvector_dropout teleport momentum "
            "graph_weight"
        ),
        domains.PROBABILITY,
    ),
    ("std power eps norm_eps scale epsilon temperature constant", domains.POSITIVE),
    ("radius", domains.NO_NUMBER),
    (
        (
            "mode kernel sums attention similarity average aggregation conv form decoder level pooling identifiers "
            "dropout_over norm normalise substructures init linear"
        ),
        domains.CHOICE,
    ),
    ("activation function", domains.FUNCTION),
    (
        (
            "manifold manifold_in manifold_out manifold_hidden manifold_branch manifold_attention manifold_feedforward "
            "manifold_memory"
        ),
        domains.MANIFOLD,
    ),
    ("curvature value", domains.CURVATURE),
    ("inner graph_encoder", domains.MODULE),
    ("orders", domains.SEQUENCE),
    ("window", domains.WINDOW),
    ("padding_idx", {**domains.NO_NUMBER, "fraction": lambda s, x: 2.5, "beyond": lambda s, x: 10**9}),
    ("dtype", domains.DTYPE),
    ("generator", domains.GENERATOR),
)
_FLAGS = (
    "learnable bias residual edge_values product lightweight local entrywise affine track_running_stats "
    "elementwise_affine lower_orders causal distinct rope share_edges learnable_curvature transformer basis_residual "
    "sparse token_positions"
)
CONSTRUCTOR = {
    "device": Kind(_unused, {}, domains.DEVICE),
    "Sphere.curvature": Kind(_unused, domains.POSITIVE),
    **{name: Kind(_unused, wrong) for names, wrong in _CONSTRUCTOR for name in names.split()},
    **{name: Kind(_unused, domains.FLAG) for name in _FLAGS.split()},
}
# Made of one number.
WITHOUT_CASES: dict[type[nn.Module], float] = {Curvature: -0.5, Lorentz: -0.5, Sphere: 0.5}
# Layers of inputs of any width.
ANY_WIDTH = {"HRC", "HypActivation", "HypDropout", "HypConcat"}
_CURVATURES = ((-1.0, -0.3, -2.5), (-1.0, -1.0, -1.0), (-0.01, -100.0, -1.0), (-100.0, -0.01, -3.0))
_RADII = (1.0, 0.1, 3.0, 0.0, 10.0, 1e-8, 1e4, 1e-30, 1e8, 1e18, 1e30, 1e37)
_WITHIN = 4  # radii at which logits stay moderate
# What weights are multiplied with where any radius will do.
_LENGTHS = (1.0, 1.0, 30.0, 1e-3, 1e3, 1e8)


class Built(NamedTuple):
    """A module of a case, the public one inside of what the laws wrap around it, its setting and possible radii."""

    case: Case
    module: nn.Module
    public: nn.Module
    setting: Setting
    radii: tuple[float, ...]


@lru_cache(maxsize=8)
def built(
    name: str, nodes: int, curvatures: tuple[float, ...], dtype: torch.dtype, seed: int, length: float = 1.0
) -> Built:
    """Build the module of a case; its weights times a number where any radius will do."""
    case = next(case for case in CASES if case.name == name)
    torch.manual_seed(seed)
    setting = Setting(nodes=nodes, features=6, curvatures=curvatures, dtype=dtype)
    module, _ = case.build(setting)
    public = next((part for part in module.modules() if type(part) is case.kind), module)
    if not case.any_radius:
        return Built(case, module, public, setting, _RADII[:_WITHIN])
    maps = domains.lengthen(module, length)
    # Where the products of weights and features leave the dtype nothing is promised.
    largest = torch.finfo(dtype).max * (1.0 if length == 1.0 else 1e-6)
    return Built(case, module, public, setting, tuple(r for r in _RADII if r * max(length, 1.0) ** maps <= largest))


# The methods by which what the laws wrap around a module calls it.
_METHODS = ("forward", "padded", "tensor", "embed")


class _FoundError(Exception):
    """Carries which method of a module was called, and with what, before it computes anything."""


def _inputs(made: Built) -> tuple[str, dict[str, Any]]:
    """Which method of the public module to call, and new arguments for it."""
    inputs = made.case.inputs(made.setting)
    if made.public is made.module:
        return "forward", named(made.module, inputs)
    with ExitStack() as patched, torch.no_grad():
        for method_name in filter(partial(hasattr, type(made.public)), _METHODS):
            patched.enter_context(
                patch.object(made.public, method_name, _finding(method_name, getattr(made.public, method_name)))
            )
        try:
            made.module(*inputs)
        except _FoundError as found:
            return found.args
    raise AssertionError(f"{made.case} calls none of {_METHODS}")


def _finding(method_name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def find(*args: Any, **kwargs: Any) -> None:
        raise _FoundError(method_name, dict(inspect.signature(method).bind(*args, **kwargs).arguments))

    return find


def steps(kind: type[nn.Module]) -> bool:
    """Whether a class goes through a sequence step by step."""
    return hasattr(kind, "step") and "state" in inspect.signature(kind.step).parameters


def _step_after(made: Built, source: Source) -> tuple[str, dict[str, Any]]:
    """The next tokens, and a state from those before, of which there may be none."""
    before, after, beside = _inputs(made)[1], None, {}
    if getattr(made.public, "manifold_memory", None) is not None:
        beside = {name: before[name] for name in ("memory", "memory_key_padding_mask") if name in before}
    if source.below(2):
        after = made.public.step(before["x"], **beside)[1]
        made.setting.radius = source.pick(made.radii)
    return "step", {"x": _inputs(made)[1]["x"][..., : source.pick((1, 2)), :], "state": after} | beside


def forward(kind: type[nn.Module], *, step: bool = False) -> Target:
    """The target of the forward pass of a public class, or of its steps."""
    cases = [case for case in CASES if case.kind is kind and not (step and {"steps", "capacity"} & case.options.keys())]
    name = f"{kind.__name__}.{'step' if step else 'forward'}"

    def opening(source: Source) -> tuple[Any, ...]:
        case = source.pick(cases)
        return (
            case.name,
            source.pick((3, 2, 5, 7)),
            source.pick(_CURVATURES),
            source.pick((torch.float64, torch.float32)),
            source.below(4),
            source.pick(_LENGTHS),
        )

    def draw(source: Source) -> Call:
        key = opening(source)
        made = built(*key)
        fate = source.pick(("valid", "wrong", "doubtful", "wrong", "wrong", "wrong"))
        made.setting.radius = source.pick(made.radii)
        training = bool(source.below(2))
        torch.manual_seed(source.below(100))
        module = made.public.train(training)
        method_name, arguments = _step_after(made, source) if step else _inputs(made)
        method = getattr(module, method_name)
        for argument, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                arguments[argument] = laid_out(value.detach(), source)
        if "batch" in inspect.signature(method).parameters and "edge_index" in arguments and source.below(2):
            arguments = _twice(arguments)
        call = Call(
            name,
            _called(module, method_name),
            arguments,
            "module" if method_name == "forward" else f"module.{method_name}",
            (
                "from tests.fuzz.modules import KeyValueState, LinearState, PerformerState, built",
                "",
                f"module = built{key!r}.public.train({training})",
            ),
            on=getattr(made.module, made.case.target) if made.case.target else None,
            learned=tuple(module.parameters()),
            restore=_restoring(module),
        )
        kinds = _kinds(kind, arguments)
        settle(call, Scene(source, seen=arguments), kinds, fate, _optional(method))
        return call

    return Target(name, draw, 0.5, opening)


def _twice(arguments: dict[str, Any]) -> dict[str, Any]:
    """Two copies of a graph as a batch."""
    n, edges = len(arguments["x"]), arguments["edge_index"]
    joined = {name: torch.cat([x, x]) for name, x in arguments.items() if isinstance(x, Tensor)}
    joined["edge_index"] = torch.cat([edges, edges + n], 1)
    joined["batch"] = torch.arange(2).repeat_interleave(n)
    return arguments | joined


def _called(module: nn.Module, method_name: str) -> Callable[..., Any]:
    """How a method is called, the forward pass as the module itself."""
    if isinstance(module, HypConcat):
        return lambda **arguments: module(*arguments.values())
    return {"forward": module, "step": partial(_stepped, module)}.get(method_name) or getattr(module, method_name)


def _stepped(module: nn.Module, x: Any, state: Any = None, **memory: Any) -> tuple[Tensor, Any]:
    """A step, whose state is there for the next one and has gradients through its results alone."""
    found, after = module.step(x, state, **memory)
    return found, tree_map(Tensor.detach, after)


def _restoring(module: nn.Module) -> Callable[[], None]:
    """Undo what training mode does to running statistics."""
    kept = [(x, x.clone()) for name, x in module.named_buffers() if "running" in name or "batches" in name]

    def restore() -> None:
        for x, before in kept:
            x.copy_(before)

    return restore


def _optional(function: Callable[..., Any]) -> set[str]:
    """Arguments that may be None."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is None or str(p.annotation).endswith("None")}


def _kinds(kind: type[nn.Module], arguments: dict[str, Any]) -> dict[str, Kind]:
    return {name: _kind(kind, name, value) for name, value in arguments.items()}


def _kind(kind: type[nn.Module], name: str, value: Any) -> Kind:
    """The kind of an argument of a forward pass, by its name and value."""
    if name == "state":
        return Kind(_unused, domains.STATE, domains.ODD_STATE)
    if isinstance(value, bool):
        return Kind(_unused, {}, domains.FLAG)
    if not isinstance(value, Tensor):
        return Kind(_unused, domains.SIZE if isinstance(value, int) else domains.OBJECTS)
    if name == "edge_index":
        return Kind(_unused, domains.EDGES, domains.ODD_INTEGERS)
    if name == "batch":
        return Kind(_unused, domains.BATCH, domains.ODD_INTEGERS)
    if name == "attn_mask":  # numbers are added to logits, as in torch
        floats = {"floats": domains.MASK["floats"]}
        return Kind(
            _unused, {how: x for how, x in domains.MASK.items() if how not in floats}, domains.ODD_MASK | floats
        )
    if value.dtype == torch.bool:
        return Kind(_unused, domains.MASK, domains.ODD_MASK)
    if not value.is_floating_point():
        return Kind(_unused, domains.CODES, domains.ODD_INTEGERS)
    return Kind(_unused, domains.UNTIED if kind.__name__ in ANY_WIDTH else domains.TIED, domains.ODD)


def constructor(kind: type[nn.Module]) -> Target:
    """The target of the constructor of a public class."""
    cases = [case for case in CASES if case.kind is kind]
    parameters = inspect.signature(kind).parameters
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    alone = {next(iter(parameters)): WITHOUT_CASES.get(kind)}

    def draw(source: Source) -> Call:
        fate = source.pick(("valid", "wrong", "doubtful", *["wrong"] * 9))
        dtype = source.pick((torch.float64, torch.float32))
        arguments = dict(_constructed(source.pick(cases).name, dtype) if cases else alone)
        if fate != "valid":
            arguments |= {name: x for name, x in defaults.items() if name not in arguments and not source.below(4)}
        call = Call(kind.__name__, kind, arguments, _home(kind))
        kinds = {name: _of_constructor(kind, name) for name in arguments}
        settle(call, Scene(source, seen=arguments), kinds, fate, _optional(kind))
        return call

    return Target(kind.__name__, draw, 0.7)


def _of_constructor(kind: type[nn.Module], name: str) -> Kind:
    """The kind of an argument of a constructor, by the names of both or its own."""
    return CONSTRUCTOR.get(f"{kind.__name__}.{name}") or CONSTRUCTOR[name]


def wrong_calls(kind: type[nn.Module]) -> Iterator[Call]:
    """Calls of the constructor and of the simplest module of a class, each with one argument wrong in one way."""
    made = constructor(kind).draw(Source())
    defaults = {p.name: p.default for p in inspect.signature(kind).parameters.values() if p.default is not p.empty}
    made.arguments = defaults | made.arguments
    yield from _spoiled(made, {name: _of_constructor(kind, name) for name in made.arguments}, _optional(kind))
    if kind not in WITHOUT_CASES:
        for step in (False, True) if steps(kind) else (False,):
            call = forward(kind, step=step).draw(Source())
            method = call.function.forward if isinstance(call.function, nn.Module) else call.function
            yield from _spoiled(call, _kinds(kind, call.arguments), _optional(kind.step if step else method))


def _spoiled(call: Call, kinds: Mapping[str, Kind], optional: set[str]) -> Iterator[Call]:
    for name, value in call.arguments.items():
        for how, change in kinds[name].wrong.items():
            if how == "none" and name in optional:
                continue
            changed = change(Scene(Source(), seen=call.arguments), value)
            if changed is not NotImplemented:
                yield replace(call, arguments={**call.arguments, name: changed}, wrong={name: how}, twice=False)


def _home(kind: type[nn.Module]) -> str:
    package = kind.__module__.split(".")[1]
    return kind.__name__ if kind in WITHOUT_CASES else f"{package}.{kind.__name__}"


@cache
def _constructed(case_name: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the constructor of a case is given."""
    case = next(case for case in CASES if case.name == case_name)
    seen: list[dict[str, Any]] = []
    initialise = case.kind.__init__

    def record(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is case.kind:
            seen.append(dict(list(inspect.signature(initialise).bind(self, *args, **kwargs).arguments.items())[1:]))
        initialise(self, *args, **kwargs)

    with patch.object(case.kind, "__init__", record):
        case.make(Setting(nodes=3, dtype=dtype), case.options)
    return seen[0]
