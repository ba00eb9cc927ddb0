"""A short form of ``make fuzz``, and that it finds what is planted."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from holonomy import layers, manifolds, models, optim, structures, theory
from holonomy.manifolds import Lorentz, Product
from tests.cases import public_classes
from tests.fuzz.calls import FUNCTIONS, METHODS
from tests.fuzz.judge import judged
from tests.fuzz.modules import wrong_calls
from tests.fuzz.run import run, shrunk, targets

MODULES = [kind for kind in public_classes() if issubclass(kind, nn.Module) and kind is not Product]

pytestmark = pytest.mark.usefixtures("without_shape_checks")


@pytest.mark.parametrize("seed", range(2))
def test_random_calls(seed: int) -> None:
    found = list(run(range(30), seed).first.values())
    assert not found, "\n\n".join(map(shrunk, found[:3]))


def test_every_wrong_argument_of_a_class_is_refused_by_its_name() -> None:
    """Each argument of the constructor and of the forward pass, each way of being wrong, one at a time."""
    failures = [judged(call) for kind in MODULES for call in wrong_calls(kind)]
    assert [(failure.key, failure.detail) for failure in failures if failure is not None] == []


# Public names that are not called by themselves, each with the reason.
ELSEWHERE = {
    "Product": "its factors have no names: see tests/manifolds",
    "basis_residual": "called by TokenGT with the option of this name",
    **dict.fromkeys(
        ("attend_linear", "attend_softmax", "follow_refinement", "follow_transformation"), "called by certify"
    ),
    **dict.fromkeys(("BoundViolatedError", "assert_lipschitz"), "an AssertionError is the result"),
    **dict.fromkeys(("CLAIMS", "Claim", "Draws", "Trial", "Verdict", "verify"), "a claim takes seconds to measure"),
    **dict.fromkeys(("Certificate", "DistanceScaling", "NodeCertificate"), "what functions return"),
    **dict.fromkeys(("Subgraph", "neighbour_batches", "node_partitions"), "iterators: see tests/structures"),
    **dict.fromkeys(("Neighbours", "sort_edges"), "write into what they are given: see tests/structures"),
    **dict.fromkeys(("NotCoveredError", "Projections"), "what functions raise or return"),
}


def test_every_public_name_is_called() -> None:
    packages = (manifolds, layers, models, optim, structures, theory)
    public = {name for package in packages for name in package.__all__}
    called = {name.partition(".")[0] for name in targets()}
    assert public - called - ELSEWHERE.keys() == set()
    assert {path.split(".")[1] for path in FUNCTIONS} <= public


def test_every_method_of_the_manifold_is_called() -> None:
    own = {name for name, value in vars(Lorentz).items() if not name.startswith("_") and callable(value)}
    assert own - {"extra_repr"} == METHODS.keys()


def test_the_same_seed_makes_the_same_calls() -> None:
    first, second = (run(range(3), 5) for _ in range(2))
    assert (first.calls, first.failures) == (second.calls, second.failures)
    assert [f.choices for f in first.first.values()] == [f.choices for f in second.first.values()]


Method = Callable[..., Any]


def planted(monkeypatch: pytest.MonkeyPatch, name: str, defect: Callable[..., Any], key: str) -> str:
    """The script of the failure that is found after a method of the manifold was replaced."""
    method: Method = getattr(Lorentz, name)

    def replaced(self: Lorentz, x: Any, **options: Any) -> Any:
        return defect(partial(method, self, **options), x)

    monkeypatch.setattr(Lorentz, name, replaced)
    found = run(range(8), 0, (f"Lorentz.{name}",)).first
    return shrunk(next(failure for text, failure in found.items() if text.startswith(f"Lorentz.{name}: {key}")))


def printed(script: str) -> str:
    """What a script prints."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        exec(script, {})
    return stream.getvalue()


def test_a_value_that_is_not_finite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(method: Method, x: Any) -> Any:
        far = isinstance(x, Tensor) and x.is_floating_point() and x.numel() and x.abs().amax() > 1e4
        return method(x) * (float("nan") if far else 1.0)

    script = planted(monkeypatch, "dist0", defect, "result is not finite")
    assert "x = tensor([" in script  # one point
    assert "nan" in printed(script)


def test_a_changed_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(method: Method, x: Any) -> Any:
        return method(x.mul_(1.5) if isinstance(x, Tensor) and not x.requires_grad else x)

    script = planted(monkeypatch, "to_klein", defect, "changes its input")
    assert "x = tensor([1.7320508075688774, 1.0, 1.0]" in script
    assert printed(script)


def test_an_error_that_is_no_refusal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(method: Method, x: Any) -> Any:
        if isinstance(x, Tensor) and x.ndim == 0:
            return x[..., 1:]  # an IndexError of torch's
        return method(x)

    with pytest.raises(IndexError):
        printed(planted(monkeypatch, "logmap0back", defect, "raises IndexError"))
