"""Stages are compiled for devices that are not here: what the compiler says, the verdict, and what
is kept. XLA's CPU compiler stands for a TPU's where libtpu is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest

from ipu_pipe.cli import plan as command
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.memory import KeptCounts, compute_stage_memory
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.run import compiling
from tests.support.runs import DIGITS, list_faults

jax = pytest.importorskip("jax", reason="xla needs jax: pip install 'ipu_pipe[xla]'")

COMMON = ["stages=2", "method=zb_h1", "gradient_accumulation=2"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a home of its own, where the cache is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def make_topology(memory: int = 10**9, versions: str = "one", count: int = 2) -> Any:
    """Return a topology whose devices are the CPU's."""
    devices = jax.devices("cpu")[:1] * count
    return compiling.Topology("v5e:1x2", devices, memory, versions)


def list_compile_faults(*settings: str) -> List[str]:
    """Return the faults of compiling the smallest config with settings."""
    config = load_config(DIGITS, [*COMMON, *settings])
    return list_faults(compiling.compile_config, config, make_topology())


def test_the_compiler_tells_the_bytes_of_each_pass_and_they_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(DIGITS, COMMON)
    lines: List[str] = []
    where = make_topology()
    job, stages = compiling.compile_config(config, where, lines.append)
    assert [line[:12] for line in lines] == ["stage 0 of 2", "stage 1 of 2"]
    assert set(stages[0].passes) == {
        "forward",
        "input gradient",
        "weight gradient",
        compiling.WEIGHTS,
    }
    weights = sum(job.model.get_parameter(n).nbytes for n in job.partition.stages[0].parameters)
    # the CPU pads nothing
    assert stages[0].passes[compiling.WEIGHTS].argument == weights
    assert stages[0].passes["forward"].argument == weights + job.example[0].nbytes
    assert stages[0].passes["forward"].flops >= 2 * 16 * 64 * 64
    assert all(stage.needed > stage.by_shape for stage in stages)

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    assert compiling.compile_config(config, where)[1] == stages
    with pytest.raises(AssertionError, match="compiled again"):
        compiling.compile_config(config, make_topology(versions="two"))
    for file in compiling.find_cache().glob("*.json"):
        file.write_text("{")
    with pytest.raises(AssertionError, match="compiled again"):
        compiling.compile_config(config, where)

    text = compiling.format_stages(job, where, stages)
    assert "input gradient" in text and "not run on hardware" in text
    assert "device 1: fits: " in text
    small = make_topology(memory=stages[1].needed - 1)
    assert "device 1: does not fit: " in compiling.format_stages(job, small, stages)
    record = json.loads(json.dumps(compiling.convert_to_record(job, where, stages)))
    assert record["stages"][1]["needed"] == stages[1].needed

    file = compiling.write_hardware(where, "here", stages)
    device = read_hardware(str(file)).device
    assert device.usable_bytes == 10**9 and device.activation_padding is not None
    assert "the compiler (one), for here" in device.activation_padding.source
    assert device.activation_padding.confirmed


def test_a_plan_charges_the_padding_of_activations() -> None:
    plain = read_hardware("v5e").device
    figure = {"value": 3, "source": "compiler"}
    padded = type(plain).model_validate({**plain.model_dump(), "activation_padding": figure})
    unit = Unit("one", 1.0, 2.0, 10, 8.0, 4.0)
    sizes = [
        compute_stage_memory(
            unit, 0.0, KeptCounts(1, 0, 2), precision="float32", samples=5, moments=0, device=device
        )
        for device in (plain, padded)
    ]
    assert sizes[1].activations == 3 * sizes[0].activations > 0
    assert sizes[1]._replace(activations=sizes[0].activations) == sizes[0]


def test_what_cannot_be_compiled_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_compile_faults("precision=float64") == [
        "precision: float64: must be float32 with --compile-for"
    ]
    assert list_compile_faults("stages=3") == [
        "--compile-for: v5e:1x2: has 2 devices, the stages need 3"
    ]
    assert "blocks with losses" in list_compile_faults("method=local_greedy")[0]
    with pytest.raises(BadInput, match="--devices: goes with a plan, not with --compile-for"):
        command.main([str(DIGITS), "--compile-for", "v5e:2x2", "--devices", "2"])
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert list_faults(compiling.find_topology, "v5e:2x2") == [
        "--compile-for: v5e:2x2: needs libtpu: pip install 'ipu_pipe[xla-tpu]'"
    ]
    monkeypatch.setattr(jax, "__version__", "0.4.30")
    assert "jax 0.4.30 is too old" in list_faults(compiling.find_topology, "v5e:2x2")[0]
    monkeypatch.setitem(sys.modules, "jax", None)
    assert "needs jax" in list_faults(compiling.find_topology, "v5e:2x2")[0]


def test_a_topology_tells_its_memory_by_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import topologies

    def compile_too_much(*_: Any) -> None:
        raise RuntimeError("HLO temporaries (2.00T) exceeds available HBM (15.75G).")

    def describe(platform: str, topology_name: str) -> Any:
        if topology_name == "v9:2x2":
            raise RuntimeError("Invalid TPU external name: TPU v9\nmore")
        return SimpleNamespace(devices=jax.devices("cpu"))

    monkeypatch.setitem(sys.modules, "libtpu", SimpleNamespace())
    monkeypatch.setattr(compiling.importlib.metadata, "version", lambda name: "0.0.1")
    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_too_much)
    where = compiling.find_topology("v5e:2x2")
    assert where.memory_bytes == int(15.75 * 2**30) and where.versions.endswith("libtpu 0.0.1")
    (fault,) = list_faults(compiling.find_topology, "v9:2x2")
    assert fault.startswith("--compile-for: v9:2x2: libtpu has no such topology") and (
        "\n" not in fault
    )


def test_the_compiler_of_tpus_pads_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu: pip install 'ipu_pipe[xla-tpu]'")
    command.main([str(DIGITS), "--compile-for", "v5e:2x2", "--set", "stages=2", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert 15e9 < record["memory_bytes"] < 17.2e9
    for stage in record["stages"]:
        assert stage["saved"] > 2 * stage["saved_by_shape"]
        assert stage["passes"]["backward"]["code"] > 10**5
    (fault,) = list_faults(compiling.find_topology, "v5e:9")
    assert "no such topology" in fault
