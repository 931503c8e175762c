"""Processes give the emulator's weights, to the last bit, for every method and rule that runs on processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest
import torch

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.model.stages import partition
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.methods import METHODS, Reads, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable, count_weight_copies
from ipu_pipe.update.apply import UpdateRules
from ipu_pipe.update.optimizer import make_groups, replace_parameters
from tests import distributed_worker as worker
from tests import forked
from tests.distributed_worker import ADAMW, SGD, Case
from tests.slot_simulation import PLAYED
from tests.support.runs import needs_processes
from tests.support.slow import mark_slow
from tests.test_rules import ROWS

pytestmark = needs_processes


def cases() -> List[Case]:
    table: List[Case] = []
    for method in (name for name, chosen in PLAYED.items() if chosen.is_pipeline):  # see test_local
        for model in ("mlp", "convolution", "residual"):
            for accumulate in (1, 4):
                table.append((f"{method}-{model}-{accumulate}", method, {}, accumulate, model, 0))
        rereads = METHODS[method].backward_reads is Reads.NEWEST and not METHODS[method].flushes
        skipping = "skipping-frozen" if rereads else "skipping"
        table += [
            (f"{way}-{method}-{n}", method, {}, n, skipping, 0)
            for way in ("plain", "channels")
            for n in (1, 4)
        ]
        table.append((f"short-{method}", method, {}, 1, "residual", 0))
    for method in (
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zb",
        "pipedream",
        "pipelined_backprop",
    ):
        table.append((f"two-{method}", method, {"stages_per_device": 2}, 4, "residual", 0))
    splits = {"split_backward": True}
    for method in ("pipedream", "pipelined_backprop"):
        table += [
            (f"split-{method}-{model}", method, splits, n, model, 0)
            for n, model in ((1, "residual"), (4, "convolution"))
        ]
        table.append(
            (
                f"channels-split-{method}",
                method,
                {**splits, "activation_limit": 2},
                1,
                "residual",
                0,
            )
        )
        table.append(
            (f"mixed-split-{method}", method, {**splits, "stages_per_device": 2}, 4, "residual", 0)
        )
        table.append((f"clip-stage-split-{method}", method, splits, 4, "redrawing", 0))
    table += [
        (f"plain-zb_h1-{model}", "zb_h1", {}, 4, model, 0)
        for model in ("checkpointed", "redrawing")
    ]
    table.append(("mixed-zb_h1", "zb_h1", {}, 4, "residual", 0))
    table.append(("capped", "pipedream", {"schedule": "1f1b_capped"}, 1, "residual", 0))
    recompute = {"recompute": {"segments": 2}}
    for n, model in ((1, "skipping-frozen"), (4, "residual")):
        table.append((f"channels-recompute-{n}", "pipemare", recompute, n, model, 0))
    for pair in "stage-pipemare global-gpipe delayed-pipedream delayed-pipedream_2bw delayed-pipemare".split():
        table += [(f"clip-{pair}-{n}", pair.split("-")[1], {}, n, "residual", 0) for n in (1, 4)]
    for R, K, model in (
        (3, 2, "convolution"),
        (4, 3, "residual"),
        (1, 2, "mlp"),
        (5, 1, "mlp"),
        (2, 9, "convolution"),
    ):
        args = {"replicas": R, "local_steps": K}
        table += [
            (f"{way}-local_sgd-{R}", "local_sgd", args, R, model, 0)
            for way in ("plain", "clip-stage", "adamw")
        ]
    for way, model, outer in (
        ("plain", "convolution", {"mix": 0.25}),
        ("channels", "residual", {"fragments": 2, "delay": 1, "mix": 0.5}),
        ("adamw", "mlp", {"fragments": "per_stage", "offset": 1}),
    ):
        table.append(
            (
                f"{way}-outer",
                "local_sgd",
                {"replicas": 3, "local_steps": 4, "outer": outer},
                3,
                model,
                0,
            )
        )
    both = {
        "spike_compensation": {"scale": 1.0},
        "weight_prediction": {"form": "velocity", "scale": 1.0},
    }
    more = {"pipemare": ROWS["t1+t2"].args, "pipelined_backprop": both}
    for method in "gpipe pipedream_flush pipedream pipedream_2bw pipemare pipelined_backprop spectrain".split():
        for model in ("mlp", "residual"):
            table.append((f"mixed-{method}-{model}", method, more.get(method, {}), 4, model, 0))
    table.append(("mixed-channels", "pipemare", recompute, 4, "residual", 0))
    table.append(
        ("mixed-compensation", "pipedream", ROWS["compensation-adaptive"].args, 4, "mlp", 0)
    )
    table.append(("mixed-adamw", "pipemare", {}, 4, "mlp", 0))
    table.append(
        ("channels-local_sgd", "local_sgd", {"replicas": 3, "local_steps": 2}, 3, "residual", 0)
    )
    for method in (name for name, chosen in PLAYED.items() if chosen.one_version):
        clips = ["clip-global"] if METHODS[method].flushes else ["clip-stage", "clip-delayed"]
        for way, model in zip(
            ["plain", "channels", "adamw", *clips], ("tied", "thrice", "twice", "tied", "thrice")
        ):
            table.append(
                (f"{way}-{method}-{model}", method, {}, 1 if method == "naive" else 4, model, 0)
            )
    again = ("checkpointed", "redrawing")
    table += [
        (f"plain-{method}-{model}", method, {}, 4, model, 0)
        for method in ("gpipe", "pipedream")
        for model in again
    ]
    table.append(("warm-up-thrice", "pipedream_2bw", {}, 4, "thrice", 3))
    for name, row in ROWS.items():
        if not resolve_method(row.method, row.args).delay:
            table.append((f"rule-{name}", row.method, _fit(row.args), 1, "residual", row.switch))
            table.append((f"rule-{name}-4", row.method, _fit(row.args), 4, "mlp", row.switch))
            if ADAMW in row.optimizers or len(row.optimizers) > 1:
                table.append(
                    (f"adamw-{name}", row.method, _fit(row.args), 4, "convolution", row.switch)
                )
    return [
        c
        for c in table
        if not (resolve_method(c[1], c[2]).forward_reads is Reads.DOUBLE_BUFFERED and c[3] < 4)
    ]


def _fit(args: Dict[str, Any]) -> Dict[str, Any]:
    """Return arguments with no more segments than there are ranks in the smallest test."""
    if "recompute" not in args:
        return args
    return {**args, "recompute": {"segments": min(args["recompute"]["segments"], 2)}}


def _counts_versions(case: Case) -> bool:
    """Return whether memory holds the table's versions and nothing else: rules keep corrected weights beside them."""
    return not case[2] and case[5] == 0 and not resolve_method(case[1]).predicts


def _can_share(case: Case, placement: Sequence[int]) -> bool:
    """Return whether the method has so many stages, and no two stages of a device use one weight in different versions."""
    order = resolve_method(case[1], case[2]).order
    if order is not None and len(placement) % order.stages_per_device:
        return False
    apart = len(set(placement)) == len(placement)
    return apart or case[4] not in ("tied", "thrice", "twice") or METHODS[case[1]].flushes


def emulated(case: Case, ranks: int) -> Dict[str, torch.Tensor]:
    name, method_name, args, accumulate, model_name, switch = case
    method, model = resolve_method(method_name, args), worker.make_seeded_model(model_name)
    numbers = worker.make_model_precision(case, model)
    data = worker.make_case_batches(case, numbers)
    part = partition(
        model, data[0][0], worker.list_stage_begins(model, ranks), one_stage=method.one_stage_reason
    )
    schedule = make_schedule(
        method, ranks, len(data), accumulate, worker.list_drains(case), switch * accumulate
    )
    table = VersionTable(schedule, method)
    make = ADAMW if "adamw" in name else SGD
    optimizer = make(replace_parameters(make_groups(model, part), numbers.get_trained))
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
    work = Work(
        numbers.convert_loss(torch.nn.functional.cross_entropy), table, rules, worker.get_clip(case)
    )
    emulator = Emulator(work, model, part, data[0])
    losses = [
        emulator.step(data[k * accumulate : (k + 1) * accumulate]).loss
        for k in range(worker.count_updates(case))
    ]
    emulator.close()
    copies = count_weight_copies(table)
    weighted = [
        stage.index for stage in part.stages if stage.parameters or part.list_replicas(stage.index)
    ]
    versions = {f"versions {s}": torch.tensor(copies[s] - 1.0) for s in weighted}
    with numbers.put_masters_in_place():
        state = model.state_dict()
    return {**state, "losses": torch.tensor(losses), **versions}


# One stage a device; neighbors together; V-shaped; interleaved; all on one: each with every how many-th case.
PLACEMENTS = {
    (0, 1): 1,
    (0, 1, 2, 3): 1,
    (0, 0, 1, 1): 3,
    (0, 1, 1, 0): 3,
    (0, 1, 0, 1): 4,
    (0, 0, 0, 0): 6,
}


@pytest.mark.parametrize("placement", mark_slow(PLACEMENTS, lambda placement: placement == (0, 1)))
def test_processes_give_the_emulators_weights(placement: Sequence[int], tmp_path: Path) -> None:
    chosen = [case for case in cases() if _can_share(case, placement)][
        :: PLACEMENTS[tuple(placement)]
    ]
    stages, ranks = len(placement), max(placement) + 1
    context = forked.get_fork_server()
    processes = [
        context.Process(target=worker.main, args=(r, placement, str(tmp_path), chosen))
        for r in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * ranks
    for case in chosen:
        expected, result = emulated(case, stages), {}
        for rank in range(ranks):
            result.update(torch.load(tmp_path / f"{case[0]}-{rank}.pt"))
        assert expected.keys() == result.keys(), case[0]
        for key, value in expected.items():
            if _counts_versions(case) or not key.startswith("versions"):
                assert torch.equal(value, result[key]), f"{case[0]}: {key}"
