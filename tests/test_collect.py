"""tools/collect.py compares methods on the same work."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List
from unittest.mock import Mock

import pytest
import torch

from ipu_pipe.comparison import method_comparison
from ipu_pipe.comparison.config_loop import ConfigLoop
from ipu_pipe.comparison.method_comparison import (
    compare_methods,
    make_comparison_table,
    run_turn,
    switch_method,
)
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import METHODS
from tests import forked
from tests.support.runs import ROOT, read_json, read_summary

DIGITS = "configs/mlp_digits.yaml"


def run_collect(*args: str) -> forked.CommandOutput:
    return forked.run_command("collect", *args)


def read_comparison(folder: Path) -> Dict[str, Any]:
    return {
        name: read_json(folder / f"{name}.json")["methods"]
        for name in ("throughput", "memory", "communication")
    }


def load_digits_config(*changes: str) -> Any:
    return load_config(str(ROOT / DIGITS), ["backend.threads=1", *changes])


@pytest.mark.slow
def test_resnet34_on_four_devices_sends_what_the_paper_states(tmp_path: Path) -> None:
    """Laskin et al. 2020 state these figures in Table 2, rounded to 0.1 MiB, which they call MB.

    The bytes are linear in the batch and in the size of a number. Here batches have 2 samples instead
    of 32, and numbers have 4 bytes instead of 2, with which a CPU is ten times as fast.
    """
    assert load_config(Path("configs/resnet34_ipu4.yaml")).precision == "bfloat16"
    code, _, error = run_collect(
        "configs/resnet34_ipu4.yaml", "--steps", "0", "--out", str(tmp_path / "out"),
        "--set", "micro_batch_size=2", "gradient_accumulation=2", "data.subset=8", "data.test_subset=2",
        "precision=float32",
    )  # fmt: skip
    assert code == 0, error
    results = read_comparison(tmp_path / "out")
    mib = 2**20 * 2 / 32 * 2
    crossing = results["communication"]["local_chunked"]["links"]
    links = {(link["src"], link["dst"]): link["bytes_per_microbatch"] / mib for link in crossing}
    assert links == {(0, 1): 12.25, (1, 2): 6.125, (2, 3): 3.0625}
    for name, expected in (  # received and transmitted
        ("local_chunked", [(0, 12.25), (12.25, 6.125), (6.125, 3.0625), (3.0625, 0)]),
        ("pipedream_flush", [(12.25, 12.25), (18.375, 18.375), (9.1875, 9.1875), (3.0625, 3.0625)]),
    ):
        devices = results["communication"][name]["devices"]
        for device, (received, transmitted) in zip(devices, expected):
            assert device["received_bytes"] == received * mib
            assert device["transmitted_bytes"] == transmitted * mib
    assert results["throughput"]["local_chunked"]["samples_per_second"] is None


def test_methods_do_the_same_work_and_leave_their_traces(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    names = "gpipe,local_greedy,local_overlapping"
    command = [DIGITS, "--methods", names, "--steps", "3", "--out", out]
    code, _, error = run_collect(*command)
    assert code == 0, error
    results = read_comparison(tmp_path / "out")
    for name in names.split(","):
        assert (tmp_path / "out" / name / "trace.json.gz").is_file()
        assert read_summary(tmp_path / "out" / name)["samples"] == 3 * 64
        assert len(results["memory"][name]["devices"]) == 4
    speed = results["throughput"]
    assert all(of_method["samples_per_second"] > 0 for of_method in speed.values())
    # (N + P - 1) / N is the speedup of never draining for equal stages
    speedups = [speed[name]["modelled_speedup"] for name in ("gpipe", "local_greedy")]
    assert 1 == speedups[0] < speedups[1] < 7 / 4
    assert "shared_layer_links" in results["communication"]["local_overlapping"]
    code, _, error = run_collect(*command)
    # story: it named --resume, which collect does not have
    assert code == 2 and "contains another run (config.yaml): give --overwrite or" in error
    code, _, error = run_collect(*command, "--methods", "gpipe", "--overwrite")
    assert code == 0, error


def test_a_runs_own_folder_is_refused(tmp_path: Path) -> None:
    """Story: the run's memory.json was replaced, without --overwrite."""
    config = load_digits_config("steps=1", "log.tensorboard=false")
    train(config, tmp_path, quiet=True)
    with pytest.raises(BadInput, match="is the folder of a run"):
        compare_methods(config, ["gpipe"], tmp_path, steps=0)


def test_the_folder_of_ones_own_config_is_no_runs(tmp_path: Path) -> None:
    """Story: collect my/config.yaml --out my was refused as the folder of a run."""
    shutil.copy(ROOT / DIGITS, tmp_path / "config.yaml")
    assert compare_methods(load_config(tmp_path / "config.yaml"), ["gpipe"], tmp_path, steps=0)


def test_each_method_has_a_turn_in_each_round(tmp_path: Path) -> None:
    config = load_digits_config("log.tensorboard=false", "evaluate.every=0")
    lines: List[str] = []
    methods = ["gpipe", "pipedream"]
    comparison = compare_methods(config, methods, tmp_path, steps=2, say=lines.append, rounds=3)
    assert [line.partition(":")[0] for line in lines] == methods * 3
    for name, speed in comparison["throughput"].items():
        rates = speed["samples_per_second_by_round"]
        assert len(rates) == 3 and speed["samples_per_second"] == sorted(rates)[1]
        assert (tmp_path / name / "round-3" / "trace.json.gz").is_file()
        # one machine does the work of all devices, so that no device is measured
        assert speed["utilization"] is speed["measured_speedup"] is None
        assert 0 < speed["modelled_utilization"] < 1
        planned = build(load_config(tmp_path / name / "config.yaml")).compute_planned_utilization()
        assert speed["planned_utilization"] == planned
        devices = comparison["memory"][name]["devices"]
        assert all(device["measured_bytes"] is None for device in devices)


def test_the_traffic_of_every_device_is_shown_where_methods_have_different_numbers(
    tmp_path: Path,
) -> None:
    """Story: beside a method with two stages a device half of GPipe's devices were left out."""
    comparison = compare_methods(load_digits_config(), ["gpipe", "zbv"], tmp_path, steps=0)
    lines = [line.split() for line in make_comparison_table(comparison).splitlines()]
    received = {line[0]: line[2:] for line in lines if line[1:2] == ["received"]}
    assert len(received["gpipe"]) == 4 and received["zbv"][2:] == ["-", "-"]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_processes_are_started_and_measured_beside_what_was_planned(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = "--methods pipedream --steps 3 --set backend.name=distributed stages=2 log.tensorboard=false"
    code, _, error = run_collect(DIGITS, *options.split(), "evaluate.every=0", "--out", str(out))
    assert code == 0, error
    results = read_comparison(out)
    assert read_summary(out / "pipedream")["backend"] == "distributed"
    speed = results["throughput"]["pipedream"]
    assert speed["samples_per_second"] > 0
    assert speed["measured_speedup"] == speed["modelled_speedup"] == 1
    links = results["communication"]["pipedream"]["links"]
    sizes = [(li["bytes_per_microbatch"], li["planned_bytes_per_microbatch"]) for li in links]
    assert len(sizes) == 2 and all(measured == planned > 0 for measured, planned in sizes)


@pytest.mark.parametrize(
    "stderr, message",
    [
        ("torchrun says much\nerror: update 0: the training loss is nan\nmore\n", "the training loss is nan"),
        ("Killed\n", "Killed"),
        (
            "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)  (SIGKILL)\n=======\n",
            "rank 1 ended with exit code -9 and reported no error",
        ),
        ("", "exit code 1"),
    ],
)  # fmt: skip
def test_a_fault_of_started_processes_is_one_line(
    stderr: str, message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    run = Mock(return_value=subprocess.CompletedProcess([], 1, "", stderr))
    monkeypatch.setattr(method_comparison.subprocess, "run", run)
    config = load_config(str(ROOT / DIGITS), ["backend.name=distributed"])
    with pytest.raises(RunFault, match=f"^pipedream on 3 processes: .*{message}$"):
        run_turn(config, tmp_path / "run", 3)
    (command,) = run.call_args[0]
    assert command[command.index("--nproc_per_node") + 1] == "3"
    assert command[-1] == str(tmp_path / "run")


@pytest.mark.parametrize("own", ["gpipe", "local_chunked"])
def test_the_order_of_the_methods_does_not_change_their_work(own: str, tmp_path: Path) -> None:
    """Story: the first method chose the cut of the others: local_chunked's own two blocks, or the four stages."""
    blocks = ["method_args.blocks=2"] * (own == "local_chunked")
    config = load_digits_config(f"method={own}", *blocks)
    names = ["gpipe", "local_chunked", "pipedream"]
    one, two, three = (
        compare_methods(config, order, tmp_path, steps=0, say=lambda text: None)
        for order in (names, names[::-1], ["local_chunked", "gpipe", "pipedream"])
    )
    for name in names:
        for kind in ("memory", "communication"):
            assert one[kind][name] == two[kind][name] == three[kind][name]
        assert len(one["memory"][name]["devices"]) == (2 if blocks else 4)


@pytest.mark.parametrize(
    "options, message",
    [
        ("", "CONFIG: missing"),
        (DIGITS, "--out: missing"),
        (f"{DIGITS} --out x --methods gpip", "--methods: gpip: "),
        (f"{DIGITS} --out x --methods gpipe,gpipe", "--methods: gpipe,gpipe: must be different"),
        (f"{DIGITS} --out x --steps -1", "--steps: -1"),
        (f"{DIGITS} --out x --rounds 0", "--rounds: 0"),
        (f"{DIGITS} --out x --set method=naive backend.name=poptorch --steps 0", "poptorch: "),
        (f"{DIGITS} --out x", "steps: null: "),
        ("nothing.yaml --out x", "no such config file"),
    ],
)
def test_bad_input_is_one_line(options: str, message: str) -> None:
    code, _, error = run_collect(*options.split())
    assert code == 2 and message in error and len(error.splitlines()) == 1
    assert not (ROOT / "x").exists()


def test_a_method_gets_no_settings_of_another_ones() -> None:
    """Story: of a config with two stages on a device every other method was refused, and compare lost the heads' layers."""
    zbv = load_digits_config("method=zbv", "stages_per_device=2")
    heads = {"head": {"depth": 2, "pyramid": 0.0}}
    local = load_digits_config("method=local_greedy", f"method_args.head={heads['head']}")
    for name in METHODS.keys() - {"zbv"}:
        assert not switch_method(zbv, name, 3).method_settings()
        if METHODS[name].structure and name != "local_greedy":
            assert switch_method(local, name, 3).method_settings() == heads
            assert ConfigLoop(local).describe_methods([name])[name]["method_args"] == heads


def test_methods_with_losses_of_their_own_update_after_each_microbatch() -> None:
    config = load_config(str(ROOT / "configs" / "resnet34_ipu4.yaml"))
    local = switch_method(config, "local_chunked", 3, ["layer2"])
    assert (local.steps, local.gradient_accumulation) == (24, 1)
    assert local.method_args.blocks == ["layer2"]
    assert switch_method(config, config.method, 3) == config.model_copy(update={"steps": 3})
    falling = load_digits_config("lr_schedule={name: cosine, warmup_steps: 2, total_steps: 3}")
    schedule = switch_method(falling, "local_chunked", 3).lr_schedule
    N = falling.gradient_accumulation
    assert (schedule.warmup_steps, schedule.total_steps) == (2 * N, 3 * N)
