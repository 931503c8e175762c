"""Plan which configuration to run, and why: splits of a model over devices, ranked by predicted
samples per second.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Sequence

from ipu_pipe.cli.arguments import (
    COMMON,
    CONFIG,
    JSON,
    command,
    int_in,
    option,
    parse_file,
    parse_names,
)
from ipu_pipe.config.values import MOST_STAGES
from ipu_pipe.errors import BadInput
from ipu_pipe.plan.candidates import IN_LOCKSTEP, LOCAL, USUAL
from ipu_pipe.shipped import name_commands
from ipu_pipe.text import show

# for annotations, which are not evaluated: --help must not wait for these
if TYPE_CHECKING:
    from ipu_pipe.config.schema import Config
    from ipu_pipe.plan.planner import Answer
    from ipu_pipe.plan.prediction import Problem

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
# as datasheets write them: GB are powers of ten, GiB of two
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
    # [0-9], because \d takes the digits of other scripts, too
    match = re.fullmatch(
        r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[0-9]+)?)\s*([kMGT]i?)?B?", text.strip()
    )
    size = float(match.group(1)) * SIZES[match.group(2) or ""] if match else 0.0
    # 0 also stands for text that is no size
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
        # one key for both flags, so that None can leave the choice to the hardware
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
        type=parse_file,
        metavar="FILE",
        help="write the best configuration as a config for tools/train.py",
    ),
    option("--overwrite", action="store_true", help="replace FILE if it exists"),
    option(
        "--compile-for",
        metavar="TOPOLOGY",
        help="instead: compile the config's own stages for devices that are not here, such as "
        "v5e, v6e:4x4 or blackhole, and print what memory they take there (docs/accelerators.md)",
    ),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    # refused before the search, whose result would be lost
    if args.write is not None and args.write.is_file() and not args.overwrite:
        raise BadInput(f"--write: {args.write}: exists already: use another name, or --overwrite")
    if args.compile_for is not None:
        _compile_for(args)
        return
    # import after parsing, because --help must not wait for torch
    from ipu_pipe.config.load import load_config
    from ipu_pipe.plan.planner import make_plan
    from ipu_pipe.run.planning import PlanningRequest, make_planning_problem

    config = load_config(args.config, args.set)
    request = PlanningRequest(
        args.hardware,
        args.devices,
        args.memory,
        args.methods,
        args.batch,
        args.precision,
        args.measure,
    )
    problem, methods, batch, how = make_planning_problem(config, request, args.print_progress)
    # before the search, whose result would be lost
    _check_tensor_parallel(args.tensor_parallel, problem.hardware.devices, batch)
    plan = make_plan(problem, methods, problem.hardware.devices, batch, args.top)
    _print_plan(args, plan, problem, batch, how)
    if not plan.plans:
        # without a single candidate there is none whose least change could be told
        why = plan.smallest_change or "the batch is too small"
        raise BadInput(f"no configuration fits {problem.hardware.name}: {why}")
    if args.write is not None:
        written_plan = _choose_written_plan(args, config, plan, problem, methods, batch)
        _write_best(args, config, written_plan)


def _compile_for(args: argparse.Namespace) -> None:
    """Compile the config's stages for a topology and print what the compiler says of them."""
    others = ("hardware", "devices", "memory", "methods", "batch", "precision", "measure")
    # all of these are None unless the user has given them
    for key in (*others, "tensor_parallel", "write"):
        if getattr(args, key) is not None:
            name = key.replace("_", "-")
            raise BadInput(f"--{name}: goes with a plan, not with --compile-for: leave it out")
    from ipu_pipe.config.load import load_config
    from ipu_pipe.run import compilers, compiling

    config = load_config(args.config, args.set)
    where = compilers.find_topology(args.compile_for)
    job, stages = compiling.compile_config(config, where, args.print_progress)
    if args.json:
        print(json.dumps(compiling.convert_to_record(job, where, stages), indent=1))
    args.print_result(compiling.format_stages(job, where, stages))
    file = compiling.write_hardware(where, args.config, stages)
    if file is not None:
        args.print_progress(f"written: {file}: plan with --hardware {quote(str(file))}")


def _check_tensor_parallel(ways: int | None, devices: int, batch: int) -> None:
    """Raise `BadInput` unless groups of `ways` devices divide the devices and the batch."""
    if ways is not None and (devices % ways or batch < devices // ways):
        raise BadInput(
            f"--tensor-parallel: {ways}: must divide {devices} devices into at most {batch} "
            f"groups, a sample for each"
        )


def _print_plan(
    args: argparse.Namespace, plan: Answer, problem: Problem, batch: int, how: str
) -> None:
    """Print the plan of `problem`, with the prediction of tensor parallelism if it is requested.
    `how`: the source of the model's costs.
    """
    from ipu_pipe.plan.answer import convert_to_json, format_answer
    from ipu_pipe.plan.tensor_parallel import describe_tensor_parallel, predict_tensor_parallel

    ways = args.tensor_parallel
    record = convert_to_json(plan) if args.json else {}
    text = "" if args.json else format_answer(plan)
    if ways is not None:
        tensor = predict_tensor_parallel(problem, plan.devices, ways, batch)
        record["tensor_parallel"] = None if tensor is None else asdict(tensor)
        text += f"\n\n{describe_tensor_parallel(tensor)}"
    if args.json:
        print(json.dumps(record, indent=1))
    else:
        args.print_result(f"{text}\n\nmodel: {how}")


def _choose_written_plan(
    args: argparse.Namespace,
    config: Config,
    plan: Answer,
    problem: Problem,
    methods: Sequence[str],
    batch: int,
) -> Answer:
    """Return the plan whose best configuration `--write` writes: of methods that flush, if the
    config's method flushes and `--methods` does not name another.
    """
    from ipu_pipe.plan.planner import make_plan
    from ipu_pipe.schedule.methods import METHODS

    configured = METHODS.get(config.method)
    best_method = plan.plans[0][0].candidate.method
    wants_fresh_weights = args.methods is None and configured is not None and configured.flushes
    if not wants_fresh_weights or METHODS[best_method].flushes:
        return plan
    # a method that reads stale weights changes the numbers, so the user must choose it
    flushing_methods = [name for name in methods if METHODS[name].flushes]
    # 1: only the best one is written
    flushing = make_plan(problem, flushing_methods, plan.devices, batch, 1)
    if not flushing.plans:
        raise BadInput(
            f"--write: every configuration that fits reads stale weights, which {config.method}"
            " does not: choose one by --methods"
        )
    args.print_progress(
        f"wrote the best configuration that flushes, as {config.method} does; "
        f"{best_method} reads stale weights (--methods {best_method} writes it)"
    )
    return flushing


def _write_best(args: argparse.Namespace, config: Config, plan: Answer) -> None:
    """Write the best configuration of the plan as a config and print the commands that train it."""
    from ipu_pipe.files import write_text
    from ipu_pipe.plan.answer import make_planned_config

    best = plan.plans[0][0]
    hardware = args.hardware or config.hardware
    args.write.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.write, make_planned_config(config, plan.problem, best, hardware))
    file = quote(str(args.write))
    commands = [f"python tools/train.py {file}"]
    facts = config.backend.facts
    devices = best.candidate.devices
    # one process drives all devices of a backend that trains on a device of its own
    if devices > 1 and facts.trains_on is None:
        processes = f"torchrun --nproc_per_node {devices} tools/train.py {file}"
        if facts.uses_processes:
            commands = [processes]
        else:
            # first: the plan is one of devices, which processes are and the emulator is not
            commands.insert(0, f"{processes} --set backend.name=distributed")
    args.print_progress(f"written: {args.write}: {name_commands(', or '.join(commands))}")
