"""Configs and `Pipeline` refuse alike, each in its own words, and nothing has changed then.

Not here: PopTorch, and what `Pipeline` has no argument for (plateau schedules, `ema`, `hardware`, `model.compile`).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.errors import BadInput
from tests.support.loops import make_perceptron
from tests.support.processes import run_in_group
from tests.support.runs import needs_processes

SAMPLES, EPOCH = 4, 12
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLAIN_SGD = functools.partial(torch.optim.SGD, lr=0.1)
NESTEROV = functools.partial(SGD, nesterov=True)
# words of a config that the arguments of `Pipeline` do not have
OF_A_CONFIG = re.compile(
    r"gradient_accumulation|micro_batch_size|clip\.|backend\.|backend_args\.name|evaluate|checkpoint\.|lr_schedule"
    r"|model\.output|loss: model|configure|hardware: a|method_args\.warmup|module:name|null|: (true|false)\b|optimizer\.lr"
    r"|\bscope: |\{name:"
)


class Refused(NamedTuple):
    """Arguments of `Pipeline`, of which a config has some as keys, and the beginnings of both faults."""

    arguments: Dict[str, Any]
    of_config: str
    of_pipeline: str
    make_model: Callable[[], nn.Module] = make_perceptron
    loss: Any = cross_entropy
    make_optimizer: Callable[..., Any] = SGD
    batch: str = "floats"


def make_batch(kind: str, samples: int) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (samples,), generator=generator)
    if kind == "tokens":
        return torch.randint(0, 5, (samples, 3), generator=generator), y
    return (x, y + 9) if kind == "other labels" else (x[:, :3], y) if kind == "narrow" else (x, y)


# ---- models


def append(*modules: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that makes a model of two stages, the second with more modules."""
    return lambda: nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), *modules, nn.Linear(8, 5)
    ).double()


class Counter(nn.Module):
    """A buffer that the forward changes and reads."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count.real / 100


class ListState(nn.Sequential):
    def state_dict(self, *arguments: Any, **keys: Any) -> Any:
        return []


class WithParameter(nn.Module):
    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self.added = parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class WithBuffer(WithParameter):
    def __init__(self, buffer: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.register_buffer("added", buffer)


class Fields(nn.Module):
    """Outputs in a mapping, which no plain loss takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_perceptron()

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {"logits": self.layers(x), "others": x}


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Shared(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class TrainedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, y) * self.scale


def embed(**keys: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Embedding(5, 8, **keys), Mean(), nn.Linear(8, 8), nn.Linear(8, 5)
    ).double()


def make_weight_norm() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), normed, nn.Linear(8, 5)).double()


def fail(output: Any, y: Any) -> Any:
    raise KeyError("a loss of one's own")


# ---- the table

T2, DELAYED = {"t2": {}}, {"clip": (1.0, "delayed_global")}
GLOBAL = {"clip": (1.0, "global")}


def local(**keys: Any) -> Dict[str, Any]:
    return {"method": "local_greedy", **keys}


def args(method: str, **keys: Any) -> Dict[str, Any]:
    return {"method": method, "method_args": keys}


REFUSED: Dict[str, Refused] = {
    # by the method's table and the sizes
    "unknown method": Refused({"method": "pipdream"}, "configure: method: pipdream", "method: pipdream"),
    "no microbatches": Refused({"microbatches": 0}, "configure: gradient_accumulation: 0", "microbatches: 0"),
    "2bw of few": Refused({"method": "pipedream_2bw", "microbatches": 1}, "gradient_accumulation: 1", "microbatches: 1"),
    "another's key": Refused(args("gpipe", local_steps=3), "configure: method_args.local_steps: 3", "method_args.local_steps: 3"),
    "precision": Refused({"precision": "16.16"}, "configure: precision: 16.16", "precision: 16.16"),
    "replicas 0": Refused({"replicas": 0}, "configure: replicas: 0", "replicas: 0"),
    "norm": Refused({"clip": (-1.0, "stage")}, "configure: clip.norm: -1", "clip: -1"),
    "scope": Refused({"clip": (1.0, "all")}, "configure: clip.scope: all", "clip: all"),
    "backend": Refused({"backend": "tpu"}, "configure: backend.name: tpu", "backend: tpu"),
    "stages": Refused({"stages": ["nowhere"]}, "stages: ", "stages: "),
    "auto": Refused({"stages": "auto"}, "configure: stages: auto", "stages: auto"),
    "by devices": Refused({"stages": {"count": 2, "by": "hardware"}}, "configure: stages.by: hardware", "stages.by: hardware"),
    "recompute": Refused({"method": "pipemare", "recompute": True}, "configure: recompute: true", "recompute: True"),
    "recompute and delay": Refused(
        {**args("pipemare", constant_delay={"updates": 1}), "recompute": True},
        "configure: method_args.constant_delay", "method_args.constant_delay",
    ),
    # clipping
    "clip flushes": Refused(DELAYED, "clip.scope: delayed_global", "clip: delayed_global"),
    "clip old": Refused({"method": "pipedream", **GLOBAL}, "clip.scope: global", "clip: global"),
    "clip replicas": Refused({"method": "local_sgd", **GLOBAL}, "clip.scope: global", "clip: global"),
    "clip single": Refused({"method": "randomized_pipedream", **DELAYED}, "clip.scope: delayed", "clip: delayed"),
    "clip single by all": Refused({"method": "randomized_pipedream", **GLOBAL}, "clip.scope: global", "clip: global"),
    "clip warm-up": Refused({"method": "pipemare", "warmup": 2, **DELAYED}, "clip.scope: delayed", "clip: delayed"),
    "clip blocks": Refused(local(**GLOBAL), "clip.scope: global", "clip: global"),
    "clip overlaps": Refused({"method": "local_overlapping", "clip": (1.0, "stage")}, "clip: local_over", "clip: local_over"),
    # replicas and microbatches of methods that step by themselves
    "replicas of replicas": Refused({"method": "local_sgd", "replicas": 2}, "replicas: 2", "replicas: 2"),
    "replicas single": Refused({"method": "randomized_pipedream", "replicas": 2}, "replicas: 2", "replicas: 2"),
    "many of one": Refused({"method": "local_sgd", "microbatches": 2}, "gradient_accumulation: 2", "microbatches: 2"),
    "many single": Refused(
        {"method": "randomized_pipedream", "microbatches": 2}, "gradient_accumulation: 2", "microbatches: 2"
    ),
    "replicas gather": Refused(
        {**args("local_greedy", block_accumulation=[1, 2]), "replicas": 2}, "replicas: 2", "replicas: 2"
    ),
    "replicas overlap": Refused({"method": "local_overlapping", "replicas": 2}, "replicas: 2", "replicas: 2"),
    "replicas mean square": Refused(
        {**args("pipedream", delay_compensation={"adaptive": True}), "replicas": 2}, "replicas: 2", "replicas: 2"
    ),
    # blocks
    "rates of no blocks": Refused(args("gpipe", block_rates=[1, 1]), "method_args.block_rates", "method_args.block_rates"),
    "rates of few": Refused(args("local_greedy", block_rates=[1]), "method_args.block_rates", "method_args.block_rates"),
    "gathers few": Refused(args("local_greedy", block_accumulation=[1]), "method_args.block_acc", "method_args.block_acc"),
    "head of none": Refused(args("gpipe", head="a:b"), "method_args.head", "method_args.head"),
    "gathers overlap": Refused(
        args("local_overlapping", block_accumulation=[1, 2]), "method_args.block_acc", "method_args.block_acc"
    ),
    # rules
    "weights and compensation": Refused(
        {**args("pipedream", delay_compensation={}), "microbatches": 2, "loss_weight": "tokens"},
        "method_args.delay_compensation", "method_args.delay_compensation",
    ),
    "t2 of one version": Refused(args("gpipe", t2={}), "configure: method_args.t2", "method_args.t2"),
    "t2 and prediction": Refused(
        args("pipemare", t2={}, weight_prediction={}), "configure: method_args.t2", "method_args.t2"
    ),
    "compensation of two versions": Refused(
        args("pipemare", delay_compensation={}), "configure: method_args.delay", "method_args.delay"
    ),
    "feedback and spikes": Refused(
        args("pipelined_backprop", error_feedback={}, spike_compensation={}),
        "configure: method_args.error_feedback", "method_args.error_feedback",
    ),
    "nesterov": Refused(
        args("pipelined_backprop", spike_compensation={}), "method_args.spike_compensation: optimizer.nesterov",
        "method_args.spike_compensation: optimizer.nesterov", make_optimizer=NESTEROV,
    ),
    "no velocity": Refused(
        args("pipedream", weight_prediction={"form": "velocity"}), "method_args.weight_prediction: optimizer.momentum",
        "method_args.weight_prediction: optimizer.momentum", make_optimizer=PLAIN_SGD,
    ),
    "adam spikes": Refused(
        args("pipedream", spike_compensation={}), "method_args.spike_compensation: adam",
        "method_args.spike_compensation: adam", make_optimizer=torch.optim.Adam,
    ),
    "adam predicts": Refused({"method": "spectrain"}, "method: adam", "method: adam", make_optimizer=torch.optim.Adam),
    # what the method does to the model
    "counter of replicas": Refused({"replicas": 2}, "model: 3.count", "model: 3.count", append(Counter())),
    "counter of rounds": Refused({"method": "local_sgd"}, "model: 3.count", "model: 3.count", append(Counter())),
    "written weight": Refused(
        {"method": "pipedream"}, "model: 0.weight: the forward writes", "model: 0.weight: the forward writes",
        embed(max_norm=0.5), batch="tokens",
    ),
    "written weight of replicas": Refused(
        {"replicas": 2}, "model: 0.weight: the forward writes", "model: 0.weight: the forward writes", embed(max_norm=0.5),
        batch="tokens",
    ),
    "derived weight": Refused(
        {"method": "pipemare"}, "model: with pipemare the backward", "model: with pipemare the backward", make_weight_norm
    ),
    "tied weight": Refused({"method": "pipedream", "stages": ["b"]}, "stages: ", "stages: ", Shared),
    # rows of a file, which the test writes
    "order of forwards": Refused(
        {"method": "rows", "rows": ["0F1,0F0,,,0B0,0B1", ",1F1,1F0,1B0,1B1"]}, "method_args.file", "method_args.file",
        append(nn.BatchNorm1d(8)),
    ),
    "order of backwards": Refused(
        {"method": "rows", "stages": ["b"], "rows": ["0F0,0F1,,,0B1,0B0", ",1F0,1F1,1B1,1B0"]}, "method_args.file",
        "method_args.file", Shared,
    ),
    # the model and the loss
    "lazy": Refused({}, "model: 3: is lazy", "model: 3: is lazy", append(nn.LazyLinear(8))),
    "wrapped": Refused(
        {"stages": 1}, "model: is wrapped", "model: is wrapped", lambda: nn.DataParallel(make_perceptron())
    ),
    "sparse": Refused({}, "model: 0: gradients must", "model: 0: gradients must", embed(sparse=True), batch="tokens"),
    "state": Refused({}, "model: state_dict", "model: state_dict", lambda: ListState(*make_perceptron())),
    "complex weight": Refused(
        {}, "model: 3.added: complex", "model: 3.added: complex",
        append(WithParameter(nn.Parameter(torch.zeros(2, dtype=torch.complex128)))),
    ),
    "sparse buffer": Refused(
        {}, "model: 3.added: is not a dense", "model: 3.added: is not a dense", append(WithBuffer(torch.zeros(3).to_sparse()))
    ),
    "complex buffer": Refused(
        {}, "model: 3.count: complex", "model: 3.count: complex", append(Counter(torch.complex128))
    ),
    "trained loss": Refused({}, "loss: TrainedLoss", "loss: TrainedLoss", loss=TrainedLoss()),
    "failing loss": Refused({}, "loss: it fails", "loss: it fails", loss=fail),
    # a model that was converted to fewer bits has its own again
    "failing loss in bfloat16": Refused({"method": "pipedream", "precision": "bfloat16"}, "loss: it", "loss: it", loss=fail),
    "failing loss in mixed": Refused({"precision": "bfloat16_mixed"}, "loss: it", "loss: it", loss=fail),
    "failing model": Refused({}, "model: it fails", "model: it fails", batch="narrow"),
    "fields": Refused({"stages": 1}, "model: returns", "model: returns", Fields),
    "vector": Refused(
        {}, "loss: must return one", "loss: must return one", loss=functools.partial(cross_entropy, reduction="none")
    ),
    "constant": Refused({}, "loss: depends on no", "loss: depends on no", loss=lambda output, y: torch.zeros(())),
    "labels": Refused({}, "data: label 1", "step: y: label 1", batch="other labels"),
    "weight": Refused({"loss_weight": "words"}, "loss_weight: words", "loss_weight: words"),
}  # fmt: skip
# on processes alone
ON_PROCESSES: Dict[str, Refused] = {
    "no pipeline": Refused({"method": "randomized_pipedream"}, "method: randomized", "method: randomized"),
    "drawn delays": Refused(
        args("pipemare", hogwild={"max": 4, "mean": 2}), "method_args.hogwild", "method_args.hogwild"
    ),
    "tied and corrected": Refused(
        {**args("pipedream_2bw", weight_prediction={}), "microbatches": 2, "stages": ["b"]},
        "method_args.weight_prediction", "method_args.weight_prediction", Shared,
    ),
    "clip old": REFUSED["clip old"],
    "counter of replicas": REFUSED["counter of replicas"]._replace(arguments={"replicas": 2, "stages": 1}),
}  # fmt: skip


class Batches:
    """A data source of one microbatch."""

    def __init__(self, kind: str) -> None:
        self._batch = make_batch(kind, SAMPLES)

    def train_batches_per_epoch(self, batch_size: int) -> int:
        return EPOCH * 4

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        return self._batch

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        yield self._batch


def choose_arguments(case: Refused, folder: Path) -> Dict[str, Any]:
    arguments = {"method": "gpipe", "stages": ["2"], **case.arguments}
    rows = arguments.pop("rows", None)
    if rows:
        file = folder / "rows.csv"
        file.write_text("\n".join(rows) + "\n", encoding="utf-8")
        arguments.update(method_args={"file": str(file)}, microbatches=2)
    return arguments


def ask_config(case: Refused, folder: Path, **others: Any) -> List[str]:
    """Return the faults of `configure` and `train`."""
    arguments = {**choose_arguments(case, folder), **others}
    keys = {
        "micro_batch_size": SAMPLES,
        "precision": "float64",
        "metrics": [],
        "checkpoint": None,
        "evaluate": {"every": 0},
    }
    keys.update(
        {
            key: value
            for key, value in arguments.items()
            if key not in ("microbatches", "clip", "warmup", "backend")
        }
    )
    alone = arguments["method"] in ("local_sgd", "randomized_pipedream")
    keys["gradient_accumulation"] = arguments.get("microbatches", 1 if alone else 2)
    if "clip" in arguments:
        keys["clip"] = dict(zip(("norm", "scope"), arguments["clip"]))
    if "warmup" in arguments:
        keys["method_args"] = {
            **keys.get("method_args", {}),
            "warmup": {"epochs": arguments["warmup"] / EPOCH},
        }
    if "backend" in arguments:
        keys["backend"] = {"name": arguments["backend"]}
    with pytest.raises(BadInput) as refused:
        ipu_pipe.train(
            ipu_pipe.configure(**keys),
            folder / "run",
            model=case.make_model(),
            data=Batches(case.batch),  # type: ignore[arg-type]
            loss=case.loss,
            optimizer=case.make_optimizer,
            quiet=True,
            overwrite=True,
        )
    return refused.value.faults


def ask_pipeline(case: Refused, folder: Path, **others: Any) -> List[str]:
    """Return the faults of `Pipeline` and its first step. The model and its optimizer stay as they were."""
    arguments = {**choose_arguments(case, folder), **others}
    arguments.setdefault(
        "microbatches", None if arguments["method"] in ("local_sgd", "randomized_pipedream") else 2
    )
    model = case.make_model()
    # as after `from_pretrained`
    model.eval()
    optimizer = case.make_optimizer(model.parameters())
    before = describe(model)
    x, y = make_batch(case.batch, 16)
    with pytest.raises(BadInput) as refused:
        pipe = ipu_pipe.Pipeline(model, case.loss, optimizer, **arguments)
        pipe.step(x, y)
    if "pipe" in locals():
        assert pipe.updates == pipe.in_flight == 0
    assert describe(model) == before and not optimizer.state
    # the optimizer may go into another pipeline
    if case.make_model is make_perceptron:
        ipu_pipe.Pipeline(
            model, cross_entropy, optimizer, stages=["2"], microbatches=2, **others
        ).close()
    return refused.value.faults


def describe(model: nn.Module) -> Any:
    """Return what a refusal must not change: modules and their modes, tensors and their values."""
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


def check(case: Refused, by_config: List[str], by_pipeline: List[str]) -> None:
    assert any(fault.startswith(case.of_config) for fault in by_config), by_config
    assert any(fault.startswith(case.of_pipeline) for fault in by_pipeline), by_pipeline
    # one line a fault
    assert len(by_config) == len(by_pipeline) == 1
    assert not [fault for fault in by_pipeline if OF_A_CONFIG.search(fault) or "\n" in fault]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_both_doors_refuse_in_their_own_words(name: str, tmp_path: Path) -> None:
    case = REFUSED[name]
    check(case, ask_config(case, tmp_path), ask_pipeline(case, tmp_path))


def refuse_on_processes(rank: int, folder: Path) -> None:
    for case in ON_PROCESSES.values():
        faults = ask_config(case, folder, backend="distributed")
        by_pipeline = ask_pipeline(case, folder, backend="distributed")
        check(case, faults, by_pipeline)


@needs_processes
def test_both_doors_refuse_on_processes(tmp_path: Path) -> None:
    run_in_group(2, refuse_on_processes, tmp_path)
