"""Test faults of misspelled names and of words of other libraries: each names the right word.

The rest of a message may change freely.
"""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest
import torch

from ipu_pipe import cli, shipped
from ipu_pipe.cli import COMMANDS
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.config.sections import OPTIMIZER_CLASSES, SCHEDULER_CLASSES
from ipu_pipe.data import load_data
from ipu_pipe.data.fetch import fetch
from ipu_pipe.errors import BadInput, run_command
from ipu_pipe.hardware.description import list_hardware
from ipu_pipe.job.factories import make_loss
from ipu_pipe.job.overrides import Overrides
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.shipped import find_config, list_configs
from ipu_pipe.text import ALSO_CALLED
from tests.command_line import run_here
from tests.support.runs import list_faults

DIGITS = "configs/mlp_digits.yaml"


def read_suggestion(line: str) -> List[str]:
    """Return the names that a fault suggests."""
    match = re.search(r"(?:did you mean|nearest (?:is|are)) (.*?)(?:\?| \(|, allowed|$)", line)
    return [] if match is None else re.split(r" or |, ", match.group(1))


# ---- values of keys

TORCH_OPTIMIZER, TORCH_SCHEDULER = "torch.optim.", "torch.optim.lr_scheduler."
# key -> what a user writes -> the names suggested, in order; an empty list where nothing is near
VALUES: Dict[str, Dict[str, Sequence[str]]] = {
    "method": {
        "1f1b": ["pipedream_flush", "pipedream"], "1F1B": ["pipedream_flush", "pipedream"], "GPipe": ["gpipe"],
        "ZBV": ["zbv"], "zb": ["zb_h1"], "zero_bubble": ["zb_h1"], "zero-bubble": ["zb_h1"], "zbh1": ["zb_h1"],
        "interleaved": ["interleaved_1f1b"], "dualpipe": ["dualpipe_v"], "pipedream-2bw": ["pipedream_2bw"],
        "2bw": ["pipedream_2bw"], "2BW": ["pipedream_2bw"], "pipdream": ["pipedream"], "PipeMare": ["pipemare"],
        "ScheduleZBVZeroBubble": ["zbv"], "ScheduleInterleavedZeroBubble": ["interleaved_zb"], "afab": ["gpipe"],
        "xxxxxx": [],
    },
    "backend.name": {
        "cuda": ["backend.device=cuda"], "gpu": ["backend.device=cuda"], "cuda:0": ["backend.device=cuda"],
        "cpu": ["backend.device=cpu"], "CPU": ["backend.device=cpu"],
        "nccl": ["distributed"], "gloo": ["distributed"], "ipu": ["poptorch"], "Emulator": ["emulator"],
        "emulater": ["emulator"], "tpu": ["xla"], "mps": [],
    },
    "backend.device": {"gpu": ["cuda"], "CUDA": ["cuda"], "cuda:1": ["cuda"]},
    "precision": {
        "fp16": ["bfloat16_mixed"], "half": ["bfloat16_mixed"], "16": ["bfloat16_mixed"], "bf16": ["bfloat16_mixed", "bfloat16"],
        "BF16": ["bfloat16_mixed", "bfloat16"], "bf16-mixed": ["bfloat16_mixed"], "fp32": ["float32"], "float": ["float32"],
        "float23": ["float32"], "double": ["float64"],
    },
    "optimizer.name": {
        "SGD": ["sgd"], "AdamW": ["adamw"], "admw": ["adamw"], "RMSprop": [f"{TORCH_OPTIMIZER}RMSprop"],
        "adagrad": [f"{TORCH_OPTIMIZER}Adagrad"], "optim.Adam": ["adam"], "xxxxxx": [],
    },
    "lr_schedule.name": {
        "cosin": ["cosine"], "Cosine": ["cosine"], "CosineAnnealingLR": ["cosine"], "ReduceLROnPlateau": ["plateau"],
        "MultiStepLR": ["step"], "OneCycle": [f"{TORCH_SCHEDULER}OneCycleLR"],
        "exponential": [f"{TORCH_SCHEDULER}ExponentialLR"],
    },
    "hardware": {"POD16": ["pod16"], "pod17": ["pod16"], "h100": ["h100x8"], "ipu": ["gc200"]},
    "stages": {"finst": ["finest"], "Auto": ["auto"]},
    "reduction": {"exat": ["exact"]},
    "clip": {"{norm: 1, scope: globl}": ["global"]},
    "checkpoint.format": {"shard": ["sharded"]},
    "method_args.schedule": {"1F1B": ["1f1b"], "dflow": ["dataflow"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in VALUES.items() for value in values]
)
def test_a_value_names_the_nearest_or_the_right_key(key: str, value: str) -> None:
    (fault,) = list_faults(load_config, DIGITS, [f"{key}={value}"])
    assert fault.startswith(f"--set {key}={value}: {key}")
    assert read_suggestion(fault) == list(VALUES[key][value])


def test_keywords_of_python_are_checked_alike() -> None:
    (fault,) = list_faults(lambda: configure(backend={"name": "cuda"}))
    assert fault.startswith("configure: backend.name: cuda: ") and read_suggestion(fault) == [
        "backend.device=cuda"
    ]
    (fault,) = list_faults(lambda: configure(metod="gpipe"))
    assert read_suggestion(fault) == ["method"]


@pytest.mark.parametrize(("written", "meant"), [
    ("crossentropy", "cross_entropy"), ("CrossEntropyLoss", "cross_entropy"), ("ce", "cross_entropy"),
    ("torch.nn.CrossEntropyLoss", "cross_entropy"), ("mse", "torch.nn.functional:mse_loss"),
    ("MSELoss", "torch.nn.functional:mse_loss"), ("Model", "model"),
])  # fmt: skip
def test_a_loss_names_the_nearest(written: str, meant: str) -> None:
    (fault,) = list_faults(make_loss, configure(loss=written), Overrides())
    assert fault.startswith(f"loss: {written}: ") and read_suggestion(fault) == [meant]
    if ":" in meant:
        make_loss(configure(loss=meant), Overrides())


@pytest.mark.parametrize(("written", "meant"), [
    ("CIFAR10", "cifar10"), ("cifar-10", "cifar10"), ("MNIST", "mnist"), ("Fashion-MNIST", "fashion_mnist"),
])  # fmt: skip
def test_a_data_set_names_the_nearest(written: str, meant: str, tmp_path: Path) -> None:
    for faults in (list_faults(load_data, written), list_faults(fetch, written, tmp_path)):
        assert len(faults) == 1 and read_suggestion(faults[0]) == [meant]


def test_words_of_other_libraries_are_written_as_they_are_looked_up() -> None:
    """A key in capitals or with a hyphen would never match."""
    assert all(word == word.lower().replace("-", "_") for word in ALSO_CALLED)
    for name in OPTIMIZER_CLASSES:
        assert hasattr(torch.optim, name)
    for name in SCHEDULER_CLASSES:
        assert hasattr(torch.optim.lr_scheduler, name)
    for word in ("1f1b", "2bw", "afab", "vpp", "bfs", "zb", "dualpipe", "diloco"):
        assert set(ALSO_CALLED[word].split()) <= set(METHODS)
    assert {"gc200", "gc2"} <= set(list_hardware())


# ---- command lines


def run_command_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    command, *arguments = line.split()
    place = "ipu_pipe.cli" if command in COMMANDS else "tools.experiments"
    module = importlib.import_module(f"{place}.{command}")
    return run_here(module, *arguments, monkeypatch=monkeypatch, capsys=capsys)


# command line -> the beginning of its fault, and the names suggested
LINES = {
    "train mlp_digit": ("mlp_digit: ", ["mlp_digits"]),
    "train configs/mlp_digit.yaml": ("configs/mlp_digit.yaml: ", ["configs/mlp_digits.yaml"]),
    "train Resnet20-cifar10": ("Resnet20-cifar10: ", ["resnet20_cifar10"]),
    f"train {DIGITS} epochs=2": ("", ["--set epochs=2"]),
    f"train epochs=2 {DIGITS}": ("", ["--set epochs=2"]),
    f"train {DIGITS} lr=2": ("", ["--set optimizer.lr=2"]),
    f"train {DIGITS} --epochs 2": ("", ["--set epochs=2"]),
    f"train {DIGITS} --epoch 2": ("", ["--set epochs=2"]),
    f"train {DIGITS} --lr 0.1": ("", ["--set optimizer.lr=0.1"]),
    f"train {DIGITS} --optimizer.lr=0.1": ("", ["--set optimizer.lr=0.1"]),
    f"train {DIGITS} --method gpipe": ("", ["--set method=gpipe"]),
    f"train {DIGITS} --batch-size=4": ("", ["--set micro_batch_size=4"]),
    f"train {DIGITS} --dryrun": ("", ["--dry-run"]),
    f"train {DIGITS} --ouput x": ("", ["--out x"]),
    f"train {DIGITS} --output-dir x": ("", ["--out DIR"]),
    f"train --config {DIGITS}": ("", ["CONFIG without --config"]),
    f"train {DIGITS} --zzzzzz": ("", []),
    f"train {DIGITS} --against 1f1b": ("--against: 1f1b: ", ["pipedream_flush", "pipedream"]),
    f"collect {DIGITS} --out x --methods gpipe,1F1B": (
        "--methods: 1F1B: ",
        ["pipedream_flush", "pipedream"],
    ),
    f"plan {DIGITS} --hardware POD16": ("--hardware: POD16: ", ["pod16"]),
    f"plan {DIGITS} --hardware pod16 --methods GPipe": ("--methods: GPipe: ", ["gpipe"]),
    f"plan {DIGITS} --hardware pod16 --precision fp16": (
        "--precision: fp16: ",
        ["float16", "bfloat16_mixed"],
    ),
    f"stability {DIGITS} optimizer.lr=1": ("", ["--set optimizer.lr=1"]),
    "stability mlp_digit": ("mlp_digit: ", ["mlp_digits"]),
    "schedule GPipe --stages 2 --microbatches 2": ("method: GPipe: ", ["gpipe"]),
    "schedule gpipe --stages 2 --micro-batches 2": ("", ["--microbatches 2"]),
    "schedule gpipe --stages 2 --microbatches 2 --format jsn": ("--format: ", ["json"]),
    "schedule --method gpipe --stages 2 --microbatches 2": ("", ["METHOD without --method"]),
    "reproduce pb-resnet20": ("EXPERIMENT: pb-resnet20: ", ["pb_resnet20"]),
    "completion zhs": ("SHELL: ", ["zsh"]),
}


@pytest.mark.parametrize("line", list(LINES))
def test_a_command_line_names_the_right_spelling(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command_line(line, monkeypatch, capsys)
    place, meant = LINES[line]
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert (
        result.stderr.startswith(f"error: {place}")
        and read_suggestion(result.stderr.strip()) == meant
    )


@pytest.mark.parametrize("written, meant", [
    ("trian", "train"), ("Train", "train"), ("analyse", "analyze"), ("fetch_dat", "fetch-data"), ("schedul", "schedule"),
])  # fmt: skip
def test_a_command_names_the_nearest(
    written: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ipu-pipe", written, "x"])
    with pytest.raises(SystemExit) as exit_error:
        cli.run()
    output = capsys.readouterr()
    assert (exit_error.value.code, output.out) == (2, "") and meant.replace("-", "_") in COMMANDS
    assert read_suggestion(output.err.strip()) == [meant]


def test_every_example_is_found_by_its_listed_name() -> None:
    assert "mlp_digits" in list_configs() and not any("hardware" in name for name in list_configs())
    assert all(find_config(name).is_file() for name in list_configs())


def test_a_missing_extended_file_names_the_nearest_beside_it(tmp_path: Path) -> None:
    (tmp_path / "basis.yaml").write_text("seed: 1\n")
    (tmp_path / "run.yaml").write_text("extends: bases.yaml\n")
    (fault,) = list_faults(load_config, tmp_path / "run.yaml")
    assert fault.startswith(f"{tmp_path / 'run.yaml'}: extends: bases.yaml: ")
    assert read_suggestion(fault) == [str(tmp_path / "basis.yaml")]


@pytest.mark.parametrize("name", [
    "mlp_digits", "configs/mlp_digits.yaml", "configs/mlp_digits", "mlp_digits.yaml",
])  # fmt: skip
def test_a_file_extends_an_example_by_its_name(name: str, tmp_path: Path) -> None:
    """Story: `extends: pod/X` asked "did you mean pod/X?"."""
    (tmp_path / "run.yaml").write_text(f"extends: {name}\nseed: 77\n")
    config = load_config(tmp_path / "run.yaml")
    assert config.model.entry == "models.mlp:mlp" and config.seed == 77


def test_an_example_that_extends_another_is_extended(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("extends: pod/pod16_resnet101_pipelined\n")
    found = load_config(find_config("pod/pod16_resnet101_pipelined"))
    assert load_config(tmp_path / "run.yaml") == found


def test_a_file_beside_it_is_extended_before_an_example(tmp_path: Path) -> None:
    (tmp_path / "mlp_digits.yaml").write_text(BASE + "seed: 5\n")
    (tmp_path / "run.yaml").write_text("extends: mlp_digits.yaml\n")
    assert load_config(tmp_path / "run.yaml").seed == 5


def test_examples_of_an_installed_package_are_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel has its examples in the package, and no folder configs beside it."""
    (tmp_path / "ipu_pipe" / "configs" / "own").mkdir(parents=True)
    (tmp_path / "ipu_pipe" / "configs" / "own" / "small.yaml").write_text(BASE + "seed: 6\n")
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path / "ipu_pipe")
    (tmp_path / "run.yaml").write_text("extends: own/small\n")
    assert load_config(tmp_path / "run.yaml").seed == 6
    (tmp_path / "run.yaml").write_text("extends: own/smal\n")
    (fault,) = list_faults(load_config, tmp_path / "run.yaml")
    assert read_suggestion(fault) == ["own/small"]


# ---- settings of an optimizer that is replaced

BASE = """\
model: {entry: models.mlp:mlp}
data: {name: digits}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01}
lr_schedule: {name: step, milestones: [1], gamma: 0.5, warmup_steps: 3}
"""


def write_base(folder: Path, text: str = BASE) -> str:
    (folder / "base.yaml").write_text(text)
    return str(folder / "base.yaml")


@pytest.mark.parametrize(
    "override",
    ["optimizer.name=adamw", "optimizer={name: adamw}", "optimizer.name=torch.optim.RMSprop"],
)
def test_inherited_settings_of_another_optimizer_are_left_out_with_one_warning(
    override: str, tmp_path: Path
) -> None:
    """Story: the momentum of a shipped file was a fault of the user who chose adamw."""
    path = write_base(tmp_path)
    with pytest.warns(UserWarning) as records:
        config = load_config(path, [override])
    assert config.optimizer.settings() == {"lr": 0.1, "weight_decay": 0.01}
    assert len(records) == 1
    assert all(
        f"{path}: optimizer.{key}: " in str(records[0].message) for key in ("momentum", "nesterov")
    )


def test_an_extending_file_and_a_schedule_of_rates_leave_out_alike(tmp_path: Path) -> None:
    write_base(tmp_path)
    (tmp_path / "run.yaml").write_text("extends: base.yaml\noptimizer: {name: adam, eps: 1.0e-6}\n")
    with pytest.warns(UserWarning) as records:
        config = load_config(tmp_path / "run.yaml", ["lr_schedule.name=cosine"])
    assert config.optimizer.settings() == {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-6}
    assert (
        config.lr_schedule.milestones,
        config.lr_schedule.warmup_steps,
        config.lr_schedule.gamma,
    ) == ([], 3, 0.5)
    assert len(records) == 2 and "lr_schedule.milestones: " in str(records[1].message)


@pytest.mark.parametrize("overrides, key", [
    (["optimizer.name=adamw", "optimizer.momentum=0.9"], "momentum"),
    (["optimizer.momentum=0.9", "optimizer.name=adamw"], "momentum"),
    (["optimizer={name: adamw, nesterov: true}"], "nesterov"),
    (["optimizer.betas=[0.9, 0.9]"], "betas"),
    (["optimizer={lr: 0.2, betas: [0.9, 0.9]}"], "betas"),
])  # fmt: skip
def test_settings_beside_the_new_name_are_still_faults(
    overrides: List[str], key: str, tmp_path: Path
) -> None:
    path = write_base(tmp_path, BASE.replace("nesterov: true, ", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (fault,) = list_faults(load_config, path, overrides)
    assert fault.startswith("--set ") and f": optimizer.{key}: " in fault


@pytest.mark.parametrize("name", ["name: sgd, ", ""])
def test_a_file_whose_own_settings_do_not_fit_is_a_fault(name: str, tmp_path: Path) -> None:
    text = (
        BASE.replace("momentum: 0.9", "betas: [0.9, 0.9]")
        .replace("nesterov: true, ", "")
        .replace("name: sgd, ", name)
    )
    path = write_base(tmp_path, text)
    for overrides in ([], ["optimizer.lr=0.2"], ["optimizer={lr: 0.2}"]):
        (fault,) = list_faults(load_config, path, overrides)
        assert fault.startswith(f"{path}: optimizer.betas: ")


GROUPS = "[{match: '*.bias', name: sgd, lr: 0.2}, {name: adam}]"


@pytest.mark.parametrize(
    "override", [f"optimizer={{groups: {GROUPS}}}", f"optimizer.groups={GROUPS}"]
)
@pytest.mark.parametrize("name", ["name: sgd, ", ""])
def test_groups_leave_out_the_inherited_optimizer(name: str, override: str, tmp_path: Path) -> None:
    """Story: groups over a file with an optimizer were refused for the name that they replace."""
    path = write_base(tmp_path, BASE.replace("name: sgd, ", name))
    with pytest.warns(UserWarning) as records:
        config = load_config(path, [override])
    assert [(one.name, one.lr) for one in config.optimizer.members] == [
        ("sgd", 0.2),
        ("adam", None),
    ]
    assert len(records) == 1
    left_out = ("name", "lr", "momentum", "nesterov", "weight_decay")[0 if name else 1 :]
    for key in left_out:
        assert f"{path}: optimizer.{key}: " in str(records[0].message)


def test_a_name_leaves_out_inherited_groups(tmp_path: Path) -> None:
    groups = re.sub("optimizer: .*", f"optimizer: {{groups: {GROUPS}}}", BASE)
    path = write_base(tmp_path, groups)
    with pytest.warns(UserWarning, match="optimizer.groups: .* because optimizer.name is adam$"):
        config = load_config(path, ["optimizer={name: adam, lr: 0.5}"])
    assert config.optimizer.settings() == {"lr": 0.5} and not config.optimizer.groups


def test_no_groups_leave_the_inherited_optimizer(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(write_base(tmp_path), ["optimizer.groups=[]"])
    assert config.optimizer.name == "sgd" and config.optimizer.lr == 0.1


@pytest.mark.parametrize("overrides", [
    [f"optimizer={{groups: {GROUPS}, name: adam}}"],
    [f"optimizer.groups={GROUPS}", "optimizer.lr=0.2"],
])  # fmt: skip
def test_settings_beside_the_new_groups_are_still_faults(
    overrides: List[str], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (fault,) = list_faults(load_config, write_base(tmp_path), overrides)
    assert re.match("--set .*: optimizer.(name|lr): ", fault)


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


def test_a_warning_of_a_command_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_base(tmp_path)

    def load_twice() -> None:
        for _ in range(2):
            load_config(path, ["optimizer.name=adam"])

    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)
    with warnings.catch_warnings(), pytest.raises(SystemExit) as exit_error:
        warnings.simplefilter("always")
        run_command(load_twice)
    output = capsys.readouterr()
    assert (exit_error.value.code, output.out) == (0, "")
    lines = [line for line in output.err.splitlines() if "optimizer.momentum" in line]
    assert len(lines) == 1 and lines[0].startswith("warning: ")


def test_faults_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as error:
        load_config(write_base(tmp_path), ["optimizer.name=a\nb", "method=\x1b[1f1b"])
    assert all(fault.isprintable() for fault in error.value.faults)
