"""Test orders of passes: the papers' bubbles and rates, PyTorch's orders, files of rows."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pytest

from ipu_pipe.backends.ipu.unsupported import check_method
from ipu_pipe.schedule.actions import Action, Kind, list_needs
from ipu_pipe.schedule.clock import Bubbles, Costs, clock, compute_bubbles, compute_busy_share
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.orders import make_device_rows
from ipu_pipe.schedule.rows import format_text, from_rows, lay_out, read_csv
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable, count_weight_copies
from tests.support.runs import list_faults

GENERATED = [name for name, method in METHODS.items() if method.order and name != "rows"]


def make_batch_schedule(
    name: str,
    P: int,
    M: int,
    durations: Sequence[float] = (1, 1, 1),
    link: float = 0.0,
    **args: Any,
) -> Schedule:
    """Return the schedule of one batch of M microbatches on P devices."""
    method = resolve_method(name, {**args, "durations": durations, "link": link})
    stages = P * (1 if method.order is None else method.order.stages_per_device)
    return make_schedule(method, stages, M, M)


def compute_idle_times(
    schedule: Schedule, durations: Sequence[float] = (1, 1, 1), link: float = 0.0
) -> Tuple[float, float]:
    """Return makespan and span without the work of a device."""
    bubbles = compute_bubbles(schedule, durations, link)
    work = schedule.microbatches * sum(durations)
    return bubbles.makespan - work, bubbles.span - work


# --- the papers' figures


def compute_v_half(P: int) -> Tuple[float, float]:
    """Return V-half's bubble and activations as its authors' generator has them, for P > 2."""
    return (3 * P - (4 if P % 2 else 7)) / 2, P // 2 + 1


def compute_v_min(P: int) -> Tuple[float, float]:
    """Return V-min's bubble and activations in the same way."""
    bubble = 2 * P - (2.5 if P % 3 else 3.5)
    return bubble, (P + 2 + (P % 3 == 2) * 2) // 3 + (P % 3 == 0)


@pytest.mark.parametrize("P, rounds", [(2, 2), (3, 3), (4, 2), (5, 2), (6, 2), (7, 3), (8, 4)])
def test_bubbles_and_activations_in_unit_times(P: int, rounds: int) -> None:
    M, edge = rounds * P, P - 1
    # name, stages of a device, makespan, most activations
    expected: List[Tuple[str, int, float, float]] = [
        ("interleaved_1f1b", 2, 1.5 * edge, (3 * P - 1) / 2),
        ("interleaved_1f1b", 3, edge, (4 * P - 1) / 3),
        ("looped_bfs", 2, 1.5 * edge, M),
        ("zb_h1", 1, edge, P),
        *[("interleaved_zb", v, edge / v, (2 * v - 1) * P / v) for v in (1, 2, 3, 4)],
        ("gpipe", 1, 3 * edge, M),
        ("pipedream_flush", 1, 3 * edge, P),
        ("zb_h2", 1, edge, 2 * P - 1),
        ("zbv", 2, edge / 2, P),
        ("dualpipe_v", 2, edge / 2, P + 0.5),
    ]
    # the V's of controllable memory are for more
    if P > 2:
        expected += [("v_half", 2, *compute_v_half(P)), ("v_min", 2, *compute_v_min(P))]
    for name, v, makespan, peak in expected:
        schedule = make_batch_schedule(name, P, M, stages_per_device=v)
        span = 0 if name in ("zb_h2", "zbv") else makespan
        assert compute_idle_times(schedule) == pytest.approx((makespan, span), abs=1e-9), name
        assert max(schedule.peak_activations()) == pytest.approx(peak), name


# p, m, F, I, W, c and the rates that the authors print (Qi et al. 2023): 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
PRINTED = [
    (8, 24, 18522, 18086, 9337, 601, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 64, 29935, 29621, 19388, 535, 0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
    (16, 48, 11347, 11248, 8132, 377, 0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
]


@pytest.mark.parametrize("row", PRINTED)
def test_rates_of_zero_bubble_to_every_printed_digit(row: Tuple[Any, ...]) -> None:
    P, M, *times, link, plain, h1, h2, one, two = row

    def measure(name: str, **args: Any) -> Bubbles:
        return compute_bubbles(make_batch_schedule(name, P, M, times, link, **args), times, link)

    assert round(measure("pipedream_flush").bubble_rate, 4) == plain
    assert round(measure("zb_h1").bubble_rate, 4) == h1
    assert round(measure("zb_h2").span_bubble_rate, 4) == h2
    for limit, printed in ((1, one), (2, two)):
        method = resolve_method("zb_auto", {"activation_limit": limit})
        assert method.order is not None
        schedule = make_batch_schedule("zb_auto", P, M, times, link, activation_limit=limit)
        assert round(compute_bubbles(schedule, times, link).span_bubble_rate, 4) <= printed
        assert max(schedule.peak_activations(method.order.weight_share)) <= limit * P + 1e-9


@pytest.mark.parametrize(
    ("P", "M", "times", "link", "rate"),  # times of a chunk, as printed
    [(16, 48, (14407, 14380, 9676), 1610, 0.0697), (24, 72, (6763, 6969, 5251), 755, 0.0638)],
)
def test_rates_of_zbv_to_every_printed_digit(
    P: int, M: int, times: Tuple[int, ...], link: int, rate: float
) -> None:
    both = [2 * time for time in times]
    schedule = make_batch_schedule("zbv", P, M, both, link)
    assert round(compute_bubbles(schedule, both, link).span_bubble_rate, 4) == rate
    assert max(schedule.peak_activations()) <= P


@pytest.mark.parametrize(("P", "M"), [(3, 8), (5, 13)])
def test_zero_bubble_takes_any_number_of_microbatches(P: int, M: int) -> None:
    assert compute_idle_times(make_batch_schedule("zb_h1", P, M)) == (P - 1, P - 1)
    assert compute_idle_times(make_batch_schedule("zb_h2", P, M)) == (P - 1, 0)


# --- laws of every order


ORDERED = [(name, P, M) for name in GENERATED for P, M in ((1, 2), (2, 4), (3, 6), (4, 8), (5, 10))]
# plans of the V failed where a device had begun all microbatches before one came back: 2 to 2 P - 2 of them
FEW = [("zbv", P, M) for P in (2, 3, 4) for M in range(1, 2 * P)] + [("zb_h1", 3, 7)]


@pytest.mark.parametrize("name, P, M", ORDERED + FEW)
def test_orders_run_flush_and_take_microbatches_in_order(name: str, P: int, M: int) -> None:
    method = METHODS[name]
    P *= method.order.stages_per_device  # type: ignore[union-attr]
    schedule = make_schedule(method, P, 2 * M, M, drains=[M])
    assert all(schedule.keeps_order(kind) for kind in schedule.passes)
    slots = {kind: schedule.slots(kind, 0, 2 * M) for kind in schedule.passes}
    whole = {(s, m) for s, m in zip(*map(list, schedule.is_whole.nonzero()))}
    for kind, table in slots.items():
        for (stage, m), slot in np.ndenumerate(table):
            for need in list_needs(Action(kind, m, stage), P, whole):
                assert slots[need.kind][need.stage, need.index] < slot
    versions = VersionTable(schedule, method)
    batches = [[m // M for m in range(2 * M)]] * P
    assert [window.tolist() for window in versions.window(0, 2 * M)] == [batches] * 2
    assert count_weight_copies(versions).tolist() == [1] * P


def test_a_whole_backward_among_split_ones_passes_its_gradient_on_at_its_end() -> None:
    schedule = from_rows([["F0", "I0", "W0"], ["F0", "B0"]], 1)
    assert format_text(schedule) == (
        "slot     0   1   2   3   4   5\nstage 0  F0  .   .   .   I0  W0*\nstage 1  .   F0  B0  =*  .   .\n"
    )
    assert compute_bubbles(schedule, (2, 3, 5), 1).makespan == 2 + 1 + 2 + 3 + 5 + 1 + 3 + 5


def test_the_busiest_device_bounds_and_stages_of_one_device_send_no_message() -> None:
    bubbles = compute_bubbles(make_batch_schedule("zb_h1", 2, 4), (1, 1, 1), work=(3, 1))
    assert bubbles.span == bubbles.makespan == 4 * 3 * 1.5 and bubbles.bubble_rate == 0
    assert compute_bubbles(make_batch_schedule("zbv", 1, 4), (1, 1, 1), 100).makespan == 12


# --- asynchronous


ASYNCHRONOUS: List[Dict[str, Any]] = [
    {"split_backward": True},
    {"split_backward": True, "activation_limit": 2},
    {"stages_per_device": 2},
]


@pytest.mark.parametrize("args", ASYNCHRONOUS)
@pytest.mark.parametrize(("P", "M"), [(2, 57), (3, 94)])
def test_a_long_run_repeats_its_middle(args: Dict[str, Any], P: int, M: int) -> None:
    """Slots, and so versions, are those of all rows laid out."""
    method = resolve_method("pipedream", args)
    stages = P * args.get("stages_per_device", 1)
    schedule = make_schedule(method, stages, M, 1)
    whole = lay_out(make_device_rows(method, stages, M))
    for kind in schedule.passes:
        assert (schedule.slots(kind, 0, M) == whole.find.tables[kind]).all()
    versions = VersionTable(schedule, method)
    delays = np.arange(M) - versions.forward(0, M)
    assert delays[:, M // 2 :].max(axis=1).tolist() == versions.greatest_lag().tolist()
    long = make_schedule(method, stages, 1_000_000, 1)
    assert long.stretches[0].find.tables[Kind.FORWARD].size < 600
    at = long.slot_count // 2
    for stage in range(stages):  # spelled out, looked up, and counted
        slots = {
            int(slot): f"{kind.value}{first + k}"
            for kind in long.passes
            for first, last in [long.count_before(kind, np.array([at, at + 40]))[stage].tolist()]
            for k, slot in enumerate(long.slots(kind, first, last)[stage])
        }
        assert long.cells(stage, at, at + 40) == [slots.get(slot) for slot in range(at, at + 40)]


# --- against PyTorch


def import_torch_schedules() -> Any:
    torch = pytest.importorskip("torch")
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 13):
        pytest.skip("PyTorch's own orders are those of torch 2.13")
    from torch.distributed.pipelining import schedules

    return schedules


def read_torch_order(schedules: Any, name: str, P: int, v: int, M: int) -> Dict[int, List[Any]]:
    """Return the order of one of PyTorch's classes, whose instance needs only its sizes."""
    theirs = getattr(schedules, name).__new__(getattr(schedules, name))
    theirs.pp_group_size, theirs._n_microbatches, theirs.n_local_stages = P, M, v
    theirs._stages, theirs.num_stages, theirs._num_stages = (
        [types.SimpleNamespace()] * v,
        P * v,
        P * v,
    )
    theirs.number_of_rounds = max(1, M // P)
    theirs.microbatches_per_round = M // theirs.number_of_rounds
    order = {}
    for rank in range(P):
        theirs.rank = theirs._stage_index = rank
        theirs._stage = types.SimpleNamespace(stage_index=rank, group_size=P, group_rank=rank)
        calculate = getattr(theirs, "_calculate_single_rank_operations", None)
        order[rank] = calculate(rank) if calculate else None
    orders: Dict[int, Any] = theirs._get_pipeline_order() if None in order.values() else order
    return orders


@pytest.mark.parametrize("theirs, v, ours", [
    ("ScheduleGPipe", 1, "gpipe"),
    ("ScheduleInterleaved1F1B", 2, "interleaved_1f1b"),
    ("ScheduleInterleaved1F1B", 3, "interleaved_1f1b"),
    ("ScheduleInterleavedZeroBubble", 1, "interleaved_zb"),
    ("ScheduleDualPipeV", 2, "dualpipe_v"),
])  # fmt: skip
@pytest.mark.parametrize(("P", "M"), [(2, 4), (4, 8), (4, 12)])
def test_orders_that_are_meant_to_be_pytorchs_are(
    theirs: str, v: int, ours: str, P: int, M: int, tmp_path: Path
) -> None:
    """Others come in another order there; tests/test_torch_schedules.py trains by all of them."""
    order = read_torch_order(import_torch_schedules(), theirs, P, v, M)
    cells = [
        [str(cell or "") for cell in order[rank] if "REDUCE" not in str(cell)] for rank in range(P)
    ]
    path = tmp_path / "theirs.csv"
    path.write_text("".join(",".join(row) + "\n" for row in cells))
    schedule = make_schedule(resolve_method("rows", {"file": str(path)}), P * v, M, M)
    same = make_batch_schedule(ours, P, M, stages_per_device=v)
    assert format_text(same) == format_text(schedule)
    assert same.device_of_stage == schedule.device_of_stage


# --- bad input


CANNOT = "the schedule cannot run: "


@pytest.mark.parametrize("text, where", [
    ("0F0,0B0\n1F0,1X0\n", "row 2, cell 2: 1X0: "),
    ("0F0,0F0,0B0\n", "row 1, cell 2: 0F0: "),
    ("0F0,0B0\n0F1\n", "row 2, cell 1: 0F1: stage 0 "),
    ("0F0,0B0\n2F0,2B0\n", "stage 1: "),
    ("0F0,0B0\n,,\n", "row 2: "),
    ("(0F1;0F0)OVERLAP_F_B\n", "row 1, cell 1: "),
    ("", ""),
    ("0F0,0B0,0F1\n", "row 1: B1 on stage 0"),  # missing
    ("0F0,0I0\n", "row 1: W0 on stage 0"),
    ("0F0,0I0,0W0,,0B0\n", "row 1, cell 5: B0 on stage 0"),
    ("0F0,0I0,0B0,0W0\n", "row 1, cell 3: B0 on stage 0"),  # all three of a microbatch
    ("0B0,0F0\n", f"row 1, cell 1: {CANNOT}B0 on stage 0 waits for F0 on stage 0"),
    ("0F0,0B0,0F1,0W1,,0I1\n", f"row 1, cell 4: {CANNOT}W1 on stage 0"),
    ("0F0,0W0,0B0\n", f"row 1, cell 2: {CANNOT}W0 on stage 0"),
])  # fmt: skip
def test_rows_that_cannot_run_name_the_file_the_row_and_the_cell(
    text: str, where: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    (fault,) = list_faults(lambda: lay_out(read_csv(str(path))))
    assert fault.startswith(f"{path}: {where}")


@pytest.mark.parametrize("text, cell", [
    ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", "row 1, cell 2: (0F1;0B0)OVERLAP_F_B"),
    ("0F0,,,0B0\n,1F0,1I0,1W0\n", "row 2, cell 3: 1I0"),
])  # fmt: skip
def test_ipus_name_the_cell_that_they_cannot_run(text: str, cell: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    (fault,) = check_method(resolve_method("rows", {"file": str(path)}))
    assert fault.startswith("method: rows: ") and f"{path}: {cell}" in fault
    for name, args in (("zb_h1", {}), ("pipedream", {"split_backward": True})):
        (fault,) = check_method(resolve_method(name, args))
        assert fault.startswith(f"method: {name}: ")


WHOLE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
SPLIT = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1W0,1I1,1W1\n"
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")


@pytest.mark.parametrize("written, meant", [
    (SPLIT.replace("I", "B"), SPLIT),  # PyTorch before FULL_BACKWARD was B
    (WHOLE + "2F0,2B0,2W0,2F1,2B1\n", WHOLE + "2F0,2I0,2W0,2F1,2B1\n"),  # by microbatch: a B without W is whole
    ("0F0,(0F1;0B0)OVERLAP_F_B,0B1,0W0,0W1\n", "0F0,0F1,0I0,0I1,0W0,0W1\n"),
    ("0F0,( 0F1; 0B0 )OVERLAP_F_B,0B1\n", "0F0,0F1,0B0,0B1\n"),
    (SPLIT.lower(), SPLIT),
    (SPLIT.replace(",", " ,\t"), SPLIT),
    (SPLIT.replace("\n", ",,,\n") + "\n \n", SPLIT),
    ("\ufeff" + SPLIT, SPLIT),
    (SPLIT.replace("\n", "\r\n"), SPLIT),
    (SPLIT.replace("\n", "\r\r\n"), SPLIT),  # csv.writer on Windows without newline=""
    (SPLIT.replace("0F0,", '"0F0",None,'), SPLIT),
])  # fmt: skip
def test_other_spellings_of_rows_are_read_as_the_same_rows(
    written: str, meant: str, tmp_path: Path
) -> None:
    files = tmp_path / "written.csv", tmp_path / "meant.csv"
    for file, text in zip(files, (written, meant)):
        file.write_bytes(text.encode())
    read, expected = (read_csv(str(file)) for file in files)
    assert (read.rows, read.placement) == (expected.rows, expected.placement)
    tables = [lay_out(rows).find.tables for rows in (read, expected)]
    assert all((tables[0][kind] == tables[1][kind]).all() for kind in tables[1])


def test_communication_in_rows_is_skipped_with_one_warning(tmp_path: Path) -> None:
    """Story: each cell of a lowered schedule was a fault: 54 lines for a file of two devices."""
    plain, lowered = tmp_path / "plain.csv", tmp_path / "lowered.csv"
    plain.write_text(SPLIT)
    actions = ",".join(f"0{kind}{'' if kind.endswith('SHARD') else 1}" for kind in COMMUNICATION)
    lowered.write_text(SPLIT.replace("0F1", f"{actions},0F1"))
    with pytest.warns(UserWarning) as records:
        assert read_csv(str(lowered)).rows == read_csv(str(plain)).rows
    assert len(records) == 1 and str(lowered) in str(records[0].message)
    assert all(f"1 {kind}" in str(records[0].message) for kind in COMMUNICATION)
    lowered.write_text(WHOLE + "2UNSHARD,2RESHARD\n")
    assert [fault.split(": ")[1] for fault in list_faults(read_csv, str(lowered))] == ["row 3"]


@pytest.mark.parametrize("name, args, stages, microbatches, key", [
    ("zbv", {}, 3, 4, "stages: 3: "),
    ("interleaved_1f1b", {"stages_per_device": 3}, 4, 4, "stages: 4: "),
    ("interleaved_1f1b", {"stages_per_device": 2}, 8, 9, "accumulate: 9: "),
    ("dualpipe_v", {}, 4, 3, "accumulate: 3: "),
    ("zbv", {"stages_per_device": 4}, 8, 8, "stages_per_device: 4: "),
    ("gpipe", {"stages_per_device": 2}, 4, 4, "stages_per_device: 2: "),
    ("zb_h1", {"activation_limit": 2}, 4, 4, "method_args.activation_limit: 2: "),
    # ended in a TypeError
    ("zb_h1", {"split_backward": False}, 4, 4, "method_args.split_backward: false: "),
    ("rows", {}, 4, 4, "method_args.file: "),
    ("rows", {"file": "no/such.csv"}, 4, 4, "no/such.csv: "),
])  # fmt: skip
def test_impossible_sizes_and_arguments_are_refused(
    name: str, args: Dict[str, Any], stages: int, microbatches: int, key: str
) -> None:
    (fault,) = list_faults(
        lambda: make_schedule(resolve_method(name, args), stages, microbatches, microbatches)
    )
    assert fault.startswith(key)


# --- stages that share devices


def test_stages_of_a_pipeline_take_turns_on_fewer_devices() -> None:
    """Four stages of 1F1B run on two devices, each device's row in the order of slots."""
    P, M, placement = 4, 6, (0, 0, 1, 1)
    schedule = make_schedule(METHODS["pipedream_flush"], P, M, M)
    times = clock(schedule, Costs([1.0] * P, [1.0] * P, [0.0] * P, link=0.25), placement=placement)
    rows: List[List[Tuple[int, int, int, Action]]] = [[], []]
    for order, kind in enumerate(schedule.passes):
        for (stage, m), slot in np.ndenumerate(schedule.slots(kind, 0, M)):
            rows[placement[stage]].append((slot, order, stage, Action(kind, m, stage)))
    queues = [[action for *_, action in sorted(row, key=lambda row: row[:3])] for row in rows]
    end: Dict[Action, float] = {}
    free = [0.0, 0.0]
    while any(queues):
        for device, queue in enumerate(queues):
            needed = list_needs(queue[0], P) if queue else []
            if queue and all(need in end for need in needed):
                arrivals = [end[need] + 0.25 * (placement[need.stage] != device) for need in needed]
                end[queue.pop(0)] = free[device] = max([free[device], *arrivals]) + 1
    for action, moment in end.items():
        assert times.end[action.kind][action.stage, action.index] == moment
    assert compute_busy_share(schedule, range(P)) == schedule.busy_share() == M / (M + P - 1)
    alone = clock(schedule, Costs([1.0] * P, [1.0] * P, [0.0] * P), placement=placement).finish
    assert compute_busy_share(schedule, placement) == P * M / alone > schedule.busy_share()
    assert compute_busy_share(schedule, (0,) * P) == 1.0


def test_activations_of_a_device_are_the_greatest_sum_over_its_stages() -> None:
    """The sum of each stage's peak would be too much, since the peaks come at different times."""
    schedule, sizes = make_batch_schedule("zbv", 2, 8), [5.0, 1.0, 2.0, 7.0]
    slots = {kind: schedule.slots(kind, 0, 8) for kind in schedule.passes}
    sums = np.zeros((2, schedule.slot_count))
    for stage, size in enumerate(sizes):
        for m in range(8):
            begin, end = slots[Kind.FORWARD][stage, m], slots[Kind.WEIGHT_GRADIENT][stage, m]
            sums[schedule.device_of_stage[stage], begin : end + 1] += size
    assert schedule.peak_activations(sizes=sizes) == sums.max(axis=1).tolist()
    assert schedule.peak_activations(sizes=sizes)[0] < sum(
        size * count for size, count in zip(sizes, schedule.max_in_flight()) if size in (5.0, 7.0)
    )
    whole = make_schedule(METHODS["pipedream_flush"], 4, 8, 8)
    assert whole.peak_activations(sizes=[1.0] * 4, placement=(0, 0, 1, 1)) == [7.0, 3.0]
