"""Test the IPU keys of a config: refusals with remedies, poptorch.Options, the configs for pods.

Nothing here ran on an IPU.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from ipu_pipe.backends.ipu import options, unsupported
from ipu_pipe.backends.ipu.config import TABLE, IpuConfig
from ipu_pipe.backends.ipu.model_facts import ModelFacts
from ipu_pipe.backends.ipu.options import TRAINING_ALONE
from ipu_pipe.backends.ipu.placement import PIPELINED, Placement, get_execution, place_stages
from ipu_pipe.backends.ipu.unsupported import check_method
from ipu_pipe.config.compare import dump_config, flatten
from ipu_pipe.config.load import apply_override, configure, dump_yaml, load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.refusals import Language
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import (
    METHODS,
    DefaultAccumulate,
    Method,
    Reads,
    Timeline,
    resolve_method,
)
from tests.support.ipu_runs import PODS, simulate_poprun
from tests.support.runs import DIGITS, ROOT, list_faults, read_json

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`


def configure_ipus(ipu: Any = None, **keys: Any) -> Any:
    base = {"method": "gpipe", "gradient_accumulation": 16, "stages": 4}
    return configure(backend={"name": "poptorch", "ipu": ipu or {}}, **{**base, **keys})


def get_method(settings: Any) -> Method:
    return resolve_method(settings.method, settings.method_settings())


def check_facts(settings: Any, facts: ModelFacts) -> List[str]:
    lines = unsupported.check_model(settings, get_method(settings), facts)
    return [Language.CONFIG.say(line) for line in lines]


def make_poptorch_options(settings: Any, *others: Any, **more: Any) -> Any:
    return options.make_options(settings, get_method(settings), *others, **more)


def list_ipu_faults(ipu: Any = None, **keys: Any) -> List[str]:
    return [fault.replace("configure: ", "") for fault in list_faults(configure_ipus, ipu, **keys)]


# ---- refusals from the config alone: the key and value in the fault, backend.ipu, other keys

LOCAL = {"method": "local_greedy"}
APART = {"local": "decoupled"}
LOCATIONS = "options.TensorLocations"
MEAN = "Training.setMeanAccumulationAndReplicationReductionStrategy"
COMBINED: Dict[str, Any] = {"use_combined_accum": True}
REFUSED: List[Tuple[str, Dict[str, Any], Dict[str, Any]]] = [
    ("gradient_accumulation: 6", {}, {"gradient_accumulation": 6}),
    ("gradient_accumulation: 4", {"ipus": [0, 1, 0, 1]}, {"gradient_accumulation": 4}),
    ("stages: 3 IPUs", {}, {"stages": 3}),
    ("stages: 4 IPUs x replicas 3 = 12", {}, {"replicas": 3}),
    ("backend.ipu.ipus: [0, 1]", {"ipus": [0, 1]}, {}),
    ("backend.ipu.ipus: [1, 2, 3, 3]", {"ipus": [1, 2, 3, 3]}, {}),
    ("backend.ipu.available_memory_proportion: [0.1, 0.2]", {"available_memory_proportion": [0.1, 0.2]}, {}),
    ("backend.ipu.available_memory_proportion: 1.5", {"available_memory_proportion": 1.5}, {}),
    ("clip.scope: stage", {}, {"clip": {"norm": 1, "scope": "stage"}}),
    ("precision: float64", {}, {"precision": "float64"}),
    ("backend.ipu.output_mode: every_n", {"output_mode": "every_n"}, {}),
    ("backend.ipu.loss_scaling: [(0, 1.0), (2, 2.0)]",
     {"options": {"Training.setAutomaticLossScaling": True}, "loss_scaling": [[0, 1.0], [2, 2.0]]}, {}),
    ("recompute: true", {"recomputation": "none"}, {"recompute": True}),
    ("checkpoint.format: sharded", APART, {**LOCAL, "checkpoint": {"format": "sharded"}}),
    ("optimizer.groups: 1 with optimizers of their own", {}, {"optimizer": {"groups": [{"name": "sgd"}]}}),
    ("backend.ipu.local: decoupled", APART, {"method": "last_layers"}),
    ("replicas: 2", APART, {**LOCAL, "replicas": 2}),
    *(
        (f"backend.ipu.{key}", {**APART, **ipu}, LOCAL)
        for key, ipu in {
            "ipus: [0, 1, 2, 3]": {"ipus": [0, 1, 2, 3]},
            "device_iterations: 2": {"device_iterations": 2},
            "data_loading.mode: async": {"data_loading": {"mode": "async"}},
            "output_mode: final": {"output_mode": "final"},
            "compile_only: true": {"compile_only": True},
            "profile.directory: p": {"profile": {"directory": "p"}},
        }.items()
    ),
    ("method_args.block_accumulation: [1, 1, 1, 2]", {}, {**LOCAL, "method_args": {"block_accumulation": [1, 1, 1, 2]}}),
    ("clip.norm: 1.0", {}, {**LOCAL, "clip": {"norm": 1}}),
    ("backend.ipu.ipu_ids: [0, 1]", {"ipu_ids": [0, 1]}, {}),
    ("backend.ipu.recomputaton: none", {"recomputaton": "none"}, {}),
    *(
        (f"backend.ipu.popart_options.{line}", {"popart_options": chosen}, {})
        for line, chosen in {
            "no: 1": {"enableOutlining": True, "no": 1},
            "enableOutlining: 1": {"enableOutlining": 1},
            "mergeVarUpdate: -1": {"mergeVarUpdate": -1},
            "1: true": {True: 2},
            "replicatedCollectivesSettings.no: true": {"replicatedCollectivesSettings": {"no": True}},
            "convolutionOptions: ['a']": {"convolutionOptions": ["a"]},
            "customCodelets: {'a': 'b'}": {"customCodelets": {"a": "b"}},
            "matmulOptions.a: 1": {"matmulOptions": {"a": 1}},
        }.items()
    ),
    *(
        (f"backend.ipu.options.{line}", {"options": chosen}, {})
        for line, chosen in {
            "syncPatern: Full": {"syncPatern": "Full"},
            "syncPattern: full": {"syncPattern": "full"},
            "deviceIterations: 2": {"deviceIterations": 2},
            "TensorLocations.numIOTile: 2": {"TensorLocations.numIOTile": 2},
            "TensorLocations.setWeightLocation.useOnChipStorage: 3":
                {"TensorLocations": {"setWeightLocation.useOnChipStorage": 3}},
            "1: 1": {1: 2},
        }.items()
    ),
    # what PopTorch and PopART would ignore
    *(
        (f"backend.ipu.{LOCATIONS}.{name}: true", {"options": {f"TensorLocations.{name}": True}}, {})
        for name in ("setActivationLocation.useReplicatedTensorSharding", "setWeightLocation.useIOTilesToLoad",
                     "setWeightLocation.useIOTilesToStore")
    ),
    (f"backend.ipu.options.{MEAN}: Post", {"options": {MEAN: "Post"}, "optimizer_options": {"accum_type": "float16"}}, {}),
    ("backend.ipu.use_combined_accum: true",
     {**COMBINED, "options": {"TensorLocations.setOptimizerLocation.useOnChipStorage": False}}, {}),
    ("backend.ipu.use_combined_accum: true", {**COMBINED, "optimizer_options": {"accum_type": "float16"}}, {}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_ipus_do_not_support_is_refused_by_key_and_value(case: int) -> None:
    key_and_value, ipu, keys = REFUSED[case]
    lines = list_ipu_faults(ipu, **keys)
    assert len(lines) == 1 and lines[0].startswith(f"{key_and_value}: "), lines


def test_popart_options_are_those_of_the_published_list() -> None:
    published = read_json(ROOT / "tests" / "poptorch_double" / "api.json")
    types = published["popart_session_options"]
    containers = {"list": "container", "mapping": "container"}
    settable = {name: containers.get(kind, kind) for name, kind in TABLE["popart_options"].items()}
    set_by = {name: types[name] for name in TABLE["set_by"]}
    assert {**settable, **set_by} == types and not settable.keys() & set_by.keys()
    (fault,) = list_ipu_faults({"popart_options": {"enableOutlinning": False}})
    assert "nearest is enableOutlining" in fault


@pytest.mark.parametrize("name", TABLE["set_by"])
def test_a_popart_option_that_the_library_sets_is_refused_with_its_key(name: str) -> None:
    """Story: popart_options won over the library's own keys, without a word."""
    (fault,) = list_ipu_faults({"popart_options": {name: 1}})
    key = TABLE["set_by"][name]
    advice = f"use {key}" if key else "leave it out"
    assert fault == f"backend.ipu.popart_options.{name}: 1: the library sets it: {advice}"
    if key:
        operator.attrgetter(key)(configure_ipus())


def list_options(table: Any, prefix: str = "") -> Iterator[Tuple[str, Any]]:
    """Yield the name and a value of each option of the table."""
    for name, kind in table.items():
        if isinstance(kind, dict):
            yield from list_options(kind, f"{prefix}{name}.")
        elif isinstance(kind, list):
            yield f"{prefix}{name}", kind[-1]
        else:
            number = 32 if name == "numIOTiles" else 2
            yield f"{prefix}{name}", True if kind == "bool" else number


OPTIONS = dict(list_options(TABLE["options"]))


def test_the_library_and_popart_options_set_different_names(poptorch: Any) -> None:
    """But those that the config's own values are merged with, or follow from."""
    settings = configure_ipus(
        {**EVERY_KEY, "recomputation": "standard", "popart_options": {}, "options": OPTIONS},
        replicas=4,
    )
    place = place_stages(settings.backend.ipu, 4)
    names = make_poptorch_options(settings, place, True, 5, ipu_id=3).toDict().keys()
    shared = names & TABLE["popart_options"].keys()
    assert shared == {"convolutionOptions", "rearrangeAnchorsOnHost"}


# values of former keys, of others a truth value
NEW_SPELLINGS: Dict[str, Any] = {
    "offline_target": 21,
    "prefetch_buffering_depth": 5,
    "profile.blocks": "stage.*",
    **{name: "float32" for name in TABLE["former"] if name.endswith("accum_type")},
}


@pytest.mark.parametrize("former", TABLE["former"])
def test_a_former_key_is_refused_with_its_new_spelling(former: str) -> None:
    """The new spelling has the user's own value, and the config takes it. Story: it had another
    value, such as float16 for a config that said float32."""
    section, _, key = former.rpartition(".")
    value = NEW_SPELLINGS.get(former, True)
    (fault,) = list_ipu_faults({section: {key: value}} if section else {key: value})
    text = dump_yaml(value).split("\n")[0]
    assert fault.startswith(f"backend.ipu.{former}: {text}: was replaced: use "), fault
    spelling = fault.partition(": use ")[2]
    assert text in spelling or "VALUE" not in TABLE["former"][former]
    if spelling.startswith("backend.ipu.") and "=" in spelling:
        keys: Dict[str, Any] = {}
        apply_override(keys, spelling, {})
        options = flatten(configure_ipus(keys["backend"]["ipu"]).ipu.model_dump())
        (name,) = [name for name in options if spelling.partition("=")[0].endswith(name)]
        assert str(value).lower() in str(options[name]).lower()


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_poptorch_cannot_run_is_refused_with_the_nearest_that_runs(
    method: str,
) -> None:
    row = METHODS[method]
    near = ("pipedream_flush ", "local_greedy, ") if row.is_stale else ()
    if method == "local_overlapping":
        near = ("each on one IPU", "local_greedy")
    is_refused = near or row.order is not None or method == "local_sgd"
    assert bool(check_method(row)) == bool(is_refused)
    if near:
        fault = list_ipu_faults(method=method, optimizer={"momentum": 0.9})[0]
        assert all(part in fault for part in near)


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
def test_a_row_that_does_not_state_that_poptorch_runs_it_is_refused(what: str) -> None:
    (fault,) = check_method(replace(INVENTED[what], name="invented"))
    assert fault.startswith("method: invented: PopTorch flushes")


def test_a_row_is_run_by_what_it_states_alone() -> None:
    named = {"name": "invented", "source": "another", "default_accumulate": DefaultAccumulate.ONE}
    assert get_execution(replace(GPIPE, **named)) == PIPELINED


def test_a_fault_names_the_file_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    usual = "model: {entry: a:b}\ndata: {name: digits}\nstages: 4\nprecision: 16.16\nbackend: {name: poptorch}\n"
    path.write_text(f"{usual}gradient_accumulation: 4\n")
    assert list_faults(load_config, path)[0].startswith(f"{path}: gradient_accumulation: 4: ")
    config = load_config(path, ["gradient_accumulation=7"])
    assert config.precision == "16.16"  # which YAML takes for a number
    path.write_text(dump_config(config))
    assert load_config(path) == config
    on_emulator = ["backend.name=emulator", "precision=float32"]
    (fault,) = list_faults(load_config, path, on_emulator)
    assert "set backend.ipu=null" in fault
    assert load_config(path, [*on_emulator, "backend.ipu=null"]).backend.ipu is None


# ---- stages on IPUs


def test_neighbours_on_one_ipu_are_one_stage_and_a_pipeline_has_twice_as_many_less_one() -> None:
    place = place_stages(IpuConfig(ipus=[0, 1, 1, 2, 0]), 5)
    assert place.poptorch_stages == [(0, [0]), (1, [1, 2]), (2, [3]), (0, [4])]
    assert (place.forward_stages, place.ipu_count, place.least_accumulation) == (4, 3, 7)
    whole = place_stages(IpuConfig(), 8)
    assert (whole.ipu_by_stage, whole.least_accumulation) == (tuple(range(8)), 15)
    # PopART's schedule (willow/src/transforms/pipeline.cpp): cycles of an update
    for stages, accumulation, cycles in ((2, 3, 5), (8, 64, 78)):
        assert Placement(tuple(range(stages))).count_cycles(accumulation) == cycles


SHARDED_STATE = "TensorLocations.setOptimizerLocation.useReplicatedTensorSharding"
FACTS = ModelFacts(4, {}, [1, 2, 3], [], [], ("sgd", [{}]))
NESTEROV = {"optimizer": ("sgd", [{"nesterov": True}])}
OF_MODELS: List[Tuple[str, Dict[str, Any], Dict[str, Any], Dict[str, Any]]] = [
    ("stages", {}, {}, {"order": [1, 3, 2]}),
    ("stages", {}, {}, {"order": [1, 2, 3, 1]}),
    ("optimizer.centered: [True, False]", {}, {}, {"optimizer": ("rmsprop", [{"centered": True}, {"centered": False}])}),
    ("optimizer.dampening", {}, {}, {"optimizer": ("sgd", [{"dampening": 0.1}])}),
    ("optimizer.nesterov: true", {}, {}, NESTEROV),
    ("optimizer.nesterov: true",
     {**COMBINED, "options": {"Training.setMeanAccumulationAndReplicationReductionStrategy": "Running"}}, {}, NESTEROV),
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


def test_one_replica_of_a_process_shards_nothing(poptorch: Any, monkeypatch: Any) -> None:
    """Story: PopTorch shards over a process's own replicas, and silently does not with one."""
    settings = configure_ipus({"options": {SHARDED_STATE: True}}, replicas=2)
    assert check_facts(settings, FACTS) == []
    simulate_poprun(monkeypatch, 2, 0, 1)
    (fault,) = check_facts(settings, FACTS)
    assert fault.startswith(f"backend.ipu.options.{SHARDED_STATE}: true: ")


# ---- poptorch.Options


def test_set_reaches_a_name_with_dots(tmp_path: Path) -> None:
    """Story: --set divided a name of PopART at its dots, and the config did not know the part."""
    name = "replicatedCollectivesSettings.mergeAllReduceCollectives"
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {entry: a:b}\ndata: {name: digits}\nstages: 4\ngradient_accumulation: 16\n"
        f"backend: {{name: poptorch, ipu: {{popart_options: {{{name}: true}},"
        " engine_options: {opt.enableInlining: 'true'}}}\n"
    )
    settings = [
        f"backend.ipu.popart_options.{name}=false",
        "backend.ipu.popart_options.convolutionOptions.enableConvDithering='true'",
        "backend.ipu.engine_options.debug.instrument='true'",
    ]
    ipu = load_config(path, settings).ipu
    convolution = {"enableConvDithering": "true"}
    assert ipu.popart_options.model_dump() == {"convolutionOptions": convolution, name: False}
    assert ipu.engine_options == {"opt.enableInlining": "true", "debug.instrument": "true"}


def test_convolution_options_keep_the_partials(poptorch: Any) -> None:
    """Story: dithering, by its new spelling, dropped the half partials."""
    dithering = {"enableConvDithering": "true"}
    chosen = {"partials": "half", "popart_options": {"convolutionOptions": dithering}}
    options = make_poptorch_options(configure_ipus(chosen), Placement((0, 1, 2, 3)), True, 5)
    assert options.toDict()["convolutionOptions"] == {"partialsType": "half", **dithering}


def test_a_config_with_options_goes_to_another_process() -> None:
    """Story: pickle did not find the classes of the sections, which are made from a table."""
    settings = configure_ipus({"options": {"TensorLocations.numIOTiles": 32}})
    assert pickle.loads(pickle.dumps(settings)) == settings


EVERY_KEY = {
    "device_iterations": 2, "ipus": [0, 1, 1, 2], "auto_round_num_ipus": True, "broadcast_buffers": False,
    "available_memory_proportion": [0.1, 0.2, 0.3], "partials": "half", "stochastic_rounding": True,
    "recomputation": "norm_only", "output_mode": "sum", "executable_cache": "cache",
    "engine_options": {"debug.instrument": "true"}, "profile": {"directory": "p"},
    "popart_options": {
        "enableOutlining": False, "defaultPrefetchBufferingDepth": 3,
        "convolutionOptions": {"partialsType": "float"},  # wins
    },
    "options": {
        "Precision.enableFloatingPointExceptions": True, "connectionType": "OnDemand", "syncPattern": "SinglePipeline",
        "Training": {"setMeanAccumulationAndReplicationReductionStrategy": "Running"},
        "TensorLocations.setOptimizerLocation": {"useOnChipStorage": False, "useReplicatedTensorSharding": True},
        "TensorLocations": {"setWeightLocation": {"useOnChipStorage": True, "minElementsForOffChip": 5}},
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
        "enableStochasticRounding": True, "enableFloatingPointChecks": True,
        "convolutionOptions": {"partialsType": "float"},
        "autoRecomputation": 2, "defaultPrefetchBufferingDepth": 3,
        "output_mode": poptorch.OutputMode.Sum, "cachePath": "cache", "enableEngineCaching": True,
        "connection_type": poptorch.ConnectionType.OnDemand, "sync_pattern": poptorch.SyncPattern.SinglePipeline,
        "ipu_id": 3, "random_seed": 5, "model_name": "training",
        "enableOutlining": False, "num_distributed_processes": 1,
        "meanAccumulationAndReplicationReductionStrategy": poptorch.MeanReductionStrategy.Running,
        "accumulation_and_replication_reduction_type": poptorch.ReductionType.Mean,
        "location_optimizer": {"onChip": 0, "useReplicatedTensorSharding": 1},
        "location_weight": {"onChip": 1, "minElementsForOffChip": 5},
        "engineOptions": {"debug.instrument": "true", "debug.allowOutOfMemory": "true", "autoReport.all": "true",
                          "autoReport.directory": "p"},
    }  # fmt: skip
    assert {key: options.get(key) for key in expected} == expected
    inference = make_poptorch_options(settings, place, False, 5).toDict()
    assert inference["device_iterations"] == 3 and inference["gradient_accumulation"] == 1
    assert inference["output_mode"] == poptorch.OutputMode.All
    assert inference["replication_factor"] == 4 and "autoRecomputation" not in inference
    assert inference["enableStochasticRounding"] is False


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_applied_by_its_name(name: str, poptorch: Any) -> None:
    """Each is a method that the double has, with an argument of that type, and reaches the
    options of both models, or of the training model alone."""
    # without these, some options would be ignored
    tiles = {"TensorLocations.numIOTiles": 32}
    settings = configure_ipus({"options": {**tiles, name: OPTIONS[name]}}, replicas=2)
    place = place_stages(settings.backend.ipu, 4)
    for training in (True, False):
        poptorch.recorded.calls.clear()
        make_poptorch_options(settings, place, training, 5)
        called = {call.name.rpartition(".")[2] for call in poptorch.recorded.calls}
        is_training_alone = any(part in TRAINING_ALONE for part in name.split("."))
        assert (name.rpartition(".")[2] in called) == (training or not is_training_alone)


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
    assert options["enableStochasticRounding"] is False


def test_recomputation_is_set_where_it_was_requested(poptorch: Any) -> None:
    place = Placement((0, 1, 2, 3))

    def read_recomputation(ipu: Any = None, **keys: Any) -> Tuple[Any, Any]:
        options = make_poptorch_options(configure_ipus(ipu, **keys), place, True, 0).toDict()
        return options.get("autoRecomputation"), options.get("explicitRecomputation")

    # a pipeline recomputes by itself
    assert read_recomputation(recompute=True) == (None, None)
    assert read_recomputation({"recomputation": "none"}) == (0, None)
    assert read_recomputation(method="naive", recompute=True) == (1, True)
    assert read_recomputation({"recomputation": "recompute_all"}, method="naive") == (4, True)


def test_reading_a_config_waits_for_no_torch() -> None:
    code = "import sys, ipu_pipe.backends.ipu.unsupported; print('torch' in sys.modules, 'poptorch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "False False\n", result.stderr


# ---- the memory that a plan states, which follows PopTorch's stash


def read_activation_stash(*keys: str) -> List[Tuple[int, int]]:
    """Return microbatches in flight and bytes of activations, stage by stage."""
    common = ["method=pipedream_flush", "gradient_accumulation=16", "evaluate.every=0", "steps=2"]
    rows = build_memory_table(build(load_config(DIGITS, [*common, *keys])))
    return [(row["in_flight"], row["activation_bytes"]) for row in rows]


@pytest.mark.parametrize(
    "keys, stash",
    [
        ([], [7, 5, 3, 1]),  # 2(P-1-s) + 1
        (["method=gpipe"], [7, 5, 3, 1]),  # in PopTorch the same pipeline
        (["backend.ipu.ipus=[0, 0, 1, 1]"], [3, 3, 1, 1]),  # two stages of PopTorch's
        (["method=naive"], [1, 1, 1, 1]),
    ],
)
def test_stages_on_ipus_keep_poptorchs_stash(keys: List[str], stash: List[int]) -> None:
    plain = ["backend.name=poptorch", "backend.ipu.recomputation=none"]
    saved = [size for _, size in read_activation_stash("method=naive")]
    expected = [(count, count * size) for count, size in zip(stash, saved)]
    assert read_activation_stash(*plain, *keys) == expected
    if not keys:  # PopTorch recomputes in pipelines by default, on all stages but the last one
        recomputed = read_activation_stash("backend.name=poptorch")
        assert recomputed == read_activation_stash("backend.name=poptorch", "recompute=true")
        assert recomputed[-1] == expected[-1]
        assert recomputed[0] == (7, 7 * 16 * 64 * 4 + saved[0])


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
        micro = config.micro_batch_size * config.gradient_accumulation
        assert (config.replicas, micro * replicas) == (replicas, batch)
    # combined accumulators have no state that could be streamed
    assert config.ipu.use_combined_accum and not config.ipu.streams_state
    assert config.ipu.model_copy(update={"use_combined_accum": False}).stream_state().streams_state
    assert config.evaluate.every == 0  # evaluated after training


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet34_ipu4", "resnet101_ipu8"])
def test_the_papers_tables_are_accepted_on_ipus_in_their_precision(
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
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", name[-1])
    build(load_config(path, [*settings, "data.shape=[3, 32, 32]", "micro_batch_size=2"]))


def test_docs_name_every_key() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("ipu.md", "reference/ipu.md"))
    missing = [key for key in IpuConfig.model_fields if f"`{key}`" not in text]
    assert missing == [] and "not run on hardware" in text.lower()
    assert [name for name in METHODS if f"`{name}`" not in text] == []
