"""Stages are compiled for devices that are not here: what the compiler says, the verdict, and what
is kept. XLA's CPU compiler stands for a TPU's where libtpu is not installed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, List
from unittest.mock import Mock

import pytest
import torch

from ipu_pipe.cli import plan as command
from ipu_pipe.config.load import load_config
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.memory import KeptCounts, compute_stage_memory
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.run import blackhole, compilers, compiling
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
    return compilers.Topology("v5e:1x2", devices, memory, versions)


def test_the_compiler_tells_the_bytes_of_each_pass_and_they_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, where = load_config(DIGITS, COMMON), make_topology()
    lines: List[str] = []
    job, stages = compiling.compile_config(config, where, lines.append)
    assert [line[:12] for line in lines] == ["stage 0 of 2", "stage 1 of 2"]
    passes = stages[0].passes
    assert set(passes) == {"forward", "input gradient", "weight gradient", compiling.WEIGHTS}
    weights = sum(job.model.get_parameter(n).nbytes for n in job.partition.stages[0].parameters)
    # the CPU pads nothing
    assert passes[compiling.WEIGHTS].argument == weights
    assert passes["forward"].argument == weights + job.example[0].nbytes
    assert passes["forward"].flops >= 2 * 16 * 64 * 64
    assert all(stage.needed > stage.by_shape for stage in stages)

    monkeypatch.setattr(jax.stages.Lowered, "compile", Mock(side_effect=AssertionError))
    assert compiling.compile_config(config, where)[1] == stages
    with pytest.raises(AssertionError):
        compiling.compile_config(config, make_topology(versions="two"))
    for file in compilers.find_cache().glob("*.json"):
        file.write_text("{")
    with pytest.raises(AssertionError):
        compiling.compile_config(config, where)


def test_compiled_stages_are_judged_and_recorded() -> None:
    where = make_topology()
    job, stages = compiling.compile_config(load_config(DIGITS, COMMON), where)
    small = make_topology(memory=stages[1].needed - 1)
    unknown = replace(small, memory_bytes=None)
    for topology, verdict in ((where, "fits: "), (small, "does not fit: "), (unknown, "needs ")):
        assert f"device 1: {verdict}" in compiling.format_stages(job, topology, stages)
    file = compiling.write_hardware(where, "here", stages)
    device = read_hardware(str(file)).device
    assert device.usable_bytes == 10**9 and device.activation_padding is not None
    assert "the compiler (one), for here" in device.activation_padding.source
    assert device.activation_padding.confirmed
    # Story: where the compiler did not tell the memory, the bytes of a pass that does not compile
    # were left out without a word
    stages[1].passes["forward"] = compilers.CompiledPass(fault="no sine")
    assert "device 1: does not fit: a pass" in compiling.format_stages(job, unknown, stages)
    # Story: the padding was written as confirmed, without the bytes of this stage
    assert compiling.write_hardware(where, "here", stages) is None
    record = json.loads(json.dumps(compiling.convert_to_record(job, where, stages)))
    assert record["stages"][1]["needed"] == stages[1].needed


def test_a_plan_charges_the_padding_of_activations() -> None:
    plain = read_hardware("v5e").device
    figure = {"value": 3, "source": "compiler"}
    padded = type(plain).model_validate({**plain.model_dump(), "activation_padding": figure})
    unit, kept = Unit("one", 1.0, 2.0, 10, 8.0, 4.0), KeptCounts(1, 0, 2)
    keys: Any = {"precision": "float32", "samples": 5, "moments": 0}
    before, after = (
        compute_stage_memory(unit, 0.0, kept, device=device, **keys) for device in (plain, padded)
    )
    assert after.activations == 3 * before.activations > 0
    assert after._replace(activations=before.activations) == before


@pytest.mark.parametrize("settings, fault", [
    (["precision=float64"], "precision: float64: must be float32 with --compile-for"),
    (["stages=3"], "--compile-for: v5e:1x2: has 2 devices, the stages need 3"),
    (["method=local_greedy"], "blocks with losses"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_refused_in_one_line(settings: List[str], fault: str) -> None:
    config = load_config(DIGITS, [*COMMON, *settings])
    assert fault in list_faults(compiling.compile_config, config, make_topology())[0]


@pytest.mark.parametrize("name, lacks, fault", [
    ("v5f:2x2", ["libtpu"], "--compile-for: v5f:2x2: must be blackhole, v4, v5e"),
    ("v5e:2x2", ["libtpu"], "--compile-for: v5e:2x2: needs libtpu: pip install 'ipu_pipe[xla-tpu]'"),
    ("v5e:2x2", ["jax"], "needs jax"),
])  # fmt: skip
def test_a_compiler_that_is_not_there_is_named(
    name: str, lacks: List[str], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in lacks:
        monkeypatch.setitem(sys.modules, module, None)
    assert fault in list_faults(compilers.find_topology, name)[0]


def test_a_topology_tells_its_memory_by_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import topologies

    def describe(platform: str, topology_name: str) -> Any:
        if topology_name == "v5e:9":
            raise RuntimeError("Invalid TPU topology: 9\nmore")
        return SimpleNamespace(devices=jax.devices("cpu"))

    error = RuntimeError("HLO temporaries (2.00T) exceeds available HBM (15.75G).")
    monkeypatch.setitem(sys.modules, "libtpu", SimpleNamespace())
    monkeypatch.setattr(compilers.importlib.metadata, "version", lambda name: "0.0.1")
    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(jax.stages.Lowered, "compile", Mock(side_effect=error))
    where = compilers.find_topology("v5e:2x2")
    assert where.memory_bytes == int(15.75 * 2**30) and where.versions.endswith("libtpu 0.0.1")
    (fault,) = list_faults(compilers.find_topology, "v5e:9")
    assert fault.startswith("--compile-for: v5e:9: libtpu has no such topology")
    assert "\n" not in fault


@pytest.mark.slow
@pytest.mark.parametrize("name", compilers.TPUS)
def test_the_compiler_of_tpus_pads_a_stage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu: pip install 'ipu_pipe[xla-tpu]'")
    command.main([str(DIGITS), "--compile-for", name, "--set", "stages=2", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["topology"] == compilers.TPUS[name]
    assert record["memory_bytes"] > 15e9
    for stage in record["stages"]:
        assert stage["saved"] > 2 * stage["saved_by_shape"]
        assert stage["passes"]["backward"]["code"] > 10**5
    (fault,) = list_faults(compilers.find_topology, f"{name}:9")
    assert "no such topology" in fault


# ---- Tenstorrent's Blackhole

# two outputs; the product's is computed from what a constant's function keeps, and a sum lies in L1
TTNN = """
#dram = #ttnn.buffer_type<dram>
#flat = #ttnn.ttnn_layout<(d0) -> (d0), <1x1>, memref<20x64xf32, #dram>, <interleaved>>
#host = #ttnn.ttnn_layout<(d0) -> (0, d0), <1x1>, memref<1x10xbf16, #system_memory>>
#tiles = #ttnn.ttnn_layout<(d0) -> (d0), <1x1>, memref<1x2x!ttcore.tile<32x32, f32>, #dram>, <interleaved>>
#cores = #ttnn.ttnn_layout<(d0) -> (d0), <2x4, (d0) -> (0)>, memref<1x1x!ttcore.tile<32x32, bfp_bf8>, #l1>, <block_sharded>>
  func.func private @main_const_eval_0() -> tensor<#tiles> {
    %0 = "ttnn.full"() <{shape = #ttnn.shape<20x64>}> : () -> tensor<#tiles> loc(#loc)
    return %0 : tensor<#tiles>
  }
  func.func public @main(%arg0: tensor<#flat> loc("x"), %arg1: tensor<#host>) -> (tensor<#tiles>, tensor<#cores>) {
    %0 = ttcore.load_cached(@main_const_eval_0, []) : () -> tensor<#tiles>
    %1 = "ttnn.to_layout"(%arg0) : (tensor<#flat>) -> tensor<#tiles> loc(#loc)
    "ttnn.deallocate"(%arg0) : (tensor<#flat>) -> () loc(#loc)
    %2:2 = "ttnn.sort"(%1) : (tensor<#tiles>) -> (tensor<#tiles>, tensor<#flat>)
    "ttnn.deallocate"(%1) : (tensor<#tiles>) -> () loc(#loc)
    "ttnn.deallocate"(%2#1) : (tensor<#flat>) -> () loc(#loc)
    %3 = "ttnn.multiply"(%2#0, %0) : (tensor<#tiles>, tensor<#tiles>) -> tensor<#tiles>
    %4 = "ttnn.sum"(%3) : (tensor<#tiles>) -> tensor<#cores> loc(#loc)
    return %3, %4 : tensor<#tiles>, tensor<#cores> loc(#loc)
"""


def test_bytes_and_operations_are_read_from_the_text_of_a_compiled_program() -> None:
    flat, tiles, cores = 20 * 64 * 4, 2 * 1024 * 4, 2 * 4 * 1088
    assert blackhole.read_facts(TTNN) == {
        "argument": flat + 10 * 2,
        "output": tiles + cores,
        # the constant, the tiles of the argument, and both results of the sort
        "temporary": 3 * tiles + flat,
        "operations": {"full": 1, "to_layout": 1, "sort": 1, "multiply": 1, "sum": 1},
        "in_dram": 4,
    }


def make_plugin_environment(script: str) -> Path:
    """Make an environment of Tenstorrent's compiler whose Python is a shell script."""
    folder = compilers.find_environment()
    for name, version in {"jax": "0.10.2", compilers.PLUGIN: "0.1.3"}.items():
        info = folder / "lib/python3.11/site-packages" / f"{name.replace('-', '_')}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin/python").chmod(0o755)
    return folder


def compile_for_blackhole(graph: Any, where: Any = None) -> compilers.CompiledPass:
    """Compile a function of eight numbers."""
    where = where or compilers.find_topology("blackhole")
    return compilers.compile_or_read(graph, [torch.zeros(8)], where, None)


def ask_compiler(number: int, where: Any = None) -> compilers.CompiledPass:
    """Compile the addition of a number."""
    return compile_for_blackhole(lambda x: x + number, where)


def test_tenstorrents_compiler_is_asked_in_its_own_environment(home: Path) -> None:
    facts = json.dumps({"argument": 7, "operations": {"add": 2}, "seconds": 0.5})
    folder = make_plugin_environment(
        f"""echo; echo "$2" > "$HOME/asks"; read file; cp "$file" "$HOME/seen"; echo '{facts}'
        read file; echo 'loc("jit(run)/net.fc (aten.sin)/sine"(x)): error: no sine' >&2; echo '{{}}'
        read file; echo 'LLVM ERROR: no cosine' >&2; exit 3"""
    )
    where = compilers.find_topology("blackhole")
    assert where.versions == "jax 0.10.2, jax-tt-plugin 0.1.3"
    compiled = compilers.CompiledPass(argument=7, operations={"add": 2}, seconds=0.5)
    assert ask_compiler(1, where) == compiled
    assert "stablehlo.add" in (folder / "seen").read_text()
    # it ends with this process, whose number it is told
    assert int((folder / "asks").read_text()) == os.getpid()
    # it is kept, so the next program is the process's second
    assert ask_compiler(1, where) == compiled
    fault, _, log = ask_compiler(2, where).fault.partition(" (/")
    assert fault == "net.fc (aten.sin)/sine: no sine"
    assert "no sine" in Path(f"/{log[:-1]}").read_text()
    assert ask_compiler(3, where).fault.startswith("no cosine (/")
    # the process has ended: another one begins
    assert ask_compiler(4, where) == compiled


def test_a_compiler_that_ends_between_two_programs_is_a_fault_and_begins_again(home: Path) -> None:
    """Story: the broken pipe was taken for the end of the command's reader, and it ended with 0."""
    make_plugin_environment("""echo; read file; echo '{"argument": 7}'""")
    where: Any = compilers.find_topology("blackhole")
    assert ask_compiler(1, where).argument == 7
    process = where.compile.__self__._process
    assert ask_compiler(2, where).fault.startswith("no reason (/")
    # Story: it stayed as a zombie, with its pipes
    assert process.returncode is not None and process.stdin.closed and process.stdout.closed
    assert ask_compiler(2, where).argument == 7


def test_two_commands_do_not_read_each_others_programs(home: Path) -> None:
    make_plugin_environment(
        """echo; while read file; do sleep 0.3; wc -c < "$file" | sed 's/.*/{"argument": &}/'; done"""
    )
    graphs = [lambda x: x + 1, lambda x: (x + 1) * (x + 2) * (x + 3)]
    with ThreadPoolExecutor(2) as pool:
        short, long = (one.argument for one in pool.map(compile_for_blackhole, graphs))
    assert 0 < short < long


def test_a_machine_without_tenstorrents_compiler_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    (fault,) = list_faults(compilers.find_topology, "blackhole")
    assert fault.startswith("--compile-for: blackhole: needs jax-tt-plugin")
    assert all(" ".join(one) in fault for one in compilers.list_commands())
    make_plugin_environment("echo 'TT_FATAL: no chip' >&2; exit 1")
    assert "does not start: no chip" in list_faults(ask_compiler, 1)[0]
    for name, value in {"libc_ver": ("glibc", "2.31"), "machine": "aarch64"}.items():
        with monkeypatch.context() as patch:
            patch.setattr(platform, name, lambda value=value: value)
            (fault,) = list_faults(compilers.find_topology, "blackhole")
            assert "needs Linux on x86_64 with glibc 2.34" in fault


@pytest.fixture(scope="module")
def tenstorrent_home() -> Iterator[str]:
    """Make Tenstorrent's environment by the commands that a user is told, in a home of its own."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("HOME", folder)
        for one in compilers.list_commands():
            made = subprocess.run(one, capture_output=True, text=True)
            if made.returncode:
                last = (made.stderr or made.stdout).strip().splitlines()[-1]
                pytest.skip(f"no environment of Tenstorrent's compiler: {last}")
        yield folder


@pytest.mark.slow
def test_tenstorrents_compiler_compiles_stages(
    tenstorrent_home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax.numpy as jnp

    monkeypatch.setenv("HOME", tenstorrent_home)
    records = []
    for name in ("mlp_digits", "resnet20_cifar10"):
        command.main([name, "--compile-for", "blackhole", "--set", "stages=2", "--json"])
        records.append(json.loads(capsys.readouterr().out))
    assert (compilers.find_environment() / "tmp").is_dir()
    for record in records:
        for stage in record["stages"]:
            assert not any(one["fault"] for one in stage["passes"].values())
            assert all(one["operations"] for one in stage["passes"].values())
    digits, resnet = ([stage["version"] for stage in record["stages"]] for record in records)
    # in tiles of 4096 bytes: matrices of 64 x 64 with biases of 64, and the last one of 64 x 10
    layer = (4 + 2) * 4096
    assert digits == [2 * layer, 2 * layer + (2 + 1) * 4096]
    # a kernel of 3 x 3 takes a tile
    by_shape = [stage["version_by_shape"] for stage in records[1]["stages"]]
    assert all(100 * shape < version for version, shape in zip(resnet, by_shape))
    fault = compile_for_blackhole(lambda x: jnp.fft.rfft(x).real).fault
    assert "real: failed to legalize" in fault
