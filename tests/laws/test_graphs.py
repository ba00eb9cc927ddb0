"""Laws of everything that is called with graphs or hyperedges: what must not depend on the graph, or on its mates."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from holonomy import layers, models
from holonomy.layers import HigherOrderEncoderLayer
from holonomy.structures import Hyperedges
from tests.registry.graphs import (
    BATCHED,
    MODELS,
    OF_GRAPHS,
    OF_HYPEREDGES,
    WITHOUT_FEATURES,
    Graph,
    drawn_graph,
    drawn_hyperedges,
    made,
)

pytestmark = pytest.mark.usefixtures("without_shape_checks")  # tests/laws/test_values.py runs with them

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


CALL = ["x", "edge_index", "batch", "edge_attr", "edge_weight", "num_graphs"]
OF_ANY_GRAPH = [
    one for one in map(models.__dict__.get, models.__all__) if "edge_index" in inspect.signature(one.forward).parameters
]


@pytest.mark.parametrize("model", OF_ANY_GRAPH)
def test_models_are_built_and_called_by_the_same_names(model):
    called = inspect.signature(model.forward).parameters
    assert [name for name in called if name in CALL] == CALL
    assert [name for name in called if called[name].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD][1:] == CALL[:3]
    assert "level" in inspect.signature(model).parameters
    for one in (model, layers.GCN, layers.Propagation):
        assert list(inspect.signature(one).parameters)[:3] == ["in_features", "hidden_features", "out_features"]


@pytest.mark.parametrize("model", OF_ANY_GRAPH)
def test_what_a_model_does_not_read_of_edges_is_refused_in_the_same_words(model):
    given = drawn_graph(0).arguments("TokenGT")
    x, edge_index, m = given["x"], given["edge_index"], given["edge_index"].shape[1]
    of_edges = {"edge_attr": torch.randn(m, 2), "edge_weight": torch.rand(m)}
    name = "edge_attr" if model in {models.HGCN, models.Hypformer} else "edge_weight"
    who = "GCN" if model is models.Hypformer else model.__name__
    kind = {"edge_attr": "features", "edge_weight": "weights"}[name]
    with pytest.raises(
        ValueError, match=rf"^{name} must be None with {who}, which reads no {kind} of edges; pass \w.*\.$"
    ):
        model(3, 8, 2, level="node")(x, edge_index, **{name: of_edges[name]})


def of_graph(given, graph):
    """The arguments of one graph of a batch, alone."""
    there, batch = (given["batch"] == graph).nonzero()[:, 0], given["batch"]
    kept = batch[given["edge_index"][0]] == graph
    number = torch.full_like(batch, -1).index_copy(0, there, torch.arange(len(there)))
    alone = {"x": given["x"][there], "edge_index": number[given["edge_index"][:, kept]], "batch": 0 * batch[there]}
    return alone | ({"edge_attr": given["edge_attr"][kept]} if "edge_attr" in given else {})


@pytest.mark.parametrize("name", BATCHED)
def test_the_result_of_a_graph_does_not_depend_on_its_batch(name):
    """Nor do more graphs without nodes at the end change it; each of them has a finite row."""
    module = made(name, dtype=torch.float64)
    for seed in range(3):
        given = drawn_graph(seed, nodes=9, dtype=torch.float64).arguments(name)
        together = module(**given)
        for graph in given["batch"].unique().tolist():
            torch.testing.assert_close(together[graph], module(**of_graph(given, graph))[0])
        more = module(**given, num_graphs=len(together) + 2)
        torch.testing.assert_close(more[:-2], together)
        assert more.shape[0] == len(together) + 2
        assert more.isfinite().all()


LEVELS = [(name, level) for name in BATCHED for level in ("graph", "node")]
LEVELS += [(name, "edge") for name in MODELS if "CGT" not in name]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_a_result_has_a_row_for_each_graph_node_or_edge(name, level):
    """In the order in which they came, as a graph alone has them, with or without its batch."""
    module = made(name, dtype=torch.float64, level=level)
    for seed in range(2):
        given = drawn_graph(seed, nodes=7, dtype=torch.float64).arguments(name)
        batch, (source, _) = given["batch"], given["edge_index"]
        graphs = int(batch.max()) + 1
        of_rows = {"graph": torch.arange(graphs), "node": batch, "edge": batch[source]}[level]
        together = module(**given, num_graphs=graphs)
        assert together.shape == (len(of_rows), 2)
        for graph in batch.unique().tolist():
            alone = of_graph(given, graph)
            torch.testing.assert_close(together[of_rows == graph], module(**alone))
            torch.testing.assert_close(module(**alone | {"batch": None}), module(**alone))
        order = torch.randperm(len(source))
        moved = {key: value[..., order] if key == "edge_index" else value for key, value in given.items()}
        if "edge_attr" in given:
            moved["edge_attr"] = given["edge_attr"][order]
        torch.testing.assert_close(module(**moved), together[order] if level == "edge" else together)


@pytest.mark.parametrize("model", OF_ANY_GRAPH)
def test_a_model_made_without_a_level_says_which_it_has(model):
    """The default is the constructor's; what ``batch`` decided before comes with a warning for one release."""
    x, edge_index, batch = torch.randn(5, 3), torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), torch.tensor([0, 0, 1, 1, 2])
    rows = {"node": 5, "graph": 3}
    if model not in {models.Hypformer, models.HGCN}:
        default = model(3, 8, 2)
        assert default.level == "graph"
        assert len(default(x, edge_index)) == 1
        assert len(default(x, edge_index, batch)) == 3
        return
    default = model(3, 8, 2)
    assert len(default(x, edge_index)) == 5
    with pytest.warns(
        FutureWarning,
        match=rf"^{model.__name__} was made without level and is called with batch: it returns a row for each graph, "
        r"and will return one for each node in the next release; pass level='graph' or level='node' to it\.$",
    ):
        result = default(x, edge_index, batch)
    for level, count in rows.items():
        asked = model(3, 8, 2, level=level)
        asked.load_state_dict(default.state_dict())
        assert len(asked(x, edge_index, batch)) == count
        assert len(asked(x, edge_index)) == {"node": 5, "graph": 1}[level]
        if level == "graph":
            torch.testing.assert_close(result, asked(x, edge_index, batch), rtol=0, atol=0)


@pytest.mark.parametrize("name", BATCHED)
def test_a_number_of_graphs_that_does_not_fit_gets_one_sentence(name):
    module, given = made(name), arguments(name, 0)
    seen = int(given["batch"].max()) + 1
    for wrong in ({"num_graphs": seen - 1}, {"num_graphs": seen, "batch": None}):
        expected = (
            f"at least the {seen} that batch numbers, got {seen - 1}" if len(wrong) == 1 else "None without batch"
        )
        with pytest.raises(ValueError, match=f"^num_graphs must be {expected}"):
            module(**given | wrong)


def index_tensors():
    """Two graphs of five nodes, of which the third has no edge, and which index tensors there are."""
    edge_index = torch.tensor([[0, 1, 3, 4, 3], [1, 0, 4, 3, 3]])
    batch, pairs, nodes = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([[0, 1], [1, 1]]), torch.tensor([[1], [3]])
    return {"edge_index": edge_index, "indices": edge_index.T.clone(), "batch": batch, 2: pairs, 1: nodes}


# What each becomes in place.
CHANGES = {
    "edge_index": lambda x: x.masked_fill_(x == 1, 2),
    "indices": lambda x: x.masked_fill_(x == 1, 2),
    "batch": lambda x: x.index_fill_(0, torch.tensor([2]), 1),
    "to": lambda x: x.masked_fill_(x == 1, 2),
}


def called(name, module, seed, tensors):
    """The module, called with index tensors and with features drawn from a seed; which of them it reads."""
    torch.manual_seed(seed)
    if name in OF_GRAPHS:
        given = Graph(torch.randn(5, 3), tensors["edge_index"], torch.randn(5, 2), tensors["batch"]).arguments(name)
        return given, given.keys() & CHANGES.keys()
    given = {"x": Hyperedges(tensors["indices"], torch.randn(5, 8), 5, tensors["batch"])}
    order = getattr(module, "order_out", getattr(module, "orders", (0,))[-1])
    if order in {1, 2} and not isinstance(module, HigherOrderEncoderLayer):
        given["to"] = tensors[order]
    return given, {"indices", "batch", *(given.keys() - {"x"})}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_an_index_tensor_that_changes_in_place_is_seen_or_refused(name, inference):
    """Nothing that was computed for what it held before is used again."""
    module = made(name)
    with torch.inference_mode(inference):
        for changed in called(name, module, 0, index_tensors())[1]:
            tensors = index_tensors()
            given, _ = called(name, module, 0, tensors)
            module(**given)
            there = given["to"] if changed == "to" else tensors[changed]
            CHANGES[changed](there)
            expected = values(module(**called(name, module, 0, tensors)[0]))
            with suppress(ValueError):  # refused, as tests/structures says
                assert torch.equal(values(module(**given)), expected), changed


# The forms of a call in which sizes depend on numbers, and a class that is called so; other forms are compiled whole,
# as test_modules.py says.
COMPILED = {
    **{f"{name}, {form}": (name, {}, form) for name in ("HOT, coupled", "IGN") for form in ("graph", "batch")},
    "HOT, hyperedges": ("of hyperedges: HOT", {}, "hyperedges"),
    "IGN, hyperedges": ("of hyperedges: IGN", {}, "hyperedges"),
    "TokenGT, eigenvectors": ("TokenGT", {}, "graph"),
    "TokenGT, batch": ("TokenGT, performer", {"layers": 1}, "batch"),
    "CGT, batch": ("CGT", {"layers": 1}, "batch"),
    "Hypformer, batch": ("Hypformer", {"layers": 1}, "batch"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by dynamo itself where a graph breaks
@pytest.mark.parametrize("call", COMPILED)
def test_a_compiled_module_is_the_eager_one_where_sizes_depend_on_numbers(call):
    name, how, form = COMPILED[call]
    module, tensors = made(name, dtype=torch.float64, **how), index_tensors()
    given = {
        key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in called(name, module, 0, tensors)[0].items()
    }
    if form == "graph":
        given["batch"] = None
    elif form == "hyperedges":
        given["x"] = given["x"].with_values(given["x"].values.double())
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager")
    # The backward pass of hyperbolic blocks takes long to compile; test_modules.py has it.
    with torch.set_grad_enabled("Hyp" not in name):
        expected, result = values(module(**given)), values(compiled(**given))
    torch.testing.assert_close(result, expected)
    if result.requires_grad:
        grads = (
            torch.autograd.grad(y.square().sum(), module.parameters(), allow_unused=True) for y in (expected, result)
        )
        for theirs, ours in zip(*grads, strict=True):
            assert (ours is None) == (theirs is None)
            torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
@pytest.mark.parametrize("name", ["Hypformer", "HGCN"])
def test_a_model_compiled_for_all_sizes_is_the_eager_one(name):
    module = made(name, layers=1)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for nodes in (6, 200):
        given = {key: x for key, x in graph_of(nodes).arguments(name).items() if x is not None}
        ours, theirs = compiled(**given), module(**given)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        gradients = (torch.autograd.grad(y.square().sum(), [*module.parameters()]) for y in (ours, theirs))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITHOUT_FEATURES, "GCN", "Propagation", "DegreeNodeEncoder", "CGT", "CGT, mono"])
def test_an_exported_module_takes_graphs_of_other_sizes(name):
    """Also larger ones, for which other formulas run: an exported program has one."""
    module = made(name, **({"layers": 1} if "Hyp" in name else {}))
    given, other = (
        {key: x for key, x in graph_of(nodes).arguments(name).items() if x is not None} for nodes in (6, 200)
    )
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    sizes = {"x": {0: nodes}, "edge_index": {1: edges}, "edge_attr": {0: edges}}
    sizes = {key: sizes[key] for key in given}
    program = torch.export.export(module, (), given, dynamic_shapes=sizes, strict=False)
    torch.testing.assert_close(program.module()(**other), module(**other), rtol=1e-4, atol=1e-5)


def graph_of(nodes):
    """A graph with twice as many edges as nodes."""
    edges = torch.randint(nodes, (2, 2 * nodes))
    return Graph(torch.randn(nodes, 3), edges, torch.randn(2 * nodes, 2), None)
