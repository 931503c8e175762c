"""Test that figures are self-contained: their titles, notes and legends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest

pytest.importorskip("matplotlib")

from ipu_pipe import configure  # noqa: E402
from ipu_pipe.report.plots import open_figure  # noqa: E402
from tools.experiments.plots import describe_seeds, describe_sizes, plot_mean_with_range  # noqa: E402


def test_a_figure_has_its_title_above_and_its_note_below(tmp_path: Path) -> None:
    note = "5,000 images; " + describe_seeds([1, 0])
    with open_figure(tmp_path / "f.png", (4, 3), 2, title="What it shows", note=note) as panels:
        plot_mean_with_range(panels[0], [0, 1], [[1.0, 3.0], [2.0, 2.0]])
    figure: Any = panels[0].figure
    assert figure.get_suptitle() == "What it shows"
    assert figure.get_supxlabel().replace("\n", " ") == note
    assert list(panels[0].lines[0].get_ydata()) == [2.0, 2.0]
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_lines_of_one_color_differ_in_style(tmp_path: Path) -> None:
    with open_figure(tmp_path / "f.png", (4, 3), title="", note="") as (axes,):
        for number in range(30):
            plot_mean_with_range(axes, [0, 1], [[number], [number + 1.0]])
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 30


def test_a_runs_sizes_are_described() -> None:
    keys: Dict[str, Any] = {"micro_batch_size": 4, "replicas": 2, "gradient_accumulation": 8}
    text = describe_sizes(configure(**keys, data={"name": "digits"}, epochs=3))
    assert text == "digits, 3 epochs, 64 samples an update"
