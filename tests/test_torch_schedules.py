"""Compare with PyTorch's pipelining: its runtime runs our rows, and our `rows` run its orders.

Both must have the bits of plain gradient accumulation.
"""

from __future__ import annotations

import functools
import re
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.cut.cutting import cut_model, list_crossings
from ipu_pipe.errors import end_process
from ipu_pipe.model.stages import partition
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.rows import format_csv, format_text, from_rows, read_csv
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.optimizer import make_groups, select_stage
from tests import forked
from tests.support.emulating import make_rules
from tests.support.flows import run_batches
from tests.support.slow import mark_slow

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    or not torch.distributed.is_available(),
    reason="the judge is the runtime of torch 2.13",
)

BLOCKS, WIDTH, SAMPLES = 8, 12, 3
RANKS = [2, 4]
OURS = {  # every synchronous row, by the stages on a device
    "gpipe": 1, "pipedream_flush": 1, "zb_h1": 1, "zb_h2": 1, "zb_auto": 1,
    "interleaved_1f1b": 2, "looped_bfs": 2, "interleaved_zb": 2, "zbv": 2, "v_half": 2, "v_min": 2, "dualpipe_v": 2,
}  # fmt: skip
THEIRS = {
    "ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2, "ScheduleZBVZeroBubble": 2, "ScheduleDualPipeV": 2,
}  # fmt: skip
Gradients = Dict[str, torch.Tensor]


def make_equal_blocks() -> nn.Sequential:
    """Return blocks of one width, so that any of them may begin a stage."""
    torch.manual_seed(3)
    layers = lambda: (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())  # noqa: E731
    return nn.Sequential(*[nn.Sequential(*layers()) for _ in range(BLOCKS)])


def make_block_data(microbatches: int) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(microbatches * SAMPLES, WIDTH, generator=generator)
    return x, torch.randint(0, WIDTH, (len(x),), generator=generator)


def split_data(microbatches: int) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(*(part.chunk(microbatches) for part in make_block_data(microbatches))))


def get_gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sum_gradients(order_of_block: Sequence[Sequence[int]]) -> Gradients:
    """Sum the gradients of the unsplit model by plain autograd, for each block in its own order
    of microbatches."""
    model = make_equal_blocks()
    by_microbatch = []
    for x, y in split_data(len(order_of_block[0])):
        model.zero_grad()
        (F.cross_entropy(model(x), y) / len(order_of_block[0])).backward()
        by_microbatch.append(get_gradients(model))
    return {
        name: functools.reduce(
            torch.add, [by_microbatch[m][name] for m in order_of_block[int(name.split(".")[0])]]
        )
        for name in by_microbatch[0]
    }


def sum_gradients_in_order(microbatches: int) -> Gradients:
    return sum_gradients([range(microbatches)] * BLOCKS)


def sum_gradients_as(schedule: Schedule) -> Gradients:
    """Sum in the order in which the schedule's stages finish their backwards."""
    order = schedule.slots(schedule.passes[-1], 0, schedule.microbatches).argsort(axis=1)
    return sum_gradients(np.repeat(order, BLOCKS // schedule.stages, axis=0).tolist())


def are_equal(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


# ---- PyTorch's side: in the ranks of a gloo group


def run_judge_rank(rank: int, ranks: int, folder: Path) -> None:
    """Run all of our files, then PyTorch's own classes, and write the gradients of this rank's
    stages."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        for name, v in OURS.items():
            save_gradients(run_file(rank, ranks, v, folder / f"{name}.csv"), folder, name, rank)
        for name, v in THEIRS.items():
            save_gradients(run_class(name, rank, ranks, v, folder), folder, name, rank)
        torch.distributed.barrier()  # all files of PyTorch's orders are written
        for name in (*OURS, *THEIRS):
            gradients = train_on_rank(rank, *make_method_schedule(name, ranks, folder))
            save_gradients(gradients, folder, f"ours-{name}", rank)
        torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)


def save_gradients(gradients: Gradients, folder: Path, name: str, rank: int) -> None:
    torch.save(gradients, folder / f"{name}-{rank}.pt")


def run_file(rank: int, ranks: int, v: int, path: Path) -> Gradients:
    from torch.distributed.pipelining import schedules

    rows = [line.split(",") for line in path.read_text().splitlines()]
    stages = sorted(
        {int(cell[: cell.index(kind)]) for cell in rows[rank] for kind in "FBIW" if kind in cell}
    )

    def make_runtime(runtime_stages: List[Any], M: int) -> Any:
        return schedules._PipelineScheduleRuntime(runtime_stages, M, loss_fn=F.cross_entropy)

    def load_order(runtime: Any) -> None:
        runtime._load_csv(str(path))
        if rank == 0:  # with the communication that PyTorch has added
            runtime._dump_csv(str(path.with_suffix(".lowered")), format="compute_comms")

    return run_runtime_batch(make_runtime, rank, ranks, v, stages, load_order)


def run_class(name: str, rank: int, ranks: int, v: int, folder: Path) -> Gradients:
    from torch.distributed.pipelining import schedules

    is_single = v == 1
    second = 2 * ranks - 1 - rank if "V" in name[-4:] or "ZBV" in name else rank + ranks
    stages = [rank, second][:v]

    def make_runtime(runtime_stages: List[Any], M: int) -> Any:
        return getattr(schedules, name)(
            runtime_stages[0] if is_single else runtime_stages, M, loss_fn=F.cross_entropy
        )

    def write_order(schedule: Any) -> None:
        if rank == 0:
            order = schedule._get_pipeline_order() if is_single else schedule.pipeline_order
            lines = [",".join(str(action or "") for action in order[r]) for r in range(ranks)]
            if name == "Schedule1F1B":  # Schedule1F1B numbers the forwards of the last rank from 1
                lines[-1] = re.sub(
                    r"F(\d+)", lambda match: f"F{int(match.group(1)) - 1}", lines[-1]
                )
            # replicas average their gradients there
            text = re.sub(r",\d+REDUCE_GRAD", "", "\n".join(lines) + "\n")
            (folder / f"{name}.csv").write_text(text)

    return run_runtime_batch(make_runtime, rank, ranks, v, stages, write_order)


def run_runtime_batch(
    make_runtime: Callable[..., Any],
    rank: int,
    ranks: int,
    v: int,
    stages: List[int],
    prepare_runtime: Callable[[Any], None],
) -> Gradients:
    """Run one batch of a schedule with the rank's stages; return their gradients by the unsplit
    model's names."""
    from torch.distributed.pipelining import PipelineStage

    model, count, M = make_equal_blocks(), v * ranks, 2 * ranks
    size = BLOCKS // count
    runtime_stages = [
        PipelineStage(model[s * size : (s + 1) * size], s, count, torch.device("cpu"))
        for s in stages
    ]
    schedule = make_runtime(runtime_stages, M)
    prepare_runtime(schedule)
    x, y = make_block_data(M)
    schedule.step(*([x] if 0 in stages else []), target=y if count - 1 in stages else None)
    return get_gradients(model)


# ---- our side: the emulator, and processes in the same ranks


class CapturingSGD(torch.optim.SGD):
    """SGD that records the gradients of its steps."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.gradients: Dict[Any, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.gradients[p] = p.grad.clone()
        return super().step(closure)


class OurSide:
    """A model in a schedule's stages with the work of one batch; `trained_stages` are trained
    here."""

    def __init__(self, schedule: Schedule, method: Any, trained_stages: Sequence[int]) -> None:
        self.model, self.data = make_equal_blocks(), split_data(schedule.microbatches)
        count = schedule.stages
        self.begins = [str(s * BLOCKS // count) for s in range(1, count)]
        self.part = partition(self.model, self.data[0][0], self.begins)
        table, groups = VersionTable(schedule, method), make_groups(self.model, self.part)
        self.optimizer = CapturingSGD(
            [group for s in trained_stages for group in select_stage(groups, s)]
        )
        staleness, accumulate = table.rule_lag(), len(self.data)
        rules = make_rules(self.optimizer, method, staleness, accumulate=accumulate)
        self.work = Work(F.cross_entropy, table, rules)

    def get_gradients(self) -> Gradients:
        """Return the gradients that the optimizer received, by parameter name."""
        gradients = self.optimizer.gradients
        return {name: gradients[p] for name, p in self.model.named_parameters() if p in gradients}


def train_on_emulator(schedule: Schedule, method: Any) -> Gradients:
    """Run one batch of a schedule on the emulator."""
    side = OurSide(schedule, method, range(schedule.stages))
    emulator = Emulator(side.work, side.model, side.part, side.data[0])
    emulator.step(side.data)
    emulator.close()
    return side.get_gradients()


def train_on_rank(rank: int, schedule: Schedule, method: Any) -> Gradients:
    """Run one batch of a schedule on processes; this process is `rank`."""
    from ipu_pipe.backends.processes.interpreter import Interpreter
    from ipu_pipe.backends.processes.layout import RankLayout
    from ipu_pipe.backends.processes.mail import Mail
    from ipu_pipe.backends.processes.stage import Stage, StageModel
    from ipu_pipe.backends.processes.trace import TraceRecorder

    layout, cpu = RankLayout(rank, schedule.device_of_stage), torch.device("cpu")
    side = OurSide(schedule, method, layout.stages_of_rank)
    pieces = cut_model(side.model, side.begins, side.data[0][0])
    recorder = TraceRecorder(rank, layout.stages_of_rank[0], range(1))
    mail = Mail(layout, cpu, recorder, 60.0)
    crossings = list_crossings(pieces)
    models = [
        StageModel(layout, s, pieces[s], crossings, lambda m: side.data[m], cpu)
        for s in layout.stages_of_rank
    ]
    engine = Interpreter(
        side.work, {m.stage: Stage(side.work, m, mail, recorder) for m in models}, mail, recorder
    )
    assert [k for k, _ in run_batches(engine, side.work.schedule, 0, 1)] == [0]
    engine.close()
    return side.get_gradients()


def make_method_schedule(name: str, ranks: int, folder: Path) -> Tuple[Schedule, Any]:
    """Return one of our schedules, or that of a file of PyTorch's order in the folder, and its
    method."""
    if name in THEIRS:
        v, method = THEIRS[name], resolve_method("rows", {"file": str(folder / f"{name}.csv")})
    else:
        v = OURS[name]
        method = resolve_method(name, {"stages_per_device": v} if v > 1 else {})
    return make_schedule(method, v * ranks, 2 * ranks, 2 * ranks), method


@pytest.fixture(scope="module", params=mark_slow(RANKS, lambda ranks: ranks == 2))
def judge_results(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tuple[int, Path]:
    """Return the number of ranks, and the folder of their files and gradients."""
    ranks, folder = request.param, tmp_path_factory.mktemp("ranks")
    for name in OURS:
        (folder / f"{name}.csv").write_text(
            "".join(format_csv(make_method_schedule(name, ranks, folder)[0]))
        )
    forked.fork_ranks(ranks, run_judge_rank, ranks, folder, of=forked.get_fork_server())
    return ranks, folder


def load_gradients(folder: Path, name: str, ranks: int) -> Gradients:
    """Return the gradients that all ranks wrote."""
    gradients: Gradients = {}
    for rank in range(ranks):
        gradients.update(torch.load(folder / f"{name}-{rank}.pt"))
    return gradients


def test_pytorchs_runtime_runs_our_rows(judge_results: Tuple[int, Path]) -> None:
    ranks, folder = judge_results
    expected = sum_gradients_in_order(2 * ranks)
    for name in OURS:
        schedule, method = make_method_schedule(name, ranks, folder)
        assert_all_sides_equal(name, ranks, folder, expected, schedule, method)


def assert_all_sides_equal(
    name: str, ranks: int, folder: Path, expected: Gradients, schedule: Schedule, method: Any
) -> None:
    """Assert that PyTorch's runtime, our processes and the emulator have these gradients."""
    for prefix in ("", "ours-"):
        assert are_equal(load_gradients(folder, f"{prefix}{name}", ranks), expected), name
    assert are_equal(train_on_emulator(schedule, method), expected), name


def test_files_that_pytorch_reads_and_writes_have_our_rows(
    judge_results: Tuple[int, Path],
) -> None:
    """PyTorch's runtime has read ours, and has added communication."""
    ranks, folder = judge_results
    for name in OURS:
        schedule, _ = make_method_schedule(name, ranks, folder)
        ours = read_csv(str(folder / f"{name}.csv"))
        assert ours.placement == schedule.device_of_stage
        assert format_text(
            from_rows(ours.rows, schedule.accumulate, placement=ours.placement)
        ) == format_text(schedule)
        with pytest.warns(UserWarning):
            assert read_csv(str(folder / f"{name}.lowered")).rows == ours.rows, name


def test_our_rows_run_pytorchs_orders(judge_results: Tuple[int, Path]) -> None:
    ranks, folder = judge_results
    for name in THEIRS:
        schedule, method = make_method_schedule(name, ranks, folder)
        assert schedule.in_order == (name != "ScheduleLoopedBFS"), name
        expected = sum_gradients_as(schedule)
        # another order changes the bits
        assert are_equal(expected, sum_gradients_in_order(2 * ranks)) == schedule.in_order
        assert_all_sides_equal(name, ranks, folder, expected, schedule, method)
