"""Plan which configuration to run, and why: splits of a model over devices, ranked by predicted
samples per second.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

from ipu_pipe.cli.arguments import COMMON, CONFIG, JSON, command, int_in, option, parse_names
from ipu_pipe.config.values import MOST_STAGES
from ipu_pipe.errors import BadInput
from ipu_pipe.plan.candidates import IN_LOCKSTEP, LOCAL, USUAL
from ipu_pipe.text import show

EPILOG = """
All figures are predictions: from the model's FLOPs and bytes and the hardware's figures, or, with --measure and on hardware that
measure-hardware described on this machine, from the times that the model's parts take here. docs/planner.md describes the method
and compares predictions with measurements.

examples:
  python tools/plan.py configs/resnet50_ipu4.yaml --hardware pod16 --devices 8
  python tools/plan.py configs/resnet50_cifar10_finest.yaml --hardware v100x8 --memory 16GB --write runs/planned.yaml
  python tools/train.py runs/planned.yaml
"""
# samples of an update; every microbatch of it is scheduled
MOST_BATCH = 10**6
SIZES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def _parse_size(text: str) -> float:
    """Convert an argument such as "16GB", "900MiB" or "16e9" to bytes."""
    match = re.fullmatch(
        r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[0-9]+)?)\s*([kMGT]i?)?B?", text.strip()
    )
    size = float(match.group(1)) * SIZES[match.group(2) or ""] if match else 0.0
    if not 0 < size < 1e18:
        raise argparse.ArgumentTypeError(
            f"{show(text)}: must be a number of bytes, such as 16GB or 900MiB"
        )
    return size


@command(
    __doc__,
    EPILOG,
    *CONFIG,
    option(
        "--hardware",
        metavar="NAME|FILE",
        help="a name in configs/hardware/, or a YAML file (default: the config's)",
    ),
    option(
        "--devices",
        type=int_in(1, MOST_STAGES),
        metavar="N",
        help="number of devices (default: all that the hardware has)",
    ),
    option(
        "--memory",
        type=_parse_size,
        metavar="SIZE",
        help="memory of a device, such as 16GB (default: the hardware's)",
    ),
    option(
        "--methods",
        metavar="A,B,...",
        type=parse_names,
        help=f"methods to rank: pipelines, {' or '.join(LOCAL)} (default: the config's, "
        f"{', '.join(USUAL)}; on hardware in "
        f"lock-step, such as IPUs, {', '.join(IN_LOCKSTEP)} and the config's if it is local)",
    ),
    option(
        "--batch",
        type=int_in(1, MOST_BATCH),
        metavar="SAMPLES",
        help="largest global batch (default: the config's)",
    ),
    option(
        "--precision",
        metavar="P",
        help="precision (default: the config's); also float16: on GPUs, with float32 masters",
    ),
    option(
        "--measure",
        action="store_true",
        default=None,
        help="time the model's parts on this machine instead of counting FLOPs (default if the "
        "hardware is this machine)",
    ),
    option(
        "--count",
        dest="measure",
        action="store_false",
        default=None,
        help="count FLOPs even on this machine's hardware",
    ),
    option(
        "--tensor-parallel",
        type=int_in(2, MOST_STAGES),
        metavar="T",
        help="also predict Megatron's tensor parallelism over T devices, for comparison (ipu_pipe "
        "does not run it)",
    ),
    option(
        "--top",
        type=int_in(1),
        default=10,
        metavar="K",
        help="configurations to print (default 10)",
    ),
    JSON,
    option(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the best configuration as a config for tools/train.py",
    ),
    option("--overwrite", action="store_true", help="replace FILE if it exists"),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.write is not None and args.write.is_file() and not args.overwrite:
        raise BadInput(f"--write: {args.write}: exists already: use another name, or --overwrite")
    from ipu_pipe.config.load import load_config
    from ipu_pipe.files import write_text
    from ipu_pipe.plan import answer
    from ipu_pipe.plan.planner import make_plan
    from ipu_pipe.plan.tensor_parallel import describe_tensor_parallel, predict_tensor_parallel
    from ipu_pipe.run.planning import make_planning_problem
    from ipu_pipe.schedule.methods import METHODS

    config = load_config(args.config, args.set)
    problem, methods, batch, how = make_planning_problem(
        config,
        args.hardware,
        devices=args.devices,
        memory=args.memory,
        methods=args.methods,
        batch=args.batch,
        precision=args.precision,
        measure=args.measure,
        say=args.print_progress,
    )
    ways = args.tensor_parallel
    devices = problem.hardware.devices
    if ways is not None and (devices % ways or batch < devices // ways):
        raise BadInput(
            f"--tensor-parallel: {ways}: must divide {devices} devices into at most {batch} "
            f"groups, a sample for each"
        )
    plan = make_plan(problem, methods, devices, batch, args.top)
    tensor = None if ways is None else predict_tensor_parallel(problem, devices, ways, batch)
    if args.json:
        compared = (
            {} if ways is None else {"tensor_parallel": None if tensor is None else asdict(tensor)}
        )
        print(json.dumps({**answer.convert_to_json(plan), **compared}, indent=1))
    else:
        compared_lines = "" if ways is None else f"\n\n{describe_tensor_parallel(tensor)}"
        args.print_result(f"{answer.format_answer(plan)}{compared_lines}\n\nmodel: {how}")
    if not plan.plans:
        why = plan.smallest_change or "the batch is too small"
        raise BadInput(f"no configuration fits {problem.hardware.name}: {why}")
    if args.write is None:
        return
    best = plan.plans[0][0]
    row = METHODS.get(config.method)
    if (
        args.methods is None
        and row is not None
        and row.flushes
        and not METHODS[best.candidate.method].flushes
    ):
        # weights that are read old are not chosen unasked
        flushing = make_plan(
            problem,
            [name for name in methods if METHODS[name].flushes],
            problem.hardware.devices,
            batch,
            1,
        )
        if not flushing.plans:
            raise BadInput(
                f"--write: every configuration that fits reads stale weights, which {config.method}"
                " does not: choose one by --methods"
            )
        args.print_progress(
            f"wrote the best configuration that flushes, as {config.method} does; "
            f"{best.candidate.method} reads stale weights"
            f" (--methods {best.candidate.method} writes it)"
        )
        plan = flushing
        best = flushing.plans[0][0]
    args.write.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        args.write,
        answer.make_planned_config(config, plan.problem, best, args.hardware or config.hardware),
    )
    commands = [f"python tools/train.py {args.write}"]
    # one process drives all devices of a kind of its own
    if best.candidate.devices > 1 and config.backend.facts.trains_on is None:
        processes = (
            f"torchrun --nproc_per_node {best.candidate.devices} tools/train.py {args.write}"
        )
        if config.backend.facts.uses_processes:
            commands = [processes]
        else:
            commands.insert(0, f"{processes} --set backend.name=distributed")
    args.print_progress(f"written: {args.write}: {', or '.join(commands)}")
