"""Test the optimizer state in streaming memory: it is planned where nothing fits without it, at
the cost of its traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict

import pytest

from ipu_pipe.cli import plan as command
from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.plan.answer import convert_to_json, format_answer, make_planned_config
from ipu_pipe.plan.candidates import Candidate, list_layouts
from ipu_pipe.plan.config_cut import make_problem, predict_config_cut
from ipu_pipe.plan.planner import make_plan
from ipu_pipe.plan.prediction import Costing, Problem, UnitSums, predict_cut
from ipu_pipe.run.planning import build_for_planning

KEY = "backend.ipu.options.TensorLocations.setOptimizerLocation.useOnChipStorage: false"
UNITS = tuple(Unit(f"unit{i}", 5.0, 10.0, 1000, 4.0, 40.0) for i in range(4))


def make_streaming_problem(memory: float, **device: Any) -> Problem:
    """Return a problem of four units of 1000 float32 weights with Adam: each weight takes 16
    bytes on the device, 8 of them state that may be streamed."""
    rates = {"float32": {"peak_flops": 1.0, "achievable_share": 1.0}}
    figures: Dict[str, Any] = {
        "devices": 2,
        "device": {
            "memory_bytes": 1e6, "usable_share": 1.0, "memory_bandwidth": 1e9, "rates": rates, "streaming_bytes": 1e6,
            "streaming_bandwidth": 100.0, **device,
        },
        "links": [{"name": "all", "bandwidth": 1e6, "latency": 0.0}],
    }  # fmt: skip
    return Problem(UNITS, 8.0, read_hardware(figures, "here"), memory, "float32", 2)


def test_state_leaves_the_device_and_costs_its_traffic_at_each_update() -> None:
    on_chip = make_streaming_problem(1e6)
    candidate = Candidate("pipedream_flush", 2, 1, 1, 4, False)
    result = [
        predict_cut(Costing(task, candidate, list_layouts(2, 1)[0], UnitSums(task, 1)), [0, 2])
        for task in (on_chip, replace(on_chip, streamed=True))
    ]
    state = 2 * 1000 * 8  # of a stage
    for here, streamed in zip(result[0].memory, result[1].memory):
        assert (here.optimizer, streamed.optimizer) == (
            state,
            0,
        ) and here.total - streamed.total == state
    assert result[1].seconds - result[0].seconds == pytest.approx(2 * state / 100.0)


def test_it_is_planned_where_nothing_else_fits_and_printed() -> None:
    """It is not planned where another plan fits, on devices without streaming memory, or beyond
    the size of that memory."""

    def make_flushed_plan(problem: Problem) -> Any:
        return make_plan(problem, ["pipedream_flush"], 2, 8)

    enough, little = 40_000.0, 20_000.0  # a stage of two units: 32 kB, 16 kB of them state
    usual = make_flushed_plan(make_streaming_problem(enough))
    assert usual.plans and not usual.problem.streamed and usual.smallest_change is None
    result = make_flushed_plan(make_streaming_problem(little))
    assert (
        result.plans
        and result.problem.streamed
        and KEY in str(result.smallest_change)
        and KEY in format_answer(result)
    )
    assert (
        max(memory.total for prediction, _ in result.plans for memory in prediction.memory)
        <= little
    )
    assert all(
        "optimizer state in streaming memory, whose traffic takes" in p["binding"]
        for p in convert_to_json(result)["plans"]
    )
    assert not make_flushed_plan(
        make_streaming_problem(little, streaming_bytes=None, streaming_bandwidth=None)
    ).plans
    assert not make_flushed_plan(make_streaming_problem(little, streaming_bytes=15_999.0)).plans
    assert make_flushed_plan(make_streaming_problem(little, streaming_bytes=16e3)).plans
    assert "optimizer state in streaming memory" in str(
        make_flushed_plan(make_streaming_problem(1000.0)).smallest_change
    )


def test_the_key_is_read_and_written(tmp_path: Path, capsys: Any) -> None:
    """The key of a PopTorch config is read and written; `gc200` has streaming memory."""
    file, planned = tmp_path / "c.yaml", tmp_path / "planned.yaml"
    keys: Dict[str, Any] = {
        "model": {"entry": "models.mlp:mlp", "args": {"inputs": 64, "width": 256, "layers": 4, "classes": 10}},
        "data": {"name": "digits"}, "backend": {"name": "poptorch"}, "steps": 2, "gradient_accumulation": 8,
        "optimizer": {"name": "adam", "lr": 0.1}, "stages": 1, "precision": "32.32",
    }  # fmt: skip
    file.write_text(dump_config(configure(**keys)))
    hardware = read_hardware("pod4")
    assert not make_problem(load_config(file), UNITS, 8.0, hardware).streamed
    code = 0.2 * hardware.device.memory_bytes.value
    options = [str(file), "--hardware", "pod4", "--devices", "1", "--json", "--write", str(planned)]
    command.main([*options, "--memory", str(code + 2e6)])
    assert json.loads(capsys.readouterr().out)["smallest_change"] == f"{KEY}, as in this plan"
    assert load_config(planned).ipu.streams_state
    assert make_problem(load_config(planned), UNITS, 8.0, hardware).streamed
    command.main([*options, "--overwrite"])
    assert not load_config(planned).ipu.streams_state


def test_a_written_pipeline_recomputes_only_if_the_plan_does(tmp_path: Path) -> None:
    """Story: PopTorch's pipelines recompute by default, so a plan without recomputation was written
    as a config with it."""
    keys: Dict[str, Any] = {
        "model": {"entry": "models.mlp:mlp", "args": {"inputs": 64, "width": 32, "layers": 4}},
        "data": {"name": "digits"}, "steps": 2, "gradient_accumulation": 8, "stages": 2,
        "method": "gpipe", "precision": "32.32", "hardware": "pod4",
    }  # fmt: skip
    file = tmp_path / "planned.yaml"
    for recomputation, recomputes in (("none", False), ("auto", True)):
        ipu = {"recomputation": recomputation}
        job = build_for_planning(configure(**keys, backend={"name": "poptorch", "ipu": ipu}))
        cut = predict_config_cut(job)
        config = configure(**keys, backend={"name": "poptorch"})
        file.write_text(make_planned_config(config, cut.problem, cut.prediction, "pod4"))
        assert config.recomputes and load_config(file).recomputes is recomputes
