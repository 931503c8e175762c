"""Test the IPU keys of a config: refusals with remedies, poptorch.Options, the configs for pods.

Nothing here ran on an IPU.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch

from ipu_pipe.backends.ipu import options, popart_options, unsupported, wrapping
from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.backends.ipu.model_facts import ModelFacts
from ipu_pipe.backends.ipu.options import RECOMPUTATION
from ipu_pipe.backends.ipu.placement import PIPELINED, Placement, get_execution, place_stages
from ipu_pipe.backends.ipu.unsupported import check_method
from ipu_pipe.backends.table import make_engine
from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.pipeline.build import build
from ipu_pipe.refusals import Language
from ipu_pipe.schedule.methods import (
    METHODS,
    DefaultAccumulate,
    Method,
    Reads,
    Timeline,
    resolve_method,
)
from tests.support.ipu_runs import PODS
from tests.support.runs import ROOT, list_faults, read_json
from tests.support.slow import mark_slow

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`


def configure_ipus(ipu: Any = None, **keys: Any) -> Any:
    base = {"method": "gpipe", "gradient_accumulation": 16, "stages": 4}
    return configure(backend={"name": "poptorch", "ipu": ipu or {}}, **{**base, **keys})


def get_method(settings: Any) -> Method:
    return resolve_method(settings.method, settings.method_settings())


def check_facts(settings: Any, facts: ModelFacts, **replicas: int) -> List[str]:
    lines = unsupported.check_model(settings, get_method(settings), facts, **replicas)
    return [Language.CONFIG.say(line) for line in lines]


def make_poptorch_options(settings: Any, *others: Any, **more: Any) -> Any:
    return options.make_options(settings, get_method(settings), *others, **more)


def list_ipu_faults(ipu: Any = None, **keys: Any) -> List[str]:
    return [fault.replace("configure: ", "") for fault in list_faults(configure_ipus, ipu, **keys)]


# ---- refusals from the config alone: the key and value in the fault, backend.ipu, other keys

IO = {"tensor_locations": {"num_io_tiles": 32}}
OVERLAPPED: Dict[str, Any] = {"overlapped_io": "accumulation_loop", **IO}
NAIVE, LOCAL = {"method": "naive"}, {"method": "local_greedy"}
SHARDS = {"optimizer": {"replicated_tensor_sharding": True}}
OFFLINE: Dict[str, Any] = {"offline_target": 2, "compile_only": True}
APART = {"local": "decoupled"}
REFUSED: List[Tuple[str, Dict[str, Any], Dict[str, Any]]] = [
    ("gradient_accumulation: 6", {}, {"gradient_accumulation": 6}),
    ("gradient_accumulation: 4", {"ipus": [0, 1, 0, 1]}, {"gradient_accumulation": 4}),
    ("stages: 3 IPUs", {}, {"stages": 3}),
    ("stages: 4 IPUs x replicas 3 = 12", {}, {"replicas": 3}),
    ("replicas: 16", {}, {"stages": 8, "replicas": 16}),
    ("replicas: 16", {"auto_round_num_ipus": True}, {"stages": 5, "replicas": 16, "gradient_accumulation": 9}),
    ("backend.ipu.ipus: [0, 1]", {"ipus": [0, 1]}, {}),
    ("backend.ipu.ipus: [1, 2, 3, 3]", {"ipus": [1, 2, 3, 3]}, {}),
    ("backend.ipu.inference_device_iterations: 3", {"inference_device_iterations": 3}, {}),
    ("backend.ipu.available_memory_proportion: [0.1, 0.2]", {"available_memory_proportion": [0.1, 0.2]}, {}),
    ("backend.ipu.available_memory_proportion: 1.5", {"available_memory_proportion": 1.5}, {}),
    ("backend.ipu.overlapped_io: accumulation_loop", OVERLAPPED, {}),
    ("backend.ipu.overlapped_io: accumulation_loop", {"overlapped_io": "accumulation_loop"}, NAIVE),
    ("backend.ipu.output_mode: final", {**OVERLAPPED, "output_mode": "final"}, NAIVE),
    ("backend.ipu.tensor_locations.num_io_tiles: 33", {"tensor_locations": {"num_io_tiles": 33}}, {}),
    ("backend.ipu.tensor_locations.weight.io_tiles_to_load: true",
     {"tensor_locations": {"weight": {"io_tiles_to_load": True}}}, {}),
    ("backend.ipu.tensor_locations.optimizer.replicated_tensor_sharding: true", {"tensor_locations": SHARDS}, {}),
    ("backend.ipu.use_combined_accum: true",
     {"use_combined_accum": True, "tensor_locations": {"optimizer": {"on_chip": False}}}, {}),
    ("clip.scope: stage", {}, {"clip": {"norm": 1, "scope": "stage"}}),
    ("precision: float64", {}, {"precision": "float64"}),
    ("precision: bfloat16", {}, {"precision": "bfloat16"}),
    ("backend.ipu.output_return_period: 3", {"output_mode": "every_n", "output_return_period": 3}, {}),
    ("backend.ipu.output_return_period: 2", {"output_return_period": 2}, {}),
    ("recompute: true", {"recomputation": "none"}, {"recompute": True}),
    ("backend.ipu.device_iterations: 4", {"device_iterations": 4}, {"steps": 6}),
    ("backend.ipu.device_iterations: 4", {"device_iterations": 4}, {"checkpoint": {"every": 6}}),
    ("checkpoint.format: sharded", APART, {**LOCAL, "checkpoint": {"format": "sharded"}}),
    ("optimizer.groups: 1 with optimizers of their own", {}, {"optimizer": {"groups": [{"name": "sgd"}]}}),
    ("backend.ipu.local: decoupled", APART, {}),
    ("backend.ipu.local: decoupled", APART, {"method": "last_layers"}),
    ("replicas: 2", APART, {**LOCAL, "replicas": 2}),
    ("backend.ipu.ipus: [0, 1, 2, 3]", {**APART, "ipus": [0, 1, 2, 3]}, LOCAL),
    ("backend.ipu.device_iterations: 2", {**APART, "device_iterations": 2}, LOCAL),
    ("backend.ipu.data_loading.mode: async", {**APART, "data_loading": {"mode": "async"}}, LOCAL),
    ("backend.ipu.output_mode: final", {**APART, "output_mode": "final"}, LOCAL),
    ("backend.ipu.compile_only: true", {**APART, "compile_only": True}, LOCAL),
    ("backend.ipu.local: decoupled", {**APART, "profile": {"directory": "p"}}, LOCAL),
    ("method_args.block_accumulation: [1, 1, 1, 2]", {}, {**LOCAL, "method_args": {"block_accumulation": [1, 1, 1, 2]}}),
    ("clip.norm: 1.0", {}, {**LOCAL, "clip": {"norm": 1}}),
    ("backend.ipu.ipu_ids: [0, 1]", {"ipu_ids": [0, 1]}, {}),
    ("backend.ipu.offline_target: 2", {"offline_target": 2}, {}),
    ("backend.ipu.offline_target: 3", {"offline_target": 3}, {}),
    ("backend.ipu.use_ipu_model: true", {**OFFLINE, "use_ipu_model": True}, {}),
    ("backend.ipu.ipu_ids: [0]", {**OFFLINE, "ipu_ids": [0]}, {}),
    ("backend.ipu.log_cycle_count: true", {**OFFLINE, "log_cycle_count": True}, {}),
    ("backend.ipu.log_cycle_count: true", {"log_cycle_count": True, "use_ipu_model": True}, {}),
    ("backend.ipu.recomputaton: none", {"recomputaton": "none"}, {}),
    ("backend.ipu.popart_options.enableOutlinning: false", {"popart_options": {"enableOutlinning": False}}, {}),
    ("backend.ipu.popart_options.no: 1", {"popart_options": {"enableOutlining": True, "no": 1}}, {}),
    ("backend.ipu.popart_options.enableOutlining: 1", {"popart_options": {"enableOutlining": 1}}, {}),
    ("backend.ipu.popart_options.outlineThreshold: 2", {"popart_options": {"outlineThreshold": 2}}, {}),
    ("backend.ipu.popart_options.mergeVarUpdate: -1", {"popart_options": {"mergeVarUpdate": -1}}, {}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_ipus_do_not_support_is_refused_by_key_and_value(case: int) -> None:
    key_and_value, ipu, keys = REFUSED[case]
    lines = list_ipu_faults(ipu, **keys)
    assert len(lines) == 1 and lines[0].startswith(f"{key_and_value}: "), lines


def test_popart_options_are_those_of_the_published_list() -> None:
    published = read_json(ROOT / "tests" / "poptorch_double" / "api.json")
    assert popart_options.TYPES == published["popart_session_options"]
    assert popart_options.VERSION == published["version"]
    (fault,) = list_ipu_faults({"popart_options": {"enableOutlinning": False}})
    assert "3.4" in fault and "nearest is enableOutlining" in fault


def test_an_unknown_popart_option_of_another_sdk_is_a_warning(monkeypatch: Any) -> None:
    monkeypatch.setattr(popart_options.metadata, "version", lambda name: "3.3.0+1")
    with pytest.warns(UserWarning, match="popart_options.enableOutlinning: PopART 3.4.0 has no"):
        configure_ipus({"popart_options": {"enableOutlinning": False}})
    monkeypatch.setattr(popart_options.metadata, "version", lambda name: "3.4.0+1")
    assert len(list_ipu_faults({"popart_options": {"enableOutlinning": False}})) == 1


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.is_stale])
def test_asynchronous_methods_are_refused_with_the_nearest_that_runs(method: str) -> None:
    fault = list_ipu_faults(method=method, optimizer={"momentum": 0.9})[0]
    assert fault.startswith(
        f"method: {method}: a PopTorch pipeline is flushed at every weight update"
    )
    assert any(f"use {near}" in fault for near in ("pipedream_flush", "gpipe"))


def test_layers_in_two_blocks_are_refused_and_all_other_methods_run() -> None:
    (fault,) = list_ipu_faults(method="local_overlapping")
    assert "two IPUs" in fault and "local_greedy" in fault
    for name, method in METHODS.items():
        is_refused = (
            method.is_stale
            or method.order is not None
            or name in ("local_overlapping", "local_sgd")
        )
        assert bool(check_method(method)) == is_refused, name


GPIPE, GREEDY = METHODS["gpipe"], METHODS["local_greedy"]
INVENTED = {
    "pipeline": replace(GPIPE, pipeline=Timeline.DATAFLOW),
    "forward_reads": replace(GPIPE, forward_reads=Reads.DOUBLE_BUFFERED),
    "backward_reads": replace(METHODS["pipedream_flush"], backward_reads=Reads.STASHED),
    "predicts": replace(GPIPE, predicts=True),
    "turn": replace(GPIPE, turn=1),
    "blocks_in_a_pipeline": replace(GPIPE, structure=GREEDY.structure),
    "blocks_that_flush": replace(GREEDY, flushes=True),
    "one_loss_in_a_local_schedule": replace(GREEDY, flushes=True, structure=None),
}


@pytest.mark.parametrize("what", INVENTED)
def test_a_row_that_does_not_state_that_poptorch_runs_it_is_refused(
    what: str, monkeypatch: Any
) -> None:
    invented = replace(INVENTED[what], name="invented")
    monkeypatch.setitem(METHODS, "invented", invented)
    (fault,) = list_ipu_faults(method="invented")
    assert (
        fault.startswith("method: invented: PopTorch is not known to run")
        and "gpipe or pipedream_flush" in fault
    )
    new_method = replace(
        GPIPE, name="invented", source="another", default_accumulate=DefaultAccumulate.ONE
    )
    assert (
        check_method(new_method) == [] and get_execution(new_method) == PIPELINED
    )  # neither changes the execution


def test_a_fault_names_the_file_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    usual = "model: {entry: a:b}\ndata: {name: digits}\nstages: 4\nprecision: 16.16\nbackend: {name: poptorch}\n"
    path.write_text(f"{usual}gradient_accumulation: 4\n")
    assert list_faults(load_config, path)[0].startswith(f"{path}: gradient_accumulation: 4: ")
    config = load_config(path, ["gradient_accumulation=7"])
    assert config.precision == "16.16"  # which YAML takes for a number
    path.write_text(dump_config(config))
    assert load_config(path) == config
    sets = ["backend.name=emulator", "backend.ipu=null", "precision=float32"]
    assert load_config(path, sets).backend.ipu is None
    (fault,) = list_faults(load_config, path, [sets[0], sets[2]])
    assert "backend.ipu" in fault and "set backend.ipu=null" in fault
    (fault,) = list_faults(load_config, path, sets[:2])
    assert "precision: 16.16: " in fault


# ---- stages on IPUs


def test_neighbours_on_one_ipu_are_one_stage_and_a_pipeline_has_twice_as_many_less_one() -> None:
    place = place_stages(IpuConfig(ipus=[0, 1, 1, 2, 0]), 5)
    assert place.poptorch_stages == [(0, [0]), (1, [1, 2]), (2, [3]), (0, [4])]
    assert (place.forward_stages, place.ipu_count, place.least_accumulation) == (4, 3, 7)
    whole = place_stages(IpuConfig(), 8)
    assert (whole.ipu_by_stage, whole.least_accumulation) == (tuple(range(8)), 15)
    # PopART's schedule (willow/src/transforms/pipeline.cpp): cycles of an update, and the share of them that is full
    for stages, accumulation, cycles, share in (
        (2, 3, 5, 0.6),
        (4, 7, 13, 0.54),
        (4, 64, 70, 0.91),
        (8, 64, 78, 0.82),
    ):
        place = Placement(tuple(range(stages)))
        assert (
            place.count_cycles(accumulation) == cycles and round(accumulation / cycles, 2) == share
        )


FACTS = ModelFacts(4, {}, [1, 2, 3], [], [], ("sgd", [{}]), 100, 50)
NESTEROV = {"optimizer": ("sgd", [{"nesterov": True}])}
COMBINED: Dict[str, Any] = {"use_combined_accum": True}
OF_MODELS: List[Tuple[str, Dict[str, Any], Dict[str, Any], Dict[str, Any]]] = [
    ("model: w", {}, {}, {"shared": {"w": [0, 2]}}),
    ("stages", {}, {}, {"order": [1, 3, 2]}),
    ("stages", {}, {}, {"order": [1, 2, 3, 1]}),
    ("stages: 2", {}, {}, {"empty": [2]}),
    ("backend.ipu.broadcast_buffers: true", {}, {"replicas": 2}, {"written": ["n.running_mean"]}),
    ("optimizer: adagrad", {}, {}, {"optimizer": ("adagrad", [])}),
    ("optimizer.amsgrad: true", {}, {}, {"optimizer": ("adam", [{"amsgrad": True}])}),
    ("optimizer.dampening", {}, {}, {"optimizer": ("sgd", [{"dampening": 0.1}])}),
    ("optimizer.nesterov: true", {}, {}, NESTEROV),
    ("optimizer.nesterov: true", {**COMBINED, "mean_reduction_strategy": "running"}, {}, NESTEROV),
    ("model: Own", {}, {}, {"functions": ["Own"]}),
    ("model: relu in 1", {}, {}, {"ungraded": ["relu in 1"]}),
    ("model: seen", {}, {}, {"counters": ["seen"]}),
    ("precision: 16.32: 1.c", {}, {"precision": "16.32"}, {"biased_convolutions": ["1.c"]}),
    ("precision: 16.32", {}, {"precision": "16.32"}, {"input_type": torch.uint8}),
    ("backend.ipu.use_combined_accum: true", COMBINED, {}, {"optimizer": ("adam", [])}),
    ("backend.ipu.velocity_accum_type: float16", {"velocity_accum_type": "float16"}, {}, {"optimizer": ("adamw", [])}),
    ("clip.norm: 1.0", {}, {"clip": {"norm": 1}}, {"optimizer": ("rmsprop", [])}),
    ("backend.ipu.device_iterations: 3", {"device_iterations": 3}, {}, {}),
    ("backend.ipu.device_iterations: 4", {"device_iterations": 4}, {}, {}),
    ("backend.ipu.ipu_ids: [0]", {**APART, "ipu_ids": [0]}, LOCAL, {}),
    ("backend.ipu.available_memory_proportion: [0.1]", {**APART, "available_memory_proportion": [0.1]}, LOCAL, {}),
    ("stages: 6 IPUs", {}, {"stages": None}, {"stages": 6}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(OF_MODELS)))
def test_models_that_do_not_fit_are_refused_by_key_and_value(case: int) -> None:
    key_and_value, ipu, keys, facts = OF_MODELS[case]
    settings = configure_ipus(ipu, **keys)
    assert check_facts(settings, FACTS) == [] or not facts
    lines = check_facts(settings, FACTS._replace(**facts))
    assert any(line.startswith(f"{key_and_value}: ") for line in lines), lines


def test_replicas_of_one_process_count_for_its_ipus() -> None:
    settings = configure_ipus(replicas=16)
    assert check_facts(settings, FACTS) == []
    many = settings.model_copy(update={"replicas": 64})
    assert (
        check_facts(many, FACTS)[0].startswith("replicas: 64: ")
        and check_facts(many, FACTS, local_replicas=16) == []
    )
    (fault,) = check_facts(
        configure_ipus({"tensor_locations": SHARDS}, replicas=2), FACTS, local_replicas=1
    )
    assert fault.startswith(
        "backend.ipu.tensor_locations.optimizer.replicated_tensor_sharding: true: "
    )


# ---- poptorch.Options

EVERY_KEY = {
    "device_iterations": 2, "ipus": [0, 1, 1, 2], "auto_round_num_ipus": True, "broadcast_buffers": False,
    "available_memory_proportion": [0.1, 0.2, 0.3], "partials": "half", "stochastic_rounding": True,
    "floating_point_exceptions": True, "stable_norm": True, "convolution_dithering": True, "automatic_loss_scaling": True,
    "mean_reduction_strategy": "running", "recomputation": "norm_only", "prefetch_buffering_depth": 3, "output_mode": "sum",
    "synthetic_data": True, "executable_cache": "cache", "connection_type": "on_demand", "sync_pattern": "single_pipeline",
    "log_cycle_count": True, "engine_options": {"debug.instrument": "true"}, "profile": {"directory": "p"},
    "popart_options": {"enableOutlining": False},
    "tensor_locations": {
        "num_io_tiles": 64,
        "optimizer": {"on_chip": False, "replicated_tensor_sharding": True, "min_elements_for_replicated_tensor_sharding": 8},
        "weight": {"on_chip": True, "min_elements_for_off_chip": 5, "io_tiles_to_load": True, "io_tiles_to_store": True},
    },
}  # fmt: skip


def test_every_key_becomes_the_option_of_its_name(poptorch: Any) -> None:
    settings = configure_ipus(EVERY_KEY, replicas=4)
    place = place_stages(settings.backend.ipu, 4)
    options = make_poptorch_options(settings, place, True, 5, ipu_id=3).toDict()
    strategy = make_poptorch_options(settings, place, True, 5)._execution_strategy
    assert [strategy.stage(f"stage{s}")._ipu for s in range(4)] == [0, 1, 1, 2]
    assert [strategy.stage(f"stage{s}")._stage_id for s in range(4)] == [0, 1, 1, 2]
    expected = {
        "device_iterations": 2, "replication_factor": 4, "gradient_accumulation": 16, "auto_round_num_ipus": True,
        "broadcast_buffers": False, "available_memory_proportion": {0: 0.1, 1: 0.2, 2: 0.3}, "partialsTypeMatMuls": "half",
        "enableStochasticRounding": True, "enableFloatingPointChecks": True, "enableStableNorm": True,
        "convolutionOptions": {"partialsType": "half", "enableConvDithering": "true"},
        "automaticLossScalingSettings.enabled": True, "autoRecomputation": 2, "defaultPrefetchBufferingDepth": 3,
        "output_mode": poptorch.OutputMode.Sum, "syntheticDataMode": 2, "cachePath": "cache", "enableEngineCaching": True,
        "connection_type": poptorch.ConnectionType.OnDemand, "sync_pattern": poptorch.SyncPattern.SinglePipeline,
        "instrumentWithHardwareCycleCounter": True, "ipu_id": 3, "random_seed": 5, "model_name": "training",
        "enableOutlining": False, "numIOTiles": 64, "num_distributed_processes": 1,
        "meanAccumulationAndReplicationReductionStrategy": poptorch.MeanReductionStrategy.Running,
        "accumulation_and_replication_reduction_type": poptorch.ReductionType.Mean,
        "location_optimizer": {"onChip": 0, "useReplicatedTensorSharding": 1, "minElementsForReplicatedTensorSharding": 8},
        "location_weight": {"onChip": 1, "minElementsForOffChip": 5, "useIOTilesToLoad": 1, "useIOTilesToStore": 1},
        "engineOptions": {"debug.instrument": "true", "debug.allowOutOfMemory": "true", "autoReport.all": "true",
                          "autoReport.directory": "p"},
    }  # fmt: skip
    assert {key: options.get(key) for key in expected} == expected
    inference = make_poptorch_options(settings, place, False, 5).toDict()
    assert inference["device_iterations"] == 3 and inference["gradient_accumulation"] == 1
    assert (
        inference["output_mode"] == poptorch.OutputMode.All
        and "location_optimizer" not in inference
    )
    assert inference["replication_factor"] == 4 and "autoRecomputation" not in inference
    assert inference["enableStochasticRounding"] is False


def test_defaults_leave_poptorchs_own(poptorch: Any) -> None:
    settings = configure_ipus()
    options = make_poptorch_options(
        settings, place_stages(settings.backend.ipu, 4), True, 5
    ).toDict()
    plain = poptorch.Options().outputMode(poptorch.OutputMode.All).toDict()
    changed = {key for key in options if options[key] != plain.get(key)}
    assert changed == {
        "gradient_accumulation", "model_name", "random_seed", "partialsTypeMatMuls", "convolutionOptions",
        "enableStochasticRounding",
    }  # fmt: skip
    assert (
        options["partialsTypeMatMuls"] == "float" and options["enableStochasticRounding"] is False
    )


def test_recomputation_is_set_where_it_was_requested(poptorch: Any) -> None:
    place = Placement((0, 1, 2, 3))

    def read_recomputation(ipu: Any = None, **keys: Any) -> Tuple[Any, Any]:
        options = make_poptorch_options(configure_ipus(ipu, **keys), place, True, 0).toDict()
        return options.get("autoRecomputation"), options.get("explicitRecomputation")

    assert (
        read_recomputation() == read_recomputation(recompute=True) == (None, None)
    )  # a pipeline recomputes by itself
    assert read_recomputation({"recomputation": "none"}) == (0, None)
    assert read_recomputation({"recomputation": "pipeline"}) == (3, None)
    assert read_recomputation(method="naive", recompute=True) == (1, True)
    assert read_recomputation({"recomputation": "recompute_all"}, method="naive") == (4, True)


def test_overlapped_io_reaches_the_model(poptorch: Any, monkeypatch: Any) -> None:
    settings = configure_ipus({"overlapped_io": "device_iteration_loop", **IO}, method="naive")
    loss, mode = (
        torch.nn.functional.cross_entropy,
        wrapping.OVERLAP[settings.backend.ipu.overlapped_io],
    )
    wrapped = wrapping.Wrapped(wrapping.WholeModel(torch.nn.Linear(2, 2)), loss, False, mode)
    options = make_poptorch_options(settings, Placement((0,)), True, 0)
    executor = poptorch.trainingModel(
        wrapped, options, poptorch.optim.SGD(wrapped.parameters(), lr=0.1)
    )
    modes: List[Any] = []
    real = poptorch.set_overlap_for_input
    monkeypatch.setattr(
        poptorch, "set_overlap_for_input", lambda x, mode: modes.append(mode) or real(x, mode)
    )
    executor.compile(torch.ones(16, 2), torch.zeros(16, dtype=torch.int64))
    assert set(modes) == {poptorch.OverlapMode.OverlapDeviceIterationLoop}


def test_reading_a_config_waits_for_no_torch() -> None:
    code = "import sys, ipu_pipe.backends.ipu.unsupported; print('torch' in sys.modules, 'poptorch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "False False\n", result.stderr


# ---- the configs for pods


def test_there_is_a_config_for_every_pod_depth_and_method() -> None:
    names = {path.stem for path in PODS}
    every = itertools.product((4, 16, 64), (18, 34, 50, 101), ("pipelined", "local"))
    wanted = {f"pod{pod}_resnet{depth}_{how}" for pod, depth, how in every}
    assert names == wanted | {"pod4_resnet50_decoupled", "graphcore_pod16_resnet50"}


def test_graphcores_own_recipe_is_a_config() -> None:
    path = ROOT / "configs" / "pod" / "graphcore_pod16_resnet50.yaml"
    for settings, replicas, batch in (
        ([], 16, 16416),
        (["replicas=64", "gradient_accumulation=14"], 64, 16128),
    ):
        config = load_config(path, settings)
        assert config.replicas == replicas
        assert config.micro_batch_size * config.gradient_accumulation * replicas == batch
    assert config.ipu.use_combined_accum and config.ipu.tensor_locations.optimizer.on_chip is None
    assert len(config.ipu.popart_options) == 5 and config.ipu.output_mode == "sum"
    assert config.model.args["zero_init"] is True
    assert (
        config.model.args["norm"] == "batch" and config.evaluate.every == 0
    )  # evaluated after training


@pytest.mark.parametrize(
    "name",
    mark_slow(
        ["resnet34_ipu4", "resnet34_ipu8", "resnet50_ipu4", "resnet50_ipu8", "resnet101_ipu8"],
        lambda name: name == "resnet34_ipu4",
    ),
)
def test_the_papers_tables_start_on_ipus_in_their_precision(
    name: str, poptorch: Any, monkeypatch: Any
) -> None:
    """They are in bfloat16, which PopTorch does not support; a comment states the overrides."""
    path = ROOT / "configs" / f"{name}.yaml"
    (command,) = [
        line for line in path.read_text().splitlines() if "--set backend.name=poptorch" in line
    ]
    settings = [word for word in command.split() if "=" in word]
    with pytest.raises(BadInput, match="precision: bfloat16: is not supported on IPUs"):
        load_config(path, settings[:1])
    config = load_config(path, settings)
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", name[-1])
    small = load_config(path, [*settings, "data.shape=[3, 32, 32]", "micro_batch_size=2"])
    job = build(small)
    engine = make_engine(job, 0, job.table)
    assert small.gradient_accumulation == config.gradient_accumulation
    if name == "resnet34_ipu4":
        engine.executors.training.compile(*engine.calls[0])  # type: ignore[attr-defined]
        assert poptorch.recorded.compilations[0].ipus == 4
    engine.abort()


def test_docs_name_every_key() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("ipu.md", "reference/ipu.md"))
    missing = [key for key in IpuConfig.model_fields if f"`{key}`" not in text]
    assert missing == [] and "not run on hardware" in text.lower()
    assert all(f"`{name}`" in text for name in METHODS)
    assert json.dumps(RECOMPUTATION)
