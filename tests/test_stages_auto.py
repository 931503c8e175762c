"""Check `stages: auto` and `{count: P, by: hardware}`: the planner's cut of a config's model,
and the predictions of dry runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch.nn import functional as F

from ipu_pipe.cli import plan, train
from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.model_units import FEW, count_units
from ipu_pipe.plan.blocks import count_blocks
from ipu_pipe.plan.candidates import list_layouts
from ipu_pipe.plan.config_cut import choose_stages, make_candidate, make_problem, predict_config_cut
from ipu_pipe.plan.prediction import Costing, UnitSums, predict_cut
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.text import format_estimate
from models.mlp import mlp
from tests.support.runs import list_faults

EXAMPLE = torch.zeros(8, 64), torch.zeros(8, dtype=torch.long)
SMALL = {"entry": "models.mlp:mlp", "args": {"inputs": 64, "width": 32, "layers": 5, "classes": 10}}


def describe_devices(count: int = 4, memory: float = 1e6, **device: Any) -> Dict[str, Any]:
    """Return the hardware section of `count` slow devices that share one link."""
    rates = {"float32": {"peak_flops": 1e6, "achievable_share": 1.0}}
    device_keys = {
        "memory_bytes": memory,
        "usable_share": 1.0,
        "memory_bandwidth": 1e9,
        "rates": rates,
        **device,
    }
    return {
        "devices": count,
        "device": device_keys,
        "links": [{"name": "wire", "bandwidth": 1e6, "latency": 1e-3}],
    }


def make_auto_config(**keys: Any) -> Any:
    defaults = {
        "model": SMALL,
        "data": {"name": "digits"},
        "stages": "auto",
        "hardware": describe_devices(),
        "steps": 2,
    }
    return configure(**{**defaults, "gradient_accumulation": 8, **keys})


def choose_stage_names(settings: Any, **keys: Any) -> List[str]:
    method = resolve_method(settings.method)
    return choose_stages(settings, method, mlp(**SMALL["args"]), F.cross_entropy, EXAMPLE, **keys)


@pytest.mark.parametrize("keys", [
    {},
    {"method": "pipedream"},
    {"gradient_accumulation": 3},
    {"replicas": 2, "method": "pipedream_2bw"},
    {"hardware": describe_devices(memory=4e4)},
    {"stages": {"count": 3, "by": "hardware"}},
])  # fmt: skip
def test_the_chosen_stages_are_the_best_of_all(keys: Any) -> None:
    """Compare with all depths and cuts that fit, tried one by one."""
    settings = make_auto_config(**keys)
    units = count_units(mlp(**SMALL["args"]), EXAMPLE[0], (), F.cross_entropy, EXAMPLE[1]).units
    problem = make_problem(settings, units, 256.0, read_hardware(settings.hardware))
    depths = [3] if "stages" in keys else range(1, 4 // settings.replicas + 1)
    sums, slowest = UnitSums(problem, settings.micro_batch_size), {}
    for depth in depths:
        for inner in itertools.combinations(range(1, len(units)), depth - 1):
            for layout in list_layouts(depth, settings.replicas):
                prediction = predict_cut(
                    Costing(problem, make_candidate(settings, depth), layout, sums), [0, *inner]
                )
                if max(stage.total for stage in prediction.memory) <= problem.memory_bytes:
                    slowest[inner] = max(prediction.samples_per_second, slowest.get(inner, 0.0))
    names = choose_stage_names(settings)
    starts = tuple(i for i, unit in enumerate(units) if unit.name in names)
    rate = slowest[starts]
    # for each depth the planner minimizes the slowest stage, which does not minimize the time to fill the pipeline
    assert rate >= 0.97 * max(slowest.values())
    assert len(starts) in {
        len(cut) for cut, speed in slowest.items() if speed >= 0.97 * max(slowest.values())
    }


def test_without_hardware_processes_are_the_stages_and_flops_the_costs() -> None:
    settings = make_auto_config(hardware=None, backend={"name": "distributed"})
    units = count_units(mlp(**SMALL["args"]), EXAMPLE[0], (), F.cross_entropy, EXAMPLE[1]).units
    work = [unit.forward_flops + unit.backward_flops for unit in units]
    for processes in (1, 2, 3, 5):
        names = choose_stage_names(settings, processes=processes)
        cuts = [
            [0, *inner, len(work)]
            for inner in itertools.combinations(range(1, len(work)), processes - 1)
        ]
        greatest = [max(sum(work[a:b]) for a, b in zip(cut, cut[1:])) for cut in cuts]
        edges = [0, *[i for i, unit in enumerate(units) if unit.name in names], len(work)]
        assert len(edges) == processes + 1
        assert max(sum(work[a:b]) for a, b in zip(edges, edges[1:])) == min(greatest)


@pytest.mark.parametrize("method, depths", [("local_greedy", range(1, 5)), ("local_chunked", [2])])
@pytest.mark.parametrize("on_hardware", [True, False])
def test_local_stages_are_the_best_of_all_with_their_heads(
    method: str, depths: Any, on_hardware: bool
) -> None:
    """Compare with all cuts of one block per stage: by predicted times on hardware, by FLOPs
    without hardware.

    With hardware the run is then built with those blocks, and its prediction equals that of the
    choice.
    """
    processes = None if on_hardware or method == "local_chunked" else 3
    where = {} if on_hardware else {"hardware": None, "backend": {"name": "distributed"}}
    settings = make_auto_config(method=method, gradient_accumulation=1, **where)
    names = choose_stage_names(
        settings, processes=2 if not on_hardware and method == "local_chunked" else processes
    )
    model, x = mlp(**SMALL["args"]), EXAMPLE[0][:FEW]
    units = count_units(model, x, (), F.cross_entropy, EXAMPLE[1][:FEW]).units
    blocks = count_blocks(model, x, units)
    result: Dict[Any, float] = {}
    for depth in depths if on_hardware else [processes or 2]:
        for inner in itertools.combinations(range(1, len(units)), depth - 1):
            starts, ends = [0, *inner], [*inner, len(units)]
            if on_hardware:
                problem = replace(
                    make_problem(settings, units, 256.0, read_hardware(settings.hardware)),
                    blocks=blocks,
                )
                costing = Costing(
                    problem,
                    make_candidate(settings, depth),
                    list_layouts(depth, 1)[0],
                    UnitSums(problem, 8),
                )
                result[inner] = 1 / predict_cut(costing, starts).samples_per_second
            else:
                stages = [
                    [blocks.first[a], *units[a + 1 : b]] if a else units[:b]
                    for a, b in zip(starts, ends)
                ]
                heads = [[blocks.heads[end - 1]] if end < len(units) else [] for end in ends]
                with_heads = [[*stage, *head] for stage, head in zip(stages, heads)]
                result[inner] = max(
                    sum(u.forward_flops + u.backward_flops for u in stage) for stage in with_heads
                )
    best = result[tuple(i for i, unit in enumerate(units) if unit.name in names)]
    assert best <= (1.03 if on_hardware else 1 + 1e-9) * min(result.values())
    if on_hardware:
        job = build(settings)
        assert job.partition.begin_names() == names
        assert predict_config_cut(job).prediction.samples_per_second == pytest.approx(1 / best)


@pytest.mark.parametrize("keys, message", [
    ({"hardware": None}, "stages: auto: needs to know the devices: set hardware, a name or file, or processes"),
    ({"hardware": None, "stages": {"count": 2, "by": "hardware"}}, "stages.by: hardware: needs to know the devices"),
    ({"method": "local_overlapping"}, "stages: auto: the planner knows pipelines of one loss and a block a stage"),
    ({"method": "local_chunked", "method_args": {"blocks": ["fc2"]}}, "stages: auto: method_args.blocks names the blocks"),
    ({"hardware": describe_devices(memory=9e3)},
     "stages: auto: no cut fits hardware given, 9 kB usable on each device: 4 stages"),
    ({"stages": {"count": 99, "by": "hardware"}}, "the model has 12 places where a stage may begin"),
    ({"stages": {"count": 7, "by": "hardware"}}, "stages: 7: must be at most 6"),
    ({"precision": "float64"}, "precision: float64: hardware given states no rate for float64"),
    ({"replicas": 5}, "replicas: 5: stages: auto: hardware given has 4 devices"),
    ({"method": "zbv", "gradient_accumulation": 8, "hardware": "pod4"}, "stages: auto: devices in lock-step do not run zbv"),
    ({"method": "zb_auto", "method_args": {"activation_limit": 2}}, "stages: auto: the planner knows zb_auto without"),
])  # fmt: skip
def test_impossible_choices_of_stages_are_reported(keys: Any, message: str) -> None:
    faults = list_faults(lambda: build(make_auto_config(**keys)))
    assert any(message in fault for fault in faults), faults


def run_train_command(capsys: Any, *arguments: str) -> str:
    """Run `train` with these arguments and return its output."""
    train.main(list(arguments))
    return str(capsys.readouterr().out)


def test_a_run_keeps_the_stages_that_were_chosen(tmp_path: Path, capsys: Any) -> None:
    """The run's folder stores their names. A resumed run keeps them for the same hardware, and
    other hardware may be requested."""
    file, out = tmp_path / "c.yaml", str(tmp_path / "run")
    file.write_text(
        dump_config(make_auto_config(log={"tensorboard": False}, evaluate={"every": 0}))
    )
    run_train_command(capsys, str(file), "--out", out)
    stages = load_config(Path(out) / "config.yaml").stages
    assert isinstance(stages, list) and stages == choose_stage_names(make_auto_config())
    output = run_train_command(capsys, str(file), "--out", out, "--resume", "--set", "steps=3")
    assert (
        "another steps" in output
        and "another stages" not in output
        and "another hardware" not in output
    )
    output = run_train_command(
        capsys, str(file), "--out", out, "--resume", "--set", "steps=4", "hardware=v100x8"
    )
    assert "the run continues with another hardware" in output


def test_a_dry_run_predicts_its_own_cut(capsys: Any) -> None:
    """Each figure is marked as predicted, with its hardware, memory against the limit, and the
    bottleneck."""
    arguments = ["configs/mlp_digits.yaml", "--dry-run", "--set"]
    output = run_train_command(capsys, *arguments, "hardware=v100x8")
    lines = output.splitlines()
    table = lines[lines.index("predicted on v100x8, not measured") + 1 :]
    assert "memory   share of usable" in table[0]
    prediction = predict_config_cut(
        build(load_config("configs/mlp_digits.yaml", ["hardware=v100x8"]))
    ).prediction
    assert (
        f"predicted {format_estimate(prediction.samples_per_second, 2)} samples/s" in output
        and "predicted bottleneck: " in output
    )
    assert [line.split()[0] for line in table[1 : len(prediction.starts) + 1]] == [
        str(s) for s in range(len(prediction.starts))
    ]
    merged = "method_args={schedule: dataflow}"
    for more in ("method=local_overlapping", "precision=bfloat16", "stages={finest: 40}", merged):
        assert "no prediction for v100x8: " in run_train_command(
            capsys, *arguments, "hardware=v100x8", more
        )
    assert "predicted" not in run_train_command(capsys, *arguments, "hardware=null")


WIDE: Dict[str, Any] = {"method": "gpipe", "stages": 4, "gradient_accumulation": 4}


@pytest.mark.parametrize("keys, needs", [
    ({"replicas": 8, "hardware": "pod16"}, "hardware: pod16: needs 32 of 16 devices (stages 4 x replicas 8)"),
    ({"replicas": 5, "hardware": "pod16"}, "hardware: pod16: needs 20 of 16 devices"),
    ({"replicas": 3, "hardware": "v100x8"}, "hardware: v100x8: needs 12 of 8 devices"),
    ({"hardware": "a100"}, "hardware: a100: needs 4 of 1 devices"),
    ({"hardware": {**describe_devices(), "devices": 3}}, "hardware: given: needs 4 of 3 devices"),
    ({"replicas": 2, "hardware": "pod4", "stages": {"count": 4, "by": "hardware"}}, "hardware: pod4: needs 8 of 4 devices"),
    ({"hardware": {**describe_devices(), "devices": 3}, "stages": {"count": 4, "by": "hardware"}},
     "hardware: given: needs 4 of 3"),
    ({"method": "interleaved_1f1b", "stages_per_device": 2, "replicas": 3, "hardware": describe_devices()},
     "hardware: given: needs 6 of 4 devices (stages 4, 2 on a device, x replicas 3)"),
    ({"method": "local_greedy", "replicas": 2, "hardware": describe_devices()}, "hardware: given: needs 8 of 4"),
])  # fmt: skip
def test_no_more_devices_are_predicted_than_the_hardware_has(
    keys: Dict[str, Any], needs: str
) -> None:
    """8 stages x 4 replicas were once predicted on a POD16, as if it had 32 IPUs."""
    (fault,) = list_faults(lambda: build(make_auto_config(**{**WIDE, **keys})))
    assert fault.startswith(needs) and "fewer stages or replicas" in fault


def test_as_many_devices_as_the_hardware_has_are_predicted() -> None:
    for keys in (
        {"replicas": 4, "hardware": "pod16"},
        {"replicas": 2, "hardware": "v100x8"},
        {"hardware": describe_devices()},
    ):
        assert (
            predict_config_cut(
                build(make_auto_config(**{**WIDE, **keys}))
            ).prediction.samples_per_second
            > 0
        )
    # replicas of local SGD take turns on the devices of one pipeline
    turns = {
        "method": "local_sgd",
        "gradient_accumulation": 1,
        "method_args": {"replicas": 9},
        "hardware": describe_devices(),
    }
    assert (
        predict_config_cut(
            build(make_auto_config(**{**WIDE, **turns}))
        ).prediction.candidate.devices
        == 4
    )


def test_a_plan_for_more_devices_than_described_is_written_with_them(
    tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "planned.yaml"
    arguments = [
        "--hardware",
        "v100x8",
        "--devices",
        "16",
        "--precision",
        "float32",
        "--top",
        "1",
        "--write",
        str(file),
    ]
    plan.main(["configs/mlp_digits.yaml", *arguments])
    assert "describes 8" in capsys.readouterr().err
    planned = load_config(file)
    assert read_hardware(planned.hardware).devices == 16
    assert build(planned).config.hardware == planned.hardware


def test_stages_inside_modules_are_predicted_too() -> None:
    """A unit begins wherever one of the config's stages begins."""
    keys = {
        "model": {"entry": "models.resnet:preact_resnet20", "args": {"classes": 10}},
        "hardware": describe_devices(memory=1e9),
    }
    data = {
        "name": "synthetic",
        "shape": [3, 32, 32],
        "classes": 10,
        "subset": 64,
        "test_subset": 8,
    }
    job = build(make_auto_config(**keys, data=data, stages=["layer2.0.conv2", "layer3.1"]))
    result = predict_config_cut(job)
    names = [unit.name for unit in result.problem.units]
    assert [names[start] for start in result.prediction.starts[1:]] == [
        "layer2.0.conv2",
        "layer3.1",
    ]
    assert sum(unit.forward_flops for unit in result.problem.units) * 8 == sum(
        job.footprint.forward_flops
    )


RESNET = {
    "model": {"entry": "models.resnet:preact_resnet20", "args": {"classes": 10}},
    "data": {
        "name": "synthetic",
        "shape": [3, 32, 32],
        "classes": 10,
        "subset": 64,
        "test_subset": 8,
    },
    "hardware": describe_devices(memory=1e9),
    "micro_batch_size": 2,
}


@pytest.mark.parametrize("keys", [
    {"micro_batch_size": 2, "stages": 1},
    {"micro_batch_size": 2, "stages": ["fc2", "fc4"]},
    {"micro_batch_size": 2, "stages": ["fc1", "fc2", "fc3", "fc4"], "method": "pipedream", "hardware": describe_devices(5)},
    {"micro_batch_size": 16, "stages": ["fc1", "fc3"]},
    {**RESNET, "stages": 1},
    {**RESNET, "stages": ["layer2.0"]},
    {**RESNET, "stages": ["layer1.1", "layer2.0.conv2", "layer3.1"], "method": "pipedream"},
    {**RESNET, "stages": ["layer1.0", "layer3.2"], "recompute": True},
])  # fmt: skip
def test_predicted_activations_are_those_of_the_runs_memory_report(keys: Any) -> None:
    """Include the inputs that stages stash for their backward, even if the previous stage stashes
    them too, and the loss's own tensors.

    The figures are equal to the byte with the number of samples that units are counted with; a
    few numbers do not grow with the samples.
    """
    job = build(make_auto_config(**keys))
    predicted = [memory.activations for memory in predict_config_cut(job).prediction.memory]
    reported = [row["activation_bytes"] for row in build_memory_table(job)]
    assert predicted == (
        reported if job.config.micro_batch_size == FEW else pytest.approx(reported, rel=0.02)
    )
