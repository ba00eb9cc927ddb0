"""A short form of ``make fuzz``, and that it finds what is planted."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

import holonomy
from holonomy.manifolds import Lorentz
from tests.fuzz.calls import FUNCTIONS, METHODS
from tests.fuzz.known import is_known
from tests.fuzz.run import run, shrunk, targets

pytestmark = pytest.mark.usefixtures("without_shape_checks")


@pytest.mark.parametrize("seed", range(2))
def test_random_calls(seed):
    report = run(range(30), seed)
    new = [found for key, found in report.first.items() if not is_known(key)]
    assert not new, "\n\n".join(shrunk(found) for found in new[:3])


# Public names that are not called by themselves, each with the reason.
ELSEWHERE = {
    "basis_residual": "called by TokenGT with the option of this name",
    "RiemannianAdam": "known: its calls are not drawn yet",
}


def test_every_public_name_is_called():
    packages = (holonomy.manifolds, holonomy.layers, holonomy.models, holonomy.optim, holonomy.structures)
    public = {name for package in packages for name in package.__all__}
    called = {name.partition(".")[0] for name in targets()}
    assert public - called - ELSEWHERE.keys() == set()
    assert {path.split(".")[1] for path in FUNCTIONS} <= public


def test_every_method_of_the_manifold_is_called():
    own = {name for name, value in vars(Lorentz).items() if not name.startswith("_") and callable(value)}
    assert own - {"extra_repr"} == METHODS.keys()


def test_the_same_seed_makes_the_same_calls():
    first, second = (run(range(3), 5) for _ in range(2))
    assert (first.calls, first.failures) == (second.calls, second.failures)
    assert [f.choices for f in first.first.values()] == [f.choices for f in second.first.values()]


def planted(monkeypatch, name, defect):
    """What is found after a method was replaced, with its script and what that prints."""
    method = getattr(Lorentz, name)
    monkeypatch.setattr(Lorentz, name, lambda self, x, **options: defect(method, self, x, **options))
    found = run(range(8), 0, (f"Lorentz.{name}",)).first
    return {key: shrunk(failure) for key, failure in found.items()}


def printed(script):
    """What a script prints."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        exec(script, {})
    return stream.getvalue()


def test_a_value_that_is_not_finite_is_found(monkeypatch):
    def defect(method, manifold, x, **options):
        far = torch.as_tensor(x)[..., :1].abs().amax() > 1e4 if isinstance(x, torch.Tensor) and x.numel() else False
        return method(manifold, x, **options) * (float("nan") if far else 1.0)

    script = planted(monkeypatch, "dist0", defect)["Lorentz.dist0: result is not finite"]
    assert "x = tensor([" in script  # one point
    assert "nan" in printed(script)


def test_a_changed_input_is_found(monkeypatch):
    def defect(method, manifold, x, **options):
        return method(manifold, x.mul_(1.5) if isinstance(x, torch.Tensor) and not x.requires_grad else x, **options)

    script = planted(monkeypatch, "to_klein", defect)["Lorentz.to_klein: changes its input"]
    assert "x = tensor([1.7320508075688774, 1.0, 1.0]" in script
    assert printed(script)


def test_an_error_that_is_no_refusal_is_found(monkeypatch):
    def defect(method, manifold, x, **options):
        if isinstance(x, torch.Tensor) and x.ndim == 0:
            return x[..., 1:]  # an IndexError of torch's
        return method(manifold, x, **options)

    found = planted(monkeypatch, "logmap0back", defect)
    script = next(script for key, script in found.items() if key.startswith("Lorentz.logmap0back: raises IndexError"))
    with pytest.raises(IndexError):
        printed(script)
