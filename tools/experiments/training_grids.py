"""Run experiments that train a table of configurations by several seeds: the files in
configs/experiments/.

    title, source     what is compared, and which table or figure of which paper it follows
    base              a complete config (see ipu_pipe.config.load)
    full              keys that replace those of `base` for the paper's own size (`--full`), for a GPU
    seeds             a list of whole numbers
    rows              label -> keys that replace those of `base`; {} is the base itself. `after: LABEL` begins with the weights at
                      the end of that row's run of the same seed, as fine-tuning does
    tune              {rates, keys, seed}: the learning rates of every row are multiplied by each of `rates` in a run with `keys`
                      and `seed`, such as a validation split of the data; the best final value
                      chooses the row's
    hours             about how long all runs take one core, from measured updates; without it, not known to be short
    measure           {name, ...}: what is measured of each run (tools.experiments.measures; test_accuracy by default)
    expect            what the paper says of the rows (tools.experiments.verdicts), a list: {better, than, by}: row `better` is
                      better than row `than` by more than `by`; {equal, to, margin}: they differ by
                      less than `margin`; with `at: time` not when both end, but at the planned time
                      at which the first row of all ends. `floor`: what both rows of an equality must
                      be better than to be trained at all; `confounded`: what else differs between
                      the rows, so that the claim cannot be told
    added             rows that were added after the results were seen: claims on them are not counted
    gaps              name -> [row, other row]: gaps.png draws how far the first is from the other
                      against the updates, and at the end
    finals            number -> line -> {its value: row}: finals.png draws the final values of rows against numbers in which
                      they differ, in place of their curves

Finished runs are not run again, so an interrupted experiment continues where it was.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Tuple

import numpy as np
from pydantic import Field, ValidationError, model_validator
from typing_extensions import Annotated, Literal

from ipu_pipe.config.faults import format_faults
from ipu_pipe.config.load import configure, merge_keys, read_yaml
from ipu_pipe.config.schema import Config
from ipu_pipe.config.values import Positive, Section, Seed
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.files import write_json
from ipu_pipe.run.build import build
from tools.experiments.experiment import Experiment, Findings, Key, Request, run_all
from tools.experiments.measures import (
    MEASURES,
    Draw,
    Measure,
    MeasureOptions,
    Result,
    Runs,
    draw_finals,
    draw_gaps,
)
from tools.experiments.plots import describe_sizes
from tools.experiments.verdicts import NOT_COUNTED, UNDECIDED, Claim, Verdict, judge

Keys = Dict[str, Any]


class Expectation(Section):
    """A paper's statement on the final values of two rows: one is better, or they are equal. Of
    accuracies 0.01 is a point.
    """

    better: Optional[str] = None
    than: Optional[str] = None
    by: float = 0.0
    equal: Optional[str] = None
    to: Optional[str] = None
    margin: Annotated[float, Field(gt=0)] = 0.01
    at: Literal["samples", "time"] = "samples"
    floor: Optional[float] = None
    confounded: Optional[str] = None

    @model_validator(mode="after")
    def _has_two_rows(self) -> "Expectation":
        named = [key for key in ("better", "than", "equal", "to") if getattr(self, key) is not None]
        if named not in (["better", "than"], ["equal", "to"]):
            raise ValueError("must be {better, than, by} or {equal, to, margin, floor}")
        return self

    @property
    def rows(self) -> Tuple[str, ...]:
        """The two rows."""
        named = (self.better, self.than, self.equal, self.to)
        return tuple(label for label in named if label is not None)

    def make_claim(self, measure: Measure, added: Collection[str] = ()) -> Claim:
        """Return the claim on the values of a measure; `added`: the rows that do not count."""
        claim = self._make_claim_alone(measure)
        if not set(added).isdisjoint(self.rows):
            return claim._replace(verdict=NOT_COUNTED)
        if self.confounded is not None:
            return claim._replace(text=f"{claim.text} ({self.confounded})", verdict=UNDECIDED)
        return claim

    def _make_claim_alone(self, measure: Measure) -> Claim:
        sign, at = measure.sign, " at equal time" if self.at == "time" else ""
        if self.equal is not None and self.to is not None:
            terms = f"margin {format(self.margin, measure.format_spec)}"
            if self.floor is not None:
                terms += f", floor {format(self.floor, measure.format_spec)}"
            text = f"{self.equal} equals {self.to} ({terms}){at}"
            gap = functools.partial(_compute_gap, self.equal, self.to, sign, 0.0)
            return Claim(text, (self.equal, self.to), gap, self.margin, self.floor, sign)
        assert self.better is not None and self.than is not None
        by = f" by more than {format(self.by, measure.format_spec)}" if self.by else ""
        gap = functools.partial(_compute_gap, self.better, self.than, sign, self.by)
        return Claim(
            f"{self.better} is better than {self.than}{by}{at}", (self.better, self.than), gap
        )


def _compute_gap(row: str, other: str, sign: int, by: float, finals: Mapping[str, float]) -> float:
    return sign * (finals[row] - finals[other]) - by


class Tuning(Section):
    """The choice of each row's learning rate: a run with each of `rates`, with these `keys` and
    `seed`.
    """

    rates: Annotated[List[Positive], Field(min_length=1)]
    keys: Keys = {}
    seed: Seed = 0


class TrainingGrid(Section):
    """The content of an experiment's file."""

    title: str
    source: str
    base: Keys
    full: Optional[Keys] = None
    seeds: Annotated[List[Seed], Field(min_length=1)]
    rows: Annotated[Dict[str, Optional[Keys]], Field(min_length=1)]
    tune: Optional[Tuning] = None
    hours: Optional[Annotated[float, Field(ge=0)]] = None
    measure: MeasureOptions = MeasureOptions()
    expect: List[Expectation] = []
    added: List[str] = []
    # name of a gap -> (row, row): their difference is drawn against the updates in gaps.png
    gaps: Dict[str, Tuple[str, str]] = {}
    finals: Dict[str, Dict[str, Dict[float, str]]] = {}

    def make_config(
        self, label: str, seed: int, full: bool = False, rate: float = 1.0, tunes: bool = False
    ) -> Keys:
        """Return the config of a run as plain data; learning rates times `rate`; `tunes`: of a run
        that chooses the rate.
        """
        row = {key: value for key, value in (self.rows[label] or {}).items() if key != "after"}
        changed = merge_keys(merge_keys(self.base, self.full or {} if full else {}), row)
        if tunes and self.tune is not None:
            changed = merge_keys(changed, self.tune.keys)
        if rate != 1.0:
            changed["optimizer"] = (
                configure(**changed).optimizer.scale_rate(rate).model_dump(mode="json")
            )
        return merge_keys(
            changed, {"seed": seed, "log": {"tensorboard": False}, "checkpoint": {"keep": 1}}
        )

    def get_earlier_row(self, label: str) -> Optional[str]:
        """Return the label of the row with whose weights a row's runs begin, None if they begin
        with new ones.
        """
        return (self.rows[label] or {}).get("after")

    def get_measure(self) -> Measure:
        """Return what is measured of its runs."""
        return MEASURES[self.measure.name]


def load_experiment(path: Path) -> Experiment:
    """Read an experiment's file and check all its configs. Raise `BadInput` with every fault."""
    try:
        grid = TrainingGrid.model_validate(read_yaml(path))
    except ValidationError as error:
        raise BadInput(format_faults(error.errors(), {}, str(path), TrainingGrid, {})) from None
    faults = []
    folders: Dict[str, str] = {}
    for label in grid.rows:
        other = folders.setdefault(name_folder(label), label)
        if other != label:
            faults.append(f"rows.{label}: its runs would share a folder with {other}; rename it")
        for full, tunes in ((False, False), (True, False), (False, True)):
            try:
                configure(**grid.make_config(label, 0, full, tunes=tunes))
            except BadInput as error:
                place = f"rows.{label} on {'full' if full else 'tune' if tunes else 'base'}:"
                faults += [fault.replace("configure:", place) for fault in error.faults]
        row, earlier = grid.rows[label] or {}, grid.get_earlier_row(label)
        if earlier is not None:
            beginning = [other for other in grid.rows if grid.get_earlier_row(other) is None]
            if earlier not in beginning:
                faults.append(
                    f"rows.{label}.after: {earlier}: must be one of {', '.join(beginning)}: rows "
                    f"with new weights"
                )
            if grid.tune is not None:
                faults.append(f"rows.{label}.after: {earlier}: cannot be combined with tune")
            if "init_from" in row:
                faults.append(
                    f"rows.{label}.init_from: {row['init_from']}: the row begins with the weights "
                    f"of `after`: omit one"
                )
    for number, entry in enumerate(grid.expect):
        for key in ("better", "than", "equal", "to"):
            label = getattr(entry, key)
            if label is not None and label not in grid.rows:
                faults.append(f"expect.{number}.{key}: {label}: must be one of the rows")
    for label in grid.added:
        if label not in grid.rows:
            faults.append(f"added: {label}: must be one of the rows")
    for name, pair in grid.gaps.items():
        faults += [
            f"gaps.{name}: {label}: must be one of the rows"
            for label in pair
            if label not in grid.rows
        ]
    faults += [
        f"finals.{name}.{line}: {label}: must be one of the rows"
        for name, lines in grid.finals.items()
        for line, rows in lines.items()
        for label in rows.values()
        if label not in grid.rows
    ]
    raise_faults([f"{path}: {fault}" for fault in faults])
    return make_experiment(path.stem, grid)


def make_experiment(name: str, grid: TrainingGrid) -> Experiment:
    """Return the experiment that trains all rows by all seeds, then compares them."""

    def make_findings(request: Request, folder: Path) -> Findings:
        labels = {*request.rows, *map(grid.get_earlier_row, request.rows)}
        length = {} if request.epochs is None else {"epochs": request.epochs}
        rows = {
            label: {**(row or {}), **length} for label, row in grid.rows.items() if label in labels
        }
        selected = grid.model_copy(update={"rows": rows})
        request.say(f"{grid.title}: {len(rows)} rows x {len(request.seeds)} seeds")
        refuse_rows(name, selected, folder, request.full)
        finals_by_rate = run_tuning(selected, folder, request)
        rates = {label: choose_rate(grid, finals) for label, finals in finals_by_rate.items()}
        return compare(
            selected, run_grid(selected, folder, request, rates), request.full, finals_by_rate
        )

    size = f"{len(grid.rows)} rows, {len(grid.seeds)} seeds"
    size += f", about {grid.hours:g} core-hours" if grid.hours is not None else ""
    hours = math.inf if grid.hours is None else grid.hours
    return Experiment(
        name,
        grid.title,
        grid.source,
        size,
        make_findings,
        list(grid.rows),
        grid.seeds,
        grid.full is not None,
        hours,
        grid.base.get("epochs", 0),
    )


# ---- the runs


def refuse_rows(name: str, grid: TrainingGrid, out: Path, full: bool) -> None:
    """Build the job of each row that has no finished run of its config in `out`, since a fault may
    come after hours of runs.

    Raise `BadInput` with every fault.
    """
    labels_by_fault: Dict[str, List[str]] = {}
    shapes: Dict[str, Dict[str, Any]] = {}
    # the runs of a row differ in these keys
    by_run = {"seed", "init_from", *(["optimizer"] if grid.tune is not None else [])}

    def list_keys(asked: Mapping[str, Keys]) -> Keys:
        return {
            key: value
            for key, value in _fill_in_defaults(asked).get("config", {}).items()
            if key not in by_run
        }

    for label in grid.rows:
        config = grid.make_config(label, 0, full)
        keys = list_keys({"config": config, "measure": grid.measure.model_dump()})
        finished = (out / name_folder(label)).glob("seed-*/measured.json")
        if any(list_keys(json.loads(file.read_text())["asked"]) == keys for file in finished):
            continue
        try:
            model = build(configure(**config)).model
            shapes[label] = {key: value.shape for key, value in model.state_dict().items()}
        except BadInput as error:
            for fault in error.faults:
                labels_by_fault.setdefault(fault, []).append(label)
    faults = [
        f"{name}: rows: {', '.join(labels)}: {fault}" for fault, labels in labels_by_fault.items()
    ]
    for label in shapes:
        earlier = grid.get_earlier_row(label)
        if earlier in shapes and shapes[earlier] != shapes[label]:
            faults.append(
                f"{name}: rows.{label}.after: {earlier}: its model has other weights than this "
                f"row's"
            )
    raise_faults(faults)


def run_tuning(
    grid: TrainingGrid, out: Path, request: Request
) -> Dict[str, Dict[float, Optional[float]]]:
    """Train every row with each learning rate, in `out/LABEL/rate-R`; return the final values by
    row, then rate.

    Rows that differ only in `tune.keys` share the runs of the first of them.
    """
    if grid.tune is None:
        return {}
    runs: Dict[Tuple[str, float], Tuple[Keys, Path]] = {}
    run_by_config: Dict[str, Tuple[str, float]] = {}
    shared: Dict[Tuple[str, float], Tuple[str, float]] = {}
    for label, rate in itertools.product(grid.rows, grid.tune.rates):
        config = grid.make_config(label, grid.tune.seed, request.full, rate, tunes=True)
        run = shared[label, rate] = run_by_config.setdefault(
            json.dumps(config, sort_keys=True), (label, rate)
        )
        runs[run] = (config, out / name_folder(run[0]) / f"rate-{rate:g}")
    results = _train_all(grid, runs, lambda key: f"tuning {key[0]}, rate x {key[1]:g}", request)
    return {
        label: {rate: results[shared[label, rate]]["final"] for rate in grid.tune.rates}
        for label in grid.rows
    }


def choose_rate(grid: TrainingGrid, finals: Mapping[float, Optional[float]]) -> float:
    """Return the rate with the best final value; the smallest if all runs diverged."""
    sign = grid.get_measure().sign
    return max(
        sorted(finals),
        key=lambda rate: -math.inf if finals[rate] is None else sign * (finals[rate] or 0.0),
    )


def run_grid(
    grid: TrainingGrid, out: Path, request: Request, rates: Mapping[str, float] = {}
) -> List[Dict[str, Any]]:
    """Train every row by every seed, each in `out/LABEL/seed-S`, and return the results by row,
    then seed.

    A run whose loss is not finite is a result: it diverged. Any other fault ends all runs. Rows
    that begin with the weights of another row are trained after all others.
    """
    results: Dict[Tuple[str, int], Result] = {}
    for labels in _split_by_order(grid):
        runs = {}
        for seed, label in itertools.product(request.seeds, labels):
            config = grid.make_config(label, seed, request.full, rates.get(label, 1.0))
            suffix = f"-rate-{rates[label]:g}" if label in rates else ""
            earlier = grid.get_earlier_row(label)
            if earlier is not None:
                if results[earlier, seed]["diverged"]:
                    results[label, seed] = {
                        **results[earlier, seed],
                        "diverged": f"row {earlier} diverged",
                    }
                    continue
                config["init_from"] = str(out / name_folder(earlier) / f"seed-{seed}")
                # other weights to begin with make another run
                suffix += f"-after-{hash_config(grid.make_config(earlier, seed, request.full))}"
            runs[label, seed] = config, out / name_folder(label) / f"seed-{seed}{suffix}"
        results.update(
            _train_all(grid, runs, lambda key: f"{key[0]}, seed {key[1]}", request) if runs else {}
        )
    return [
        {"label": label, "seed": seed, **results[label, seed]}
        for label in grid.rows
        for seed in request.seeds
    ]


def hash_config(config: Keys) -> str:
    """Return the first eight characters of a config's hash."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]


def _split_by_order(grid: TrainingGrid) -> List[List[str]]:
    """Return the rows that begin with new weights, then those that begin with another row's, if
    there are any.
    """
    first = [label for label in grid.rows if grid.get_earlier_row(label) is None]
    return [
        labels for labels in (first, [label for label in grid.rows if label not in first]) if labels
    ]


def _train_all(
    grid: TrainingGrid,
    runs: Mapping[Key, Tuple[Keys, Path]],
    describe_key: Callable[[Key], str],
    request: Request,
) -> Dict[Key, Result]:
    """Train and measure each run, a config and its folder. `describe_key` begins the line that says
    how a run ended.
    """
    options, measure = grid.measure.model_dump(), grid.get_measure()

    def describe(key: Key, result: Result) -> str:
        final = (
            "done"
            if result["final"] is None
            else f"{measure.quantity} {format(result['final'], measure.format_spec)}"
        )
        end = f"diverged: {result['diverged']}" if result["diverged"] else final
        return f"{describe_key(key)}: {end} ({result['seconds']:.0f} s)"

    arguments = {key: (config, str(folder), options) for key, (config, folder) in runs.items()}
    return run_all(run_one, arguments, request, describe)


def name_folder(label: str) -> str:
    """Return the folder name of a row."""
    return "".join(c if c.isalnum() or c in "+-._" else "_" for c in label)


def run_one(config: Keys, folder: str, options: Keys) -> Result:
    """Run and measure one run in `folder`, resume it if it was interrupted, or read its result if
    it is finished.
    """
    start, file = time.monotonic(), Path(folder) / "measured.json"
    settings, measure = configure(**config), MeasureOptions(**options)
    asked = _fill_in_defaults({"config": config, "measure": options})
    earlier = json.loads(file.read_text()) if file.is_file() else {}
    if earlier and _fill_in_defaults(earlier["asked"]) == asked:
        return {key: value for key, value in earlier.items() if key != "asked"}
    result = MEASURES[measure.name].run(
        settings, Path(folder), measure, bool(earlier.get("diverged"))
    )
    result["seconds"] = time.monotonic() - start
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"asked": asked, **result})
    return result


def _fill_in_defaults(asked: Mapping[str, Keys]) -> Keys:
    """Return the config and the measure of a run with today's default of each missing key; {} if a
    key no longer exists.
    """
    try:
        config, measure = configure(**asked["config"]), MeasureOptions(**asked["measure"])
    except (BadInput, ValidationError):
        return {}
    completed: Keys = json.loads(
        json.dumps({"config": config.to_dict(), "measure": measure.model_dump()})
    )
    return completed


# ---- the results


def compare(
    grid: TrainingGrid,
    runs: Runs,
    full: bool = False,
    finals_by_rate: Mapping[str, Mapping[float, Optional[float]]] = {},
) -> Findings:
    """Summarize the runs: a row for each label, and the verdicts on the paper's claims.
    `finals_by_rate`: of the tuning.
    """
    measure = grid.get_measure()
    runs_by_row = {label: [run for run in runs if run["label"] == label] for label in grid.rows}
    configs = {label: configure(**grid.make_config(label, 0, full)) for label in grid.rows}
    rows = {label: _summarize_row(label, configs[label], runs_by_row[label]) for label in grid.rows}
    sizes, seeds = (
        [describe_sizes(config) for config in configs.values()],
        sorted({run["seed"] for run in runs}),
    )
    setting = sizes[0] + (
        f" (row {next(iter(configs))}; others differ)" if len(set(sizes)) > 1 else ""
    )
    results: Dict[str, Any] = {"setting": setting, "full_size": full, "seeds": seeds}
    # "samples" or "time" -> row -> seed -> value
    values_at = {
        "samples": {
            label: {run["seed"]: run["final"] for run in group}
            for label, group in runs_by_row.items()
        }
    }
    # columns that only some experiments have: key of a row -> heading
    extras: Dict[str, str] = {}
    for label, finals in finals_by_rate.items():
        extras["rate"] = "rate x"
        rows[label].update(rate=choose_rate(grid, finals), tuning=dict(finals))
    if any(entry.at == "time" for entry in grid.expect):
        equal_time = min(
            (run["curve"][-1][1] for run in runs if run["final"] is not None), default=0.0
        )
        results["equal_time"] = equal_time
        extras["at_equal_time"] = f"{measure.quantity} at time {equal_time:.2f}"
        values_at["time"] = {
            label: {run["seed"]: _interpolate(run, equal_time) for run in group}
            for label, group in runs_by_row.items()
        }
        for label, by_seed in values_at["time"].items():
            rows[label]["at_equal_time"] = _compute_mean(by_seed.values())
    results["rows"] = list(rows.values())
    values = list(results["rows"][0]["values"])
    of_paper = "the paper's utilization, N/(N+2S), or 1 without draining"
    utilization = of_paper if grid.measure.fill_and_drain else "the pipeline's utilization"
    return Findings(
        results,
        [
            _judge(entry.make_claim(measure, grid.added), values_at[entry.at], runs)
            for entry in grid.expect
        ]
        + measure.judge(runs),
        f": {setting}; seeds {', '.join(map(str, seeds))}. Final {measure.quantity}, mean and "
        f"standard deviation. Time: epochs"
        f" divided by {utilization}.",
        (
            "row",
            "method",
            f"final {measure.quantity}",
            "by seed",
            "time",
            *extras.values(),
            *values,
        ),
        [
            _make_cells(row, measure)
            + [row[key] for key in extras]
            + [row["values"].get(key) for key in values]
            for row in rows.values()
        ],
        notes=list_notes(grid),
        curves=[{key: run[key] for key in ("label", "seed", "diverged", "curve")} for run in runs],
        pictures={
            file: functools.partial(draw, {"title": grid.title, **results}, runs)
            for file, draw in _list_pictures(grid, measure).items()
        },
    )


def list_notes(grid: TrainingGrid) -> List[str]:
    """Return the notes below the table."""
    if not grid.added:
        return []
    return [f"added after the results were seen, and not counted: {', '.join(grid.added)}"]


def _list_pictures(grid: TrainingGrid, measure: Measure) -> Dict[str, Draw]:
    """Return the pictures of the measure, with that of the gaps, or that of the final values, if
    the grid names some.
    """
    if grid.finals:
        quantity = measure.quantity
        return {"finals.png": functools.partial(draw_finals, finals=grid.finals, quantity=quantity)}
    if not grid.gaps:
        return dict(measure.pictures)
    draw = functools.partial(draw_gaps, gaps=grid.gaps, quantity=measure.quantity)
    return {**measure.pictures, "gaps.png": draw}


def _judge(
    claim: Claim, values: Mapping[str, Mapping[int, Optional[float]]], runs: Runs
) -> Verdict:
    """Judge a claim by `values` by row, then seed.

    None is the value of a run that diverged. It counts with its value at the beginning, as a model
    that is not trained.
    """
    finals: Dict[str, Dict[int, float]] = {label: {} for label in claim.rows}
    for seed in {run["seed"] for run in runs}:
        runs_of_seed = {
            run["label"]: run for run in runs if run["seed"] == seed and run["label"] in finals
        }
        # a seed in which all rows diverged tells nothing
        if any(values[label][seed] is not None for label in runs_of_seed):
            for label, run in runs_of_seed.items():
                value, curve = values[label][seed], run["curve"] or [[math.nan]]
                finals[label][seed] = run.get("begin", curve[0][-1]) if value is None else value
    return judge(claim, finals)


def _summarize_row(label: str, config: Config, runs: Runs) -> Dict[str, Any]:
    """Return the row of results of a row's runs: means and deviations over the seeds that did not
    diverge.
    """
    ended = [run for run in runs if run["final"] is not None]
    finals, best = (
        [run["final"] for run in ended],
        [run["best"] for run in ended if run["best"] is not None],
    )
    return {
        "label": label,
        "method": config.method,
        "args": config.method_settings(),
        "step": max(run["step"] for run in runs),
        "final": statistics.mean(finals) if ended and len(ended) == len(runs) else None,
        "std": statistics.stdev(finals) if len(finals) > 1 else None,
        "best": _compute_mean(best),
        "final_by_seed": {str(run["seed"]): run["final"] for run in runs},
        "diverged": sum(run["diverged"] is not None for run in runs),
        "normalized_time": _compute_mean([run["curve"][-1][1] for run in ended] if best else []),
        "values": {
            key: _compute_mean([run["values"][key] for run in ended]) for key in runs[0]["values"]
        },
    }


def _interpolate(run: Mapping[str, Any], time: float) -> Optional[float]:
    """Return the last value of a run's curve at a time, interpolated linearly; None if the run
    diverged.
    """
    if run["final"] is None:
        return None
    return float(
        np.interp(time, [point[1] for point in run["curve"]], [point[-1] for point in run["curve"]])
    )


def _compute_mean(values: Iterable[Optional[float]]) -> Optional[float]:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _make_cells(row: Mapping[str, Any], measure: Measure) -> List[Any]:
    """Return the cells that every row has: label, method, final value, that of each seed, time."""
    by_seed = row["final_by_seed"].values()
    if row["final"] is None:
        final = f"{row['diverged']} of {len(by_seed)} runs diverged"
    else:
        spread = "" if row["std"] is None else f" +- {format(row['std'], measure.format_spec)}"
        final = format(row["final"], measure.format_spec) + spread
    shown = ", ".join("diverged" if value is None else f"{value:.3f}" for value in by_seed)
    time_cell = None if row["normalized_time"] is None else f"{row['normalized_time']:.2f}"
    return [row["label"], row["method"], final, shown, time_cell]
