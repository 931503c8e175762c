"""Print the schedule of a training method: what each stage does when, and which weights every pass
reads.

python tools/schedule.py pipedream --stages 4 --microbatches 8
python tools/schedule.py gpipe --stages 4 --microbatches 16 --accumulate 8 --format csv
python tools/schedule.py pipelined_backprop --stages 4 --microbatches 8 --stash true --format json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any, Callable, Sequence, TextIO

from ipu_pipe.cli.arguments import command, option
from ipu_pipe.config.values import MOST_STAGES
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import compute_bubbles
from ipu_pipe.schedule.global_history import summarize_history_delays
from ipu_pipe.schedule.methods import METHODS, SCHEDULES, Method, resolve_method
from ipu_pipe.schedule.rows import format_csv, format_text
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import compute_utilization, make_schedule
from ipu_pipe.schedule.versions import VersionTable, count_weight_copies
from ipu_pipe.text import show

# Limits of the output on a terminal. JSON and CSV contain everything.
SHOWN_SLOTS = 120
SHOWN_STAGES = 64
MOST_SLOTS = 100_000
# passes of a schedule, stages times microbatches: proving and drawing takes a microsecond each,
# writing JSON or CSV ten
MOST_PASSES = {"text": 10_000_000, "csv": 2_000_000, "json": 2_000_000}
# the clock simulates pass by pass
MOST_TIMED = 500_000
# orders are laid out pass by pass, and some are planned several times
MOST_ORDERED = 30_000


def _parse_slots(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    # isdecimal also refuses signs: slots count from 0
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be two slots A:B with A < B")
    if int(last) - int(first) > MOST_SLOTS:
        raise argparse.ArgumentTypeError(f"{show(text)}: at most {MOST_SLOTS} slots can be shown")
    return int(first), int(last)


def _parse_time(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        # refused below, as the text "nan" is
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{show(text)}: must be a number >= 0")
    return seconds


def _parse_times(text: str) -> tuple[float, ...]:
    return tuple(map(_parse_time, text.split(",")))


def _parse_durations(text: str) -> tuple[float, ...]:
    times = _parse_times(text)
    if len(times) != 3:
        raise argparse.ArgumentTypeError(f"{show(text)}: must be three times F,I,W")
    return times


def _parse_bool(text: str) -> bool:
    # argparse's type=bool would take any text for true
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be true or false")
    return text.lower() == "true"


DEVICES = (
    "devices and times (with --format json also makespan, span, bubble rates and peak activations)"
)
# options that are method_args
METHOD_ARGS = (
    "schedule",
    "turn",
    "stash",
    "stages_per_device",
    "split_backward",
    "activation_limit",
    "file",
)
AXES = "changes to an asynchronous method (method_args in a config)"


@command(
    __doc__,
    "",
    # without choices: `resolve_method` names the nearest one
    option("method", metavar="METHOD", help=f"one of {', '.join(METHODS)}"),
    option(
        "--stages",
        metavar="S",
        type=int,
        required=True,
        help="stages of the pipeline, on all devices",
    ),
    option(
        "--microbatches", metavar="M", type=int, required=True, help="microbatches in the whole run"
    ),
    option(
        "--accumulate",
        metavar="N",
        type=int,
        help="microbatches per update (default: M for gpipe, pipedream_flush and those listed from "
        "interleaved_1f1b on, S for "
        "pipedream_2bw and local_sgd, 1 for the others); an incomplete last batch makes no update",
    ),
    option(
        "--format",
        choices=("text", "csv", "json"),
        default="text",
        help="text: as papers draw it (default); csv: for PyTorch's loader, flush methods only; "
        "json: for programs",
    ),
    option(
        "--slots",
        metavar="A:B",
        type=_parse_slots,
        help="text: print the slots from A up to, not including, B",
    ),
    option(
        "--drains",
        metavar="m",
        type=int,
        nargs="+",
        default=[],
        help="drain the pipeline before these microbatches (multiples of N)",
    ),
    option(
        "--stages-per-device",
        metavar="V",
        type=int,
        group=DEVICES,
        help="stages per device (there are S / V devices)",
    ),
    option(
        "--durations",
        metavar="F,I,W",
        type=_parse_durations,
        group=DEVICES,
        help="durations of a device's passes of a microbatch: forward, input gradient, weight "
        "gradient (default: 1,1,1)",
    ),
    option(
        "--link",
        metavar="C",
        type=_parse_time,
        group=DEVICES,
        help="time of a message between devices (default: 0)",
    ),
    option(
        "--work",
        metavar="W0,W1,...",
        type=_parse_times,
        group=DEVICES,
        help="relative work of each stage, if unequal; --durations are then those of a device with "
        "the mean work",
    ),
    option(
        "--split-backward",
        metavar="true|false",
        type=_parse_bool,
        group=DEVICES,
        help="whether an asynchronous method splits its backwards",
    ),
    option(
        "--activation-limit",
        metavar="X",
        type=_parse_time,
        group=DEVICES,
        help="limit of a device's activation memory, as a multiple of that of 1F1B",
    ),
    option(
        "--file",
        metavar="NAME.csv",
        group=DEVICES,
        help="method rows: a CSV file in PyTorch's format",
    ),
    option(
        "--schedule",
        choices=SCHEDULES,
        group=AXES,
        help="1f1b: one pass per slot; 1f1b_capped: at most S-s microbatches in flight on stage s; "
        "dataflow: a forward and a "
        "backward in each step",
    ),
    option(
        "--turn",
        choices=(0, 1),
        type=int,
        group=AXES,
        help="dataflow: steps between the last stage's forward and backward",
    ),
    option(
        "--stash",
        metavar="true|false",
        type=_parse_bool,
        group=AXES,
        help="backwards read their forward's weights",
    ),
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    # Durations and links determine the times of any schedule, and the order of planned ones.
    times: dict[str, Any] = {
        "durations": args.durations or (1.0, 1.0, 1.0),
        "link": args.link or 0.0,
    }
    _check_options(args)
    method = resolve_method(
        args.method, {**times, **{key: getattr(args, key) for key in METHOD_ARGS}}
    )
    if method.history is not None:
        raise BadInput(
            f"method: {method.name}: has no timeline: its stages, microbatches and delays are drawn "
            "at random (with order: schedule and delays: schedule it equals pipedream)"
        )
    # else a pass takes a slot, and there are no other times
    is_timed = method.order is not None or any(
        value is not None
        for value in (args.durations, args.link, args.stages_per_device, args.work)
    )
    # before anything is laid out: a table of all passes might not fit in memory
    _check_size(args, method, is_timed)
    # of 0 microbatches GPipe would gather 0; make_schedule has the better message for them
    default = max(1, method.accumulate_for(args.stages, args.microbatches))
    accumulate = default if args.accumulate is None else args.accumulate
    # before the checks below, which take its sizes for granted
    schedule = make_schedule(method, args.stages, args.microbatches, accumulate, args.drains)
    # works are taken relative to their mean, which must not be 0
    if args.work and (len(args.work) != args.stages or not sum(args.work)):
        raise BadInput(
            f"--work: {','.join(f'{part:g}' for part in args.work)}: must be the work of "
            f"{args.stages} stages"
        )
    if args.slots is not None and args.format != "text":
        raise BadInput(
            f"--slots: only --format text prints a part of the slots; {args.format} writes all of "
            f"them"
        )
    if args.format == "csv":
        _write_csv(schedule, sys.stdout)
    elif args.format == "json":
        extra = _compute_times(schedule, method, work=args.work or (), **times) if is_timed else {}
        _write_json(schedule, method, extra, sys.stdout)
    else:
        _write_text(schedule, method, args.slots or (0, SHOWN_SLOTS), sys.stdout)


def _check_options(args: argparse.Namespace) -> None:
    """Raise `BadInput` for options that must be at least 1 and are not."""
    at_least_1 = {
        "--stages-per-device": args.stages_per_device,
        "--activation-limit": args.activation_limit,
    }
    raise_faults(
        [
            f"{key}: {show(n)}: must be at least 1"
            for key, n in at_least_1.items()
            if n is not None and n < 1
        ]
    )


def _check_size(args: argparse.Namespace, method: Method, is_timed: bool) -> None:
    """Raise `BadInput` if the schedule has more stages or microbatches than the command can check
    and write.
    """
    if args.stages > MOST_STAGES:
        raise BadInput(f"--stages: {show(args.stages)}: must be at most {MOST_STAGES}")
    if method.order is not None:
        most_passes = MOST_ORDERED
    elif is_timed:
        most_passes = MOST_TIMED
    else:
        most_passes = MOST_PASSES[args.format]
    # numbers of stages below 1 are refused where the schedule is made
    most = most_passes // max(args.stages, 1)
    if args.microbatches > most:
        why = f"on {args.stages} stages at most {most} can be checked and written as {args.format}"
        raise BadInput(f"--microbatches: {show(args.microbatches)}: {why}")


def _write_csv(schedule: Schedule, out: TextIO) -> None:
    # first: it refuses what PyTorch's format cannot say, and a note would mislead before that
    rows = format_csv(schedule)
    if schedule.microbatches > schedule.accumulate:
        # on standard error, because the rows go to standard output
        print(
            "note: the rows contain several batches; PyTorch's loader has no updates between them",
            file=sys.stderr,
        )
    out.writelines(rows)


def _write_text(schedule: Schedule, method: Method, slots: tuple[int, int], out: TextIO) -> None:
    first, last = slots
    if first >= schedule.slot_count:
        raise BadInput(
            f"--slots: {first}:{last}: the schedule ends before slot {schedule.slot_count}"
        )
    table = VersionTable(schedule, method)
    every = "microbatch" if schedule.accumulate == 1 else f"{schedule.accumulate} microbatches"
    out.write(
        f"{method.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, an update "
        f"every {every}\n"
        f"weight versions: {method.forward_reads.value} in forwards, "
        f"{method.backward_reads.value} in backwards\n\n"
    )
    out.write(format_text(schedule, first, last, SHOWN_STAGES))
    legend = "F forward, B backward"
    if Kind.WEIGHT_GRADIENT in schedule.passes:
        legend += ", I input gradient, W weight gradient, = the second slot of a whole backward"
    if len(set(schedule.device_of_stage)) < schedule.stages:
        legend += ", @s of stage s"
    out.write(f"{legend}, * the stage's weights are updated, . idle\n\n")
    out.write(_format_stages(schedule, table))
    greatest, mean = summarize_history_delays(table)
    delay = (
        "none (no pass reads stale weights)"
        if greatest is None
        else f"at most {greatest}, mean {mean:.10g} block updates"
    )
    out.write(
        f"\nslots: {schedule.slot_count}\n"
        f"utilization: {compute_utilization(method, schedule.stages, schedule.accumulate):.4g} in "
        f"the steady state,"
        f" {schedule.busy_share():.4g} over this run\n"
        f"global-history delay: {delay}\n"
    )


def _format_stages(schedule: Schedule, table: VersionTable) -> str:
    columns: list[tuple[str, list[int]]] = [
        ("in flight", schedule.max_in_flight().tolist()),
        ("weight copies", count_weight_copies(table).tolist()),
        ("forward delay", table.greatest_lag().tolist()),
        ("backward delay", table.greatest_backward_lag().tolist()),
    ]
    rows = min(schedule.stages, SHOWN_STAGES)
    lines = ["stage  " + "  ".join(name for name, _ in columns)]
    for stage in range(rows):
        lines.append(
            f"{stage:>5}  " + "  ".join(f"{values[stage]:>{len(name)}}" for name, values in columns)
        )
    if rows < schedule.stages:
        lines.append(f"({rows} of {schedule.stages} stages shown)")
    return "\n".join(lines) + "\n"


def _compute_times(
    schedule: Schedule,
    method: Method,
    durations: Sequence[float],
    link: float,
    work: Sequence[float],
) -> dict[str, Any]:
    """Return the keys of JSON about devices and times."""
    # a whole backward frees all that its forward keeps
    share = 1.0 if method.order is None else method.order.weight_share
    return {
        "placement": list(schedule.device_of_stage),
        **compute_bubbles(schedule, durations, link, work)._asdict(),
        "peak_activations": schedule.peak_activations(share),
    }


def _write_json(schedule: Schedule, method: Method, timed: dict[str, Any], out: TextIO) -> None:
    """Write one stage's row at a time: a large schedule's text does not fit in memory."""
    table = VersionTable(schedule, method)
    greatest, mean = summarize_history_delays(table)
    M = schedule.microbatches

    def versions(
        read: Callable[[int, int, slice], Any],
    ) -> Callable[[int], list[int]]:
        # (1, M): one stage at a time
        return lambda stage: list(read(0, M, slice(stage, stage + 1))[0].tolist())

    def updates(stage: int) -> list[list[int]]:
        slots = schedule.slots(Kind.UPDATE, 0, schedule.update_count, slice(stage, stage + 1))[0]
        return [[slot, k] for k, slot in enumerate(slots.tolist())]

    parts = {
        "method": method.name,
        "stages": schedule.stages,
        "microbatches": M,
        "accumulate": schedule.accumulate,
        "slots": schedule.slot_count,
        "rows": schedule.cells,
        "utilization": compute_utilization(method, schedule.stages, schedule.accumulate),
        "forward_version": versions(table.forward),
        "backward_version": versions(table.backward),
        "updates": updates,
        "max_in_flight": schedule.max_in_flight().tolist(),
        "weight_copies": count_weight_copies(table).tolist(),
        "max_delay": greatest,
        "mean_delay": mean,
        **timed,
    }
    before = "{"
    for key, value in parts.items():
        out.write(f"{before}{json.dumps(key)}: ")
        before = ",\n"
        # a function gives the value of one stage
        if callable(value):
            out.writelines(
                (", " if stage else "[") + json.dumps(value(stage))
                for stage in range(schedule.stages)
            )
            out.write("]")
        else:
            out.write(json.dumps(value))
    out.write("}\n")
