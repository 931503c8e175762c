"""Plan which configuration to run, and why: splits of a model over devices, ranked by predicted samples a second."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, List, Sequence, Tuple

from ipu_pipe.cli.arguments import COMMON, CONFIG, JSON, command, get_say, get_tell, option, split_names, whole
from ipu_pipe.config.values import MOST_STAGES
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.text import show

EPILOG = """
All figures are predictions: from the model's FLOPs and bytes and the hardware's figures, or, with --measure, from the times that
the model's parts take on this machine. docs/planner.md describes the method and compares predictions with measurements.

examples:
  python tools/plan.py configs/resnet50_ipu4.yaml --hardware pod16 --devices 8
  python tools/plan.py configs/resnet50_cifar10_finest.yaml --hardware v100x8 --memory 16GB --write runs/planned.yaml
  python tools/train.py runs/planned.yaml
"""
# zb_auto, which searches for each order, takes a third of the time of a plan: only by --methods
BY_DEVICE = ("interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zb", "zbv", "v_half", "v_min", "dualpipe_v")
USUAL, IN_LOCKSTEP = ("pipedream_2bw", "pipedream_flush", "gpipe", *BY_DEVICE), ("pipedream_flush",)
# no pipeline; a file of one size; as slow as interleaved_1f1b with the activations of the whole batch
UNPLANNED = ("naive", "rows", "looped_bfs")
LOCAL = ("local_greedy", "local_chunked")  # a stage is a block
MOST_BATCH = 10**6  # samples of an update: more than any run had; every microbatch of it is scheduled
SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _parse_size(text: str) -> float:
    """Convert an argument such as "16GB", "900MiB" or "16e9" to bytes."""
    match = re.fullmatch(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[0-9]+)?)\s*([kMGT]i?)?B?", text.strip())
    size = float(match.group(1)) * SIZES[match.group(2) or ""] if match else 0.0
    if not 0 < size < 1e18:
        raise argparse.ArgumentTypeError(f"{show(text)}: must be a number of bytes, such as 16GB or 900MiB")
    return size


@command(
    __doc__, EPILOG,
    *CONFIG,
    option("--hardware", metavar="NAME|FILE", help="a name in configs/hardware/, or a YAML file (default: the config's)"),
    option("--devices", type=whole(1, MOST_STAGES), metavar="N", help="number of devices (default: all that the hardware has)"),
    option("--memory", type=_parse_size, metavar="SIZE", help="memory of a device, such as 16GB (default: the hardware's)"),
    option("--methods", metavar="A,B,...", type=split_names,
           help=f"methods to rank: pipelines, {' or '.join(LOCAL)} (default: the config's, {', '.join(USUAL)}; on hardware in "
           f"lock-step, such as IPUs, {', '.join(IN_LOCKSTEP)} and the config's if it is local)"),
    option("--batch", type=whole(1, MOST_BATCH), metavar="SAMPLES", help="largest global batch (default: the config's)"),
    option("--precision", metavar="P", help="precision (default: the config's); also float16: on GPUs, with float32 masters"),
    option("--measure", action="store_true", help="time the model's parts on this machine instead of counting FLOPs"),
    option("--top", type=whole(1), default=10, metavar="K", help="configurations to print (default 10)"),
    JSON,
    option("--write", type=Path, metavar="FILE", help="write the best configuration as a config for tools/train.py"),
    option("--overwrite", action="store_true", help="replace FILE if it exists"),
    *COMMON,
)  # fmt: skip
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.write is not None and args.write.is_file() and not args.overwrite:
        raise BadInput(f"--write: {args.write}: exists already: take another name, or --overwrite")
    from ipu_pipe.config.load import load_config
    from ipu_pipe.files import write
    from ipu_pipe.hardware.description import read_hardware
    from ipu_pipe.plan import answer
    from ipu_pipe.plan.planner import make_plan
    from ipu_pipe.schedule.methods import METHODS

    config = load_config(args.config, args.set)
    named, key = (config.hardware, "hardware") if args.hardware is None else (args.hardware, "--hardware")
    if named is None:
        raise BadInput("--hardware: missing, and the config names none: must be a name of configs/hardware/ or a file")
    hardware = read_hardware(named, key)
    if args.devices is not None:
        hardware = hardware.with_devices(args.devices)
    methods = _choose_methods(config, args, hardware.lockstep)
    problem, how = _make_problem(config, args, hardware, methods)
    batch = args.batch or config.micro_batch_size * config.gradient_accumulation * config.replicas
    plan = make_plan(problem, methods, problem.hardware.devices, batch, args.top)
    if args.json:
        print(json.dumps(answer.convert_to_json(plan), indent=1))
    else:
        get_tell(args.quiet)(f"{answer.format_answer(plan)}\n\nthe model: {how}")
    if not plan.plans:
        why = plan.smallest_change or "the batch is too small"
        raise BadInput(f"no configuration fits {problem.hardware.name}: {why}")
    if args.write is None:
        return
    best, row = plan.plans[0][0], METHODS.get(config.method)
    if args.methods is None and row is not None and row.flushes and not METHODS[best.asked.method].flushes:
        # weights that are read old are not chosen unasked
        flushing = make_plan(problem, [name for name in methods if METHODS[name].flushes], problem.hardware.devices, batch, 1)
        if not flushing.plans:
            raise BadInput(f"--write: only methods that read old weights fit, as {config.method} does not: take --methods")
        get_say(args.quiet)(
            f"written is the best that flushes, as {config.method} does: {best.asked.method} reads old weights"
            f" (--methods {best.asked.method} writes it)"
        )
        plan, best = flushing, flushing.plans[0][0]
    args.write.parent.mkdir(parents=True, exist_ok=True)
    write(args.write, answer.make_planned_config(config, plan.problem, best, named))
    commands = [f"python tools/train.py {args.write}"]
    if best.asked.devices > 1 and config.backend.name != "poptorch":
        processes = f"torchrun --nproc_per_node {best.asked.devices} tools/train.py {args.write}"
        if config.backend.name == "distributed":
            commands = [processes]
        else:
            commands.insert(0, f"{processes} --set backend.name=distributed")
    get_say(args.quiet)(f"written: {args.write}: {', or '.join(commands)}")


def _make_problem(config: Any, args: argparse.Namespace, hardware: Any, methods: Sequence[str]) -> Tuple[Any, str]:
    """Return the planning problem, and how the model's costs were determined, in words."""
    from ipu_pipe.hardware.precision import PRECISIONS
    from ipu_pipe.plan.of_config import make_problem
    from ipu_pipe.run.planning import count_config_units
    from ipu_pipe.schedule.methods import METHODS

    precision = args.precision or config.precision
    if precision not in PRECISIONS:
        raise BadInput(f"--precision: {precision}: must be one of {', '.join(PRECISIONS)}")
    usable = None if args.memory is None else args.memory * hardware.device.usable_share.value
    of_blocks = any(METHODS[name].structure is not None for name in methods)
    costed, entering, blocks = count_config_units(config, args.measure, of_blocks)
    problem = make_problem(config, costed.units, entering, hardware, memory=usable, precision=precision)
    return replace(problem, blocks=blocks), costed.how


def _choose_methods(config: Any, args: argparse.Namespace, lockstep: bool) -> List[str]:
    from ipu_pipe.schedule.methods import METHODS

    pipelines = [name for name, row in METHODS.items() if row.is_pipeline and name not in UNPLANNED]
    planned = [*pipelines, *LOCAL]
    if args.methods is not None:
        faults = [f"--methods: {name}: must be of {', '.join(planned)}" for name in args.methods if name not in planned]
        faults += [
            f"--methods: {name}: devices in lock-step, such as IPUs, do not run it: must be of {', '.join(IN_LOCKSTEP)}"
            for name in args.methods
            if lockstep and name in planned and METHODS[name].order is not None
        ]
        raise_faults(faults)
        return list(args.methods)
    row = METHODS.get(config.method)
    if (row is None or row.structure is not None) and config.method not in LOCAL:
        get_say(args.quiet)(
            f"method: {config.method}: is not planned: {'others' if row is None else 'pipelines of one loss'} are, in its place"
        )
    configured = [config.method] if config.method in (LOCAL if lockstep else planned) else []
    return list(dict.fromkeys([*configured, *(IN_LOCKSTEP if lockstep else USUAL)]))
