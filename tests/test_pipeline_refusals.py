"""Check that configs and `Pipeline` refuse the same models and arguments, each in its own words,
and change nothing.

Not here: PopTorch, and features that `Pipeline` has no argument for (plateau schedules, `ema`,
`hardware`, `model.compile`).
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.errors import BadInput, Divergence
from ipu_pipe.refusals import ARGUMENTS, BEGIN, END, Language
from tests.support.loops import make_perceptron
from tests.support.models import Composed
from tests.support.processes import run_in_group
from tests.support.runs import needs_processes
from tests.support.slow import mark_slow
from tests.test_backend_facts import CountingLoss

Case = Dict[str, Any]
SAMPLES, EPOCH = 4, 12
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# words of a config that the arguments of `Pipeline` do not have
OF_A_CONFIG = re.compile(
    r"gradient_accumulation|micro_batch_size|clip\.|backend\.|backend_args\.name|evaluate|checkpoint\.|lr_schedule"
    r"|model\.output|loss: model|configure|hardware: a|method_args\.warmup|module:name|null|: (true|false)\b|optimizer\.lr"
    r"|\bscope: |\{name:|log\.trace"
)
# words of `Pipeline` that a config does not have
OF_PYTHON = re.compile(
    r"(?<![=(])\b(None|True|False)\b|backend_args|microbatches: |=[\"({]|[^.]\b(device|deadline|warmup|trace): "
)


def make_batch_of_kind(kind: str, samples: int) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (samples,), generator=generator)
    if kind == "tokens":
        return torch.randint(0, 5, (samples, 3), generator=generator), y
    return (x, y + 9) if kind == "other labels" else (x[:, :3], y) if kind == "narrow" else (x, y)


# ---- models


def add_layers(*modules: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that makes a model of two stages, the second with these modules added."""
    return lambda: nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), *modules, nn.Linear(8, 5)
    ).double()


def count_forwards_in_place(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Change a buffer and read it."""
    module.count += 1
    return x + module.count.real / 100


def make_counter(dtype: torch.dtype = torch.float64) -> nn.Module:
    return Composed(count_forwards_in_place, count=torch.zeros((), dtype=dtype))


def carry(tensor: torch.Tensor) -> nn.Module:
    """Return a layer that has a parameter or a buffer more and does nothing."""
    return Composed(lambda module, x: x, added=tensor)


class ListState(nn.Sequential):
    def state_dict(self, *arguments: Any, **keys: Any) -> Any:
        return []


def make_tied_model() -> nn.Module:
    """Make a model whose first and last layer share one weight."""
    a, b, c = (nn.Linear(6, 6) for _ in "abc")
    c.weight = a.weight
    return Composed(lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x))))), a=a, b=b, c=c)


def share_memory() -> nn.Module:
    """Make a model whose first and last layer have two parameters in one memory."""
    # no conversion is left, which would give each its own memory
    model = make_tied_model().double()
    model.c.weight = nn.Parameter(model.a.weight.data)
    return model  # type: ignore[no-any-return]


def embed_tokens(**keys: Any) -> Callable[[], nn.Module]:
    mean = Composed(lambda module, x: x.mean(1))
    return lambda: nn.Sequential(
        nn.Embedding(5, 8, **keys), mean, nn.Linear(8, 8), nn.Linear(8, 5)
    ).double()


def make_weight_norm() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), normed, nn.Linear(8, 5)).double()


# a model that returns a mapping, which no plain loss accepts
MAPPING = Composed(lambda m, x: {"logits": m.layers(x), "others": x}, layers=make_perceptron())
TRAINED_LOSS = Composed(
    lambda module, output, y: cross_entropy(output, y) * module.scale,
    scale=nn.Parameter(torch.ones(())),
)


def raise_error(output: Any, y: Any) -> Any:
    raise KeyError("a loss of one's own")


# ---- the table

T2, DELAYED = {"t2": {}}, {"clip": (1.0, "delayed_global")}
GLOBAL = {"clip": (1.0, "global")}


# line -> the arguments of `Pipeline` that it refuses, some of them keys of a config; `model` makes the model. A config's line
# begins alike, with its own name of the key. A line of several cases is written to different lengths.
REFUSED = {
    # by the method's table and the sizes
    "method_args.stash: True": {"method_args": {"stash": True}},
    "method_args.turn: 1": {"method": "pipemare", "method_args": {"schedule": "1f1b", "turn": 1}},
    "warmup: with gpipe": {"warmup": 2},
    "method_args.split_backward: True": {
        "method": "pipemare",
        "method_args": {"split_backward": True, "recompute": {"segments": 2}, "stash": True},
    },
    "method: pipdream": {"method": "pipdream"},
    "microbatches: 0": {"microbatches": 0},
    "microbatches: 1": {"method": "pipedream_2bw", "microbatches": 1},
    "method_args.local_steps: 3": {"method_args": {"local_steps": 3}},
    "precision: 16.16": {"precision": "16.16"},
    "replicas: 0": {"replicas": 0},
    "clip: -1": {"clip": (-1.0, "stage")},
    "clip: all": {"clip": (1.0, "all")},
    "backend: tpu": {"backend": "tpu"},
    "stages: nowhere": {"stages": ["nowhere"]},
    "stages: auto": {"stages": "auto"},
    "stages.by: hardware": {"stages": {"count": 2, "by": "hardware"}},
    "recompute: True": {"method": "pipemare", "recompute": True},
    "method_args.constant_delay": {
        "method": "pipemare",
        "method_args": {"constant_delay": {"updates": 1}},
        "recompute": True,
    },
    # clipping
    "clip: delayed_global: with": {**DELAYED},
    "clip: global: with": {"method": "pipedream", **GLOBAL},
    "clip: global: local_sgd": {"method": "local_sgd", **GLOBAL},
    "clip: delayed_global: cannot": {"method": "pipemare", "warmup": 2, **DELAYED},
    "clip: global: a block": {"method": "local_greedy", **GLOBAL},
    "clip: local_overlapping": {"method": "local_overlapping", "clip": (1.0, "stage")},
    # replicas and microbatches of methods that step by themselves
    "replicas: 2: randomized": {"method": "randomized_pipedream", "replicas": 2},
    "microbatches: 2": {"method": "randomized_pipedream", "microbatches": 2},
    "replicas: 2: not with method_args": {
        "method": "local_greedy",
        "method_args": {"block_accumulation": [1, 2]},
        "replicas": 2,
    },
    "replicas: 2: not with local": {"method": "local_overlapping", "replicas": 2},
    "replicas: 2: each": {
        "method": "pipedream",
        "method_args": {"delay_compensation": {"adaptive": True}},
        "replicas": 2,
    },
    # blocks
    "method_args.block_rates": {"method": "local_greedy", "method_args": {"block_rates": [1]}},
    "method_args.head": {"method_args": {"head": "a:b"}},
    "method_args.block_acc": {
        "method": "local_overlapping",
        "method_args": {"block_accumulation": [1, 2]},
    },
    # rules
    "method_args.delay_compensation: cannot": {
        "method": "pipedream",
        "method_args": {"delay_compensation": {}},
        "microbatches": 2,
        "loss_weight": "tokens",
    },
    "method_args.t2: with": {"method_args": {"t2": {}}},
    "method_args.t2: cannot": {
        "method": "pipemare",
        "method_args": {"t2": {}, "weight_prediction": {}},
    },
    "method_args.delay_compensation: with": {
        "method": "pipemare",
        "method_args": {"delay_compensation": {}},
    },
    "method_args.error_feedback": {
        "method": "pipelined_backprop",
        "method_args": {"error_feedback": {}, "spike_compensation": {}},
    },
    "method_args.spike_compensation: optimizer.nesterov": {
        "method": "pipelined_backprop",
        "method_args": {"spike_compensation": {}},
        "optimizer": functools.partial(SGD, nesterov=True),
    },
    "method_args.weight_prediction: optimizer.momentum": {
        "method": "pipedream",
        "method_args": {"weight_prediction": {"form": "velocity"}},
        "optimizer": functools.partial(SGD, momentum=0),
    },
    "method_args.spike_compensation: adam": {
        "method": "pipedream",
        "method_args": {"spike_compensation": {}},
        "optimizer": torch.optim.Adam,
    },
    "method: adam": {"method": "spectrain", "optimizer": torch.optim.Adam},
    # requirements of the method on the model
    "model: 3.count: buffers": {"replicas": 2, "model": add_layers(make_counter())},
    "model: 3.count: buffers that": {"method": "local_sgd", "model": add_layers(make_counter())},
    "model: 0.weight: the forward writes": {
        "method": "pipedream",
        "model": embed_tokens(max_norm=0.5),
        "batch": "tokens",
    },
    "model: 0.weight: the forward": {
        "replicas": 2,
        "model": embed_tokens(max_norm=0.5),
        "batch": "tokens",
    },
    "model: with pipemare the backward": {"method": "pipemare", "model": make_weight_norm},
    "stages: a.weight": {"method": "pipedream", "stages": ["b"], "model": make_tied_model},
    "model: a.weight, c.weight: parameters in one memory": {
        "method": "pipedream",
        "stages": ["b"],
        "model": share_memory,
    },
    # rows of a file, which the test writes
    "method_args.file: ": {
        "method": "rows",
        "rows": ["0F1,0F0,,,0B0,0B1", ",1F1,1F0,1B0,1B1"],
        "model": add_layers(nn.BatchNorm1d(8)),
    },
    "method_args.file": {
        "method": "rows",
        "stages": ["b"],
        "rows": ["0F0,0F1,,,0B1,0B0", ",1F0,1F1,1B1,1B0"],
        "model": make_tied_model,
    },
    # the model and the loss
    "model: 3: is lazy": {"model": add_layers(nn.LazyLinear(8))},
    "model: is wrapped": {"stages": 1, "model": lambda: nn.DataParallel(make_perceptron())},
    "model: 0: gradients must": {"model": embed_tokens(sparse=True), "batch": "tokens"},
    "model: state_dict": {"model": lambda: ListState(*make_perceptron())},
    "model: 3.added: complex": {
        "model": add_layers(carry(nn.Parameter(torch.zeros(2, dtype=torch.complex128))))
    },
    "model: 3.added: is not a dense": {"model": add_layers(carry(torch.zeros(3).to_sparse()))},
    "model: 3.count: complex": {"model": add_layers(make_counter(torch.complex128))},
    "loss: Composed: scale": {"precision": "bfloat16", "loss": TRAINED_LOSS},
    "loss: it fails": {"loss": raise_error},
    # the model gets its original precision back
    "loss: it fails on": {"method": "pipedream", "precision": "bfloat16", "loss": raise_error},
    "loss: it fails on the": {"precision": "bfloat16_mixed", "loss": raise_error},
    "model: it fails": {"batch": "narrow"},
    "model: returns": {"stages": 1, "model": lambda: MAPPING},
    "loss: must return one": {"loss": functools.partial(cross_entropy, reduction="none")},
    "loss: depends on no": {"loss": lambda output, y: torch.zeros(())},
    "step: y: label 1": {"batch": "other labels"},
    "loss_weight: words": {"loss_weight": "words"},
}
# on processes alone
ON_PROCESSES = {
    "method: randomized": {"method": "randomized_pipedream"},
    "method_args.hogwild": {
        "method": "pipemare",
        "method_args": {"hogwild": {"max": 4, "mean": 2}},
    },
    "stages: 4: interleaved_1f1b with 3 on each": {
        "method": "interleaved_1f1b",
        "microbatches": 4,
        "stages": ["2", "5", "8"],
        "stages_per_device": 3,
    },
    "method_args.weight_prediction": {
        "method": "pipedream_2bw",
        "method_args": {"weight_prediction": {}},
        "microbatches": 2,
        "stages": ["b"],
        "model": make_tied_model,
    },
    "loss: CountingLoss: keeps": {"method": "local_greedy", "loss": CountingLoss()},
    "clip: global": {"method": "pipedream", **GLOBAL},
    "model: 3.count": {"replicas": 2, "stages": 1, "model": add_layers(make_counter())},
}


def complete_arguments(case: Case, folder: Path, others: Case) -> Case:
    """Return the arguments of a case with defaults; rows of a schedule become a file in
    `folder`."""
    objects = {"model": make_perceptron, "loss": cross_entropy, "optimizer": SGD, "batch": "floats"}
    arguments = {"method": "gpipe", "stages": ["2"], **objects, **case, **others}
    is_alone = arguments["method"] in ("local_sgd", "randomized_pipedream")
    arguments.setdefault("microbatches", None if is_alone else 2)
    rows = arguments.pop("rows", None)
    if rows:
        file = folder / "rows.csv"
        file.write_text("\n".join(rows) + "\n", encoding="utf-8")
        arguments["method_args"] = {"file": str(file)}
    arguments["model"] = arguments["model"]()
    return arguments


def list_config_faults(case: Case, folder: Path, **others: Any) -> List[str]:
    """Return the faults of `configure` and `train`; assert that the model is unchanged."""
    keys = complete_arguments(case, folder, others)
    objects = {name: keys.pop(name) for name in ("model", "loss", "optimizer")}
    batch = make_batch_of_kind(keys.pop("batch"), SAMPLES)
    microbatches = keys.pop("microbatches")
    keys["gradient_accumulation"] = 1 if microbatches is None else microbatches
    if "clip" in keys:
        keys["clip"] = dict(zip(("norm", "scope"), keys["clip"]))
    if "warmup" in keys:
        keys["method_args"] = {"warmup": {"epochs": keys.pop("warmup") / EPOCH}}
    if "backend" in keys:
        keys["backend"] = {"name": keys["backend"]}
    sizes = {"micro_batch_size": SAMPLES, "precision": "float64", "metrics": [], "checkpoint": None}
    before = snapshot_model(objects["model"])
    with pytest.raises(BadInput) as error:
        config = ipu_pipe.configure(**{**sizes, "evaluate": {"every": 0}, **keys})
        data = ipu_pipe.from_loader([batch] * EPOCH * 4, [batch])
        ipu_pipe.train(config, folder / "run", data=data, quiet=True, overwrite=True, **objects)
    # story: with bfloat16 the model was converted first, and came back rounded
    assert snapshot_model(objects["model"]) == before
    assert_says(error.value, Language.PYTHON)
    assert assert_says(error.value, Language.CONFIG) == error.value.faults
    return error.value.faults


def list_pipeline_faults(case: Case, folder: Path, **others: Any) -> List[str]:
    """Return the faults of `Pipeline` and its first step; assert that model and optimizer are
    unchanged."""
    arguments = complete_arguments(case, folder, others)
    model = arguments["model"]
    # as after `from_pretrained`
    model.eval()
    optimizer = arguments["optimizer"](model.parameters())
    arguments["optimizer"] = optimizer
    before = snapshot_model(model)
    batch = make_batch_of_kind(arguments.pop("batch"), 16)
    with pytest.raises(BadInput) as error:
        pipe = ipu_pipe.Pipeline(**arguments)
        pipe.step(*batch)
    if "pipe" in locals():
        assert pipe.updates == pipe.in_flight == 0
    assert snapshot_model(model) == before and not optimizer.state
    # the optimizer may go into another pipeline
    if "model" not in case:
        ipu_pipe.Pipeline(
            model, cross_entropy, optimizer, stages=["2"], microbatches=2, **others
        ).close()
    assert assert_says(error.value, Language.PYTHON) == error.value.faults
    return error.value.faults


def assert_says(error: BadInput, language: Language) -> List[str]:
    """Return the lines of a refusal in a language; assert that they have no mark and no word of
    the other language."""
    of_other = OF_A_CONFIG if language is Language.PYTHON else OF_PYTHON
    lines = [language.say(line) for line in error.lines]
    wrong = [line for line in lines if of_other.search(line) or {BEGIN, END, "\n"} & set(line)]
    assert wrong == []
    return lines


def snapshot_model(model: nn.Module) -> Any:
    """Return everything that a refusal must not change: modules and their modes, tensors and
    their values."""
    modules = [
        (name, type(module), module.training, len(module._forward_hooks))
        for name, module in model.named_modules()
    ]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    facts = [
        (name, t.dtype, t.requires_grad, getattr(t, "grad", None) is None) for name, t in tensors
    ]
    values = [
        t.tolist() if t.layout is torch.strided and type(t) in (nn.Parameter, torch.Tensor) else 0
        for _, t in tensors
    ]
    return modules, facts, values


# beginnings of lines that a config's lines begin otherwise
IN_A_CONFIG = {
    "warmup": "method_args.warmup", "microbatches": "gradient_accumulation", "clip: -1": "clip.norm: -1",
    "clip: local": "clip: local", "clip": "clip.scope", "backend": "backend.name", "step: y": "data",
}  # fmt: skip


def assert_both_refuse(line: str, case: Case, folder: Path, **others: Any) -> None:
    """Assert one fault of one line from each side, with its beginning."""
    (of_config,) = list_config_faults(case, folder, **others)
    (of_pipeline,) = list_pipeline_faults(case, folder, **others)
    assert of_pipeline.startswith(line)
    begin = next((begin for begin in IN_A_CONFIG if line.startswith(begin)), "")
    expected = IN_A_CONFIG.get(begin, "") + line[len(begin) :]
    assert of_config.replace("configure: ", "").lower().startswith(expected.lower())


def is_quick_line(line: str) -> bool:
    """Return whether a case has no blocks, whose heads take time."""
    return not REFUSED[line].get("method", "").startswith("local_")


@pytest.mark.parametrize("line", mark_slow(REFUSED, is_quick_line))
def test_config_and_pipeline_refuse_in_their_own_words(line: str, tmp_path: Path) -> None:
    assert_both_refuse(line, REFUSED[line], tmp_path)


def compare_refusals_on_processes(rank: int, folder: Path) -> None:
    for line, case in ON_PROCESSES.items():
        assert_both_refuse(line, case, folder, backend="distributed")


@needs_processes
def test_config_and_pipeline_refuse_on_processes(tmp_path: Path) -> None:
    run_in_group(2, compare_refusals_on_processes, tmp_path)


# ---- arguments of `Pipeline` alone


def make_float_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM needs a closure"


FLOATS, LABELS = make_batch_of_kind("floats", SAMPLES)
NAN = FLOATS.clone()
NAN[3, 2] = float("nan")
GREEDY = "local_greedy"
# line: its beginning, what is wrong, the remedy -> the arguments
OF_ARGUMENTS = {
    "backend_args.program: slot: belongs to backend xla, not emulator": {"backend_args": {"program": "slot"}},
    "backend_args.tf32: True: belongs to device cuda, not cpu": {"backend_args": {"tf32": True}},
    "backend_args.tf32: yes: must be a valid boolean": {"backend_args": {"tf32": "yes"}},
    "backend_args.ipu: given: belongs to backend poptorch, not emulator: leave": {"backend_args": {"ipu": {}}},
    "backend: cuda: is a device; did you mean device=cuda?": {"backend": "cuda"},
    "backend: poptorch: PopTorch is not installed": {"backend": "poptorch", "precision": "float32", "microbatches": 4},
    "deadline: -1.0: must be greater than 0": {"deadline": -1.0},
    "deadline: 20: backend_args has 30": {"deadline": 20, "backend_args": {"deadline": 30}},
    "device: tpu: ": {"device": "tpu"},
    "device: meta: ": {"device": torch.device("meta")},
    "device: cuda: backend_args has cpu": {"device": "cuda", "backend_args": {"device": "cpu"}},
    "process_group: backend emulator has no processes": {"process_group": "gloo"},
    "stages: 0: must be None .the model's own.": {"stages": 0},
    "stages: 9: .*at most 3": {"stages": 9, "microbatches": None},
    "microbatches: None": {"stages": "finest", "microbatches": None},
    "heads: {'lr': 0.1}: method gpipe adds no auxiliary heads": {"heads": {"lr": 0.1}},
    "heads: betas: must be a setting of SGD: lr, momentum": {"method": GREEDY, "heads": {"betas": 1}},
    "heads: Invalid learning rate": {"method": GREEDY, "heads": {"lr": -0.1}},
    "heads: 0.1: must be a mapping": {"method": GREEDY, "heads": 0.1},
    "method_args.t1.anneal_updates": {"method": "pipemare", "method_args": {"t1": {}}},
    "method_args: .*1.*: must be a mapping.*None": {"method_args": [1]},
    "method_args.warmup": {"method": "pipemare", "method_args": {"warmup": {"epochs": 1}}},
    "warmup: None: .*number of updates": {"warmup": None},
    "clip: 1: must be a norm.*pair": {"clip": "1"},
    "precision: bf16: .*bfloat16_mixed or bfloat16": {"precision": "bf16"},
    r"example: 5: must be a pair.*\(x, y\)": {"example": 5},
    "model: the class Linear: must be a torch.nn.Module": {"model": nn.Linear},
    "loss: the class CrossEntropyLoss: must be a function": {"loss": nn.CrossEntropyLoss},
    "model: float16: .*bfloat16_mixed": {"model": make_float_net().half()},
    "model: 0.weight, .* meta device.*to_empty": {"model": make_float_net().to("meta")},
    "optimizer: NeedsClosure: .*closure": {"optimizer": functools.partial(NeedsClosure, lr=0.1)},
    "optimizer: LBFGS": {"optimizer": torch.optim.LBFGS},
    r"step: y is None.*step\(\*batch\)": {"batch": ((FLOATS.float(), LABELS),)},
    "update 0 of .* nan; its batch has numbers.*the data": {"batch": (NAN.float(), LABELS)},
    "step: a tensor of the batch is sparse.*to_dense": {"batch": (FLOATS.float().to_sparse(), LABELS)},
}  # fmt: skip
if not torch.cuda.is_available():
    OF_ARGUMENTS["device: cuda: this machine has no usable CUDA device"] = {"device": "cuda"}


@pytest.mark.parametrize("line", OF_ARGUMENTS)
def test_a_wrong_argument_is_named_with_its_remedy(line: str) -> None:
    given = OF_ARGUMENTS[line]
    keys = {
        "stages": 2,
        "microbatches": 2,
        "model": make_float_net(),
        "loss": cross_entropy,
        **given,
    }
    make_optimizer = keys.pop("optimizer", SGD)
    batch = keys.pop("batch", (FLOATS.float(), LABELS))
    is_model = isinstance(keys["model"], nn.Module)
    optimizer = make_optimizer((keys["model"] if is_model else make_float_net()).parameters())
    with pytest.raises((BadInput, ValueError, Divergence), match=f"^{line}") as error:
        ipu_pipe.Pipeline(keys.pop("model"), keys.pop("loss"), optimizer, **keys).step(*batch)
    if isinstance(error.value, BadInput) and not {"optimizer", "method"} & set(given):
        assert_says(error.value, Language.PYTHON)
    # the optimizer is the caller's again
    if type(optimizer) is torch.optim.SGD and "batch" not in given:
        optimizer.step()


# ---- sentences that name a key

# of commands, files and planned runs, which a `Pipeline` does not reach
ELSEWHERE = (
    "cli",
    "compare",
    "data",
    "hardware",
    "integrations",
    "plan",
    "report",
    "run",
    "stability",
    "store",
    "trace",
)
ALONE = ("method_args.warmup: use the argument warmup", "backend.threads=1 in a config")
NAMERS = ("Argument", "Case", "Refusal", "Words", "name_key")
KEY = re.compile(
    "|".join(rf"\b{re.escape(key)}\b" for key in ARGUMENTS if "." in key or "_" in key)
    + r"|\bbackend\.[a-z]+"
)


def list_texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts with spaces of a file, but docstrings and what names a key in both
    languages."""
    named = {
        id(part)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and getattr(node.func, "id", "") in NAMERS)
        or isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in named:
            if " " in node.value.strip() and "\n" not in node.value:
                yield node.value


def test_sentences_name_keys_in_both_languages() -> None:
    """Story: thirty regular expressions turned the keys of finished lines into arguments."""
    folder = Path(ipu_pipe.__file__).parent
    files = [f for f in folder.rglob("*.py") if f.relative_to(folder).parts[0] not in ELSEWHERE]
    texts = [text for file in files for text in list_texts(ast.parse(file.read_text("utf-8")))]
    assert [
        text for text in texts if KEY.search(text) and not any(one in text for one in ALONE)
    ] == []
    assert all(any(one in text for text in texts) for one in ALONE)
