"""tools/collect.py compares methods on the same work."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Dict, List

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
from ipu_pipe.errors import RunFault
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import METHODS
from tests import forked
from tests.support.runs import ROOT, read_json, read_summary

DIGITS = "configs/mlp_digits.yaml"


def compute_balanced_speedup(stages: int, accumulate: int) -> float:
    """Return (N+P-1)/N, the speedup of never draining over draining after N microbatches, for equal stages."""
    return (accumulate + stages - 1) / accumulate


def run_collect(*args: str) -> forked.CommandOutput:
    return forked.run_command("collect", *args)


def read_comparison(folder: Path) -> Dict[str, Any]:
    return {
        name: read_json(folder / f"{name}.json")["methods"]
        for name in ("throughput", "memory", "communication")
    }


@pytest.mark.slow
def test_resnet34_on_four_devices_sends_what_the_paper_states(tmp_path: Path) -> None:
    """Laskin et al. 2020 state these figures in Table 2, rounded to 0.1 MiB, which they call MB.

    The bytes are linear in the batch and in the size of a number. Here batches have 2 samples instead
    of 32, and numbers have 4 bytes instead of 2, with which a CPU is ten times as fast.
    """
    assert load_config(Path("configs/resnet34_ipu4.yaml")).precision == "bfloat16"
    code, printed, error = run_collect(
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
        assert [
            (d["received_bytes"] / mib, d["transmitted_bytes"] / mib) for d in devices
        ] == expected
    assert (
        results["throughput"]["local_chunked"]["samples_per_second"] is None
        and "local_chunked" in printed
    )


def test_methods_do_the_same_work_and_leave_their_traces(tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = "gpipe,pipedream,local_greedy,local_overlapping"
    code, printed, error = run_collect(
        DIGITS, "--methods", names, "--steps", "3", "--out", str(out)
    )
    assert code == 0, error
    results = read_comparison(out)
    for name in names.split(","):
        assert (out / name / "trace.json.gz").is_file()
        assert read_summary(out / name)["samples"] == 3 * 64
        assert results["throughput"][name]["samples_per_second"] > 0
        assert len(results["memory"][name]["devices"]) == 4
    assert results["throughput"]["gpipe"]["modelled_speedup"] == 1
    assert (
        1
        < results["throughput"]["local_greedy"]["modelled_speedup"]
        < compute_balanced_speedup(4, 4)
    )
    assert "shared_layer_links" in results["communication"]["local_overlapping"]
    assert printed.count("local_greedy") == 3
    code, _, error = run_collect(DIGITS, "--methods", names, "--steps", "3", "--out", str(out))
    assert code == 2 and "contains another run" in error
    code, _, error = run_collect(
        DIGITS, "--methods", "gpipe", "--steps", "2", "--out", str(out), "--overwrite"
    )
    assert code == 0, error


def test_each_method_has_a_turn_in_each_round(tmp_path: Path) -> None:
    config = load_config(
        str(ROOT / DIGITS), ["backend.threads=1", "log.tensorboard=false", "evaluate.every=0"]
    )
    lines: List[str] = []
    comparison = compare_methods(
        config, ["gpipe", "pipedream"], tmp_path, steps=2, say=lines.append, rounds=3
    )
    assert [line.partition(":")[0] for line in lines] == ["gpipe", "pipedream"] * 3
    for name, speed in comparison["throughput"].items():
        rates = speed["samples_per_second_by_round"]
        assert len(rates) == 3 and speed["samples_per_second"] == sorted(rates)[1]
        assert (tmp_path / name / "round-3" / "trace.json.gz").is_file()
        # one machine does the work of all devices, so that no device is measured
        assert (
            speed["utilization"] is speed["measured_speedup"] is None
            and 0 < speed["modelled_utilization"] < 1
        )
        assert (
            speed["planned_utilization"]
            == build(load_config(tmp_path / name / "config.yaml")).compute_planned_utilization()
        )
        assert all(
            device["measured_bytes"] is None for device in comparison["memory"][name]["devices"]
        )
    printed = make_comparison_table(comparison).splitlines()
    assert (
        len({len(line) for line in printed[1:4]}) == 1
        and "modelled" in printed[1]
        and "planned" in printed[1]
    )


def test_the_traffic_of_every_device_is_shown_where_methods_have_different_numbers(
    tmp_path: Path,
) -> None:
    """Story: beside a method with two stages a device half of GPipe's devices were left out."""
    config = load_config(str(ROOT / DIGITS), ["backend.threads=1"])
    comparison = compare_methods(config, ["gpipe", "zbv"], tmp_path, steps=0)
    lines = [line.split() for line in make_comparison_table(comparison).splitlines()]
    received = {line[0]: line[2:] for line in lines if line[1:2] == ["received"]}
    assert len(received["gpipe"]) == 4 and received["zbv"][2:] == ["-", "-"]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_processes_are_started_and_measured_beside_what_was_planned(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, printed, error = run_collect(
        DIGITS, "--methods", "pipedream", "--steps", "3", "--out", str(out), "--set", "backend.name=distributed", "stages=2",
        "log.tensorboard=false", "evaluate={every: 0, subset: 32}",
    )  # fmt: skip
    assert code == 0, error
    results = read_comparison(out)
    assert read_summary(out / "pipedream")["backend"] == "distributed"
    speed = results["throughput"]["pipedream"]
    assert (
        speed["samples_per_second"] > 0
        and speed["measured_speedup"] == speed["modelled_speedup"] == 1
    )
    links = results["communication"]["pipedream"]["links"]
    assert len(links) == 2
    assert all(
        link["bytes_per_microbatch"] == link["planned_bytes_per_microbatch"] > 0 for link in links
    )


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
    commands: List[Any] = []

    def run(command: List[str], **how: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(method_comparison.subprocess, "run", run)
    config = load_config(str(ROOT / DIGITS), ["backend.name=distributed"])
    with pytest.raises(RunFault, match=f"^pipedream on 3 processes: .*{message}$"):
        run_turn(config, tmp_path / "run", 3)
    assert commands[0][commands[0].index("--nproc_per_node") + 1] == "3" and commands[0][-1] == str(
        tmp_path / "run"
    )


@pytest.mark.parametrize("own", ["gpipe", "local_chunked"])
def test_the_order_of_the_methods_does_not_change_their_work(own: str, tmp_path: Path) -> None:
    """Story: the first method chose the cut of the others: local_chunked's own two blocks, or the four stages."""
    args = {"blocks": 2} if own == "local_chunked" else {}
    config = load_config(str(ROOT / DIGITS), ["backend.threads=1"]).model_copy(
        update={"method": own}
    )
    config = config.model_copy(update={"method_args": config.method_args.model_copy(update=args)})
    names = ["gpipe", "local_chunked", "pipedream"]
    orders = (names, names[::-1], ["local_chunked", "gpipe", "pipedream"])
    one, two, three = (
        compare_methods(config, order, tmp_path, steps=0, say=lambda text: None) for order in orders
    )
    for name in names:
        for kind in ("memory", "communication"):
            assert one[kind][name] == two[kind][name] == three[kind][name]
        assert len(one["memory"][name]["devices"]) == (2 if args else 4)


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "CONFIG: missing"),
        ([DIGITS], "--out: missing"),
        ([DIGITS, "--out", "x", "--methods", "gpip"], "--methods: gpip: "),
        (
            [DIGITS, "--out", "x", "--methods", "gpipe,gpipe"],
            "--methods: gpipe,gpipe: must be different",
        ),
        ([DIGITS, "--out", "x", "--steps", "-1"], "--steps: -1"),
        ([DIGITS, "--out", "x", "--rounds", "0"], "--rounds: 0"),
        (
            [
                DIGITS,
                "--out",
                "x",
                "--steps",
                "0",
                "--set",
                "method=naive",
                "backend.name=poptorch",
            ],
            "backend.name: poptorch: ",
        ),
        ([DIGITS, "--out", "x"], "steps: null: "),
        (["nothing.yaml", "--out", "x"], "no such config file"),
    ],
)
def test_bad_input_is_one_line(args: Any, message: str) -> None:
    code, _, error = run_collect(*args)
    assert code == 2 and message in error and len(error.splitlines()) == 1
    assert not (ROOT / "x").exists()


def test_a_method_gets_no_settings_of_another_ones() -> None:
    """Story: of a config with two stages on a device every other method was refused, and compare lost the heads' layers."""
    own = ["method=zbv", "stages_per_device=2"]
    zbv = load_config(str(ROOT / DIGITS), own)
    heads = {"depth": 2, "pyramid": 0.0}
    local = load_config(str(ROOT / DIGITS), ["method=local_greedy", f"method_args.head={heads}"])
    for name in METHODS.keys() - {"zbv"}:
        assert not switch_method(zbv, name, 3).method_settings()
        expected = {"head": heads} if METHODS[name].structure and name != "local_greedy" else None
        if expected:
            assert switch_method(local, name, 3).method_settings() == expected
            assert ConfigLoop(local).describe_methods([name])[name]["method_args"] == expected


def test_methods_with_losses_of_their_own_update_after_each_microbatch() -> None:
    config = load_config(str(ROOT / "configs" / "resnet34_ipu4.yaml"))
    local = switch_method(config, "local_chunked", 3, ["layer2"])
    assert (
        local.steps == 24
        and local.gradient_accumulation == 1
        and local.method_args.blocks == ["layer2"]
    )
    assert switch_method(config, config.method, 3) == config.model_copy(update={"steps": 3})
    assert compute_balanced_speedup(4, 8) == pytest.approx(
        1.375
    )  # the bounds beside the paper's Table 1: 37.5, 44, 22 %
    assert compute_balanced_speedup(8, 16) == pytest.approx(1.4375) and compute_balanced_speedup(
        8, 32
    ) == pytest.approx(1.21875)
