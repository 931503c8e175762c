"""Run the papers' experiments: python tools/reproduce.py pb_resnet20"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence

from ipu_pipe.cli.arguments import add_quiet, folder, printing, saying, whole
from ipu_pipe.errors import BadInput, Parser
from ipu_pipe.shipped import find_configs

FOLDER = find_configs() / "experiments"
PREDICTED = {  # title and source
    "plan_local_table1": ("speedups of chunked local training on IPUs", "Laskin et al. 2020, Table 1"),
    "plan_local_table3": ("memory per IPU", "Laskin et al. 2020, Table 3"),
    "plan_2bw": ("PipeDream-2BW on 64 V100s", "Narayanan et al. 2021, Figures 6, 7 and 9"),
}
EPILOG = """\
examples:
  python tools/reproduce.py                          list the experiments
  python tools/reproduce.py pb_resnet20              run one; its tables and plots go to runs/experiments/pb_resnet20
  python tools/reproduce.py all --out docs/results   run all
  python tools/reproduce.py pb_resnet20 --full       at the paper's size, for a GPU

An experiment is a file in configs/experiments/ (or any other, by its path), or one of ipu_pipe.studies.asynchrony.
What was interrupted goes on where it was. Those that begin with plan_ run nothing: they set what the planner predicts
beside what papers printed.
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
    p.add_argument("--seeds", type=whole(0, 2**63 - 1), nargs="+", metavar="S", help="instead of the experiment's own")
    p.add_argument("--rows", nargs="+", metavar="LABEL", help="only these rows")
    p.add_argument(
        "--jobs",
        type=whole(1, 1024),
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at a time (default: cores, %(default)s)",
    )
    p.add_argument("--full", action="store_true", help="at the paper's size")
    add_quiet(p)
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    args = parser().parse_args(arguments)
    if args.seeds and len(set(args.seeds)) < len(args.seeds):
        raise BadInput(f"--seeds: {' '.join(map(str, args.seeds))}: must be different")
    known = sorted(FOLDER.glob("*.yaml"))
    say, tell = saying(args.quiet), printing(args.quiet or args.json)
    from ipu_pipe.studies import experiments
    from ipu_pipe.studies.asynchrony import delays
    from ipu_pipe.studies.asynchrony.experiments import STUDIES

    if not args.experiment:
        listed = [experiments.load_experiment(path) for path in known]
        if args.json:
            told = [(e.name, e.title, e.source) for e in listed]
            told += [(name, title, source) for name, (title, source) in PREDICTED.items()]
            told += [(delays.NAME, delays.TITLE, delays.SOURCE)]
            told += [(study.name, study.title, study.source) for study in STUDIES.values()]
            print(json.dumps([dict(zip(("experiment", "title", "source"), each)) for each in told], indent=1))
            return
        for e in listed:
            tell(f"{e.name:24s} {e.title} ({e.source}); {len(e.rows)} rows, {len(e.seeds)} seeds")
        for name, (title, source) in PREDICTED.items():
            tell(f"{name:24s} {title} ({source}); predicted")
        tell(f"{delays.NAME:24s} {delays.TITLE} ({delays.SOURCE})")
        for study in STUDIES.values():
            tell(f"{study.name:24s} {study.title} ({study.source}); {len(study.seeds)} seeds")
        return
    others = [delays.NAME, *STUDIES]
    known_here = [*PREDICTED, *others]
    asked = [*(path.stem for path in known), *known_here] if args.experiment == ["all"] else args.experiment
    chosen = [_find(name, known, known_here) for name in asked if name not in known_here]
    all_found = [_predicted(name, args) for name in asked if name in PREDICTED]
    for name in (name for name in asked if name in others):
        for option in ("full", "rows"):
            if getattr(args, option) and args.experiment != ["all"]:
                raise BadInput(f"--{option}: {name}: has one size and no rows to choose from: leave it out")
        all_found.append(_study(name, args))
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
        tell(experiments.table(found, command))
        tell("where to look:\n  " + "\n  ".join(map(str, files)))
    if args.json:
        print(json.dumps(all_found[0] if len(all_found) == 1 else all_found, indent=1))


def _study(name: str, args: argparse.Namespace) -> Dict[str, Any]:
    """Run a study whose runs are too small to keep; write and print what it gives."""
    from ipu_pipe.studies.asynchrony import delays, results
    from ipu_pipe.studies.asynchrony.experiments import STUDIES

    command, target = f"python tools/reproduce.py {name}", (args.out or args.runs) / name
    say, tell = saying(args.quiet), printing(args.quiet or args.json)
    if name == delays.NAME:
        found = delays.write_delays(command, target)
        tell(f"{delays.table(found, command)}\nwhere to look:\n  {target}")
        return found
    study = STUDIES[name]
    seeds = args.seeds or study.seeds
    say(f"{study.title}: {len(seeds)} seeds")
    runs = results.run_study(study, seeds, args.jobs, say)
    made = results.write_study(study, runs, command, target)
    tell(f"{results.table(made, command)}\nwhere to look:\n  {target}")
    return made


def _predicted(name: str, args: Any) -> Dict[str, Any]:
    """A table of predictions, printed and written."""
    from ipu_pipe.studies import predicted_2bw, predicted_local, predictions

    given = [key for key in ("rows", "seeds", "full") if getattr(args, key)]
    if given:
        raise BadInput([f"--{key}: {name} is predicted, not run: leave it out" for key in given])
    tables: Dict[str, Callable[[], predictions.Predicted]] = {
        "plan_local_table1": predicted_local.table_1,
        "plan_local_table3": predicted_local.table_3,
        "plan_2bw": predicted_2bw.table_2bw,
    }
    found = tables[name]()
    files = predictions.write_table(found, (args.out or args.runs) / name)
    tell = printing(args.quiet or args.json)
    tell(predictions.as_markdown(found))
    tell("where to look:\n  " + "\n  ".join(map(str, files)))
    return predictions.as_json(found)


def _find(name: str, known: "list[Path]", others: Sequence[str]) -> Path:
    path = next((path for path in known if path.stem == name), Path(name))
    if not path.is_file():
        raise BadInput(
            f"EXPERIMENT: {name}: must be one of {', '.join([*(p.stem for p in known), *others])}, all, or a file"
        )
    return path
