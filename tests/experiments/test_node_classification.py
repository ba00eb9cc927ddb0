"""The main job: each model learns, numbers and pictures are there, what cannot be done is one sentence."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from geoopt import ManifoldParameter
from torch import nn

from experiments import node_classification, table
from experiments.data import datasets
from experiments.data.datasets import NodeData, sir_tree
from experiments.engine import runs
from experiments.models.baselines import (
    MLP,
    EuclideanAttention,
    EuclideanFormer,
    LinearPropagation,
    NodeFormerAttention,
    nearest_neighbours,
)
from experiments.node_classification import (
    ABLATIONS,
    DEFAULTS,
    MODELS,
    USUAL,
    Settings,
    build,
    classify,
    fit,
    main,
    optimizer_for,
    settings_for,
)
from holonomy.models import Hypformer
from holonomy.ops.propagation import propagation


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _small_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "sir_tree", lambda **options: sir_tree(80, **options))


SMALL = {"hidden": 8, "feedforward": 8, "graph_hidden": 8, "graph_layers": 2, "epochs": 3, "patience": 9}
WORDS = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", str(value))]
QUICK = [*WORDS, "--quiet", "--threads", "1", "--seeds", "1"]


def easy(n: int = 60) -> NodeData:
    """Three groups, each joined among itself, with one telling feature."""
    y = torch.arange(n) % 3
    x = nn.functional.one_hot(y, 3).float() + 0.3 * torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 3) % n])
    parts = datasets.stratified_split(y, (0.3, 0.3), seed=0)
    return NodeData("easy", x, datasets.both_directions(ring), y, *parts, num_classes=3)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_what_is_easy(model: node_classification.Model) -> None:
    settings = Settings(**{**SMALL, "epochs": 25, "lr": 0.05, "dropout": 0.0, "graph_dropout": 0.0})
    record = fit(model, settings, easy(), seed=0)
    assert record["scores"]["test"] >= 0.9
    assert sum(map(sum, record["confusion"])) == len(easy().test)
    right = sum(record["confusion"][label][label] for label in range(3))
    assert right / len(easy().test) == pytest.approx(record["scores"]["test"])


def test_the_test_score_is_that_of_the_first_best_validation_epoch() -> None:
    record = fit("gcn", Settings(**{**SMALL, "epochs": 12}), easy(), seed=1)
    history = record["history"]
    first = history["val"].index(max(history["val"]))
    assert record["best_epoch"] == first + 1
    assert record["scores"] == {"val": history["val"][first], "test": history["test"][first]}


def test_the_labels_of_test_nodes_are_not_learnt_from() -> None:
    data = easy()
    y = data.y.clone()
    y[data.test] = (y[data.test] + 1) % 3
    settings = Settings(**SMALL)
    records = [fit("hypformer", settings, dataclasses.replace(data, y=labels), seed=0) for labels in (data.y, y)]
    assert records[0]["history"]["loss"] == records[1]["history"]["loss"]
    assert records[0]["history"]["val"] == records[1]["history"]["val"]


def test_curvatures_are_learnt_unless_they_are_fixed() -> None:
    settings = Settings(**{**SMALL, "curvature": -0.5})
    learnt = fit("hypformer", settings, easy(), seed=0)["curvature"]
    fixed = fit("hypformer", dataclasses.replace(settings, learnable_curvature=False), easy(), seed=0)["curvature"]
    assert set(learnt) == set(fixed) == set(build("hypformer", settings, easy()).curvatures())
    assert all(len(set(values)) > 1 for name, values in learnt.items())
    assert all(values == pytest.approx([-0.5] * len(values)) for values in fixed.values())


def test_weight_decay_leaves_curvatures_and_learnt_points_alone() -> None:
    settings = Settings(**{**SMALL, "decoder": "prototypes", "weight_decay": 0.1})
    network = build("hypformer", settings, easy())
    decay = {
        id(parameter): group["weight_decay"]
        for group in optimizer_for(network, settings).param_groups
        for parameter in group["params"]
    }
    for name, parameter in network.named_parameters():
        held = name.endswith(("log_ratio", "log_scale", "unit"))
        assert decay[id(parameter)] == (0.0 if held else 0.1), name
    assert len(decay) == len(list(network.parameters()))


def test_what_is_measured_can_be_the_mean_of_the_weights(tmp_path: Path) -> None:
    settings = Settings(**{**SMALL, "average": 0.5, "decoder": "prototypes", "epochs": 4, "lr": 0.1})
    run = runs.Run(tmp_path, {})
    record = fit("hypformer", settings, easy(), seed=0, run=run)
    plain = fit("hypformer", dataclasses.replace(settings, average=0.0), easy(), seed=0)
    # Training is the same; what is looked at is not.
    assert record["history"]["loss"] == plain["history"]["loss"]
    assert record["curvature"] != plain["curvature"]
    network = build("hypformer", settings, easy())
    network.load_state_dict(run.read_state("part-seed-0.model.pt"))
    network.eval()
    data = easy()
    assert data.score(network(data.x, data.edge_index), data.test) == record["scores"]["test"]


def test_the_running_mean_is_that_of_the_weights_in_loops() -> None:
    torch.manual_seed(0)
    network = build("hypformer", Settings(**{**SMALL, "decoder": "prototypes"}), easy())
    averaged = node_classification.RunningMean(network, 0.3)
    optimizer = optimizer_for(network, Settings(lr=0.5))
    weight, wanted = network.get_parameter("decoder.log_scale"), None
    for epoch in range(1, 7):
        optimizer.zero_grad()
        network(easy().x, easy().edge_index).square().sum().backward()
        optimizer.step()
        averaged.update(epoch)
        share = min(0.3, (epoch - 1) / (epoch + 9))
        wanted = weight.detach().clone() if wanted is None else share * wanted + (1 - share) * weight.detach()
        assert torch.allclose(averaged.mean.get_parameter("decoder.log_scale"), wanted)
    for value in averaged.mean.parameters():
        assert not value.requires_grad
        if isinstance(value, ManifoldParameter):
            assert value.manifold.check_point_on_manifold(value, atol=1e-5)


def test_every_ablation_changes_the_model() -> None:
    whole = settings_for("tree", "hypformer", SMALL)
    shapes = set()
    for change in ({}, *ABLATIONS.values()):
        network = build("hypformer", dataclasses.replace(whole, **change), easy())
        assert isinstance(network, Hypformer)
        trained = frozenset(name for name, value in network.named_parameters() if value.requires_grad)
        shapes.add((trained, repr(network)))
    assert len(shapes) == 1 + len(ABLATIONS)


def test_the_twin_has_hypformers_sizes() -> None:
    data, settings = easy(), Settings(**SMALL)
    sizes = [
        sum(value.numel() for name, value in build(model, settings, data).named_parameters() if "log_ratio" not in name)
        for model in ("hypformer", "euclidean")
    ]
    # HTC also reads the time coordinate: one more input for each of its linear maps, nothing else.
    assert sizes[1] < sizes[0] < 1.2 * sizes[1]


@pytest.mark.parametrize("heads", [1, 2])
def test_linear_attention_of_the_twin_is_eqs_15_to_17_in_loops(heads: int) -> None:
    torch.manual_seed(0)
    layer = EuclideanAttention(6, heads, power=3.0)
    nn.init.constant_(layer.log_scale, 0.3)
    x = torch.randn(5, 6)
    width = 6 // heads

    def phi(e: torch.Tensor) -> torch.Tensor:
        e = torch.relu(e)
        return e.norm() / (e**3).norm() * e**3 if e.norm() > 0 else e

    q, k, v = (linear(x).reshape(5, heads, width) for linear in (layer.query, layer.key, layer.value))
    mean, values = torch.zeros(5, heads, width), torch.zeros(5, heads, width)
    for head in range(heads):
        qs, ks, vs = ([phi(row) for row in part[:, head]] for part in (q, k, v))
        for i in range(5):
            values[i, head] = vs[i] / torch.tensor(0.3).exp()
        for i in range(5):
            weights = [qs[i] @ ks[j] for j in range(5)]
            if sum(weights) > 0:
                mean[i, head] = sum(weights[j] * values[j, head] for j in range(5)) / sum(weights)
    wanted = mean.flatten(1) + layer.residual(values.flatten(1))
    assert torch.allclose(layer(x), wanted, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
def test_the_attention_of_nodeformer_in_loops(heads: int) -> None:
    torch.manual_seed(0)
    data, layer = easy(12), NodeFormerAttention(6, heads).double()
    nn.init.normal_(layer.edges)
    x, width = torch.randn(12, 6, dtype=torch.float64), 6 // heads
    degree = torch.bincount(data.edge_index[1], minlength=12) + 1
    q, k, v = (f(x).reshape(12, heads, width) for f in (layer.query, layer.key, layer.value))

    def features(row: torch.Tensor) -> torch.Tensor:
        row = row / width**0.25
        return torch.exp(layer.projection @ row - row @ row / 2)

    mixed = torch.zeros(12, heads, width, dtype=torch.float64)
    for head in range(heads):
        for i in range(12):
            weights = [features(q[i, head]) @ features(k[j, head]) for j in range(12)]
            mixed[i, head] = sum(weights[j] * v[j, head] for j in range(12)) / sum(weights)
            near = {i} | {int(a) for a, b in data.edge_index.t() if b == i}
            for j in near:
                mixed[i, head] += layer.edges[head].sigmoid() * v[j, head] / (degree[i] * degree[j]) ** 0.5
    said = layer(x, propagation(data.edge_index, 12, x.dtype))
    torch.testing.assert_close(said, layer.result(mixed.flatten(1)))


@pytest.mark.parametrize("model", ["gat", "hgcn", "hgat", "lgcn", "nodeformer", "sgformer", "sgc", "appnp"])
def test_models_of_table_2_see_the_graph_and_take_sparse_features(model: node_classification.Model) -> None:
    torch.manual_seed(0)
    data = easy(12)
    network = build(model, Settings(**{**SMALL, "graph": "propagation"}), data).eval()
    alone, columns = torch.zeros(2, 0, dtype=torch.int64), torch.arange(3).repeat(12)
    sparse = datasets.sparse_rows(torch.arange(0, 37, 3), columns, data.x.flatten(), (12, 3))
    with torch.no_grad():
        said = network(data.x, data.edge_index)
        torch.testing.assert_close(network(sparse, data.edge_index), said, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(network(data.x, alone), said, atol=1e-3)


@pytest.mark.parametrize("size", [1e-20, 1e-36])
def test_short_queries_of_the_euclidean_attention_attend_as_long_ones_do(size) -> None:
    """Weight decay shortens them where the branch weighs little: the square of one over their length is infinite."""
    torch.manual_seed(0)
    layer, x = EuclideanAttention(8, 2), torch.randn(50, 8)
    expected = layer(x)
    with torch.no_grad():
        for parameter in layer.query.parameters():
            parameter.mul_(size)
    out = layer(x)
    assert torch.allclose(out, expected, rtol=1e-3, atol=1e-6)
    out.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_an_encoder_and_the_transformer_are_mixed_with_their_weights() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return x.new_full((x.shape[0], 8), 3.0)

    torch.manual_seed(0)
    model = EuclideanFormer(3, 8, 2, graph_encoder=Constant(), graph_weight=1.0)
    assert (model.embed(torch.randn(4, 3), torch.zeros(2, 0, dtype=torch.int64)) == 3.0).all()
    model.graph_weight = 0.0
    x = torch.randn(4, 3)
    alone = EuclideanFormer(3, 8, 2)
    alone.load_state_dict(model.state_dict())
    assert torch.equal(model.embed(x), alone.embed(x))
    with pytest.raises(ValueError, match="a model needs the transformer, a graph encoder, or both"):
        EuclideanFormer(3, 8, 2, transformer=False)
    with pytest.raises(ValueError, match="features must be a multiple of heads=3, got 8"):
        EuclideanFormer(3, 8, 2, heads=3)


def test_dense_and_sparse_features_give_the_same() -> None:
    x = torch.relu(torch.randn(10, 6, generator=torch.Generator().manual_seed(2)))
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), (x > 0).sum(dim=1).cumsum(0)])
    sparse = datasets.sparse_rows(counts, (x > 0).nonzero()[:, 1], x[x > 0], (10, 6))
    for model in (MLP(6, 8, 3), EuclideanFormer(6, 8, 3)):
        assert torch.allclose(model(x), model(sparse), atol=1e-5)


def test_linear_propagation_in_loops() -> None:
    torch.manual_seed(0)
    data, layer = easy(12), LinearPropagation(3, 4, steps=2, teleport=0.3)
    neighbours = [{node} | {int(a) for a, b in data.edge_index.t() if b == node} for node in range(12)]
    start = [layer.linear.weight @ row + layer.linear.bias for row in data.x]
    rows = start
    for _ in range(2):
        passed = [
            sum(rows[j] / (len(neighbours[i]) * len(neighbours[j])) ** 0.5 for j in neighbours[i]) for i in range(12)
        ]
        rows = [0.7 * new + 0.3 * old for new, old in zip(passed, start, strict=True)]
    assert torch.allclose(layer(data.x, data.edge_index), torch.stack(rows), atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(layer(data.x.to_sparse_csr(), data.edge_index), torch.stack(rows), atol=1e-6)
    with pytest.raises(ValueError, match="teleport must"):
        LinearPropagation(3, 4, steps=2, teleport=1.5)


def test_dropout_of_linear_propagation_is_that_of_the_features() -> None:
    data = easy(12)
    for x in (data.x, data.x.to_sparse_csr()):
        layer = LinearPropagation(3, 4, steps=1, dropout=1.0)
        assert torch.allclose(layer(x, data.edge_index), layer(0 * data.x, data.edge_index))
        assert not torch.allclose(layer.eval()(x, data.edge_index), layer(0 * data.x, data.edge_index))


@pytest.mark.parametrize("model", ["hypformer", "euclidean"])
def test_the_graph_branch_can_be_linear(model: node_classification.Model) -> None:
    network = build(model, Settings(**{**SMALL, "graph": "linear", "teleport": 0.2}), easy())
    assert isinstance(network.graph_encoder, LinearPropagation)
    assert (network.graph_encoder.steps, network.graph_encoder.teleport) == (2, 0.2)
    record = fit(model, Settings(**{**SMALL, "graph": "linear", "epochs": 25, "lr": 0.05}), easy(), seed=0)
    assert record["scores"]["test"] >= 0.9


def test_nearest_neighbours_vote_and_the_nearest_breaks_a_tie() -> None:
    x = torch.tensor([[0.0], [1.0], [4.0], [4.5], [2.4], [5.0]])
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    known, asked = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([4, 5])
    votes = {k: nearest_neighbours(x, y, known, asked, k=k, classes=3).argmax(dim=1).tolist() for k in (1, 2, 4)}
    assert votes == {1: [0, 1], 2: [0, 1], 4: [0, 1]}
    with pytest.raises(ValueError, match="k must lie between 1 and the 4 known nodes, got 5"):
        nearest_neighbours(x, y, known, asked, k=5, classes=3)


FINISHED = {"confusion.png", "run.json", "part-seed-0.json", "results.json"}


@pytest.mark.parametrize("model", MODELS)
def test_the_command_line_leaves_numbers_and_pictures(tmp_path, capsys, model) -> None:
    words = [] if model == "hypformer" else ["--baseline", model]
    assert main([*words, *QUICK, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "tree: 80 nodes, 79 edges; F1 in percent, 1 seed" in printed
    files = {path.name for path in tmp_path.iterdir()}
    wanted = set(FINISHED)
    if model != "knn":
        wanted |= {"training.png", "embedding.png", "part-seed-0.model.pt"}
    if model == "hypformer":
        wanted |= {"curvature.png"}
    assert files == wanted


def test_results_hold_what_a_reader_needs(tmp_path: Path) -> None:
    assert main([*QUICK, "--seeds", "2", "--no-pictures", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == {
        "dataset", "note", "nodes", "edges", "metric", "model", "settings", "command", "versions", "summary", "seeds",
    }  # fmt: skip
    assert results["command"].startswith("python -m experiments.node_classification --hidden 8")
    assert results["settings"]["hidden"] == 8
    assert results["versions"]["torch"] == torch.__version__
    scores = [record["scores"]["test"] for record in results["seeds"]]
    assert results["summary"]["test"]["mean"] == pytest.approx(sum(scores) / 2)
    assert results["summary"]["test"]["std"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    for seed, record in enumerate(results["seeds"]):
        assert record["seed"] == seed
        lengths = {len(values) for part in ("history", "curvature") for values in record[part].values()}
        assert lengths == {record["epochs"]}
        assert set(record["curvature"]) == {"input", "block0", "block0.attention", "block0.feedforward", "output"}


def test_all_models_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--baseline", "all", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for title in ("Hypformer", "GCN", "MLP", "Nearest neighbours", "Euclidean twin"):
        assert f"\n{title} " in printed
    assert set(json.loads((tmp_path / "table.json").read_text())["summary"]) == set(USUAL)
    assert (tmp_path / "table.png").exists()


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_runs(tmp_path: Path, ablation: str) -> None:
    assert main([*QUICK, "--ablate", ablation, "--no-pictures", "--out", str(tmp_path)]) == 0
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert {key: settings[key] for key in ABLATIONS[ablation]} == ABLATIONS[ablation]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dataset", "cora"], "say where it lies with --data FOLDER"),
        (["--dataset", "cora", "--data", "nowhere"], "there is no folder nowhere"),
        (["--protocol", "public"], "protocol of tree must be one of stratified, got 'public'"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--ablate", "softmax", "--baseline", "gcn"], "leave --baseline out"),
        (["--curvature", "1.0"], "curvature"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--ablate", "no-graph", "no-transformer"], "graph_encoder"),
        (["--hidden", "8", "--heads", "3"], "heads"),
        (["--average", "1"], "average must lie in [0, 1), got 1.0"),
        (["--average", "-0.5"], "average must lie in [0, 1), got -0.5"),
        (["--baseline", "knn", "--neighbours", "1000"], "k must lie between 1 and"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(tmp_path, capsys, words, sentence) -> None:
    assert main([*words, "--quiet", "--out", str(tmp_path / "run")]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1
    assert sentence in complaint


def test_a_resumed_run_must_be_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*QUICK, "--baseline", "mlp", "--no-pictures", "--out", str(tmp_path)]
    assert main(words) == 0
    # More seeds of the same run: the first is kept as it is.
    first = (tmp_path / "part-seed-0.json").read_bytes()
    assert main([*words, "--resume", "--seeds", "2"]) == 0
    assert (tmp_path / "part-seed-0.json").read_bytes() == first
    assert main([*words, "--resume", "--lr", "0.5"]) == 2
    assert "holds another run (lr was 0.01 and is now 0.5)" in capsys.readouterr().err


def test_a_loss_that_explodes_is_exit_code_1(tmp_path, capsys) -> None:
    assert main([*QUICK, "--baseline", "mlp", "--scale", "1e38", "--out", str(tmp_path)]) == 1
    assert "try a smaller learning rate" in capsys.readouterr().err


def test_the_help_names_every_hyper_parameter_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    for field in dataclasses.fields(Settings):
        assert "--" + field.name.replace("_", "-") in said
    for dataset in DEFAULTS:
        assert f"\n  {dataset}" in said


def test_defaults_are_settings() -> None:
    for dataset in datasets.PROTOCOLS:
        for model in MODELS:
            assert isinstance(settings_for(dataset, model), Settings)


def test_one_call_from_python_suffices() -> None:
    results = classify(lambda _: easy(), "mlp", Settings(**SMALL), seeds=(3, 4))
    assert [record["seed"] for record in results["seeds"]] == [3, 4]


KNN = {"features": ["raw", "standard"]}


def test_a_table_searches_alike_and_keeps_what_is_finished(tmp_path, capsys, monkeypatch) -> None:
    grid = {"lr": [0.01, 0.1], "hidden": [4, 8]}
    monkeypatch.setitem(table.GRIDS, "tree", {model: grid for model in MODELS if model != "knn"} | {"knn": KNN})
    # The width is given, so it is not searched.
    words = [*QUICK, "--seeds", "2", "--ablations", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    assert table.main(words) == 0
    assert "| Hypformer, fixed-curvature |" in capsys.readouterr().out
    content = json.loads((tmp_path / "tree.json").read_text())
    assert set(content["models"]) == set(USUAL)
    for name, row in content["models"].items():
        best = max(row["search"], key=lambda entry: entry["val"])
        assert row["chosen"] == best["point"]
        assert row["settings"].items() >= best["point"].items()
        assert row["settings"]["hidden"] == 8
        assert len(row["scores"]["test"]) == 2, name
        assert len(row["search"]) == 2
        assert set(row["grid"]) == {"features"} if name == "knn" else {"lr"}

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a finished cell was computed again")

    monkeypatch.setattr(node_classification, "fit", never)
    assert table.main(words) == 2
    assert "tree.json holds a result already: --overwrite replaces it" in capsys.readouterr().err
    assert table.main([*words, "--overwrite"]) == 0
    again = json.loads((tmp_path / "tree.json").read_text())
    assert again["models"] == content["models"]


def test_every_model_searches_as_many_points_of_known_settings() -> None:
    for dataset, grids in table.GRIDS.items():
        assert set(grids) == set(MODELS)
        # The same number of points for every model that is trained.
        counted = {len(table.points(grid)) for model, grid in grids.items() if model != "knn"}
        assert len(counted) == 1
        assert max(counted) <= 6
        for model, grid in grids.items():
            for point in table.points(grid):
                settings_for(dataset, model, point)


def test_a_grid_from_the_command_line_is_searched_by_the_mean_of_several_seeds(tmp_path: Path) -> None:
    words = [*QUICK, "--seeds", "2", "--search-seeds", "2", "--models", "gcn", "mlp", "--name", "mine"]
    words += ["--grid", "lr=0.01,0.3", "mlp:lr=0.02", "mlp:dropout=0.0,0.5"]
    assert table.main([*words, "--work", str(tmp_path / "work"), "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "mine.json").read_text())
    assert content["rule"].startswith("grid point by mean validation score of 2 seeds;")
    wanted = {"gcn": {"lr": [0.01, 0.3]}, "mlp": {"lr": [0.02], "dropout": [0.0, 0.5]}}
    assert {name: row["grid"] for name, row in content["models"].items()} == wanted
    for row in content["models"].values():
        for entry in row["search"]:
            assert len(entry["vals"]) == 2
            assert entry["val"] == pytest.approx(sum(entry["vals"]) / 2)
        best = max(row["search"], key=lambda entry: entry["val"])
        assert row["chosen"] == best["point"]
        assert row["scores"]["val"] == best["vals"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--grid", "lr"], "--grid must be words such as lr=0.01,0.02 or gcn:hidden=32,64, got 'lr'"),
        (["--grid", "warmth=1"], "--grid must be words such as"),
        (["--grid", "knn:neighbours=1,2"], "--grid must be words such as"),
        (["--grid", "gcn:graph_hidden=4"], "--grid must not search what is given, got graph_hidden and --graph-hidden"),
        (["--grid", "hidden=many"], "--grid: hidden must be a number, got 'many'"),
        (["--grid", "graph=cnn"], "--grid: graph must be one of propagation, linear, gcn, none, got 'cnn'"),
        (["--grid", "transformer=no"], "--grid: transformer must be one of false, true, got 'no'"),
        (["--search-seeds", "0"], "--search-seeds must be at least 1, got 0"),
        (["--search-seeds", "3"], "--search-seeds must be at most --seeds=1, got 3"),
    ],
)
def test_a_table_that_cannot_be_made_is_one_sentence(tmp_path, capsys, words, sentence) -> None:
    assert table.main([*QUICK, *words, "--work", str(tmp_path), "--out", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1
    assert sentence in complaint


def test_a_grid_holds_values_of_the_settings() -> None:
    grid = table.grid_of(["learnable_curvature=false,true", "graph=gcn", "hidden=8,16", "gcn:lr=0.5"])
    assert grid["mlp"] == {"learnable_curvature": [False, True], "graph": ["gcn"], "hidden": [8, 16]}
    assert grid["gcn"] == grid["mlp"] | {"lr": [0.5]}
    assert "knn" not in grid


def test_a_running_mean_is_resumed_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(**{**SMALL, "average": 0.8, "epochs": 6})
    whole = fit("hypformer", settings, easy(), seed=0)
    update = node_classification.RunningMean.update

    def broken(self: node_classification.RunningMean, epoch: int) -> None:
        if epoch == 5:
            raise KeyboardInterrupt
        update(self, epoch)

    monkeypatch.setattr(node_classification.RunningMean, "update", broken)
    with pytest.raises(KeyboardInterrupt):
        fit("hypformer", settings, easy(), seed=0, run=runs.Run(tmp_path, {}), checkpoint_every=2)
    monkeypatch.setattr(node_classification.RunningMean, "update", update)
    resumed = fit("hypformer", settings, easy(), seed=0, run=runs.Run(tmp_path, {}, resume=True), checkpoint_every=2)
    for key in ("scores", "history", "curvature", "best_epoch"):
        assert resumed[key] == whole[key]
