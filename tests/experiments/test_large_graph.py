"""The modes that read the same rows train the same model; a killed run goes on where it stopped."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from experiments.data.best_accuracy import beliefs, best_accuracies
from experiments.data.large_graphs import ALIKE, CLASSES, RUN, Rows, generate
from experiments.engine.options import RefusedError
from experiments.large_graph import main
from experiments.models.at_scale import MODELS, SimpleAttention, build
from tests.distributed.launch import launch


def ran(folder, mode, *more, epochs=3):
    size = ["--nodes", "600", "--epochs", str(epochs), "--every", "3"]
    return main([*size, "--out", str(folder), "--mode", mode, *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data that are there already: a process to make them would take seconds."""
    folder = tmp_path_factory.mktemp("large")
    generate(folder / "data-600-0", 600, 0)
    return folder


def losses(result):
    return torch.tensor([epoch["loss"] for epoch in result["history"]])


def test_rows_chunks_and_processes_are_one_run(folder):
    rows, chunks = ran(folder, "rows"), ran(folder, "stream", "--chunk", "250")
    torch.testing.assert_close(losses(chunks), losses(rows), rtol=1e-5, atol=0)
    assert chunks["history"][-1]["accuracy"] == pytest.approx(rows["history"][-1]["accuracy"], abs=0.01)
    options = ["--nodes", "600", "--epochs", "3", "--every", "3", "--out", str(folder), "--mode", "rows"]
    launch(2, "experiments.large_graph", options)
    two = json.loads((folder / "rows-2-600.json").read_text(encoding="utf-8"))
    torch.testing.assert_close(losses(two), losses(rows), rtol=1e-5, atol=0)
    assert all(epoch["bytes_sent"] > 0 for epoch in two["history"])


@pytest.mark.parametrize("model", sorted({*MODELS} - {"gcn", "hypformer"}))
def test_chunks_are_one_pass_for_every_model(folder, model):
    rows = ran(folder, "rows", "--model", model, "--lr", "0.02")
    chunks = ran(folder, "stream", "--model", model, "--lr", "0.02", "--chunk", "250")
    torch.testing.assert_close(losses(chunks), losses(rows), rtol=1e-5, atol=0)
    assert losses(rows)[-1] < losses(rows)[0]


@pytest.mark.parametrize("model", ["flat", "sgformer", "gcn"])
def test_the_learning_rate_with_the_best_validation_is_chosen(folder, model):
    rates = 0.3, 1e-6, 0.05
    found = ran(folder, "whole", "--model", model, "--lr", *map(str, rates))
    single = {lr: ran(folder, "whole", "--model", model, "--lr", str(lr))["chosen"] for lr in rates}
    assert found["valid_by_lr"] == {lr: chosen["valid"] for lr, chosen in single.items()}
    best = max(rates, key=lambda lr: single[lr]["valid"])
    assert {"lr", "valid", "accuracy"} <= found["chosen"].keys()
    assert all(found["chosen"][key] == single[best][key] for key in ("lr", "valid", "accuracy", "loss"))
    assert found["parameters"] == sum(p.numel() for p in build(model, 32, 32, 10, 1, graph=True).parameters())


def test_the_attention_of_sgformer_is_its_equation():
    attention, x = SimpleAttention(4, 2).double(), torch.randn(7, 4, dtype=torch.float64)
    q, k, v = (f(x).view(7, 2, 4) for f in (attention.query, attention.key, attention.value))
    q, k, expected = q / q.norm(), k / k.norm(), torch.zeros_like(x)
    for head in range(2):
        for i in range(7):
            weights = torch.stack([q[i, head] @ k[j, head] for j in range(7)]) / 7
            expected[i] += (v[i, head] + weights @ v[:, head]) / (1 + weights.sum()) / 2
    torch.testing.assert_close(attention(x), expected)


def test_beliefs_are_bayes_rule_on_a_tree():
    """Sums over all classes of all nodes, of what lies within one and two edges of the middle of a path."""
    own, ends = torch.randn(5, CLASSES), torch.rand(CLASSES).softmax(0)
    path = torch.stack([torch.arange(4), torch.arange(1, 5)])
    weight = torch.eye(CLASSES) * ALIKE / ends + 1 - ALIKE
    p = own.exp()
    one = p[2] * (p[1] @ weight) * (p[3] @ weight)
    two = p[2] * torch.einsum("a,b,ab,bc,d,e,ed,dc->c", p[0], p[1], weight, weight, p[3], p[4], weight, weight)
    found = beliefs(own, torch.cat([path, path.flip(0)], 1), ends)
    for expected in (one, two, two):
        torch.testing.assert_close(next(found)[2].softmax(0), expected / expected.sum())


def test_more_of_a_graph_tells_more_of_its_classes(tmp_path):
    generate(tmp_path, 10_000, 0)
    found = [*best_accuracies(tmp_path).values()]
    assert found == sorted(found)
    assert 0.2 < found[0] < found[-1] - 0.5 < 0.5
    scrambled = np.memmap(tmp_path / "edges", np.int32, "r+", shape=(2, 100_000))
    scrambled[:] = np.random.default_rng(0).permutation(10_000)[scrambled]  # edges that know nothing of classes
    assert best_accuracies(tmp_path)["within 2"] < found[0] + 0.01


def test_batches_have_every_row_once(tmp_path):
    generate(tmp_path, 1000, 0)
    whole = next(iter(Rows(tmp_path, [0, 1], range(100, 1000), 900, "cpu")))
    for count in (1, 3, 100):
        parts = list(Rows(tmp_path, [0, 1], range(100, 1000), 64, "cpu").parts(count))
        assert len(parts) == min(count, math.ceil(900 / RUN))
        together = [torch.cat(each) for each in zip(*parts, strict=True)]
        order, wanted = together[0][:, 0].argsort(), whole[0][:, 0].argsort()
        for ours, theirs in zip(together, whole, strict=True):
            assert torch.equal(ours[order], theirs[wanted])


def test_one_batch_is_one_pass(folder):
    torch.testing.assert_close(losses(ran(folder, "batches", "--parts", "1")), losses(ran(folder, "rows")))


@pytest.mark.parametrize("mode", ["whole", "partitions", "neighbours", "stream", "batches"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(folder, mode):
    whole = ran(folder, mode)
    ran(folder, mode, epochs=1)
    resumed = ran(folder, mode, "--resume")
    assert torch.equal(losses(resumed), losses(whole))
    assert whole["history"][-1]["loss"] < whole["history"][0]["loss"]


def test_the_graph_has_classes_and_hubs(tmp_path):
    """Half of the edges look for a node of their class, and one in ten of the others finds one."""
    generate(tmp_path, 3000, 1)
    y, edges = np.fromfile(tmp_path / "labels", np.int16), np.fromfile(tmp_path / "edges", np.int32).reshape(2, -1)
    assert np.mean(y[edges[0]] == y[edges[1]]) == pytest.approx(0.55, abs=0.02)
    degrees = np.bincount(edges[0], minlength=3000)
    assert degrees.mean() == 10
    assert degrees.max() > 60
    pairs = set(zip(*edges.tolist(), strict=True))
    assert all((b, a) in pairs for a, b in pairs)


def test_edges_are_not_shared(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["--mode", "whole"])
    assert "rows or stream" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "mode", "said"), [("sgc", "whole", "stream or batches"), ("gcn", "stream", "neighbours")]
)
def test_what_a_model_does_not_read_is_no_mode_of_it(model, mode, said, capsys):
    with pytest.raises(SystemExit):
        main(["--mode", mode, "--model", model])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"--{name} 0", f"--{name} must be at least 1, got 0") for name in ("nodes", "epochs", "every", "parts")),
        *((f"--{name} 0", f"--{name} must be at least 1, got 0") for name in ("batch", "chunk", "hidden", "layers")),
        ("--mode neighbours --neighbours 3 0", r"--neighbours must be at least 1, got \[3, 0\]"),
        ("--lr -1", "lr must be finite and not negative"),
        ("--hidden 3", "features must be a multiple of heads"),
        ("--device nowhere", "--device nowhere cannot be used here"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(folder, words, said):
    with pytest.raises(RefusedError, match=said):
        main(["--nodes", "600", "--out", str(folder), *words.split()])


def test_a_checkpoint_of_another_width_is_refused(folder):
    ran(folder, "whole", epochs=1)
    with pytest.raises(RefusedError, match=r"whole-600\.pt holds a run with --hidden 32"):
        ran(folder, "whole", "--hidden", "16", "--resume", epochs=2)
    state = torch.load(folder / "whole-600.pt", weights_only=True)
    del state["asked"]  # as those of earlier versions
    torch.save(state, folder / "whole-600.pt")
    with pytest.raises(RefusedError, match=r"whole-600\.pt does not fit this model"):
        ran(folder, "whole", "--hidden", "16", "--resume", epochs=2)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("whole", ("--lr", "0.02")),
        ("partitions", ("--parts", "3")),
        ("neighbours", ("--batch", "99")),
        ("neighbours", ("--neighbours", "2")),
        ("stream", ("--chunk", "250")),
    ],
)
def test_a_run_is_resumed_with_the_same_words(folder, mode, words):
    """The optimizer's state has the old rate: a new one was in the result, and in no step."""
    ran(folder, mode, epochs=1)
    with pytest.raises(RefusedError, match=f"holds a run with {words[0]} .*: resume it as it was"):
        ran(folder, mode, *words, "--resume", epochs=2)
