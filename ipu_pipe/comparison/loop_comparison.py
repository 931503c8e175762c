"""The result of a comparison of methods on a loop: verdicts, text, a page, JSON, a data frame."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from ipu_pipe.comparison.trainings import WINDOW, MethodRow, Training
from ipu_pipe.comparison.verdicts import Verdict, estimate, judge
from ipu_pipe.files import replace_nonfinite, write_text
from ipu_pipe.report.analysis.text import format_table
from ipu_pipe.report.static_page import (
    Curve,
    draw_curves,
    write_legend,
    write_list,
    write_static_page,
    write_table,
)
from ipu_pipe.text import format_bytes, format_count

# pixels of the page in a notebook
HEIGHT = 900
HEAD = (
    *("method", "microbatches", "rate x", "final loss"),
    *("predicted time", "devices", "most memory", "staleness"),
)


class LoopComparison:
    """The result of `ipu_pipe.compare`.

    Print it, or let a notebook show it; `save` writes the page, `frame` and `to_json` return the
    numbers, `verdicts` has a sentence a method.

    rows: the methods, in order; running: those that can run, the first of which is the baseline.
    times: a sentence on the origin of the predicted times; spread: how far they may be off by
    chance, as a share.
    """

    def __init__(self, rows: Sequence[MethodRow], times: str, spread: float) -> None:
        self.rows = list(rows)
        self.running = [row for row in rows if not row.reason]
        # `compare` raises if no method can run
        self.baseline = self.running[0]
        self.times = times
        self.spread = spread

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Return the verdict on each method that runs, by its label."""
        baseline = self.baseline
        final = estimate([training.final for training in baseline.chosen])
        words = f"{baseline.label} is the baseline: it ends at a loss of {final}."
        judged = {row.label: judge(row, baseline, self.spread) for row in self.running[1:]}
        return {baseline.label: Verdict(words), **judged}

    def list_sentences(self) -> list[str]:
        """Return a sentence on each method."""
        refused = [f"{row.label} cannot run: {row.reason}" for row in self.rows if row.reason]
        return [verdict.sentence for verdict in self.verdicts.values()] + refused

    def list_notes(self) -> list[str]:
        """Return sentences on the origin of times, on devices, and on what was changed for a
        method.
        """
        notes = [self.times]
        devices = self.baseline.chosen[0].devices
        for row in self.running:
            count = row.chosen[0].devices
            if count != devices:
                notes.append(f"{row.label} has {count} devices, {self.baseline.label} {devices}.")
            notes += [f"{row.label}: {note}." for note in row.notes]
        return notes

    def __repr__(self) -> str:
        cells = [_describe_row(row) for row in self.running]
        # all methods: by default a long table ends after 16 rows
        table = format_table(HEAD, cells, left=1, most=len(cells))
        return "\n".join([*table, "", *self.list_sentences(), "", *self.list_notes()])

    # ---- as a page

    def save(self, path: str | Path) -> Path:
        """Write one HTML file that needs no network, and return its path."""
        return write_text(Path(path), self.write_page())

    def _repr_html_(self) -> str:
        # a frame keeps the page's styles and the notebook's apart
        page = escape(self.write_page())
        return f'<iframe title="comparison" srcdoc="{page}" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'

    def write_page(self) -> str:
        """Return the page as HTML."""
        rows = self.running
        seeds = len(self.baseline.chosen)
        # the axis ends where learning methods begin: one that diverges would flatten all other
        # curves
        starts = [row.chosen[0].first for row in rows if row.chosen[0].has_learned]
        figures = [
            draw_curves([_make_curve(row, axis) for row in rows], name, "Loss", max(starts or [1]))
            for axis, name in enumerate(("samples", "predicted seconds"))
        ]
        band = f"A point is the mean of the last {WINDOW:.0%} of the updates until then."
        if seeds > 1:
            band += " The band is from the seed with the least loss to the one with the greatest."
        return write_static_page(
            "Methods on one loop",
            f"{len(rows)} methods, {format_count(seeds, 'seed')}, each method at its best rate",
            {
                "Answer": write_list(self.list_sentences()),
                "Loss": write_legend([row.label for row in rows])
                + f'<p class="hint">{band}</p><div class="charts">{"".join(figures)}</div>',
                "Methods": self._write_methods(),
                "Rates": self._write_rates(),
                "Memory": self._write_memory(),
                "Notes": write_list(self.list_notes()),
            },
        )

    def _write_methods(self) -> str:
        metrics = [_describe_metrics(row) for row in self.running]
        # a metric that one method alone has is a column, too
        names = list(dict.fromkeys(name for values in metrics for name in values))
        cells = [
            [*_describe_row(row), *(values.get(name, "-") for name in names)]
            for row, values in zip(self.running, metrics)
        ]
        caption = "Evaluated values are the last ones"
        if len(self.baseline.chosen) > 1:
            caption += "; ± is half of the 95 % interval over seeds"
        return write_table(caption, [*HEAD, *(f"evaluated {name}" for name in names)], cells)

    def _write_rates(self) -> str:
        rates = sorted({rate for row in self.running for rate in row.trainings}, reverse=True)
        cells = [
            [row.label, *(_show(row.compute_final(r)) if r in row.trainings else "" for r in rates)]
            for row in self.running
        ]
        caption = "Mean final loss by multiple of the loop's learning rate"
        return write_table(caption, ["method", *(f"{rate:.3g}" for rate in rates)], cells)

    def _write_memory(self) -> str:
        most = max(len(row.memory) for row in self.running)
        cells = [[row.label, *map(format_bytes, row.memory)] for row in self.running]
        caption = "Planned: weights and their versions, gradients, optimizer and activations"
        return write_table(caption, ["method", *(f"stage {s}" for s in range(most))], cells)

    # ---- as numbers

    def to_json(self) -> str:
        """Return all numbers as JSON; NaN and infinities become null."""
        verdicts = self.verdicts
        methods: list[dict[str, Any]] = []
        for row in self.rows:
            numbers: dict[str, Any] = {
                "label": row.label,
                "arguments": dict(row.arguments),
                "reason": row.reason,
            }
            if not row.reason:
                numbers["rate"] = row.best
                numbers["verdict"] = verdicts[row.label]._asdict()
                numbers["staleness"] = row.staleness
                numbers["notes"] = row.notes
                numbers["trainings"] = [
                    {"rate": rate, "seed": seed, "final_loss": training.final, **asdict(training)}
                    for rate, seed, training in _list_trainings(row)
                ]
            methods.append(numbers)
        record = {"schema": 1, "times": self.times, "spread": self.spread, "methods": methods}
        # arguments may hold functions and objects of the caller
        return json.dumps(replace_nonfinite(record), indent=1, default=repr)

    def frame(self) -> Any:
        """Return a pandas data frame with a row for each update of each training; without pandas a
        list of dictionaries.
        """
        records = [
            {
                "label": row.label,
                "rate": rate,
                "seed": seed,
                "update": update,
                "samples": (update + 1) * training.samples_per_update,
                "seconds": seconds,
                "loss": loss,
            }
            for row in self.running
            for rate, seed, training in _list_trainings(row)
            for update, (loss, seconds) in enumerate(zip(training.losses, training.seconds_at))
        ]
        try:
            # by its name: pandas is no requirement
            return importlib.import_module("pandas").DataFrame.from_records(records)
        except ImportError:
            return records


def _list_trainings(row: MethodRow) -> list[tuple[float, int, Training]]:
    """Return (rate, seed, training) of all trainings of a method."""
    return [
        (rate, seed, training)
        for rate, by_seed in sorted(row.trainings.items(), reverse=True)
        for seed, training in sorted(by_seed.items())
    ]


def _describe_row(row: MethodRow) -> list[str]:
    """Return a method's cells under HEAD."""
    final = estimate([training.final for training in row.chosen])
    seconds = statistics.fmean((training.seconds_at or [0.0])[-1] for training in row.chosen)
    has_ended = math.isfinite(final.mean)
    return [
        row.label,
        f"{row.chosen[0].microbatches}",
        f"{row.best:.3g}",
        str(final) if has_ended else "diverged",
        # how soon a training diverges says nothing about its method's speed
        f"{seconds:.3g} s" if has_ended else "-",
        f"{row.chosen[0].devices}",
        format_bytes(max(row.memory)),
        f"{row.staleness}",
    ]


def _describe_metrics(row: MethodRow) -> dict[str, str]:
    """Return the last evaluation's values, with their interval over seeds."""
    last = [training.evaluations[-1] for training in row.chosen if training.evaluations]
    described = {}
    for name in last[0] if last else ():
        values: list[Any] = [one.get(name) for one in last]
        # a metric may be None, where it is not defined
        if name != "update" and all(isinstance(value, float) for value in values):
            described[name] = str(estimate(values))
    return described


def _show(final: float) -> str:
    return f"{final:.4g}" if math.isfinite(final) else "diverged"


def _make_curve(row: MethodRow, axis: int) -> Curve:
    """Return the smoothed losses of a method, as far as all seeds went, against samples (axis 0) or
    predicted seconds (1).
    """
    # a mean over fewer seeds would jump where one diverges
    length = min(len(training.seconds_at) for training in row.chosen)
    # (seeds, updates)
    losses = np.stack([training.smooth()[:length] for training in row.chosen])
    samples = row.chosen[0].samples_per_update * np.arange(1.0, length + 1)
    seconds = np.mean([training.seconds_at[:length] for training in row.chosen], axis=0)
    x = (samples, seconds)[axis]
    return Curve(x, losses.mean(axis=0), losses.min(axis=0), losses.max(axis=0))
