"""What can be said of IPUs in a config: every refusal with its remedy, what becomes of each key in poptorch.Options, the configs
for pods. Nothing here ran on an IPU."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch

from ipu_pipe.backends.ipu import check_model, options, session, wrapping
from ipu_pipe.backends.ipu.check_model import ModelFacts, observe_model
from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.backends.ipu.options import RECOMPUTATION
from ipu_pipe.backends.ipu.placement import Execution, Placement, check_method, get_execution, place_stages
from ipu_pipe.backends.table import make_engine
from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.config.yaml_files import read_yaml
from ipu_pipe.errors import BadInput
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import METHODS, DefaultAccumulate, Method, Pipeline, Reads, resolve_method

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
ROOT = Path(__file__).resolve().parents[1]
PODS = sorted(path for path in (ROOT / "configs" / "pod").glob("pod*.yaml"))


def config(ipu: Any = None, **keys: Any) -> Any:
    base = {"method": "gpipe", "gradient_accumulation": 16, "stages": 4}
    return configure(backend={"name": "poptorch", "ipu": ipu or {}}, **{**base, **keys})


def method_of(settings: Any) -> Method:
    return resolve_method(settings.method, settings.method_settings())


def refuses(settings: Any, facts: ModelFacts, **replicas: int) -> List[str]:
    return check_model.check_model(settings, method_of(settings), facts, **replicas)


def make_options(settings: Any, *others: Any, **more: Any) -> Any:
    return options.make_options(settings, method_of(settings), *others, **more)


def faults(ipu: Any = None, **keys: Any) -> List[str]:
    with pytest.raises(BadInput) as caught:
        config(ipu, **keys)
    return [fault.replace("configure: ", "") for fault in caught.value.faults]


# ---- refusals from the config alone: (backend.ipu, other keys) -> what is said

Case = Tuple[Dict[str, Any], Dict[str, Any]]
IO = {"tensor_locations": {"num_io_tiles": 32}}
LOCAL = {"method": "local_greedy"}
SHARDS = {"optimizer": {"replicated_tensor_sharding": True}}
REFUSED: List[Tuple[Case, str]] = [
    (({}, {"gradient_accumulation": 6}), "gradient_accumulation: 6: .* needs at least 2 x 4 - 1 = 7 microbatches .*naive"),
    (({}, {"stages": 3}), "stages: 3 IPUs: .*powers of 2, here 4.*auto_round_num_ipus: true, which leaves 1 idle"),
    (({}, {"stages": 4, "replicas": 3}), "stages: 4 IPUs x replicas 3 = 12: .*here 16"),
    (({}, {"stages": 8, "replicas": 16}), "8 IPUs x replicas 16 = 128: .*at most 64: .*poprun"),
    (({"auto_round_num_ipus": True}, {"stages": 5, "replicas": 16, "gradient_accumulation": 9}), "at most 64"),
    (({"ipus": [0, 1]}, {}), r"ipus: \[0, 1\]: must name an IPU for each of 4 stages"),
    (({"ipus": [1, 2, 3, 3]}, {}), "the first stage must be on IPU 0"),
    (({"ipus": [0, 1, 0, 1]}, {"gradient_accumulation": 4}), "a PopTorch pipeline of 4 stages"),
    (({"inference_device_iterations": 3}, {}), "inference_device_iterations: 3: a pipeline of 4 stages needs as many"),
    (({"available_memory_proportion": [0.1, 0.2]}, {}), "available_memory_proportion: .*must be one number, or 4, one an IPU"),
    (({"available_memory_proportion": 1.5}, {}), "proportion: 1.5: must be null, a number from 0 to 1"),
    (({"overlapped_io": "accumulation_loop", **IO}, {}), "overlapped_io: .*with a pipeline: must be none .*naive"),
    (({"overlapped_io": "accumulation_loop"}, {"method": "naive"}), "overlapped_io: .*needs tensor_locations.num_io_tiles"),
    (({"overlapped_io": "accumulation_loop", "output_mode": "final", **IO}, {"method": "naive"}), "all or sum"),
    (({"tensor_locations": {"num_io_tiles": 33}}, {}), "num_io_tiles: 33: must be an even number from 32 to 192"),
    (({"tensor_locations": {"weight": {"io_tiles_to_load": True}}}, {}), "weight.io_tiles_to_load: true: needs"),
    (({"tensor_locations": SHARDS}, {}), "optimizer.replicated_tensor_sharding: true: .*must be false, or replicas 2 or more"),
    (({"use_combined_accum": True, "tensor_locations": {"optimizer": {"on_chip": False}}}, {}), "leaves no optimizer state"),
    (({}, {"clip": {"norm": 1, "scope": "stage"}}), "clip.scope: stage: .*must be global"),
    (({}, {"precision": "float64"}), "precision: float64: no IPU computes in it: must be 16.16, 16.32, 32.32 or float32"),
    (({}, {"precision": "bfloat16"}), "precision: bfloat16: no IPU"),
    (({"output_mode": "every_n", "output_return_period": 3}, {}), "must divide gradient_accumulation 16"),
    (({"output_return_period": 2}, {}), "output_return_period: 2: is of output_mode every_n"),
    (({"recomputation": "none"}, {"recompute": True}), "recompute: true: contradicts"),
    (({"device_iterations": 4}, {"steps": 6}), "device_iterations: 4: .*must divide steps 6"),
    (({"device_iterations": 4}, {"checkpoint": {"every": 6}}), "must divide checkpoint.every 6"),
    (({"device_iterations": 4}, {"lr_schedule": {"name": "cosine"}}), "share one learning rate, which cosine changes at each"),
    (({"device_iterations": 4}, {"lr_schedule": {"warmup_steps": 8}}), "which a warm-up changes at each"),
    (({"local": "decoupled"}, {}), "local: decoupled: gpipe has one loss: must be fused, or a local_ method"),
    (({"local": "decoupled"}, {"method": "last_layers"}), "trains one block alone: must be fused"),
    (({"local": "decoupled"}, {**LOCAL, "replicas": 2}), "replicas: 2: not with backend.ipu.local decoupled"),
    (({"local": "decoupled", "ipus": [0, 1, 2, 3]}, LOCAL), "ipus: .*use ipu_ids, ids of gc-info"),
    (({"local": "decoupled", "device_iterations": 2}, LOCAL), "device_iterations: 2: must be 1 with local decoupled"),
    (({"local": "decoupled", "data_loading": {"mode": "async"}}, LOCAL), "data_loading.mode: async: must be sync"),
    (({"local": "decoupled", "output_mode": "final"}, LOCAL), "output_mode: final: must be all with local decoupled"),
    (({"local": "decoupled", "compile_only": True}, LOCAL), "compile_only: true: not with local decoupled"),
    (({}, {**LOCAL, "method_args": {"block_accumulation": [1, 1, 1, 2]}}), "block_accumulation: .*backend.ipu.local=decoupled"),
    (({}, {**LOCAL, "clip": {"norm": 1}}), "clip: PopTorch's norm is over all blocks"),
    (({"ipu_ids": [0, 1]}, {}), "ipu_ids: .*must be one id of gc-info"),
    (({"offline_target": 2}, {}), "offline_target: 2: nothing can run on it: needs compile_only: true"),
    (({"offline_target": 3}, {}), "offline_target: 3: must be 1, 2 or 21"),
    (({"offline_target": 2, "compile_only": True, "use_ipu_model": True}, {}), "not together with offline_target"),
    (({"offline_target": 2, "compile_only": True, "ipu_ids": [0]}, {}), r"ipu_ids: \[0\]: not with offline_target"),
    (({"offline_target": 2, "compile_only": True, "log_cycle_count": True}, {}), "log_cycle_count: true: not with offline"),
    (({"log_cycle_count": True, "use_ipu_model": True}, {}), "log_cycle_count: true: cycles are counted by hardware alone"),
    (({"popart_options": {"x": None}}, {}), "popart_options: .*x: must be a number, text"),
    (({"recomputaton": "none"}, {}), "recomputaton: none: unknown key, nearest is recomputation"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_no_ipu_can_do_is_refused_with_the_remedy(case: int) -> None:
    (ipu, keys), said = REFUSED[case]
    assert any(re.search(said, fault) for fault in faults(ipu, **keys)), faults(ipu, **keys)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.is_stale])
def test_asynchronous_methods_are_refused_with_the_nearest_that_runs(method: str) -> None:
    said = faults(method=method, optimizer={"momentum": 0.9})[0]
    assert said.startswith(f"method: {method}: a PopTorch pipeline is flushed at every weight update")
    assert any(f"use {near}" in said for near in ("pipedream_flush", "gpipe"))


def test_layers_in_two_blocks_are_refused_and_all_other_methods_run() -> None:
    (said,) = faults(method="local_overlapping")
    assert "two IPUs" in said and "local_greedy" in said
    for name, method in METHODS.items():
        refused = method.is_stale or name in ("local_overlapping", "local_sgd")
        assert bool(check_method(method)) == refused, name


GPIPE, GREEDY = METHODS["gpipe"], METHODS["local_greedy"]
INVENTED = {
    "pipeline": replace(GPIPE, pipeline=Pipeline.DATAFLOW),
    "forward_reads": replace(GPIPE, forward_reads=Reads.DOUBLE_BUFFERED),
    "backward_reads": replace(METHODS["pipedream_flush"], backward_reads=Reads.STASHED),
    "predicts": replace(GPIPE, predicts=True),
    "turn": replace(GPIPE, turn=1),
    "blocks_in_a_pipeline": replace(GPIPE, structure=GREEDY.structure),
    "blocks_that_flush": replace(GREEDY, flushes=True),
    "one_loss_in_a_local_schedule": replace(GREEDY, flushes=True, structure=None),
}


@pytest.mark.parametrize("what", INVENTED)
def test_a_row_of_which_nobody_said_that_poptorch_runs_it_is_refused(what: str, monkeypatch: Any) -> None:
    invented = replace(INVENTED[what], name="invented")
    monkeypatch.setitem(METHODS, "invented", invented)
    (said,) = faults(method="invented")
    assert (
        said.startswith("method: invented: nobody has said that PopTorch runs") and "gpipe or pipedream_flush" in said
    )
    own = replace(GPIPE, name="invented", source="another", default_accumulate=DefaultAccumulate.ONE)
    assert check_method(own) == [] and get_execution(own) is Execution.PIPELINED  # neither alters what runs


def test_a_field_that_is_new_to_methods_is_refused_where_it_says_anything() -> None:
    @dataclass(frozen=True)
    class Wider(Method):
        sideways: bool = False

    def wider(**given: Any) -> Method:
        return Wider(**{field.name: getattr(GPIPE, field.name) for field in fields(GPIPE)}, **given)

    assert check_method(wider()) == [] and len(check_method(wider(sideways=True))) == 1


def test_a_fault_names_the_file_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {entry: a:b}\ndata: {name: digits}\nstages: 4\ngradient_accumulation: 4\nprecision: 16.16\nbackend: "
        "{name: poptorch}\n"
    )
    with pytest.raises(BadInput) as caught:
        load_config(path)
    assert caught.value.faults[0].startswith(f"{path}: gradient_accumulation: 4: ")
    held = load_config(path, ["gradient_accumulation=7"])
    assert held.precision == "16.16"  # which YAML takes for a number
    path.write_text(dump_config(held))
    assert load_config(path) == held
    with pytest.raises(
        BadInput, match="backend.ipu.*belongs to backend.name poptorch, not emulator: set backend.ipu=null"
    ):
        load_config(path, ["backend.name=emulator", "precision=float32"])
    assert load_config(path, ["backend.name=emulator", "backend.ipu=null", "precision=float32"]).backend.ipu is None
    with pytest.raises(BadInput, match="precision: 16.16: is of backend.name poptorch"):
        load_config(path, ["backend.name=emulator", "backend.ipu=null"])


# ---- stages on IPUs


def test_neighbours_on_one_ipu_are_one_stage_and_a_pipeline_has_twice_as_many_less_one() -> None:
    place = place_stages(IpuConfig(ipus=[0, 1, 1, 2, 0]), 5)
    assert place.runs == [(0, [0]), (1, [1, 2]), (2, [3]), (0, [4])]
    assert (place.forward_stages, place.ipus, place.least_accumulation) == (4, 3, 7)
    whole = place_stages(IpuConfig(), 8)
    assert (whole.ipu_of, whole.least_accumulation) == (tuple(range(8)), 15)
    # PopART's schedule (willow/src/transforms/pipeline.cpp): cycles of an update, and the share of them that is full
    for stages, accumulation, cycles, share in ((2, 3, 5, 0.6), (4, 7, 13, 0.54), (4, 64, 70, 0.91), (8, 64, 78, 0.82)):
        place = Placement(tuple(range(stages)))
        assert place.cycles(accumulation) == cycles and round(accumulation / cycles, 2) == share


FACTS = ModelFacts(4, {}, [1, 2, 3], [], [], ("SGD", [{}]), 100, 50)
OF_MODELS: List[Tuple[Dict[str, Any], Dict[str, Any], Dict[str, Any], str]] = [
    ({}, {}, {"shared": {"w": [0, 2]}}, "model: w: used by stages 0, 2 on IPUs 0, 2, .*lies on one: .*backend.ipu.ipus"),
    ({}, {}, {"order": [1, 3, 2]}, "stages: a forward begins them in the order 1, 3, 2"),
    ({}, {}, {"order": [1, 2, 3, 1]}, "each must begin once"),
    ({}, {}, {"empty": [2]}, "stages: 2: nothing begins there"),
    ({}, {"replicas": 2}, {"written": ["n.running_mean"]}, "broadcast_buffers: true: training writes n.running_mean .*GroupNorm"),
    ({}, {}, {"optimizer": ("Adagrad", [])}, "optimizer: Adagrad: PopTorch has none such"),
    ({}, {}, {"optimizer": ("Adam", [{"amsgrad": True}])}, "optimizer.amsgrad: true"),
    ({}, {}, {"optimizer": ("SGD", [{"dampening": 0.1}])}, "optimizer.dampening: .*must be 0"),
    ({}, {}, {"optimizer": ("SGD", [{"nesterov": True}])}, "optimizer.nesterov: true: .*mean_reduction_strategy=running"),
    ({"use_combined_accum": True, "mean_reduction_strategy": "running"}, {}, {"optimizer": ("SGD", [{"nesterov": True}])},
     "optimizer.nesterov: true: not with backend.ipu.use_combined_accum"),
    ({}, {}, {"functions": ["Own"]}, "model: Own: .*torch.autograd.Function"),
    ({}, {}, {"ungraded": ["relu in 1"]}, r"model: relu in 1: torch.no_grad\(\)"),
    ({}, {}, {"counters": ["seen"]}, "model: seen: training writes an integer buffer"),
    ({}, {"precision": "16.32"}, {"biased_convolutions": ["1.c"]}, "precision: 16.32: 1.c: .*bias=False"),
    ({}, {"precision": "16.32"}, {"input_type": torch.uint8}, "precision: 16.32: inputs are uint8"),
    ({"use_combined_accum": True}, {}, {"optimizer": ("Adam", [])}, "use_combined_accum: true: Adam has none: it is of SGD"),
    ({"velocity_accum_type": "float16"}, {}, {"optimizer": ("AdamW", [])}, "float16: AdamW has none: it is of SGD"),
    ({"device_iterations": 3}, {}, {}, "must divide the run's 100"),
    ({"device_iterations": 4}, {}, {}, "must divide the 50 updates between evaluations"),
    ({"device_iterations": 10}, {"lr_schedule": {"name": "step", "milestones": [0.1]}}, {}, "lr_schedule.milestones in updates"),
    ({"local": "decoupled", "ipu_ids": [0]}, LOCAL, {}, "ipu_ids: .*a device for each of 4 blocks"),
    ({"local": "decoupled", "available_memory_proportion": [0.1]}, LOCAL, {}, "or 4, one a block"),
    ({}, {"stages": None}, {"stages": 6}, "stages: 6 IPUs"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(OF_MODELS)))
def test_models_that_do_not_fit_are_refused_with_the_remedy(case: int) -> None:
    ipu, keys, facts, said = OF_MODELS[case]
    settings = config(ipu, **keys)
    assert refuses(settings, FACTS) == [] or not facts
    found = refuses(settings, FACTS._replace(**facts))
    assert any(re.search(said, fault) for fault in found), found


def test_replicas_of_one_process_count_for_its_ipus() -> None:
    settings = config(replicas=16)
    assert refuses(settings, FACTS) == []
    many = settings.model_copy(update={"replicas": 64})
    assert "at most 64" in refuses(many, FACTS)[0] and refuses(many, FACTS, local_replicas=16) == []
    sharded = many.model_copy(deep=True)
    object.__setattr__(sharded.backend.ipu.tensor_locations.optimizer, "replicated_tensor_sharding", True)
    assert "of which there is one" in refuses(sharded, FACTS, local_replicas=1)[0]
    clipped = many.model_copy(update={"clip": object()})
    rms = FACTS._replace(optimizer=("RMSprop", []))
    assert any("not with RMSprop" in fault for fault in refuses(clipped, rms, local_replicas=16))


# ---- poptorch.Options

SAID = {
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
    settings = config(SAID, replicas=4)
    place = place_stages(settings.backend.ipu, 4)
    made = make_options(settings, place, True, 5, ipu_id=3).toDict()
    strategy = make_options(settings, place, True, 5)._execution_strategy
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
    assert {key: made.get(key) for key in expected} == expected
    inference = make_options(settings, place, False, 5).toDict()
    assert inference["device_iterations"] == 3 and inference["gradient_accumulation"] == 1
    assert inference["output_mode"] == poptorch.OutputMode.All and "location_optimizer" not in inference
    assert inference["replication_factor"] == 4 and "autoRecomputation" not in inference
    assert inference["enableStochasticRounding"] is False


def test_defaults_leave_poptorchs_own(poptorch: Any) -> None:
    settings = config()
    made = make_options(settings, place_stages(settings.backend.ipu, 4), True, 5).toDict()
    plain = poptorch.Options().outputMode(poptorch.OutputMode.All).toDict()
    changed = {key for key in made if made[key] != plain.get(key)}
    assert changed == {
        "gradient_accumulation", "model_name", "random_seed", "partialsTypeMatMuls", "convolutionOptions",
        "enableStochasticRounding",
    }  # fmt: skip
    assert made["partialsTypeMatMuls"] == "float" and made["enableStochasticRounding"] is False


def test_recomputation_is_set_where_it_was_asked_for(poptorch: Any) -> None:
    place = Placement((0, 1, 2, 3))

    def asked(ipu: Any = None, **keys: Any) -> Tuple[Any, Any]:
        made = make_options(config(ipu, **keys), place, True, 0).toDict()
        return made.get("autoRecomputation"), made.get("explicitRecomputation")

    assert asked() == asked(recompute=True) == (None, None)  # a pipeline recomputes by itself
    assert asked({"recomputation": "none"}) == (0, None)
    assert asked({"recomputation": "pipeline"}) == (3, None)
    assert asked(method="naive", recompute=True) == (1, True)
    assert asked({"recomputation": "recompute_all"}, method="naive") == (4, True)


def test_overlapped_io_reaches_the_model(poptorch: Any, monkeypatch: Any) -> None:
    settings = config({"overlapped_io": "device_iteration_loop", **IO}, method="naive")
    loss, mode = torch.nn.functional.cross_entropy, wrapping.OVERLAP[settings.backend.ipu.overlapped_io]
    wrapped = wrapping.Wrapped(wrapping.Whole(torch.nn.Linear(2, 2)), loss, False, mode)
    options = make_options(settings, Placement((0,)), True, 0)
    executor = poptorch.trainingModel(wrapped, options, poptorch.optim.SGD(wrapped.parameters(), lr=0.1))
    asked: List[Any] = []
    real = poptorch.set_overlap_for_input
    monkeypatch.setattr(poptorch, "set_overlap_for_input", lambda x, mode: asked.append(mode) or real(x, mode))
    executor.compile(torch.ones(16, 2), torch.zeros(16, dtype=torch.int64))
    assert set(asked) == {poptorch.OverlapMode.OverlapDeviceIterationLoop}


def test_reading_a_config_waits_for_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, ipu_pipe.backends.ipu.check_config; print('torch' in sys.modules, 'poptorch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


# ---- the configs for pods


def test_there_is_a_config_for_every_pod_depth_and_way() -> None:
    names = {path.stem for path in PODS}
    wanted = {
        f"pod{pod}_resnet{depth}_{how}"
        for pod in (4, 16, 64)
        for depth in (18, 34, 50, 101)
        for how in ("pipelined", "local")
    }
    assert names == wanted | {"pod4_resnet50_decoupled"}


@functools.lru_cache(maxsize=None)
def built(raw: str) -> Any:
    """The job of a config in JSON, built once for all pods that differ in batch and replicas alone."""
    return build(configure(**json.loads(raw)))


@pytest.mark.parametrize("path", PODS, ids=lambda path: str(path.stem))
def test_a_pods_config_passes_all_checks_that_need_no_hardware(
    path: Path, poptorch: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """Small images in the place of ImageNet's; compiled on a double with as many IPUs as the pod has, all of which "
    "it uses."""
    pod = int(re.match(r"pod(\d+)_", path.stem).group(1))  # type: ignore[union-attr]
    stated = load_config(path)
    assert stated.data.name == "image_folder" and stated.precision == "16.16" and stated.epochs == 90
    batch = stated.micro_batch_size * stated.gradient_accumulation * stated.replicas
    assert stated.optimizer.lr == pytest.approx(0.1 * batch / 256)
    raw = read_yaml(path)
    raw["data"] = {"name": "synthetic", "shape": [3, 32, 32], "classes": 1000, "subset": 65536, "test_subset": 8}
    raw["data"]["bytes"] = stated.data.bytes
    raw["steps"] = 1
    raw["backend"]["ipu"].update(data_loading={"mode": "sync"}, executable_cache=str(tmp_path))
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", str(pod))
    del raw["lr_schedule"], raw["optimizer"]["lr"]
    small = {**raw, "micro_batch_size": 1, "replicas": 1, "gradient_accumulation": 16}
    small["backend"] = {"name": "poptorch", "ipu": {"local": raw["backend"]["ipu"].get("local", "fused")}}
    job = replace(built(json.dumps(small, sort_keys=True)), config=configure(**raw))
    assert len(job.part) == stated.stages
    if stated.backend.ipu.local == "decoupled":
        assert stated.backend.ipu.ipu_ids == [0, 1, 2, 3] and "4 blocks on 4 IPUs" in job.note
        return
    assert len(job.part) * stated.replicas == pod
    if stated.replicas > 2:  # the same graph as the smaller pod's
        assert refuses(job.config, observe_model(job)) == []
        make_options(job.config, place_stages(stated.backend.ipu, len(job.part)), True, 0)
        return
    engine = make_engine(job, 0)
    engine._session.executors.training.compile(*engine._session.calls[0])  # type: ignore[attr-defined]
    made = poptorch.recorded.compilations[0]
    assert (
        made.ipus == pod and made.forward_stages == stated.stages and made.micro_batch[0][0] == stated.micro_batch_size
    )
    assert made.options["location_optimizer"]["onChip"] == 0 and made.options["cachePath"] == str(tmp_path)
    assert poptorch.recorded.runs == []
    engine.abort()


@pytest.mark.parametrize("name", ["resnet34_ipu4", "resnet34_ipu8", "resnet50_ipu4", "resnet50_ipu8", "resnet101_ipu8"])
def test_the_papers_tables_start_on_ipus_in_their_precision(name: str, poptorch: Any, monkeypatch: Any) -> None:
    """They are in bfloat16, which PopTorch does not take; their first lines say what to set."""
    path = ROOT / "configs" / f"{name}.yaml"
    (said,) = [line for line in path.read_text().splitlines() if "--set backend.name=poptorch" in line]
    settings = [word for word in said.split() if "=" in word]
    with pytest.raises(BadInput, match="precision: bfloat16: no IPU"):
        load_config(path, settings[:1])
    stated = load_config(path, settings)
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", name[-1])
    small = load_config(path, [*settings, "data.shape=[3, 32, 32]", "micro_batch_size=2"])
    engine = make_engine(build(small), 0)
    assert small.gradient_accumulation == stated.gradient_accumulation
    if name == "resnet34_ipu4":
        engine._session.executors.training.compile(*engine._session.calls[0])  # type: ignore[attr-defined]
        assert poptorch.recorded.compilations[0].ipus == 4
    engine.abort()


def test_docs_name_every_key() -> None:
    text = (ROOT / "docs" / "ipu.md").read_text()
    missing = [key for key in IpuConfig.model_fields if f"`{key}`" not in text]
    assert missing == [] and "not run on hardware" in text.lower()
    assert all(f"`{name}`" in text for name in METHODS)
    assert (
        json.dumps(RECOMPUTATION) and session.make_options is options.make_options
    )  # what the engine reads is this one
