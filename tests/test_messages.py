"""Test faults of misspelled names and of words of other libraries: each names the right word.

The rest of a message may change freely.
"""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ipu_pipe import cli, shipped
from ipu_pipe.cli import COMMANDS
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.data import load_data
from ipu_pipe.data.fetch import fetch
from ipu_pipe.job.factories import make_loss
from ipu_pipe.job.overrides import Overrides
from ipu_pipe.shipped import find_config
from tests.command_line import run_here
from tests.support.runs import list_faults

DIGITS = "configs/mlp_digits.yaml"


def read_suggestion(line: str) -> str:
    """Return the names that a fault suggests, as it writes them; "" for none."""
    match = re.search(r"(?:did you mean|nearest (?:is|are)) (.*?)(?:\?| \(|, allowed|$)", line)
    return match.group(1) if match else ""


# ---- values of keys

TORCH_OPTIMIZER, TORCH_SCHEDULER = "torch.optim.", "torch.optim.lr_scheduler."
# key -> what a user writes -> the names suggested; "" where nothing is near
VALUES = {
    "method": {
        "1f1b": "pipedream_flush or pipedream", "1F1B": "pipedream_flush or pipedream", "GPipe": "gpipe", "zb": "zb_h1",
        "zero-bubble": "zb_h1", "zbh1": "zb_h1", "interleaved": "interleaved_1f1b", "dualpipe": "dualpipe_v",
        "pipedream-2bw": "pipedream_2bw", "2BW": "pipedream_2bw", "pipdream": "pipedream",
        "ScheduleInterleavedZeroBubble": "interleaved_zb", "afab": "gpipe", "xxxxxx": "",
    },
    "backend.name": {
        "cuda:0": "backend.device=cuda", "CPU": "backend.device=cpu", "nccl": "distributed", "ipu": "poptorch",
        "emulater": "emulator", "tpu": "xla", "mps": "",
    },
    "backend.device": {"gpu": "cuda", "CUDA": "cuda", "cuda:1": "cuda"},
    "precision": {
        "fp16": "bfloat16_mixed", "16": "bfloat16_mixed", "BF16": "bfloat16_mixed or bfloat16", "bf16-mixed": "bfloat16_mixed",
        "fp32": "float32", "float23": "float32", "double": "float64",
    },
    "optimizer.name": {
        "SGD": "sgd", "admw": "adamw", "RMSprop": f"{TORCH_OPTIMIZER}RMSprop", "adagrad": f"{TORCH_OPTIMIZER}Adagrad",
        "optim.Adam": "adam", "xxxxxx": "",
    },
    "lr_schedule.name": {
        "cosin": "cosine", "CosineAnnealingLR": "cosine", "ReduceLROnPlateau": "plateau",
        "OneCycle": f"{TORCH_SCHEDULER}OneCycleLR", "exponential": f"{TORCH_SCHEDULER}ExponentialLR",
    },
    "hardware": {"POD16": "pod16", "pod17": "pod16", "h100": "h100x8", "ipu": "gc200"},
    "stages": {"finst": "finest"},
    "reduction": {"exat": "exact"},
    "clip": {"{norm: 1, scope: globl}": "global"},
    "checkpoint.format": {"shard": "sharded"},
    "method_args.schedule": {"dflow": "dataflow"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in VALUES.items() for value in values]
)
def test_a_value_names_the_nearest_or_the_right_key(key: str, value: str) -> None:
    (fault,) = list_faults(load_config, DIGITS, [f"{key}={value}"])
    assert fault.startswith(f"--set {key}={value}: {key}")
    assert read_suggestion(fault) == VALUES[key][value]


@pytest.mark.parametrize("written, meant", [
    ("crossentropy", "cross_entropy"), ("ce", "cross_entropy"), ("torch.nn.CrossEntropyLoss", "cross_entropy"),
    ("MSELoss", "torch.nn.functional:mse_loss"), ("Model", "model"),
])  # fmt: skip
def test_a_loss_names_the_nearest(written: str, meant: str) -> None:
    (fault,) = list_faults(make_loss, configure(loss=written), Overrides())
    assert fault.startswith(f"loss: {written}: ") and read_suggestion(fault) == meant
    if ":" in meant:
        make_loss(configure(loss=meant), Overrides())


@pytest.mark.parametrize("written, meant", [("cifar-10", "cifar10"), ("MNIST", "mnist")])
def test_a_data_set_names_the_nearest(written: str, meant: str, tmp_path: Path) -> None:
    for faults in (list_faults(load_data, written), list_faults(fetch, written, tmp_path)):
        assert list(map(read_suggestion, faults)) == [meant]


# ---- command lines


# command line -> the beginning of its fault, and the names suggested
LINES = {
    "train mlp_digit": ("mlp_digit: ", "mlp_digits"),
    "train configs/mlp_digit.yaml": ("configs/mlp_digit.yaml: ", "configs/mlp_digits.yaml"),
    "train Resnet20-cifar10": ("Resnet20-cifar10: ", "resnet20_cifar10"),
    "train CONFIG epochs=2": ("", "--set epochs=2"),
    "train epochs=2 CONFIG": ("", "--set epochs=2"),
    "train CONFIG lr=2": ("", "--set optimizer.lr=2"),
    "train CONFIG --epoch 2": ("", "--set epochs=2"),
    "train CONFIG --optimizer.lr=0.1": ("", "--set optimizer.lr=0.1"),
    "train CONFIG --batch-size=4": ("", "--set micro_batch_size=4"),
    "train CONFIG --dryrun": ("", "--dry-run"),
    "train CONFIG --ouput x": ("", "--out x"),
    "train CONFIG --output-dir x": ("", "--out DIR"),
    "train --config CONFIG": ("", "CONFIG without --config"),
    "train CONFIG --zzzzzz": ("", ""),
    "train CONFIG --against 1f1b": ("--against: 1f1b: ", "pipedream_flush or pipedream"),
    "collect CONFIG --out x --methods gpipe,1F1B": (
        "--methods: 1F1B: ",
        "pipedream_flush or pipedream",
    ),
    "plan CONFIG --hardware POD16": ("--hardware: POD16: ", "pod16"),
    "plan CONFIG --hardware pod16 --methods GPipe": ("--methods: GPipe: ", "gpipe"),
    "plan CONFIG --hardware pod16 --precision fp16": (
        "--precision: fp16: ",
        "float16 or bfloat16_mixed",
    ),
    "stability CONFIG optimizer.lr=1": ("", "--set optimizer.lr=1"),
    "stability mlp_digit": ("mlp_digit: ", "mlp_digits"),
    "schedule GPipe --stages 2 --microbatches 2": ("method: GPipe: ", "gpipe"),
    "schedule gpipe --stages 2 --micro-batches 2": ("", "--microbatches 2"),
    "schedule gpipe --stages 2 --microbatches 2 --format jsn": ("--format: ", "json"),
    "schedule --method gpipe --stages 2 --microbatches 2": ("", "METHOD without --method"),
    "reproduce pb-resnet20": ("EXPERIMENT: pb-resnet20: ", "pb_resnet20"),
    "completion zhs": ("SHELL: ", "zsh"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_names_the_right_spelling(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, meant = LINES[line]
    command, *arguments = line.replace("CONFIG", DIGITS, 1).split()
    package = "ipu_pipe.cli" if command in COMMANDS else "tools.experiments"
    module = importlib.import_module(f"{package}.{command}")
    result = run_here(module, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"error: {place}")
    assert read_suggestion(result.stderr.strip()) == meant


@pytest.mark.parametrize("written, meant", [("Train", "train"), ("fetch_dat", "fetch-data")])
def test_a_command_names_the_nearest(
    written: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ipu-pipe", written, "x"])
    with pytest.raises(SystemExit) as exit_error:
        cli.run()
    output = capsys.readouterr()
    assert (exit_error.value.code, output.out) == (2, "")
    assert read_suggestion(output.err.strip()) == meant


# ---- settings of an optimizer that is replaced

BASE = """\
model: {entry: models.mlp:mlp}
data: {name: digits}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01}
lr_schedule: {name: step, milestones: [1], gamma: 0.5, warmup_steps: 3}
"""
UNNAMED = BASE.replace("name: sgd, ", "")
GROUPS = "[{match: '*.bias', name: sgd, lr: 0.2}, {name: adam}]"
GROUPED = re.sub("optimizer: .*", f"optimizer: {{groups: {GROUPS}}}", BASE)


def write_base(folder: Path, text: str = BASE) -> str:
    (folder / "base.yaml").write_text(text)
    return str(folder / "base.yaml")


SETTINGS = ["lr", "momentum", "nesterov", "weight_decay"]
# inherited file, override -> the keys of the file that are left out, and the settings that count
LEFT_OUT = [
    (BASE, "optimizer.name=adamw", ["optimizer.momentum", "optimizer.nesterov"], {"lr": 0.1, "weight_decay": 0.01}),
    (BASE, "optimizer={name: adam, eps: 1.0e-6}", ["optimizer.momentum", "optimizer.nesterov"],
     {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-6}),
    (BASE, "lr_schedule.name=cosine", ["lr_schedule.milestones"], dict(zip(SETTINGS, (0.1, 0.9, True, 0.01)))),
    (BASE, f"optimizer={{groups: {GROUPS}}}", [f"optimizer.{key}" for key in ("name", *SETTINGS)], {}),
    (UNNAMED, f"optimizer.groups={GROUPS}", [f"optimizer.{key}" for key in SETTINGS], {}),
    (GROUPED, "optimizer={name: adam, lr: 0.5}", ["optimizer.groups"], {"lr": 0.5}),
    (BASE, "optimizer.groups=[]", [], dict(zip(SETTINGS, (0.1, 0.9, True, 0.01)))),
]  # fmt: skip


@pytest.mark.parametrize("text, override, keys, settings", LEFT_OUT)
def test_inherited_settings_of_another_optimizer_are_left_out_with_a_warning(
    text: str, override: str, keys: List[str], settings: Dict[str, Any], tmp_path: Path
) -> None:
    """Story: the momentum of a shipped file was a fault of the user who chose adamw."""
    path = write_base(tmp_path, text)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        config = load_config(path, [override])
    said = [str(record.message) for record in records]
    assert len(said) == bool(keys) and all(f"{path}: {key}: " in said[0] for key in keys)
    assert config.optimizer.groups or config.optimizer.settings() == settings


# a setting that is given beside the new name, or in one file with the old one, is a fault
STILL_FAULTS = [
    (BASE, ["optimizer.name=adamw", "optimizer.momentum=0.9"], "--set .*: optimizer.momentum: "),
    (BASE, ["optimizer.momentum=0.9", "optimizer.name=adamw"], "--set .*: optimizer.momentum: "),
    (BASE, ["optimizer={name: adamw, nesterov: true}"], "--set .*: optimizer.nesterov: "),
    (BASE, ["optimizer={lr: 0.2, betas: [0.9, 0.9]}"], "--set .*: optimizer.betas: "),
    (BASE, [f"optimizer={{groups: {GROUPS}, name: adam}}"], "--set .*: optimizer.name: "),
    (BASE, [f"optimizer.groups={GROUPS}", "optimizer.lr=0.2"], "--set .*: optimizer.lr: "),
    (BASE.replace("momentum", "betas"), ["optimizer.lr=0.2"], ".*base.yaml: optimizer.betas: "),
    (UNNAMED.replace("momentum", "betas"), [], ".*base.yaml: optimizer.betas: "),
]


@pytest.mark.parametrize("text, overrides, line", STILL_FAULTS)
def test_settings_beside_the_new_name_are_still_faults(
    text: str, overrides: List[str], line: str, tmp_path: Path
) -> None:
    path = write_base(tmp_path, text.replace("nesterov: true, ", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (fault,) = list_faults(load_config, path, overrides)
    assert re.match(line, fault)


# ---- files that extend another

# extended name -> the seed of the example or file that is found, or the nearest name
EXTENDED = {
    "mlp_digits": 0, "configs/mlp_digits.yaml": 0, "resnet20_cifar10.yaml": 5,
    "own/small": 6, "pod/pod16_resnet101_pipelined": 0, "bases.yaml": "basis.yaml", "own/smal": "own/small",
}  # fmt: skip


@pytest.mark.parametrize("name", EXTENDED)
def test_a_file_extends_the_file_beside_it_or_an_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel has its examples in the package. Story: `extends: pod/X` asked "did you mean pod/X?"."""
    found = EXTENDED[name]
    (tmp_path / "basis.yaml").write_text("seed: 1\n")
    (tmp_path / "resnet20_cifar10.yaml").write_text(BASE + "seed: 5\n")
    if name.startswith("own"):
        examples = tmp_path / "ipu_pipe" / "configs" / "own"
        examples.mkdir(parents=True)
        (examples / "small.yaml").write_text(BASE + "seed: 6\n")
        monkeypatch.setattr(shipped, "PACKAGE", tmp_path / "ipu_pipe")
    (tmp_path / "run.yaml").write_text(f"extends: {name}\n")
    if isinstance(found, str):
        (fault,) = list_faults(load_config, tmp_path / "run.yaml")
        assert read_suggestion(fault).endswith(found)
        return
    config = load_config(tmp_path / "run.yaml")
    assert config.seed == found
    if name.startswith("pod"):
        assert config == load_config(find_config(name))


# ---- arguments of a model that is replaced

MODEL = BASE.replace("models.mlp:mlp", '"models.mlp:mlp", args: {inputs: 64, width: 32}')


@pytest.mark.parametrize("text, overrides, args", [
    ("model: {entry: 'mine:Net'}", [], {}),
    ("model: {entry: 'mine:Net', args: {width: 8, depth: null}}", [], {"width": 8, "depth": None}),
    ("seed: 1", ["model.entry=mine:Net"], {}),
    ("model: {args: {classes: 3}}", ["model.entry=mine:Net", "model.args.width=8"], {"width": 8}),
    ("seed: 1", ["model.args.width=8", "model.entry=mine:Net"], {"width": 8}),
    ("model: {entry: 'mine:Net'}", ["model.args.depth=2", "model.entry=mine:Other"], {"depth": 2}),
])  # fmt: skip
def test_arguments_belong_to_their_model(
    text: str, overrides: List[str], args: Dict[str, Any], tmp_path: Path
) -> None:
    """Story: `model.args` of an extended file were passed to one's own model, and null passed None."""
    path = write_base(tmp_path, MODEL)
    (tmp_path / "run.yaml").write_text(f"extends: base.yaml\n{text}\n")
    with pytest.warns(UserWarning) as records:
        config = load_config(tmp_path / "run.yaml", overrides)
    assert config.model.args == args
    assert len(records) == 1 and f"{path}: model.args.inputs: 64" in str(records[0].message)
    assert "because model.entry is mine:" in str(records[0].message)


@pytest.mark.parametrize("entry", ["models.mlp:mlp", "models.mlp:another"])
def test_models_of_one_module_share_their_arguments(entry: str, tmp_path: Path) -> None:
    """A ResNet-50 that extends a ResNet-34's file keeps its classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(write_base(tmp_path, MODEL), [f"model.entry={entry}"])
    assert config.model.args == {"inputs": 64, "width": 32}
