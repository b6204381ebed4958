"""Draws reward curves as a PNG. matplotlib is imported only to draw: runs need it only for their figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from branchline.core.extras import requires_extra


@dataclass(frozen=True)
class Curve:
    """The values of a series of steps."""

    name: str
    values: Sequence[float]
    steps: Sequence[float] = ()
    """Their steps; none: 1, 2, and so on, whose values are smoothed."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """The range of several seeds, if there is one."""


def check_matplotlib() -> None:
    """Raises MissingExtraError if no figure can be drawn; called before a long run that ends with one."""
    with requires_extra():
        import matplotlib  # noqa: F401


def plot_curves(
    path: Path, title: str, curves: Sequence[Curve], *, chance: float | None = None, window: int = 5
) -> None:
    """Writes a figure with the curves, smoothed by a running mean unless they name their steps, and the score
    of chance, if given."""
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        if curve.steps:
            axes.plot(curve.steps, curve.values, label=curve.name, marker="o", markersize=3)
            continue
        steps = range(1, len(curve.values) + 1)
        (line,) = axes.plot(steps, running_mean(curve.values, window), label=curve.name)
        if curve.low:
            low, high = running_mean(curve.low, window), running_mean(curve.high, window)
            axes.fill_between(steps, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
        else:
            axes.plot(steps, curve.values, color=line.get_color(), alpha=0.25, linewidth=1)
    if chance is not None:
        axes.axhline(chance, color="gray", linestyle=":", linewidth=1, label="chance")
    axes.set(title=title, xlabel="step", ylabel="reward")
    if all(0 <= value <= 1 for curve in curves for value in curve.values):
        axes.set(ylim=(0, 1.02))
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    axes.grid(alpha=0.2)
    figure.savefig(path)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and up to `window` − 1 values before it.

    >>> running_mean([1, 3, 5, 7], 2)
    [1.0, 2.0, 4.0, 6.0]
    """
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]
