"""Compare the planner's predictions with the measurements of papers:
docs/results/predictions.md, and the costs behind its tables."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, Dict, List

import pytest
import torch
from torch import nn

from ipu_pipe.cli import plan
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.model_units import count_units
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.model.flops import FlopCounterMode
from ipu_pipe.plan.batch_times import BatchTimes
from ipu_pipe.plan.blocks import BlockUnits, count_blocks
from ipu_pipe.plan.candidates import Candidate, list_candidates, list_layouts
from ipu_pipe.plan.planner import search
from ipu_pipe.plan.prediction import Costing, Problem, UnitSums, predict_cut
from ipu_pipe.plan.tensor_parallel import predict_tensor_parallel
from ipu_pipe.schedule.clock import HOST
from ipu_pipe.schedule.methods import METHODS
from tests.command_line import run_here
from tests.support.models import Composed
from tests.support.runs import DIGITS, ROOT
from tools.experiments import (
    predicted_2bw,
    predicted_local,
    predicted_pipemare,
)
from tools.experiments.experiment import PredictedRows
from tools.experiments.verdicts import PREDICTED

needs_flop_counter = pytest.mark.skipif(
    FlopCounterMode is None, reason="this PyTorch counts no FLOPs"
)


def read_stored_table(name: str) -> Dict[str, Any]:
    """Return a table of docs/results/."""
    return dict(
        json.loads((ROOT / "docs" / "results" / name / "results.json").read_text(encoding="utf-8"))
    )


def assert_same_as_docs(name: str, prediction: PredictedRows) -> None:
    """Assert that the computed rows equal the rows in docs/, in whole percents."""
    rows = read_stored_table(name)["rows"]
    assert len(rows) == len(prediction.rows)
    for row, computed in zip(rows, prediction.rows):
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        assert {key: computed[key] for key in numbers} == pytest.approx(numbers, rel=0.01, abs=0.11)
        words = {key: value for key, value in row.items() if isinstance(value, str)}
        assert {key: computed[key] for key in words} == words


# ---- tables


@pytest.mark.slow
@needs_flop_counter
def test_the_local_papers_speedups_are_predicted_within_eight_points() -> None:
    """Without fitting, from model, hardware file and schedule alone, the predictions are far
    better than the balanced bound."""
    speedups = predicted_local.predict_speedups()
    assert_same_as_docs("plan_local_table1", speedups)
    errors = [abs(row["error"]) for row in speedups.rows]
    assert sum(errors) / 7 <= 8
    words = [verdict.verdict for verdict in speedups.verdicts]
    assert words[7:] == [PREDICTED] * 2
    assert all(word.startswith("predicted, off by ") for word in words[:7])
    bounds = [abs(row["bound"] - row["printed"]) for row in speedups.rows]
    assert sum(errors) < sum(bounds)


@pytest.mark.slow
@needs_flop_counter
def test_the_local_papers_memory_is_in_order() -> None:
    """For one network on one machine, backpropagation without recomputation needs most memory by
    far, and local training least; over all rows nine pairs in ten are in order."""
    result = predicted_local.predict_memory()
    assert_same_as_docs("plan_local_table3", result)
    by: Dict[Any, Dict[str, float]] = defaultdict(dict)
    for row in result.rows:
        by[row["network"], row["samples"], row["devices"]][row["method"]] = row["predicted"]
    for sizes in by.values():
        most = sizes.get("backpropagation", 1e9)
        assert sizes["local"] < sizes["backpropagation, recompute"] < most
    assert sum(verdict.difference or 0 for verdict in result.verdicts) <= 20
    assert all(0.6 < row["predicted"] / row["printed"] < 1.2 for row in result.rows)


def test_pipemares_columns_are_predicted_within_two_percent() -> None:
    """With fairseq's vocabularies IWSLT's Transformer has its 42,864,640 parameters."""
    pipemare = predicted_pipemare.predict_pipemare()
    assert_same_as_docs("plan_pipemare", pipemare)
    errors = [
        float(row["error"].rstrip("%"))
        for row in pipemare.rows
        if row.get("error") not in (None, "fitted")
    ]
    assert len(errors) == len(pipemare.verdicts) == 22 and max(map(abs, errors)) < 2
    activations = [row["predicted"] for row in pipemare.rows if row["item"] == "Figure 9"]
    assert activations == [
        2 * 136,
        2 * (16 + 12 + 8 + 4) + 4 * 12,
    ]  # 2(P-i) + 2 at heads, 2(S-j) + 2 inside


@needs_flop_counter
def test_two_buffered_pipelines_beat_the_others_as_printed() -> None:
    """Figure 6: the four systems have the printed order at both batches, and the printed ratios
    within a third."""
    printed_ratios = {row[:3]: row[3] for row in predicted_2bw.RATIOS}
    rates = {
        (width, batch): predicted_2bw.predict_throughputs(width, depth, batch)
        for _, width, depth in predicted_2bw.MODELS
        for batch in predicted_2bw.BATCHES
    }
    for rate in rates.values():
        assert rate["pipedream_2bw"] > rate["pipedream_flush"] > rate["gpipe"] > rate["naive"]
    for (one, other, batch), ratio in printed_ratios.items():
        widths = [1920] if other == "naive" else [1920, 2560]
        greatest = max(rates[width, batch][one] / rates[width, batch][other] for width in widths)
        assert 0.75 < greatest / ratio < 1.25, (one, other, batch)


def read_stored_2bw(key: str, word: str) -> List[float]:
    """Return the numbers of the rows of docs/ whose `key` has the word."""
    rows = read_stored_table("plan_2bw")["rows"]
    return [row["small"] for row in rows if word in row[key]]


@needs_flop_counter
def test_tensor_parallelism_loses_between_servers() -> None:
    """The abstract's 1.3 times on one server and 20 times on eight are predicted as 1.2 and 26."""
    ratios = [predicted_2bw.compare_tensor_parallel(*row[1:5]) for row in predicted_2bw.TENSOR]
    assert read_stored_2bw("what", "tensor") == pytest.approx(ratios, rel=0.01)
    assert 1 < ratios[0] < 1.5 and ratios[1] > 10


def test_tensor_parallelism_by_hand() -> None:
    """Two units of 4 and 8 FLOPs forward at 1 FLOP a second; all-reduces of 16 bytes at 16 bytes
    a second between two of four devices."""
    works = (("a", 4.0, 4, 16.0, 8.0), ("b", 8.0, 8, 4.0, 8.0), ("loss", 0.0, 0, 4.0, 0.0))
    units = tuple(Unit(name, work, 2 * work, *sizes) for name, work, *sizes in works)
    hardware = make_unit_hardware(False, bandwidth=16.0)
    problems = [Problem(units, 4.0, hardware, most, "float32", 0) for most in (1e9, 1.0)]
    found = predict_tensor_parallel(problems[0], 4, 2, 2)
    assert found is not None and (found.ways, found.width) == (2, 2)
    assert (found.micro_batch_size, found.gradient_accumulation) == (1, 1)
    compute = (2 * 12 + 24) / 2  # with recomputation
    messages = 3 * 2 * (16 + 4) / 16  # 2 (t-1)/t = 1 among two
    gradients = 4 * (12 / 2) / 16  # half of them on each device
    assert found.samples_per_second == pytest.approx(2 / (compute + messages + gradients))
    assert predict_tensor_parallel(problems[1], 4, 2, 2) is None


@pytest.mark.parametrize(("ways", "code"), [("4", 0), ("3", 2)])
def test_the_planner_compares_tensor_parallelism(
    ways: str, code: int, monkeypatch: Any, capsys: Any
) -> None:
    options = f"--hardware v100x8 --precision float32 --tensor-parallel {ways} --json".split()
    done = run_here(plan, DIGITS, *options, monkeypatch=monkeypatch, capsys=capsys)
    assert done.returncode == code
    assert done.stderr.startswith("error: --tensor-parallel: 3: ") == (code == 2)
    if not code:
        compared = json.loads(done.stdout)["tensor_parallel"]
        assert (compared["ways"], compared["width"]) == (4, 2)
        assert compared["samples_per_second"] > 0


@needs_flop_counter
def test_gpipe_does_not_fit_as_in_the_paper_and_depth_makes_room() -> None:
    """Sources: figures 7 and 9 of the paper."""
    memory = predicted_2bw.predict_memory()
    limit = predicted_2bw.make_problem(predicted_2bw.count_gpt(1920), 8).memory_bytes
    assert sorted(memory, key=lambda method: memory[method])[-2:] == ["pipedream_2bw", "gpipe"]
    assert memory["pipedream_2bw"] <= limit < memory["gpipe"] and len(memory) == 4
    sizes = [predicted_2bw.find_largest_model(depth) / 1e9 for depth in (4, 8, 16)]
    assert sizes == sorted(sizes) and sizes[0] < 2.2 < sizes[1]  # 2.2 billion need eight stages
    assert read_stored_2bw("figure", "9")[:3] == pytest.approx(sizes, abs=0.06)


@needs_flop_counter
def test_the_planner_chooses_depths_as_printed() -> None:
    """Check two of the printed depths; the third is expensive and left to the command, and the
    page reports that the fourth differs."""
    choices = [predicted_2bw.choose_depth(*of) for of in ((1920, 2048), (2560, 512))]
    assert choices == [8, 16]
    differences = read_stored_table("plan_2bw")["differences"]
    assert sum("the planner's choice" in text for text in differences) == 1


# ---- bytes that operations other than products move


@needs_flop_counter
def test_operations_without_flops_cost_what_they_move() -> None:
    """A ReLU reads and writes; its backward reads the gradient and the result, and writes. Views
    and products move no bytes in this model."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Unflatten(1, (2, 2)))
    linear, relu, view = count_units(model, torch.zeros(3, 8)).units
    assert (linear.forward_moved, linear.forward_flops, view.forward_moved) == (0.0, 64.0, 0.0)
    assert (relu.forward_moved, relu.backward_moved) == (2 * 4 * 4, 3 * 4 * 4)


# ---- blocks with auxiliary losses

NETWORK = nn.Sequential(
    nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False)
)


@needs_flop_counter
def test_heads_are_counted_and_a_block_spares_the_gradient_of_its_input() -> None:
    x = torch.zeros(4, 8)
    units = count_units(NETWORK, x).units
    result = count_blocks(NETWORK, x, units)
    assert [unit.backward_flops for unit in units] == [2 * 48, 0, 4 * 36, 4 * 18]
    assert [unit.backward_flops for unit in result.first] == [2 * 48, 0, 2 * 36, 2 * 18]
    assert len(result.heads) == 3 and {head.parameters for head in result.heads} == {6 * 3 + 3}
    assert [head.forward_flops for head in result.heads] == [2 * 18] * 3
    assert all(p.device.type == "cpu" for p in NETWORK.parameters())


@needs_flop_counter
def test_blocks_end_where_one_activation_crosses() -> None:
    def forward_with_skip(m: Any, x: torch.Tensor) -> Any:
        x = m.a(x)
        return m.c(m.b(x.relu()) + x)

    model, x = Composed(forward_with_skip, **{n: nn.Linear(8, 8) for n in "abc"}), torch.zeros(2, 8)
    with pytest.raises(BadInput, match="cannot begin at b: a skip connection crosses"):
        count_blocks(model, x, count_units(model, x).units)


def make_unit_hardware(lockstep: bool, host: Any = None, bandwidth: float = 1e15) -> Any:
    """Return hardware whose device does a FLOP a second and moves bytes at once."""
    rates = {"float32": {"peak_flops": 1.0, "achievable_share": 1}}
    device = {"memory_bytes": 1e9, "usable_share": 1, "memory_bandwidth": 1e15, "rates": rates}
    links = [{"name": "all", "bandwidth": bandwidth, "latency": 0.0, "shared_by": 1}]
    return read_hardware(
        {"devices": 4, "lockstep": lockstep, "device": device, "links": links, "host": host}
    )


def make_block_units(units: Any, head: float = 0.2, spared: float = 1 / 3) -> BlockUnits:
    """Return block units: a head of `head` FLOPs after each unit, and as the first of a block a
    unit without the share `spared` of its backward."""
    heads = tuple(Unit("", head, 2 * head, 0, 0.0, 0.0) for _ in units[1:])
    first = tuple(
        Unit(u.name, u.forward_flops, u.backward_flops * (1 - spared), 0, 4.0, 0.0) for u in units
    )
    return BlockUnits(heads, first)


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_block_takes_its_passes_its_head_and_no_gradient_of_its_input(lockstep: bool) -> None:
    units = tuple(Unit(str(i), 1.0, 3.0, 0, 4.0, 0.0) for i in range(4))
    problem = Problem(
        units, 4.0, make_unit_hardware(lockstep), 1e9, "float32", 0, make_block_units(units)
    )
    candidate = Candidate("local_greedy", 2, 1, 1, 8, False)
    prediction = predict_cut(
        Costing(problem, candidate, list_layouts(2, 1)[0], UnitSums(problem, 1)), [0, 2]
    )
    assert prediction.work == pytest.approx([8 + 0.6, 8 - 1.0])
    assert prediction.seconds == pytest.approx(8 * 8.6, rel=1e-6)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize(
    "work, head, spared", [((1.0, 2.0, 1.5, 0.5, 2.5, 1.0), 0.2, 1 / 3), ((1.0,) * 5, 0.0, 1.0)]
)
def test_the_search_is_exact_with_blocks(
    lockstep: bool, work: Any, head: float, spared: float
) -> None:
    """The bounds find the best local configuration that trying all finds, and its cut is the
    best of all cuts."""
    units = tuple(Unit(str(i), w, 3 * w, 0, 4.0, 0.0) for i, w in enumerate(work))
    blocks = make_block_units(units, head, spared)
    problem = Problem(units, 4.0, make_unit_hardware(lockstep), 1e9, "float32", 0, blocks)

    def cost(candidate: Candidate, layout: Any) -> Costing:
        return Costing(problem, candidate, layout, UnitSums(problem, candidate.micro_batch_size))

    methods = ["local_greedy", "pipedream_flush"]
    candidates = list(list_candidates(methods, 4, len(units), 8, (False,)))
    rates = []
    for candidate in candidates:
        for layout in list_layouts(candidate.depth, candidate.width):
            costing = cost(candidate, layout)
            costs = costing.compute_costs(costing.find_cut())
            times = BatchTimes(METHODS[candidate.method], candidate.depth, costs)
            seconds = times.compute(candidate.gradient_accumulation).seconds
            assert costing.bound_seconds(costs) <= seconds * (1 + 1e-9)
            rates.append(candidate.global_batch_size / seconds)
    best = search(problem, candidates, 3).best[0]
    assert best.samples_per_second == pytest.approx(max(rates))
    costing = cost(Candidate("local_greedy", 2, 2, 1, 4, False), list_layouts(2, 2)[0])
    slowest = {k: max(predict_cut(costing, [0, k]).work) for k in range(1, len(units))}
    assert costing.find_cut() == [0, min(slowest, key=lambda k: slowest[k])]


# ---- the link to the host


def test_in_lock_step_all_wait_for_samples_from_the_host() -> None:
    """With eight microbatches of a second each, lock-step devices wait for samples; others
    receive them beside the passes."""
    units = tuple(Unit(str(i), 1.0, 2.0, 0, 4.0, 0.0) for i in range(2))
    candidate = Candidate("pipedream_flush", 2, 1, 1, 8, False)

    def predict(lockstep: bool, host: Any) -> Any:
        problem = Problem(units, 4.0, make_unit_hardware(lockstep, host), 1e9, "float32", 0)
        costing = Costing(problem, candidate, list_layouts(2, 1)[0], UnitSums(problem, 1))
        return predict_cut(costing, [0, 1])

    host = {"bandwidth": 4.0, "latency": 0.0}
    waiting, beside = predict(True, host), predict(False, host)
    assert waiting.seconds == pytest.approx(predict(True, None).seconds + 8)
    assert beside.seconds == predict(False, None).seconds
    assert waiting.link_busy[HOST] == pytest.approx(8) and HOST not in beside.link_busy
