"""Describe an experiment's sizes and seeds in the note of its figure, and draw means with their
range.
"""

from __future__ import annotations

import statistics
from typing import Any, Sequence

from ipu_pipe.config.schema import Config


def describe_sizes(config: Config) -> str:
    """Describe the data and the length of a run for the note of its figure."""
    data, batch = (
        config.data.options(),
        config.micro_batch_size * config.gradient_accumulation * config.replicas,
    )
    parts = [f"{data['size']}x{data['size']}"] if "size" in data else []
    parts += [
        f"{data[key]:,} {what} samples"
        for key, what in (("subset", "training"), ("test_subset", "test"))
        if key in data
    ]
    length = f"{config.epochs} epochs" if config.steps is None else f"{config.steps:,} updates"
    of_data = f"{config.data.name} ({', '.join(parts)})" if parts else config.data.name
    return f"{of_data}, {length}, {batch:,} {'sample' if batch == 1 else 'samples'} an update"


def describe_seeds(seeds: Sequence[int]) -> str:
    """Describe the lines and bands of `plot_mean_with_range` for runs with these seeds."""
    if len(set(seeds)) == 1:
        return f"seed {seeds[0]} alone"
    return (
        f"lines: means over seeds {', '.join(map(str, sorted(set(seeds))))}; bands: from the "
        f"least to the greatest of them"
    )


def plot_mean_with_range(
    axes: Any, x: Sequence[float], groups: Sequence[Sequence[float]], **how: Any
) -> None:
    """Draw a line through the mean of each group of values, and shade their range.

    Up to 30 lines differ in color or style.
    """
    if "color" not in how:  # matplotlib has ten
        how["linestyle"] = ("-", "--", ":")[len(axes.lines) // 10 % 3]
    (line,) = axes.plot(x, [statistics.mean(group) for group in groups], marker="o", **how)
    low, high = [min(group) for group in groups], [max(group) for group in groups]
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
