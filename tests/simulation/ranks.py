"""Run one seed: a case, a network and perhaps a lost rank. The result must equal the emulator's,
or the error must name the lost rank."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import re
from types import SimpleNamespace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple
from unittest import mock

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import CheckpointState
from ipu_pipe.backends.processes import engine as processes
from ipu_pipe.backends.processes import interpreter, launch
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.lost_ranks import WARM_UP
from ipu_pipe.backends.processes.nccl import make_channels
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.versions import count_weight_copies
from tests.simulation.cases import (
    DEADLINE,
    Case,
    Result,
    build_job,
    draw_case,
    run_on_emulator,
    train_job,
)
from tests.simulation.network import Loss, Network, Outcome, format_error

SHARED = 4  # seeds of one case
CHUNK = 8  # actions: so that the row of a rank has several chunks
SLACK = 60.0  # virtual seconds that ranks may go on after a loss before they wait for the lost one, and after its end is known


class Prepared(NamedTuple):
    """A case, its result on the emulator, the job of each rank, and the calls of each rank in a
    run without a loss."""

    case: Case
    expected: Result
    jobs: List[PlannedJob]
    calls: List[int]


def prepare_case(case: Case) -> Prepared:
    """Return a case ready to run. Raise `BadInput` if it is refused."""
    expected, jobs = run_on_emulator(case), []
    with mock.patch.object(dist, "get_world_size", lambda group=None: case.ranks):
        for rank in range(case.ranks):
            with mock.patch.object(dist, "get_rank", lambda group=None, rank=rank: rank):
                jobs.append(build_job(case))
    prepared, network = Prepared(case, expected, jobs, []), Network(0, case.ranks, DEADLINE)
    network.has_one_clock = True  # as most seeds have: a rank is lost at one of these calls
    train_on_network(prepared, network)
    prepared.calls.extend(rank.calls for rank in network.ranks)
    return prepared


def prepare_keys(model: str, **keys: Any) -> Prepared:
    """Return a short run on two devices of one stage each, ready to run."""
    usual: Dict[str, Any] = {"stages": 2, "gradient_accumulation": 1, "steps": 2, "evaluate": {"every": 0}}  # fmt: skip
    return prepare_case(Case(model, 2, {**usual, "method_args": {}, **keys}))


def prepare_number(number: int) -> Prepared:
    """Return case number `number`, ready to run."""
    rng = random.Random(number)
    for _ in range(50):
        with contextlib.suppress(BadInput):
            return prepare_case(draw_case(number, rng))
    raise AssertionError(f"case {number}: no drawn case can be trained")


def train_on_network(prepared: Prepared, network: Network) -> List[Outcome]:
    """Run a case on a network, and return the outcomes of its ranks."""
    case = prepared.case
    jobs = copy.deepcopy(prepared.jobs)

    def work(rank: int) -> Result:
        job = jobs[rank]
        flow = Flow(job)
        try:
            result = train_job(flow, job, case)
        except BaseException:
            flow.engine.abort()
            raise
        flow.engine.close()
        result = result._replace(report=flow.engine.report())
        launch.leave()
        return result

    channels = _make_channels if case.through_channels else lambda run, layout, tied: None
    with contextlib.ExitStack() as stack:
        stack.enter_context(network.install())
        stack.enter_context(mock.patch.object(processes, "make_channels", channels))
        stack.enter_context(mock.patch.object(interpreter, "CHUNK", CHUNK))
        return network.run(work)


def _make_channels(run: Run, layout: RankLayout, tied: Sequence[Any]) -> Optional[Dict[Any, Any]]:
    """Make the groups that ranks have if each has a GPU."""
    with_gpu: Any = SimpleNamespace(
        device=torch.device("cuda"), method=run.method, options=run.options
    )
    return make_channels(with_gpu, layout, tied)


def split_by_case(seeds: Sequence[int]) -> List[Tuple[int, ...]]:
    """Return seeds, grouped by the case that they share."""
    return [tuple(group) for _, group in itertools.groupby(seeds, lambda seed: seed // SHARED)]


def run_seeds(seeds: Sequence[int]) -> List[str]:
    """Run seeds that share a case, and return the failures, each with the command that runs it
    alone."""
    failures: List[str] = []
    prepared: Optional[Prepared] = None
    for seed in seeds:
        try:
            prepared = prepared or prepare_number(seed // SHARED)
            check_seed(seed, prepared)
        except Exception as error:  # of the code under test, whatever it is
            case = "" if prepared is None else f"\n{prepared.case}"
            is_told = isinstance(error, AssertionError) and prepared is not None
            why = str(error) if is_told else format_error(error)
            failures.append(
                f"seed {seed} failed: make simulate SEEDS=1 START={seed}{case}\n{why}\n"
            )
    return failures


def check_seed(seed: int, prepared: Prepared) -> None:
    """Draw a network for a seed, and check the case on it by `check_run`."""
    rng = random.Random(seed)
    case, loss = prepared.case, None
    fault = rng.choice(("none", "none", "held back", "killed", "stopped"))
    if fault in ("killed", "stopped"):
        rank = rng.randrange(case.ranks)
        loss = Loss(rank, rng.randint(1, prepared.calls[rank]), fault == "killed")
    check_run(prepared, Network(seed, case.ranks, DEADLINE, loss, fault == "held back"))


def check_run(prepared: Prepared, network: Network) -> None:
    """Run a case on a network. Raise `AssertionError` if a rank misbehaves."""
    outcomes = train_on_network(prepared, network)
    unexpected = [
        o
        for o in outcomes
        if o.error is not None and not (network.lost_at >= 0 and isinstance(o.error, RunFault))
    ]
    if unexpected:
        first = min(unexpected, key=lambda outcome: outcome.place)
        assert first.error is not None
        raise AssertionError(f"rank {outcomes.index(first)}: {format_error(first.error)}")
    if network.lost_at < 0:
        _assert_same_result(outcomes[0].result, prepared.expected)
        _assert_planned_versions(outcomes[0].result, prepared)
    elif network.loss is not None:
        _assert_loss_is_named(network, outcomes, network.loss)


def _assert_same_result(result: Result, expected: Result) -> None:
    runs = [{"losses": run.losses, "evaluations": run.evaluations} for run in (result, expected)]
    assert_same_values(*runs, "")
    assert len(result.states) == len(expected.states)
    for number, (state, other) in enumerate(zip(result.states, expected.states)):
        assert state is not None and other is not None
        for part, one, two in zip(CheckpointState._fields, state, other):
            assert_same_values(one, two, f"checkpoint {number}: {part}: ")


def assert_same_values(values: Dict[str, Any], expected: Dict[str, Any], place: str) -> None:
    """Assert that tensors have one dtype and the same bits, and that other values are equal."""
    assert values.keys() == expected.keys(), (
        f"{place}{sorted(values)}, of the emulator {sorted(expected)}"
    )
    for key, value in expected.items():
        one = values[key]
        same = torch.equal(one, value) and one.dtype == value.dtype if torch.is_tensor(value) else one == value  # fmt: skip
        assert same, f"{place}{key}: {one}, of the emulator {value}"


def _assert_planned_versions(result: Result, prepared: Prepared) -> None:
    """Assert that a stage keeps the weight versions of the plan: if no rule keeps other weights
    beside them, and no pause is given on the way."""
    job, keys = prepared.jobs[0], prepared.case.keys
    has_pauses = "checkpoint" in keys or "steps" in keys["evaluate"] or prepared.case.stop_after
    is_plain = job.method.is_pipeline and not (job.method.predicts or keys["method_args"])
    if has_pauses or not is_plain or job.precision.masters is not None or result.report is None:
        return
    copies = count_weight_copies(job.table)
    for stage, size in zip(job.partition.stages, result.report.version_bytes):
        names = [*stage.parameters, *job.partition.list_replicas(stage.index)]
        weights = [job.model.get_parameter(name) for name in names]
        planned = sum(p.numel() * p.element_size() for p in weights) * (copies[stage.index] - 1)
        assert size == planned, f"stage {stage.index}: {size} bytes of versions, planned {planned}"


def _assert_loss_is_named(network: Network, outcomes: Sequence[Outcome], loss: Loss) -> None:
    """Assert that all other ranks end in time, and that the first error names the lost rank."""
    faults = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.error is not None}
    # with the time in which ranks report for whom they wait
    limit = network.lost_at + 1.1 * network.limit + WARM_UP + SLACK
    for rank, outcome in enumerate(outcomes):
        if rank == loss.rank:
            continue
        assert outcome.error is not None or outcome.result is not None, (
            f"rank {rank} does not end after {loss}"
        )
        assert outcome.seconds <= limit, (
            f"rank {rank} ends at {outcome.seconds:.1f} s, later than {limit:.1f}: {outcome.error}"
        )
    # with a rank that leaves after the last barrier, the one that keeps the store may be gone, too
    if faults and not network.ranks[loss.rank].is_leaving:
        first = min(faults, key=lambda rank: faults[rank].place)
        named = re.search(r"ranks? ([\d, ]+) is lost", str(faults[first].error))
        ranks = [] if named is None else [int(number) for number in named[1].split(",")]
        # when a collective fails because a rank is killed, the others may not have called it yet, and cannot be distinguished
        knows = loss.rank in ranks and (len(ranks) == 1 or loss.is_killed)
        assert knows, f"{loss}: rank {first} reports {faults[first].error}"
