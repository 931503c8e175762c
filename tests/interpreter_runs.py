"""Training without config, data set or checkpoint: a schedule on the emulator, and a rank's row of it on processes.

    emulate_case(case, placement)     Emulator      all stages, replay by replay
    interpret_case(rank, case, placement)   Interpreter   the stages of one rank, action by action

Both return final weights, losses and counts of weight versions; the ranks' results together are the emulator's.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.backends.processes.nccl import list_links
from ipu_pipe.backends.processes.ties import find_ties
from ipu_pipe.cut.cutting import cut_model, list_crossings
from ipu_pipe.hardware.precision import MIXED, resolve_precision
from ipu_pipe.job.record import DTYPES
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.precision import ModelPrecision
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.stages import partition
from ipu_pipe.replay.work import Work, average
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable, count_weight_copies
from ipu_pipe.update.apply import UpdateRules, choose_rules
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

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=1e-2)
CPU = torch.device("cpu")
CHUNK = 8  # actions: so that a row has several chunks


class ScheduleCase(NamedTuple):
    """What is trained. `kind`: what the case alone or with few others shows."""

    name: str
    kind: str
    method: str
    args: Dict[str, Any] = {}
    microbatches: int = 1  # of an update
    model: str = "residual"
    warmup: int = 0  # updates
    optimizer: Any = SGD
    clip: Optional[Tuple[float, str]] = None
    over_channels: bool = False  # groups that behave as nccl's, in the place of tags
    is_mixed: bool = False  # bfloat16_mixed; else float64
    updates: int = 9


def list_drains(case: ScheduleCase) -> List[int]:
    """Return the microbatches before which the pipeline empties."""
    return [case.microbatches * 5] if case.updates > 5 else []


def choose_boundaries(model: nn.Module, stages: int) -> List[str]:
    """Return the modules at which the model's stages begin: the model's own stages, the first ones merged."""
    if isinstance(model, SkippingModel):
        return ["b", "c", "d"][-(stages - 1) :]
    if len(list(model.children())) < len(model):  # type: ignore[arg-type]
        return ["1", "2", "4"] if stages == 4 else ["2"]  # one of them runs twice
    count = len(list(model.children()))
    return [str(index) for index in range(count - stages + 1, count)]


def make_case_model(name: str) -> nn.Module:
    """Return a model of `tests/staged_models.py` in float64, with the same weights each time."""
    torch.manual_seed(3)
    if name.startswith("skipping"):
        return SkippingModel(trains_scale=name == "skipping").double()
    if name == "twice":
        return make_repeating_model().double()
    makers = {
        **MODELS,
        **TIED,
        "checkpointed": make_checkpointed_stages,
        "redrawing": make_redrawing_stages,
    }
    return join_stages([stage.double() for stage in makers[name]()])


class Setup:
    """What the emulator and a rank have in common: model, precision, microbatches, stages, schedule."""

    def __init__(self, case: ScheduleCase, stages: int) -> None:
        self.case = case
        self.method = resolve_method(case.method, case.args)
        self.model = make_case_model(case.model)
        row = resolve_precision(MIXED, self.method) if case.is_mixed else "float64"
        self.precision = ModelPrecision(self.model, row, DTYPES[row], CPU, is_given=False)
        count = case.microbatches * case.updates
        self.data = [(x.to(self.precision.inputs), y) for x, y in draw_microbatches(count)]
        self.boundaries = choose_boundaries(self.model, stages)
        self.partition = partition(
            self.model, self.data[0][0], self.boundaries, one_stage=self.method.one_stage_reason
        )
        self.schedule: Schedule = make_schedule(
            self.method,
            stages,
            count,
            case.microbatches,
            list_drains(case),
            case.warmup * case.microbatches,
        )
        self.table = VersionTable(self.schedule, self.method)
        groups = make_groups(self.model, self.partition)
        self.groups = replace_parameters(groups, self.precision.get_trained)

    def make_work(self, optimizer: torch.optim.Optimizer) -> Work:
        """Return loss, versions, rules and clipping."""
        case = self.case
        rate = case.optimizer.keywords["lr"]
        rules = UpdateRules(
            choose_rules(case.args, self.method, self.table.rule_lag(), case.microbatches),
            optimizer,
            lambda k: rate,
            case.warmup,
            self.precision.masters,
        )
        loss = self.precision.convert_loss(nn.functional.cross_entropy)
        return Work(loss, self.table, rules, case.clip)


def counts_versions(case: ScheduleCase) -> bool:
    """Return whether a stage keeps the versions of the table and nothing else. Rules keep corrected weights beside them."""
    has_rules = bool(case.args) or case.warmup > 0 or resolve_method(case.method).predicts
    return not has_rules


def can_share(case: ScheduleCase, placement: Sequence[int]) -> bool:
    """Return whether the method fits the number of stages, and no two stages on a device use one weight in two versions."""
    order = resolve_method(case.method, case.args).order
    if order is not None and len(placement) % order.stages_per_device:
        return False
    has_own_device = len(set(placement)) == len(placement)
    is_tied = case.model in ("tied", "thrice", "twice")
    return has_own_device or not is_tied or METHODS[case.method].flushes


def emulate_case(case: ScheduleCase, stages: int) -> Dict[str, Any]:
    """Return weights, losses and, by stage, the weight versions besides the newest."""
    setup = Setup(case, stages)
    work = setup.make_work(case.optimizer(setup.groups))
    emulator = Emulator(work, setup.model, setup.partition, setup.data[0])
    losses = []
    for k in range(case.updates):
        first = k * case.microbatches
        losses.append(emulator.step(setup.data[first : first + case.microbatches]).loss)
    emulator.close()
    with setup.precision.put_masters_in_place():
        state = setup.model.state_dict()
    versions = {}
    if counts_versions(case):
        copies = count_weight_copies(setup.table)
        for stage in setup.partition.stages:
            if stage.parameters or setup.partition.list_replicas(stage.index):
                versions[f"versions {stage.index}"] = copies[stage.index] - 1.0
    return {**state, "losses": losses, **versions}


def make_channels(case: ScheduleCase, placement: Sequence[int], tied: Any) -> Any:
    """Return groups of gloo in the place of nccl's, of the links between ranks; None if the case sends by tags."""
    if not case.over_channels:
        return None
    channels = {}
    for link in list_links(len(placement), resolve_method(case.method, case.args), tied):
        pair = sorted(placement[stage] for stage in link[:2])
        if pair[0] != pair[1]:
            channels[link] = dist.new_group(pair)
    return channels


def interpret_case(rank: int, case: ScheduleCase, placement: Sequence[int]) -> Dict[str, Any]:
    """Return this rank's part of what `emulate_case` returns."""
    from ipu_pipe.backends.processes import interpreter

    chunk = interpreter.CHUNK
    interpreter.CHUNK = CHUNK
    try:
        return _interpret_row(rank, case, placement)
    finally:
        interpreter.CHUNK = chunk


def _interpret_row(rank: int, case: ScheduleCase, placement: Sequence[int]) -> Dict[str, Any]:
    from ipu_pipe.backends.processes.interpreter import Interpreter
    from ipu_pipe.backends.processes.layout import RankLayout
    from ipu_pipe.backends.processes.mail import Mail
    from ipu_pipe.backends.processes.stage import Stage, StageModel
    from ipu_pipe.backends.processes.trace import TraceRecorder

    setup = Setup(case, len(placement))
    model, data = setup.model, setup.data
    layout = RankLayout(rank, tuple(placement))
    own = layout.stages_of_rank
    cut = cut_model(model, setup.boundaries, data[0][0])
    crossings = list_crossings(cut)
    optimizer = case.optimizer([group for s in own for group in select_stage(setup.groups, s)])
    keyed = KeyedRandomness(model, observe_effects(model, data[0][0]).draws, 0, CPU)
    ties = {s: find_ties(model, cut, s, placement) for s in own}
    channels = make_channels(case, placement, ties[own[0]].links)
    double = NcclDouble(list((channels or {}).values()))
    for s in own:
        double.watch(cut[s], optimizer)
    work = setup.make_work(optimizer)
    recorder = TraceRecorder(rank, own[0], range(512))
    mail = Mail(layout, CPU, recorder, 300.0, channels=channels)
    stages = {}
    for s in own:
        stage_model = StageModel(
            layout, s, cut[s], crossings, lambda m: data[m], CPU, keyed, ties=ties[s]
        )
        stages[s] = Stage(work, stage_model, mail, recorder)
    if setup.schedule.passes == SPLIT_PASSES:
        for s, stage in stages.items():
            draws_again = case.model in ("checkpointed", "redrawing")
            assert stage.verify_split(data[0]) or draws_again, (case, s)
    engine = Interpreter(work, stages, mail, recorder, channels=channels)
    updates = []
    with double:
        for k in range(case.updates):
            # a drain is where an evaluation may run, with kernels of its own
            if k * case.microbatches in list_drains(case):
                assert not double.count_pending(), "receives are posted while the pipeline is empty"
            updates += [losses for _, losses in run_batches(engine, setup.schedule, k, k + 1)]
        engine.close()
    values: Dict[str, Any] = {}
    for s, stage in stages.items():
        with setup.precision.put_masters_in_place():
            values.update(cut[s].select_state())
            names = (*setup.partition.stages[s].parameters, *setup.partition.list_replicas(s))
            weights = [model.get_parameter(name) for name in names]
            size = sum(p.numel() * p.element_size() for p in weights)
        if size and counts_versions(case):
            values[f"versions {s}"] = stage.peak_version_bytes / size
        if stage.model.is_last:
            values["losses"] = [average(losses[s])[0] for losses in updates]
    return values
