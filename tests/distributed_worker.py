"""Worker processes of test_distributed.py: each runs all cases one after another, in one process group."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.backends.processes.nccl import list_links
from ipu_pipe.backends.processes.ties import find_ties
from ipu_pipe.cut.cutting import cut_model, list_crossings
from ipu_pipe.errors import end_process
from ipu_pipe.hardware.precision import MIXED, resolve_precision
from ipu_pipe.job.record import DTYPES
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.precision import ModelPrecision
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.stages import partition
from ipu_pipe.replay.work import average
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules
from ipu_pipe.update.optimizer import make_groups, replace_parameters, select_stage
from tests.nccl_double import NcclDouble
from tests.staged_models import (
    MODELS,
    TIED,
    SkippingModel,
    draw_microbatches,
    join_stages,
    make_checkpointed_stages,
    make_redrawing_stages,
    make_repeating_model,
)
from tests.support.flows import run_batches

Case = Tuple[
    str, str, Dict[str, Any], int, str, int
]  # name, method, args, microbatches an update, model, switch
BATCHES = 9
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=1e-2)


def count_updates(case: Case) -> int:
    """Return the updates of a case: 2, fewer than ranks, if its name begins with "short"."""
    return 2 if case[0].startswith("short") else BATCHES


def list_drains(case: Case) -> List[int]:
    """Return the microbatches at which the pipeline drains before the end."""
    return [case[3] * 5] if count_updates(case) > 5 else []


def list_stage_begins(model: nn.Module, ranks: int) -> List[str]:
    """Return the names of the modules that begin stages on `ranks` ranks: the first modules are merged."""
    if isinstance(model, SkippingModel):
        return ["b", "c", "d"][-(ranks - 1) :]
    if len(list(model.children())) < len(model):  # type: ignore[arg-type]
        return ["1", "2", "4"] if ranks == 4 else ["2"]  # one of them runs twice
    count = len(list(model.children()))
    return [str(index) for index in range(count - ranks + 1, count)]


def make_seeded_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    if name.startswith("skipping"):
        return SkippingModel(trains_scale=name == "skipping").to(dtype)
    if name == "twice":
        return make_repeating_model().to(dtype)
    return join_stages(
        [
            stage.to(dtype)
            for stage in {
                **MODELS,
                **TIED,
                "checkpointed": make_checkpointed_stages,
                "redrawing": make_redrawing_stages,
            }[name]()
        ]
    )


def make_model_precision(case: Case, model: nn.Module) -> ModelPrecision:
    """Make the precision of a model: mixed if the case's name begins with "mixed", else float64."""
    row = (
        resolve_precision(MIXED, resolve_method(case[1], case[2]))
        if case[0].startswith("mixed")
        else "float64"
    )
    return ModelPrecision(model, row, DTYPES[row], torch.device("cpu"), is_given=False)


def make_case_batches(case: Case, numbers: ModelPrecision) -> List[Any]:
    """Return the microbatches of a case."""
    return [(x.to(numbers.inputs), y) for x, y in draw_microbatches(case[3] * count_updates(case))]


def get_clip(case: Case) -> Any:
    """Return the (norm, scope) of clipping that the case's name requests, or None."""
    scopes = {"clip-stage": "stage", "clip-global": "global", "clip-delayed": "delayed_global"}
    return next(((0.3, scope) for word, scope in scopes.items() if case[0].startswith(word)), None)


def make_channels(case: Case, placement: Sequence[int], tied: Any) -> Any:
    """Make process groups for links, as nccl needs them, if the case's name begins with "channels"."""
    if not case[0].startswith("channels"):
        return None
    order = list_links(len(placement), resolve_method(case[1], case[2]), tied)
    ranks = {link: sorted(placement[stage] for stage in link[:2]) for link in order}
    return {link: dist.new_group(pair) for link, pair in ranks.items() if pair[0] != pair[1]}


def run_case(case: Case, rank: int, placement: Sequence[int]) -> Dict[str, torch.Tensor]:
    from ipu_pipe.backends.processes.interpreter import Interpreter
    from ipu_pipe.backends.processes.layout import RankLayout
    from ipu_pipe.backends.processes.mail import Mail
    from ipu_pipe.backends.processes.stage import Stage, StageModel
    from ipu_pipe.backends.processes.trace import TraceRecorder
    from ipu_pipe.replay.work import Work

    _, name, args, accumulate, model_name, switch = case
    method = resolve_method(name, args)
    model = make_seeded_model(model_name)
    numbers = make_model_precision(case, model)
    data = make_case_batches(case, numbers)
    stages = len(placement)
    names = list_stage_begins(model, stages)
    part = partition(model, data[0][0], names, one_stage=method.one_stage_reason)
    schedule = make_schedule(
        method, stages, len(data), accumulate, list_drains(case), switch * accumulate
    )
    table = VersionTable(schedule, method)
    layout = RankLayout(rank, tuple(placement))
    cut = cut_model(model, names, data[0][0])
    across = list_crossings(cut)
    make = ADAMW if "adamw" in case[0] else SGD
    groups = replace_parameters(make_groups(model, part), numbers.get_trained)
    optimizer = make([group for s in layout.stages_of_rank for group in select_stage(groups, s)])
    rate = make.keywords["lr"]
    rules = UpdateRules(
        args,
        method,
        table.rule_lag(),
        accumulate,
        optimizer,
        lambda k: rate,
        switch,
        numbers.masters,
    )
    keyed = KeyedRandomness(model, observe_effects(model, data[0][0]).draws, 0, torch.device("cpu"))
    ties = {s: find_ties(model, cut, s, placement) for s in layout.stages_of_rank}
    channels = make_channels(case, placement, ties[layout.stages_of_rank[0]].links)
    double = NcclDouble(list((channels or {}).values()))
    for s in layout.stages_of_rank:
        double.watch(cut[s], optimizer)
    cpu = torch.device("cpu")
    work = Work(numbers.convert_loss(nn.functional.cross_entropy), table, rules, get_clip(case))
    recorder = TraceRecorder(rank, layout.stages_of_rank[0], range(512))
    mail = Mail(layout, cpu, recorder, 300.0, channels=channels)
    models = [
        StageModel(layout, s, cut[s], across, lambda m: data[m], cpu, keyed, ties=ties[s])
        for s in layout.stages_of_rank
    ]
    stages_here = {model.stage: Stage(work, model, mail, recorder) for model in models}
    if schedule.passes == SPLIT_PASSES:
        for s, stage in stages_here.items():
            assert stage.verify_split(data[0]) or model_name in ("checkpointed", "redrawing"), (
                case,
                s,
            )
    engine = Interpreter(work, stages_here, mail, recorder, channels=channels)
    with double:
        losses = []
        for k in range(count_updates(case)):
            if k * accumulate in list_drains(case):  # an evaluation runs here, with its own kernels
                assert not double.pending(), "receives are posted while the pipeline is empty"
            losses += [tables for _, tables in run_batches(engine, schedule, k, k + 1)]
        engine.close()
    state: Dict[str, torch.Tensor] = {}
    for s, stage in stages_here.items():
        with numbers.put_masters_in_place():
            state.update(cut[s].select_state())
            weights = [
                model.get_parameter(name)
                for name in (*part.stages[s].parameters, *part.list_replicas(s))
            ]
            size = sum(p.numel() * p.element_size() for p in weights)
        if size:  # weight versions besides the newest, at most
            state[f"versions {s}"] = torch.tensor(stage.peak_version_bytes / size)
        if stage.model.is_last:
            state["losses"] = torch.tensor([average(tables[s])[0] for tables in losses])
    return {key: value.clone() for key, value in state.items()}


def main(rank: int, placement: Sequence[int], folder: str, cases: List[Case]) -> None:
    from ipu_pipe.backends.processes import interpreter

    interpreter.CHUNK = 8  # so that rows have several chunks
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=max(placement) + 1
    )
    try:
        for case in cases:
            torch.save(run_case(case, rank, placement), Path(folder) / f"{case[0]}-{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)
