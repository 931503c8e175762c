"""Wrong configs give exactly the expected lines; right ones are the same after writing and reading."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ipu_pipe.config.compare import (
    compare_deciding,
    dump_config,
    keep_recorded_choices,
    select_deciding,
)
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import Description, Given
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.job.factories import call_entry, check_arguments, resolve_entry
from ipu_pipe.run.build import build
from tests.hostile.configs import KEYS, set_key
from tests.support.runs import ROOT, list_faults

SMALLEST = "model: {entry: 'models.mlp:mlp'}\ndata: {name: digits}\n"


@pytest.fixture()
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder and return it; the search path for modules is restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def read_config(text: str, *overrides: str) -> Config:
    """Write the smallest config with `text` added into x.yaml of the current folder, and load it."""
    Path("x.yaml").write_text(SMALLEST + text, encoding="utf-8")
    return load_config("x.yaml", overrides)


def read_dumped(config: Config) -> Config:
    """Write a config into dumped.yaml of the current folder, and load it."""
    Path("dumped.yaml").write_bytes(dump_config(config).encode("utf-8"))
    return load_config("dumped.yaml")


def list_config_faults(text: str, *overrides: str) -> List[str]:
    return list_faults(read_config, text, *overrides)


def assert_faults_begin(faults: List[str], *begins: str) -> None:
    """Check that each fault begins with its place, key and value, and continues with a remedy."""
    assert len(faults) == len(begins), faults
    for fault, begin in zip(faults, begins):
        assert fault.startswith(begin) and len(fault) > len(begin) + 5, (fault, begin)


# ---- wrong configs

# KEY: VALUE, with which the line of the fault begins
WRONG_VALUES = [
    "batch_size: 8", "precision: bf16", "micro_batch_size: -1",  "micro_batch_size: true",
    "seed: 9223372036854775808", "steps: 2147483648",  "method: pipdream", "hardware: pod61",
     "stages: lots", "stages: []", "extends: none.yaml", "extends: x.yaml",
     "extends: .", "extends: loop.yaml", "log.trace_microbatches: 64",  "log.tensorboard: no",
    "backend.deadline: 0", "backend.device: gpu", "backend.threads: 100000", "clip.norm: 0",
    "optimizer: 3", "optimizer.lrr: 0.1",  "optimizer.lr: fast",
    "optimizer.momentum: 1", "optimizer.nesterov: true", "optimizer.no_decay: 3", "optimizer.no_decay: [1, 2]",
    "lr_schedule.milestones: 3", "method_args.turn: 2",  "method_args.schedule: gpipe",
    "method_args.t2.gamma: 3",
    "method_args.gradient_shrinking.factor: 0", "method_args.weight_prediction.form: linear", "method_args.head: 3",
    "method_args.head.depth: 0",
]  # fmt: skip
TOO_LARGE_ALIASES = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{y}: &{y} [{','.join([f'*{x}'] * 9)}]\n" for x, y in zip("abcdefg", "bcdefgh")
)
WRONG = {
    "log: {trace: {begin: 3, end: 3}}": "log.trace.end: 3: ",
    "method_args: {hogwild: {mean: 1}}": "method_args.hogwild.max: missing: ",
    "method_args: {spike_compensation: {a: 1}}": "method_args.spike_compensation.a: 1.0: ",
    "method_args: {spike_compensation: {a: 1, b: 2, scale: 2}}": "method_args.spike_compensation.scale: 2.0: ",
    **{
        f"method_args: {{constant_delay: {{updates: {value}}}}}": "method_args.constant_delay.updates: "
        for value in ("0", "1.0", "[]", "[[0], [0]]", "[[1], 2]", "[[true]]")
    },
    "optimizer: {name: adam, reference_batch_size: 8}": "optimizer.reference_batch_size: 8: ",
    "method: gpipe\nmethod_args: {t2: {}}": "method_args.t2: ",
    "micro_batch_size: '8'": "micro_batch_size: 8: ",
    "method: pipemare\nrecompute: true": "recompute: true: ",
    "backend: {ipu: {local: fused}}": "backend.ipu: given: ",
    "optimizer: {lr: .inf}": "optimizer.lr: inf: ",
    "optimizer: {name: adam, betas: [0.9, 1]}": "optimizer.betas.1: 1: ",
    "optimizer: {weight_decay: 1e308}": "optimizer.weight_decay: 1e+308: ",
    "lr_schedule: {name: step}": "lr_schedule.milestones: []: ",
    "lr_schedule: {name: cosine, milestones: [3]}": "lr_schedule.milestones: [3.0]: ",
    "lr_schedule: {name: constant, metric: loss}": "lr_schedule.metric: loss: ",
    "clip: {}": "clip.norm: missing: ",
    "stages: {by: flops}": "stages.count: missing: ",
    "stages: {count: 4, bi: flops}": "stages.bi: flops: ",
    "stages: {count: 4, by: size}": "stages.by: size: ",
    "stages: {finest: 4, count: 2}": "stages.count: 2: ",
    "method_args: {stash: 'yes'}": "method_args.stash: yes: ",
    "method: local_chunked\nmethod_args: {blocks: []}": "method_args.blocks: ",
    "method: local_overlapping\nmethod_args: {overlap: 2}": "method_args.overlap: 2: ",
    "method: zb_auto\nmethod_args: {activation_limit: 0.5}": "method_args.activation_limit: 0.5: ",
    "method: rows\nmethod_args: {file: ''}": "method_args.file: : ",
    "method: pipemare\nrecompute: true\nmethod_args: {constant_delay: {updates: 2}}": "method_args.constant_delay: 2: ",
    "method: pipemare\nmethod_args: {constant_delay: {updates: 2}, recompute: {segments: 2}}": "method_args.constant_delay: ",
    # valid YAML that is not a valid config
    "seed: 1\nseed: 2": "line 4: ",
    "seed: [": "line 3: ",
    "seed: \0": "line 3: ",
    "seed: " + "9" * 5000: "",
    "data: {root: 3}": "line 3: ",
    "hardware: {x: !!int abc}": "",
    "hardware: !!set {a, b}": "line 3: ",
    "hardware: !!python/object/apply:os.getcwd []": "line 3: ",
    "hardware: " + "[" * 500 + "]" * 500: "",
    "hardware: &a {b: *a}": "",
    "hardware: {[a]: 3}": "line 3: ",
    'hardware: {x: "\\ud800"}': "\\ud800: ",
    TOO_LARGE_ALIASES: "",
    'extends: "a\\0b"': "extends: a\\x00b: ",
    'init_from: "a\\0"': "init_from.path: a\\x00: ",
}


def write_as_yaml(line: str) -> str:
    """Return `a.b.c: value` as YAML: a: {b: {c: value}}."""
    keys, _, value = line.partition(": ")
    top, *inner = keys.split(".")
    for key in reversed(inner):
        value = f"{{{key}: {value}}}"
    return f"{top}: {value}"


WRONG_TEXTS = {**{write_as_yaml(line): f"{line}: " for line in WRONG_VALUES}, **WRONG}


@pytest.mark.parametrize("text", list(WRONG_TEXTS), ids=lambda text: text[:60].replace("\0", "NUL"))
def test_a_wrong_config_gives_one_line_with_place_key_and_value(
    text: str, empty_folder: Path
) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    assert_faults_begin(list_config_faults(text), f"x.yaml: {WRONG_TEXTS[text]}")


DEVICE = "{memory_bytes: 1e9, usable_share: 1, memory_bandwidth: 1e9, rates: {float32: {peak_flops: 1e9, achievable_share: 1}}}"


def test_hardware_is_a_name_a_file_or_a_mapping_checked_when_the_config_is_read(
    empty_folder: Path,
) -> None:
    Path("own.yaml").write_text(f"devices: 2\ndevice: {DEVICE}\n")
    assert_faults_begin(list_config_faults("hardware: own.yaml"), "own.yaml: devices: 2: ")
    Path("own.yaml").write_text(f"devices: 1\ndevice: {DEVICE}\n")
    for value in ("pod16", "own.yaml", f"{{devices: 1, device: {DEVICE}}}"):
        config = read_config(f"hardware: {value}\n")
        assert read_hardware(config.hardware).devices in (1, 16)
        assert read_dumped(config) == config
    wrong = DEVICE.replace("peak_flops: 1e9", "peak_flops: -1")
    assert_faults_begin(
        list_config_faults(f"hardware: {{devices: 1, device: {wrong}}}"),
        "x.yaml: hardware.device.rates.float32.peak_flops.value: -1: ",
    )


@pytest.mark.parametrize("text, message", [
    (SMALLEST.splitlines()[1], "x.yaml: model: missing: Field required"),
    (SMALLEST.replace("'models.mlp:mlp'", "3"), "x.yaml: model.entry: 3: must be a valid string"),
    ("", "x.yaml: must be a mapping of keys to values, as in configs/mlp_digits.yaml"),
])  # fmt: skip
def test_a_config_without_a_required_key_is_refused(
    text: str, message: str, empty_folder: Path
) -> None:
    Path("x.yaml").write_text(text)
    assert list_faults(load_config, "x.yaml") == [message]


def test_python_loads_an_example_by_its_name_as_the_commands_do(empty_folder: Path) -> None:
    # story: "mlp_digits: no such config file; did you mean mlp_digits?"
    assert load_config("mlp_digits") == load_config(ROOT / "configs" / "mlp_digits.yaml")


def test_all_faults_are_reported_at_once_each_with_the_place_of_its_value(
    empty_folder: Path,
) -> None:
    Path("base.yaml").write_text(SMALLEST + "seed: abc\noptimizer: {lr: 0.1, momentum: 2}\n")
    Path("x.yaml").write_text(
        "extends: base.yaml\nmethod: gpippe\nfoo_size: 1\noptimizer: {lr: -1}\n"
    )
    faults = list_faults(
        load_config, "x.yaml", ["epochs=0", "nonsense", "steps=[", "log.every.x=1"]
    )
    assert_faults_begin(
        sorted(faults),
        "--set epochs=0: epochs: 0: ", "--set log.every.x=1: log.every: {'x'", "--set steps=[: line 1: ",
        "--set: nonsense: must be KEY=VALUE",
        "base.yaml: optimizer.momentum: 2: ", "base.yaml: seed: abc: ",
        "x.yaml: foo_size: 1: ", "x.yaml: method: gpippe: ", "x.yaml: optimizer.lr: -1: ",
    )  # fmt: skip


WRONG_OVERRIDES = {
    "seed=abc": "--set seed=abc: seed: abc: ", "seed": "--set: seed: ", "=3": "--set: =3: ",
    "optimizer..lr=3": "--set: optimizer..lr=3: ", "seed=\udcff": "--set seed=\\udcff: line 1: ",
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG_OVERRIDES)
def test_a_wrong_override_is_reported_as_such(override: str, empty_folder: Path) -> None:
    assert_faults_begin(list_config_faults("", override), WRONG_OVERRIDES[override])


# ---- values


def test_overrides_are_read_as_yaml_and_the_last_wins(empty_folder: Path) -> None:
    config = read_config(
        "optimizer: {momentum: 0.9}\n",
        "optimizer.lr=1e-3", "epochs=3", "epochs=4", "stages=[a, b.0]", "model.args.width=7", "clip.norm=2",
        "clip.scope=stage", "optimizer={weight_decay: 5e-4}", "data.answer=no",
    )  # fmt: skip
    merged = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    assert config.optimizer.settings().items() >= merged.items()
    assert (config.epochs, config.stages) == (4, ["a", "b.0"])
    assert config.model.args == {"width": 7} and config.data.options() == {"answer": "no"}
    assert config.clip is not None and config.clip.scope == "stage"


# text of YAML -> its value
PLAIN_VALUES = {
    "1e-3": 1e-3, "1E3": 1e3, ".5": 0.5, "-2.": -2.0, "010": 10, "0x10": 16, "0o10": 8, "+3": 3, "true": True, "no": "no",
    "1:30": "1:30", "2026-01-01": "2026-01-01", "1_000": "1_000", "~": None, "null": None, "": None, "'1'": "1", "=": "=",
}  # fmt: skip


def test_plain_yaml_values_have_the_expected_types(empty_folder: Path) -> None:
    args = "".join(f"    a{number}: {text}\n" for number, text in enumerate(PLAIN_VALUES))
    Path("args.yaml").write_text(f"model:\n  args:\n{args}extends: smallest.yaml\n")
    Path("smallest.yaml").write_text(SMALLEST)
    read_as = list(load_config("args.yaml").model.args.values())
    # repr, since 1 == 1.0 == True
    assert repr(read_as) == repr(list(PLAIN_VALUES.values()))


def test_merge_keys_and_anchors_work(empty_folder: Path) -> None:
    args = "{a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}"
    Path("args.yaml").write_text(f"model: {{entry: m:f, args: {args}}}\ndata: {{name: digits}}\n")
    assert load_config("args.yaml").model.args == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


# ---- extends


def test_extends_merges_deeply_and_relative_to_the_file(empty_folder: Path) -> None:
    (empty_folder / "sub").mkdir()
    Path("base.yaml").write_text(
        SMALLEST + "optimizer: {lr: 0.5, momentum: 0.9}\nstages: [a, b]\nseed: 3\n"
    )
    Path("sub/middle.yaml").write_text("extends: ../base.yaml\noptimizer: {lr: 0.25}\n")
    Path("sub/top.yaml").write_text("extends: middle.yaml\nstages: [c]\n")
    config = load_config("sub/top.yaml")
    assert config.optimizer.lr == 0.25 and config.optimizer.momentum == 0.9
    assert config.stages == ["c"] and config.seed == 3  # lists are replaced, not concatenated


# ---- writing, comparing


def test_a_dumped_config_reads_as_the_same_config(empty_folder: Path) -> None:
    groups = {"no_decay": ["*.bias"], "betas": [0.9, 0.95], "eps": 1e-20, "name": "adamw"}
    for stages in (None, 3, ["a"], "finest", {"finest": 9}, {"count": 3, "by": "time"}):
        config = configure(
            stages=stages, optimizer=groups, data={"name": "x", "date": "2026-01-01"}
        )
        again = read_dumped(config)
        assert again == config and again.to_dict() == config.to_dict()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
LIKE_NUMBERS = st.text("0123456789eE+-._xo:~<=", max_size=6)


@examples(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(min_size=1), SCALARS | LIKE_NUMBERS | st.lists(SCALARS), max_size=4))
def test_any_value_survives_being_written_and_read(
    empty_folder: Path, values: Dict[str, Any]
) -> None:
    again = read_dumped(configure(model={"entry": "m:f", "args": values})).model.args
    assert again == values and repr(again) == repr(values)  # repr, since 1 == 1.0 == True


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_configs_of_this_repository_are_right(path: Path, empty_folder: Path) -> None:
    config = load_config(path)
    assert read_dumped(config) == config
    check_arguments(
        resolve_entry(config.model.entry, "model.entry"), config.model.args, "model.args"
    )


# ---- import strings


def test_an_import_string_is_searched_in_the_current_folder(empty_folder: Path) -> None:
    Path("folder_model_a.py").write_text(
        "class Nets:\n    @staticmethod\n    def small(): return 7\n"
    )
    assert resolve_entry("folder_model_a:Nets.small", "model.entry")() == 7


@pytest.mark.parametrize("entry, names", [
    ("models.resnet", "module:name"), (":f", "module:name"), ("no_such_module_x:f", "no module no_such_module_x"),
    ("folder_model_b.sub:f", "no module folder_model_b.sub"), ("folder_model_b:smal", "small"),
    ("folder_model_b:number", "int"), ("folder_model_c:f", "no_such_module_y"), ("folder_model_d:f", "ZeroDivisionError"),
])  # fmt: skip
def test_a_wrong_import_string_is_reported_with_the_reason(
    entry: str, names: str, empty_folder: Path
) -> None:
    texts = {
        "folder_model_b": "number = 3\ndef small(): pass\n",
        # the fault is inside it: not "no such module"
        "folder_model_c": "import no_such_module_y\n",
        "folder_model_d": "1 / 0\n",
    }
    for name, text in texts.items():
        sys.modules.pop(name, None)
        Path(f"{name}.py").write_text(text)
    (line,) = list_faults(resolve_entry, entry, "model.entry")
    assert line.startswith(f"model.entry: {entry}: ") and names in line


def test_arguments_that_a_callable_does_not_take_are_named() -> None:
    def make_pair(width: int, *rest: int, depth: int = 2) -> Any:
        return (width, depth)

    for call in (check_arguments, call_entry):
        assert_faults_begin(
            list_faults(call, make_pair, {"widht": 3, "depth": True}, "model.args"),
            "model.args.widht: 3: unknown argument, allowed are ",
            "model.args.width: missing: ",
        )
    check_arguments(lambda **rest: rest, {"anything": 1}, "model.args")
    check_arguments(dict, {"anything": 1}, "model.args")  # dict has no signature
    assert call_entry(make_pair, {"width": 3}, "model.args") == (3, 2)


@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_an_exception_of_a_callable_about_a_value_is_one_line(kind: Any) -> None:
    def raise_kind(number: int) -> Any:
        raise kind("too large\nhere is why")

    # story: these ended in a traceback
    (line,) = list_faults(call_entry, raise_kind, {"number": 3}, "model.args")
    assert line.startswith("model.args: {'number': 3}") and "too large" in line
    assert "\n" not in line and (f"{kind.__name__}: " in line) == (kind is not ValueError)


MEASURED = {"stages": {"count": 3, "by": "time"}}


@pytest.mark.parametrize("old, new, kept", [
    # stages measured by time are the same as the names that they came to
    ({"stages": ["b", "c"]}, MEASURED, {"stages": ["b", "c"]}),
    ({"stages": ["b", "c"]}, {"stages": {"count": 4, "by": "time"}}, {}),
    ({"stages": ["b", "c"]}, {"stages": {"count": 3, "by": "flops"}}, {}),
    ({"stages": ["b", "c"]}, {"stages": ["b", "d"]}, {}),
    (MEASURED, MEASURED, {}),
    # a rate that the method advised; one that the new config sets wins
    ({"optimizer": {"name": "sgd", "lr": 0.07}}, {"optimizer": {"name": "sgd"}}, {"optimizer": {"name": "sgd", "lr": 0.07}}),
    ({"optimizer": {"name": "sgd", "lr": 0.07}}, {"optimizer": {"name": "sgd", "lr": 0.3}}, {}),
])  # fmt: skip
def test_a_resumed_run_keeps_what_its_config_leaves_open(old: Any, new: Any, kept: Any) -> None:
    resumed = keep_recorded_choices(configure(**old), configure(**new))
    assert resumed == configure(**{**new, **kept})


def test_a_key_that_an_earlier_version_lacked_counts_as_its_default() -> None:
    """Story: a checkpoint without `model.compile`, which was new, was refused, since null is not false."""
    now = select_deciding(configure().to_dict())
    saved = {key: value for key, value in now.items() if key != "model.compile"}
    assert compare_deciding(saved, now) == [] == compare_deciding(now, saved)
    assert compare_deciding(saved, {**now, "model.compile": True}) == [
        ("model.compile", False, True)
    ]
    assert [key for key, _, _ in compare_deciding(saved, {**now, "seed": 3})] == ["seed"]


# ---- files, long and odd texts


def test_files_that_are_not_configs_are_refused_unread(empty_folder: Path) -> None:
    (empty_folder / "folder").mkdir()
    os.mkfifo("pipe")  # story: the reader waited for a writer
    Path("latin.yaml").write_bytes(b"seed: 1\nx: \xe9\n")
    Path("large.yaml").write_text("# " + "x" * 2**19)
    names = ("gone.yaml", "folder", "pipe", "/dev/zero", "latin.yaml", "large.yaml", "a\0b")
    for name in (*names, "x" * 300):
        assert_faults_begin(list_faults(load_config, name), name.replace("\0", "\\x00") + ": ")


def test_twenty_thousand_keys_are_read_and_their_faults_counted(empty_folder: Path) -> None:
    """Story: each key was compared with all keys before it, and with all known keys for the nearest one."""
    faults = list_config_faults("".join(f"k{number}: 1\n" for number in range(20_000)))
    assert len(faults) == 51 and faults[-1] == "x.yaml: 19950 more such faults"


@pytest.mark.parametrize("value", [None, 5, "x", [None, 5, "x"], {"x": 5}, {5: [{}]}], ids=repr)
def test_no_kind_of_value_at_any_key_ends_in_a_traceback(value: Any, empty_folder: Path) -> None:
    """Story: null in a list of sections, given.callbacks, had its fault described without its section."""
    places = [*KEYS, *(f"given.{key}" for key in Given.model_fields)]
    places += [
        f"given.{kind}.{key}" for kind in ("model", "callbacks") for key in Description.model_fields
    ]
    assert len(places) > 250 and "optimizer.groups.match" in places
    for place in places:
        above, _, name = place.rpartition(".")
        for key, new in [(place, value), (above, [{name: value}])][: 1 + bool(above)]:
            keys = yaml.safe_load(SMALLEST)
            set_key(keys, key, new)
            Path("x.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
            try:
                load_config("x.yaml")
            except BadInput as error:
                assert all(map(str.isprintable, error.lines)), place


def test_fault_lines_are_cut_and_escaped(empty_folder: Path) -> None:
    (fault,) = list_config_faults("", f"seed=[{'a' * 9000}]")
    assert fault.isprintable() and len(fault) < 600 and "... (9004 characters)" in fault
    assert_faults_begin(
        list_config_faults('method: "\\e[31mred\\nline"'), "x.yaml: method: \\x1b[31mred\\nline: "
    )
    (fault,) = BadInput("a\x1b" + "b" * 9000).faults
    assert fault.startswith("a\\x1bbb") and len(fault) < 2100


def test_an_override_within_an_alias_changes_one_of_the_two(empty_folder: Path) -> None:
    text = "model:\n  entry: m:f\n  args:\n    a: &a {x: {y: 1}}\n    b: *a\ndata: {name: digits}\n"
    Path("x.yaml").write_text(text)
    config = load_config("x.yaml", ["model.args.a.x.y=2"])
    assert config.model.args == {"a": {"x": {"y": 2}}, "b": {"x": {"y": 1}}}


@pytest.mark.parametrize(
    "override", ["a." * 3000 + "a=1", "hardware." + "a." * 30 + "a=" + "[" * 30 + "]" * 30]
)
def test_overrides_that_are_too_deep_are_refused(override: str, empty_folder: Path) -> None:
    assert "nested deeper than 50 levels" in list_config_faults("", override)[0]


@pytest.mark.parametrize("keys, begin", [
    ({"epochs": 10_000_000}, "epochs: 10000000: 1790000000 updates, at most 10000000: "),
    ({"steps": 5_000_000, "checkpoint": {"every": 1}},
     "checkpoint.every: 1: 5000000 times in 5000000 updates, at most 1000000: "),
])  # fmt: skip
def test_a_run_too_long_to_be_planned_is_refused_with_the_reason(keys: Any, begin: str) -> None:
    config = configure(**yaml.safe_load(SMALLEST), evaluate={"every": 0}, **keys)
    assert_faults_begin(list_faults(build, config), begin)


@pytest.mark.parametrize("trace, accumulate, updates", [
    (None, 1, range(512)), ("true", 8, range(64)), ("{begin: 100, every: 10}", 8, range(100, 740, 10)),
    ("{begin: 5, end: 9}", 1000, range(5, 9)), ("{}", 1000, range(1)), ("false", 1, None), ("null", 1, None),
])  # fmt: skip
def test_traced_updates(empty_folder: Path, trace: Any, accumulate: int, updates: Any) -> None:
    config = read_config(f"log: {{trace: {trace}}}" if trace else "")
    chosen = config.log.trace
    assert (chosen and chosen.updates(accumulate)) == updates
    assert Config.model_validate(config.to_dict()) == config


def test_a_circle_names_the_file_that_closes_it(empty_folder: Path) -> None:
    Path("a.yaml").write_text("extends: b.yaml\n")
    Path("b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(
        BadInput,
        match="^b.yaml: extends: a.yaml: more than 20 files extend one another, or in a circle$",
    ):
        load_config("a.yaml")


def test_a_dumped_config_means_the_same_to_a_reader_of_yaml_1_1() -> None:
    values = {"a": "no", "b": "1:30", "c": "2026-01-01", "d": "1_0", "e": "1e-3"}
    dumped = dump_config(configure(model={"entry": "m:f", "args": values}))
    assert yaml.safe_load(dumped)["model"]["args"] == values


def test_a_file_without_permission_is_reported_as_such(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_permission_error(*arguments: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", raise_permission_error)  # root may read every file
    assert_faults_begin(list_faults(load_config, "x.yaml"), "x.yaml: cannot be read: ")
