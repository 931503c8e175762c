"""Run the papers' experiments: python tools/reproduce.py pb_resnet20"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Optional, Sequence

from ipu_pipe.cli.arguments import folder, say
from ipu_pipe.errors import BadInput, Parser
from ipu_pipe.shipped import configs

FOLDER = configs() / "experiments"
EPILOG = """\
examples:
  python tools/reproduce.py                          list the experiments
  python tools/reproduce.py pb_resnet20              run one; its tables and plots go to runs/experiments/pb_resnet20
  python tools/reproduce.py all --out docs/results   run all
  python tools/reproduce.py pb_resnet20 --full       at the paper's size, for a GPU

An experiment is a file in configs/experiments/ (or any other, by its path). What was interrupted goes on where it was.
Exit codes: 0 done (also where results differ from what was expected: the table says so), 2 bad input, 1 fault, 130 Ctrl-C.
"""


def parser() -> Parser:
    """The command line."""
    p = Parser(prog="tools/reproduce.py", description="Run the papers' experiments.", epilog=EPILOG)
    p.add_argument("experiment", metavar="EXPERIMENT", nargs="*", help="names, files, or all; none lists them")
    p.add_argument("--json", action="store_true", help="print the results as JSON")
    p.add_argument(
        "--out", type=folder, metavar="DIR", help="tables and plots go to DIR/EXPERIMENT (default: with the runs)"
    )
    p.add_argument(
        "--runs", type=folder, default=Path("runs/experiments"), metavar="DIR", help="where runs are kept (%(default)s)"
    )
    p.add_argument("--seeds", type=int, nargs="+", metavar="S", help="instead of the experiment's own")
    p.add_argument("--rows", nargs="+", metavar="LABEL", help="only these rows")
    p.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at a time (default: cores, %(default)s)",
    )
    p.add_argument("--full", action="store_true", help="at the paper's size")
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    args = parser().parse_args(arguments)
    if args.jobs < 1:
        raise BadInput(f"--jobs: {args.jobs}: must be at least 1")
    if args.seeds and len(set(args.seeds)) < len(args.seeds):
        raise BadInput(f"--seeds: {' '.join(map(str, args.seeds))}: must be different")
    known = sorted(FOLDER.glob("*.yaml"))
    from ipu_pipe.studies import experiments

    if not args.experiment:
        listed = [experiments.load_experiment(path) for path in known]
        if args.json:
            print(json.dumps([{"experiment": e.name, "title": e.title, "source": e.source} for e in listed], indent=1))
            return
        for e in listed:
            print(f"{e.name:24s} {e.title} ({e.source}); {len(e.rows)} rows, {len(e.seeds)} seeds")
        return
    chosen = known if args.experiment == ["all"] else [_find(name, known) for name in args.experiment]
    all_found = []
    for path in chosen:
        experiment = experiments.load_experiment(path)
        unknown = [label for label in args.rows or () if label not in experiment.rows]
        if unknown:
            raise BadInput(f"--rows: {unknown[0]}: must be of {', '.join(experiment.rows)}")
        if args.rows:
            keep = {label: experiment.rows[label] for label in args.rows}
            expect = [entry for entry in experiment.expect if {entry["better"], entry["than"]} <= set(keep)]
            experiment = replace(experiment, rows=keep, expect=expect)
        seeds = args.seeds or experiment.seeds
        folder = args.runs / (experiment.name + ("-full" if args.full else ""))
        say(f"{experiment.title}: {len(experiment.rows)} rows x {len(seeds)} seeds")
        runs = experiments.run_experiment(experiment, folder, seeds, args.jobs, args.full, say)
        found = experiments.results(experiment, runs, args.full)
        command = f"python tools/reproduce.py {experiment.name}" + (" --full" if args.full else "")
        target = args.out / experiment.name if args.out else folder
        files = experiments.write_results(found, runs, list(experiment.rows), command, target)
        all_found.append(found)
        if not args.json:
            print(experiments.table(found, command))
            print("where to look:\n  " + "\n  ".join(map(str, files)))
    if args.json:
        print(json.dumps(all_found[0] if len(all_found) == 1 else all_found, indent=1))


def _find(name: str, known: "list[Path]") -> Path:
    path = next((path for path in known if path.stem == name), Path(name))
    if not path.is_file():
        raise BadInput(f"EXPERIMENT: {name}: must be one of {', '.join(p.stem for p in known)}, all, or a file")
    return path
