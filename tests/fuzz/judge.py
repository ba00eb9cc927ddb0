"""What a call must do: give finite numbers on the manifold, or say in a sentence which argument is wrong."""

from __future__ import annotations

import dataclasses
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch._dynamo  # a call that is the first to use it would be too slow
from torch import Tensor, nn

import holonomy
from holonomy.manifolds import Lorentz, hyperboloid

__all__ = ["Call", "Failure", "judged"]

_LIBRARY = Path(holonomy.__file__).parent
_SECONDS = 20
_ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-13}


@dataclass
class Call:
    """One call.

    Attributes:
        name: the public name.
        function: what is called with the arguments, by name.
        arguments: by name; ``size`` is handed over by position.
        written: the function as a script writes it, after the lines of ``setup``.
        setup: lines that make what the function needs.
        wrong: arguments that must be refused, each with what is wrong about it.
        doubtful: arguments that may be refused.
        on: the manifold of the result, where it is points.
        learned: tensors beside the arguments that get gradients.
        restore: called after each evaluation, to undo what it changed in the module.
        twice: whether it is evaluated again under the same seed.
        differentiable: whether gradients are promised.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    written: str
    setup: tuple[str, ...] = ()
    wrong: Mapping[str, str] = field(default_factory=dict)
    doubtful: Mapping[str, str] = field(default_factory=dict)
    on: Lorentz | None = None
    learned: tuple[Tensor, ...] = ()
    restore: Callable[[], None] = lambda: None
    twice: bool = False
    differentiable: bool = True

    def evaluate(self) -> Any:
        """Call it from a fixed seed."""
        torch.default_generator.manual_seed(0)
        arguments = dict(self.arguments)
        for value in arguments.values():
            if isinstance(value, torch.Generator):
                value.manual_seed(value.initial_seed())
        size = arguments.pop("size", ())
        return self.function(*size, **arguments)


@dataclass
class Failure:
    """What is wrong with a call.

    Attributes:
        name: the public name.
        what: what is wrong, in a few words.
        detail: the message of the error, or the argument concerned.
        place: the function of the library that an error came from.
    """

    name: str
    what: str
    detail: str = ""
    place: str = ""

    @property
    def key(self) -> str:
        """What tells causes apart: numbers do not."""
        return f"{self.name}: {self.what}{' in ' * bool(self.place)}{self.place}"


class _Caught:
    """Holds the error that the block raised."""

    error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return isinstance(error, Exception)


class _TooSlowError(Exception):
    """A call did not come back."""


def _too_slow(*_: Any) -> None:
    raise _TooSlowError(f"no result after {_SECONDS} s")


def judged(call: Call) -> Failure | None:
    """Make a call and say what is wrong about what it does."""
    # Of the processor's time, so that other work beside this one does not count.
    signal.signal(signal.SIGPROF, _too_slow)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)
            warnings.filterwarnings("ignore", r"\w+ was made without level", FutureWarning)
            return _judged(call)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        call.restore()


def _judged(call: Call) -> Failure | None:
    versions = {name: (x, x._version) for name, x in call.arguments.items() if isinstance(x, Tensor)}
    before = {name: x.detach().clone() for name, (x, _) in versions.items() if not x.is_sparse}
    result = None
    with _Caught() as caught:
        result = call.evaluate()
    if caught.error is not None:
        return _of_error(call, caught.error)
    for name, (x, version) in versions.items():
        if x._version != version or (name in before and not x.is_meta and not _same(x, before[name])):
            return Failure(call.name, "changes its input", name)
    if call.wrong:
        argument, how = next(iter(call.wrong.items()))
        return Failure(call.name, f"accepts {argument}: {how}")
    if call.doubtful:
        return None
    return _of_result(call, result)


def _of_error(call: Call, error: BaseException) -> Failure | None:
    kind, message = type(error).__name__, str(error)
    spoiled = [*call.wrong, *call.doubtful]
    if not spoiled:
        return Failure(call.name, f"raises {kind} on valid arguments", message, _place(error))
    how = ", ".join(f"{name}: {how}" for name, how in (*call.wrong.items(), *call.doubtful.items()))
    if "meta" in call.doubtful.values() and re.search(r"\b(meta|device)\b", message, re.IGNORECASE):
        return None  # torch's own words on tensors that are not where the others are
    ours = type(error).__module__.partition(".")[0] in {"builtins", "holonomy"}
    if not isinstance(error, ValueError | TypeError) or not ours:
        return Failure(call.name, f"raises {kind}, {how}", message, _place(error))
    # A shape is wrong beside another argument's, which the sentence may name instead.
    names = [name for name, x in call.arguments.items() if name in spoiled or isinstance(x, Tensor)]
    if not any(re.search(rf"(?<![\w.]){_written(name)}\b(?!\()", message) for name in names):
        return Failure(call.name, f"{kind} names no argument, {how}", message, _place(error))
    return None


def _written(name: str) -> str:
    """The name of an argument, one of several by position or in a list, or a curvature's only one, in sentences."""
    return {"value": "(curvature|value)", "layers": "layers?"}.get(name, name.rstrip("0123456789"))


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(_LIBRARY)]
    if not frames:
        return ""
    return f"{Path(frames[-1].filename).relative_to(_LIBRARY)}:{frames[-1].name}"


def _of_result(call: Call, result: Any) -> Failure | None:
    tensors = list(_tensors(result))
    if not all(x.isfinite().all() for x in tensors if x.is_floating_point()):
        return Failure(call.name, "result is not finite")
    if call.on is not None and not _on(call.on, tensors[0]):
        return Failure(call.name, "result is off the manifold")
    leaves = {name: x for name, x in call.arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    leaves |= {f"parameter {place}": x for place, x in enumerate(call.learned) if x.requires_grad}
    roots = [x for x in tensors if x.requires_grad]
    if roots and leaves and call.differentiable:
        gradients: tuple[Tensor, ...] = ()
        with _Caught() as caught:
            cotangents = [_cotangent(x) for x in roots]
            gradients = torch.autograd.grad(roots, list(leaves.values()), cotangents, materialize_grads=True)
        if caught.error is not None:
            kind = type(caught.error).__name__
            return Failure(call.name, f"backward raises {kind}", str(caught.error), _place(caught.error))
        for name, gradient in zip(leaves, gradients, strict=True):
            if not gradient.isfinite().all():
                return Failure(call.name, "gradient is not finite", name)
    if call.twice:
        call.restore()
        again = list(_tensors(call.evaluate()))
        if len(again) != len(tensors) or not all(map(_same, tensors, again)):
            return Failure(call.name, "gives other bits under the same seed")
    return None


def _tensors(result: Any) -> Iterator[Tensor]:
    """All tensors of a result, in containers and fields too."""
    if isinstance(result, Tensor):
        if result.layout == torch.strided:
            yield result
    elif isinstance(result, nn.Module):
        yield from result.parameters()
        yield from result.buffers()
    elif isinstance(result, dict):
        yield from _of_all(result.values())
    elif isinstance(result, list | tuple):
        yield from _of_all(result)
    elif dataclasses.is_dataclass(result):
        yield from _of_all(getattr(result, f.name) for f in dataclasses.fields(result))


def _of_all(results: Iterable[Any]) -> Iterator[Tensor]:
    for result in results:
        yield from _tensors(result)


def _cotangent(x: Tensor) -> Tensor:
    return torch.cos(1.0 + 2.3 * torch.arange(x.numel(), dtype=torch.float64)).reshape(x.shape).to(x.dtype)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(
        torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, 0, 0, equal_nan=True))
    )


def _on(manifold: Lorentz, points: Tensor) -> bool:
    """Whether time is the root, to the rounding of the dtype."""
    wide = points.detach().double().as_subclass(Tensor)
    expected = hyperboloid.time(hyperboloid.space(wide), manifold.curvature.detach().double())
    return torch.allclose(wide[..., :1], expected, rtol=_ROUNDING[points.dtype], atol=0)
