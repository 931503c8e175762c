"""Plan which configuration to run, and why: splits of a model over devices, ranked by predicted samples a second."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from ipu_pipe.cli.arguments import add_quiet, add_set, add_traceback, count, get_say, get_tell, take_config, whole
from ipu_pipe.config.values import MOST_STAGES
from ipu_pipe.errors import BadInput, Parser, show_traceback

EPILOG = """
All figures are predicted: from the model's FLOPs and bytes and the figures of the hardware's file, or, with --measure, from the
times that the model's parts take on this machine. docs/planner.md says how, and how well it agrees with what was measured.

examples:
  python tools/plan.py configs/resnet50_ipu4.yaml --hardware pod16 --devices 8
  python tools/plan.py configs/resnet50_cifar10_finest.yaml --hardware v100x8 --memory 16GB --write runs/planned.yaml
  python tools/train.py runs/planned.yaml
"""
USUAL, IN_LOCKSTEP = ("pipedream_2bw", "pipedream_flush", "gpipe"), ("pipedream_flush",)
LOCAL = ("local_greedy", "local_chunked")  # a stage is a block
METHODS_HELP = (
    f"pipelines, or {' or '.join(LOCAL)}, a block a stage (default: the config's and {', '.join(USUAL)}; on hardware in "
    f"lock-step, such as IPUs, {' and '.join(IN_LOCKSTEP)} and a config's local method)"
)
MOST_BATCH = 10**6  # samples of an update: more than any run had; every microbatch of it is scheduled
SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _parse_size(text: str) -> float:
    """Convert an argument such as "16GB", "900MiB" or "16e9" to bytes."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kMGT]i?)?B?", text.strip())
    try:
        assert match is not None
        size = float(match.group(1)) * SIZES[match.group(2) or ""]
    except (AssertionError, ValueError):
        size = 0.0
    if not 0 < size < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of bytes, such as 16GB or 900MiB")
    return size


def make_parser() -> Parser:
    """Return the command's parser."""
    p = Parser(prog="tools/plan.py", description=__doc__, epilog=EPILOG)
    p.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file")
    add_set(p, "replace keys of the config")
    p.add_argument(
        "--hardware", metavar="NAME|FILE", help="of configs/hardware/, or a file like those (default: the config's)"
    )
    p.add_argument(
        "--devices",
        type=whole(1, MOST_STAGES),
        metavar="N",
        help="how many (default: as many as the hardware's file says)",
    )
    p.add_argument(
        "--memory", type=_parse_size, metavar="SIZE", help="of a device, such as 16GB, in place of the file's"
    )
    p.add_argument("--methods", metavar="A,B,...", help=METHODS_HELP)
    p.add_argument(
        "--batch", type=whole(1, MOST_BATCH), metavar="SAMPLES", help="greatest global batch (default: the config's)"
    )
    p.add_argument(
        "--precision", metavar="P", help="in place of the config's; also float16, of GPUs, with a float32 master copy"
    )
    p.add_argument("--measure", action="store_true", help="time the model's parts here instead of counting their FLOPs")
    p.add_argument("--top", type=count, default=10, metavar="K", help="how many configurations to show (default 10)")
    p.add_argument("--json", action="store_true", help="for programs")
    p.add_argument("--write", type=Path, metavar="FILE", help="write the best one as a config that tools/train.py runs")
    p.add_argument("--overwrite", action="store_true", help="replace FILE")
    add_quiet(p)
    add_traceback(p)
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    args = make_parser().parse_args(arguments)
    args.config = take_config(args, "configs/resnet50_ipu4.yaml")
    if args.write is not None and args.write.is_file() and not args.overwrite:
        raise BadInput(f"--write: {args.write}: exists already: take another name, or --overwrite")
    with show_traceback(args.traceback):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    from ipu_pipe.config.load import load_config
    from ipu_pipe.files import write
    from ipu_pipe.plan import answer
    from ipu_pipe.plan.answer import make_planned_config
    from ipu_pipe.plan.planner import make_plan

    config = load_config(args.config, args.set)
    hardware = _read_hardware(config, args)
    methods = _choose_methods(config, args, hardware.lockstep)
    problem, how = _make_problem(config, args, hardware, methods)
    batch = args.batch or config.micro_batch_size * config.gradient_accumulation * config.replicas
    plan = make_plan(problem, methods, problem.hardware.devices, batch, args.top)
    if args.json:
        print(json.dumps(answer.convert_to_json(plan), indent=1))
    else:
        get_tell(args.quiet)(f"{answer.format_answer(plan)}\n\nthe model: {how}")
    if not plan.plans:
        raise BadInput(
            f"no configuration fits {problem.hardware.name}: {plan.smallest_change or 'the batch is too small'}"
        )
    if args.write is not None:
        named = args.hardware if args.hardware is not None else config.hardware
        args.write.parent.mkdir(parents=True, exist_ok=True)
        write(args.write, make_planned_config(config, plan.problem, plan.plans[0][0], named))
        get_say(args.quiet)(
            f"written: {args.write}: {_format_commands(config, args.write, plan.plans[0][0].asked.devices)}"
        )


def _format_commands(config: Any, path: Path, devices: int) -> str:
    """Return the command lines that train by the planned config."""
    here = f"python tools/train.py {path}"
    if devices == 1 or config.backend.name == "poptorch":
        return here
    processes = f"torchrun --nproc_per_node {devices} tools/train.py {path}"
    return (
        processes if config.backend.name == "distributed" else f"{processes} --set backend.name=distributed, or {here}"
    )


def _read_hardware(config: Any, args: argparse.Namespace) -> Any:
    from ipu_pipe.hardware.description import read_hardware

    if args.hardware is None and config.hardware is None:
        raise BadInput("--hardware: missing, and the config names none: must be a name of configs/hardware/ or a file")
    hardware = read_hardware(args.hardware) if args.hardware is not None else read_hardware(config.hardware, "hardware")
    return hardware if args.devices is None else hardware.with_devices(args.devices)


def _make_problem(config: Any, args: argparse.Namespace, hardware: Any, methods: Sequence[str]) -> Tuple[Any, str]:
    """Return what is to be planned, and how the model's figures were plan, in words."""
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

    pipelines = [name for name, row in METHODS.items() if row.is_pipeline and name != "naive"]
    planned = [*pipelines, *LOCAL]
    if args.methods is not None:
        asked = [name for name in args.methods.split(",") if name]
        faults = [f"--methods: {name}: must be of {', '.join(planned)}" for name in asked if name not in planned]
        if faults or not asked:
            raise BadInput(faults or f"--methods: {args.methods}: must be names of methods, by commas")
        return asked
    if METHODS[config.method].structure is not None and config.method not in LOCAL:
        get_say(args.quiet)(f"method: {config.method}: is not planned: pipelines of one loss are, in its place")
    configured = [config.method] if config.method in (LOCAL if lockstep else planned) else []
    return list(dict.fromkeys([*configured, *(IN_LOCKSTEP if lockstep else USUAL)]))
