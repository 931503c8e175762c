"""Find the learning rates that are stable under delay, for a run's stages or in the papers'
figures.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict

from ipu_pipe.cli.arguments import COMMON, JSON, SET, command, option, parse_folder
from ipu_pipe.cli.stability import CURVATURE, examine_config
from ipu_pipe.errors import BadInput
from ipu_pipe.shipped import find_config, list_configs
from ipu_pipe.text import show, suggest
from tools.experiments.reproduce import RUNS

OUT = Path("runs/stability")
# figure -> the experiment of tools/reproduce.py that draws it
EXPERIMENTS = {
    "pipemare_17": "pipemare_recompute_resnet20",
    "pipemare_18": "pipemare_recompute_translation",
}
EPILOG = """
examples:
  python tools/stability.py                                     list the figures
  python tools/stability.py configs/mlp_digits.yaml             the stages of a run: delays, largest stable rates, what helps
  python tools/stability.py configs/mlp_digits.yaml --json --set method=pipemare optimizer.lr=0.5
  python tools/stability.py pipemare_5a pb_5                    figures as data and pictures, into runs/stability
  python tools/stability.py all --out docs/results/stability    all figures that need no training

The curvature is the largest eigenvalue of the training loss's Hessian at the start of the run (init_from sets another start),
found by power iteration, or given by --curvature. docs/stability.md states the theory's assumptions. pipemare_17 and pipemare_18
train: they run experiments of tools/reproduce.py.
"""


@command(
    __doc__,
    EPILOG,
    option(
        "what", metavar="CONFIG|FIGURE", nargs="*", help="a YAML file, or names of figures, or all"
    ),
    SET,
    JSON,
    option(
        "--out",
        type=parse_folder,
        metavar="DIR",
        help="folder for figures (default: runs/stability)",
    ),
    *CURVATURE,
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    # `--set a=1 CONFIG`: the config was taken for an override
    if not args.what and args.set and "=" not in args.set[-1]:
        args.what = [args.set.pop()]
    path = find_config(args.what[0]) if len(args.what) == 1 else None
    is_run = path is not None and (path / "config.yaml").is_file()
    if path is not None and (path.suffix in (".yaml", ".yml") or path.is_file() or is_run):
        if args.out is not None:
            raise BadInput(
                f"--out: {args.out}: is where figures go; of a config nothing is written"
            )
        examine_config(args.what[0], args)
    else:
        _make_figures(args)


def _make_figures(args: argparse.Namespace) -> None:
    from tools.experiments.theory_figures import FIGURES

    known = [*FIGURES, *EXPERIMENTS]
    unknown = [name for name in args.what if name not in known and name != "all"]
    if unknown:
        allowed = (
            f"is not a file, nor one of {', '.join(known)}, "
            f"all{suggest(unknown[0], [*known, *list_configs()])}"
        )
        raise BadInput(f"CONFIG|FIGURE: {show(unknown[0])}: {allowed}")
    if args.set:
        raise BadInput("--set: changes keys of a config, and figures have none: name a YAML file")
    if not args.what:
        listed = {name: (make.__doc__ or "").strip() for name, make in FIGURES.items()}
        listed.update(
            {
                name: f"Training runs: tools/reproduce.py {experiment}."
                for name, experiment in EXPERIMENTS.items()
            }
        )
        args.print_result("\n".join(f"{name:12s} {summary}" for name, summary in listed.items()))
        if args.json:
            print(json.dumps(listed, indent=1))
        return
    from ipu_pipe.report.plots import check_plots

    check_plots()
    names = list(
        dict.fromkeys(name for word in args.what for name in (FIGURES if word == "all" else [word]))
    )
    figures = {
        name: _run_experiment(name, args) if name in EXPERIMENTS else _make_figure(name, args)
        for name in names
    }
    if args.json:
        print(json.dumps(figures, indent=1))


def _make_figure(name: str, args: argparse.Namespace) -> Any:
    from ipu_pipe.files import replace_nonfinite, write_text
    from tools.experiments.theory_figures import FIGURES, draw

    out: Path = args.out or OUT
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: {out}: cannot be written: {error.strerror or error}") from None
    args.print_progress(f"{name} ...")
    figure = FIGURES[name]()
    data: Dict[str, Any] = {
        "figure": name,
        **replace_nonfinite(figure._asdict()),
        "command": f"python tools/stability.py {name}",
    }
    draw(figure, out / f"{name}.png")
    write_text(out / f"{name}.json", json.dumps(data) + "\n")
    title = figure.title.replace("\n", " ")
    text = (
        f"{name}: {title}\n  {figure.source}\n  {figure.seen}\n  {out / name}.json, "
        f"{out / name}.png"
    )
    args.print_result(text)
    return data


def _run_experiment(name: str, args: argparse.Namespace) -> Any:
    """Make a figure of training runs, as tools/reproduce.py does."""
    from tools.experiments.catalogue import find_experiments
    from tools.experiments.experiment import Request

    (experiment,) = find_experiments([EXPERIMENTS[name]])
    request = Request(RUNS, jobs=os.cpu_count() or 1, say=args.print_progress)
    return experiment.publish(request, args.out or OUT, args.print_result)
