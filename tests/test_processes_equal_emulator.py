"""Processes give the emulator's bits: every comparison of the two is a row of one table.

    CASES on PLACEMENTS   a schedule, interpreted by ranks that have one stage or several
    LOOPS                 a `Pipeline` in a loop of one's own
    RUNS                  a config, trained by `ipu_pipe.train`, with checkpoints, metrics and reports
    FEATURES              arguments of `ipu_pipe.train`, made in the file that tests a feature

A row trains on the emulator, and on ranks that stay alive from row to row; then everything that the ranks return equals what
the emulator returned, to the last bit. One row of each kind is quick, the others are marked slow.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Set, Tuple

import pytest
import torch

from ipu_pipe.config.load import configure, load_config
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import METHODS, Reads, resolve_method
from tests import interpreter_runs
from tests.interpreter_runs import ADAMW, ScheduleCase, can_share
from tests.slot_simulation import PLAYED
from tests.support.loops import Loop, take_share
from tests.support.pairs import cover_pairs, list_pairs
from tests.support.rank_group import RankGroups
from tests.support.runs import (
    DIGITS,
    find_checkpoint,
    needs_processes,
    read_numbers,
    read_state,
    read_summary,
)
from tests.test_pipeline_processes import ON_PROCESSES
from tests.test_processes import PASSES_OF_ROWS, SHORT
from tests.test_rules import ROWS as RULES

pytestmark = needs_processes


class Comparison(NamedTuple):
    """A comparison: both functions return values by name; the ranks' values together are the emulator's."""

    ranks: int
    is_quick: bool
    train_on_emulator: Callable[[Path], Dict[str, Any]]
    train_on_rank: Callable[[int, Path], Dict[str, Any]]
    missing: str = ""  # reason to skip it: a package that is not installed


# ---- CASES: schedules on the interpreter

SPLIT = {"split_backward": True}
RECOMPUTE = {"recompute": {"segments": 2}}
COMPENSATE_AND_PREDICT = {
    "spike_compensation": {"scale": 1.0},
    "weight_prediction": {"form": "velocity", "scale": 1.0},
}
CLIPS = {
    "clip-stage": (0.3, "stage"),
    "clip-global": (0.3, "global"),
    "clip-delayed": (0.3, "delayed_global"),
}


def make_schedule_case(way: str, name: str, kind: str, *more: Any, **keys: Any) -> ScheduleCase:
    """Return a case that trains in a way: plain, channels, mixed, adamw, or a key of CLIPS."""
    ways: Dict[str, Dict[str, Any]] = {
        "plain": {},
        "channels": {"over_channels": True},
        "mixed": {"is_mixed": True},
        "adamw": {"optimizer": ADAMW},
        **{clip: {"clip": value} for clip, value in CLIPS.items()},
    }
    return ScheduleCase(f"{way}-{name}", kind, *more, **{**ways[way], **keys})


def list_methods() -> Iterator[ScheduleCase]:
    """Yield every pipeline's method on every model; blocks are among LOOPS."""
    for method in (name for name, row in PLAYED.items() if row.is_pipeline):
        for model in ("mlp", "convolution", "residual"):
            for n in (1, 4):
                yield ScheduleCase(f"{method}-{model}-{n}", method, method, {}, n, model)
        # weights of a cut module cannot be read anew
        rereads = METHODS[method].backward_reads is Reads.NEWEST and not METHODS[method].flushes
        skipping = "skipping-frozen" if rereads else "skipping"
        for way in ("plain", "channels"):
            for n in (1, 4):
                kind = f"{way} {METHODS[method].pipeline}"
                yield make_schedule_case(way, f"{method}-{n}", kind, method, {}, n, skipping)
        yield ScheduleCase(f"short-{method}", "fewer microbatches than stages", method, updates=2)


def list_orders() -> Iterator[ScheduleCase]:
    """Yield orders with several stages on a device, and backwards in two halves."""
    virtual = {"stages_per_device": 2}
    for method in "interleaved_1f1b looped_bfs interleaved_zb pipedream pipelined_backprop".split():
        yield ScheduleCase(f"two-{method}", f"virtual {method}", method, virtual, 4)
    for method in ("pipedream", "pipelined_backprop"):
        for n, model in ((1, "residual"), (4, "convolution")):
            yield ScheduleCase(
                f"split-{method}-{model}", f"split {method}", method, SPLIT, n, model
            )
        limited = {**SPLIT, "activation_limit": 2}
        yield make_schedule_case("channels", f"split-{method}", "split channels", method, limited)
        both = {**SPLIT, **virtual}
        yield make_schedule_case("mixed", f"split-{method}", "split mixed", method, both, 4)
        clipped = f"split-{method}"
        yield make_schedule_case("clip-stage", clipped, "split clip", method, SPLIT, 4, "redrawing")
    for model in ("checkpointed", "redrawing"):
        yield make_schedule_case(
            "plain", f"zb_h1-{model}", "split recompute", "zb_h1", {}, 4, model
        )
    yield make_schedule_case("mixed", "zb_h1", "mixed zb_h1", "zb_h1", {}, 4)
    yield ScheduleCase("capped", "capped", "pipedream", {"schedule": "1f1b_capped"})
    for n, model in ((1, "skipping-frozen"), (4, "residual")):
        kind = "channels recompute"
        yield make_schedule_case(
            "channels", f"recompute-{n}", kind, "pipemare", RECOMPUTE, n, model
        )


def list_clips() -> Iterator[ScheduleCase]:
    """Yield gradients clipped to the norm of a stage, of the model, or of the model in the update before."""
    pairs = [
        ("clip-stage", "pipemare"),
        ("clip-global", "gpipe"),
        ("clip-delayed", "pipedream"),
        ("clip-delayed", "pipedream_2bw"),
        ("clip-delayed", "pipemare"),
    ]
    for clip, method in pairs:
        for n in (1, 4):
            yield make_schedule_case(clip, f"{method}-{n}", f"{clip} {method}", method, {}, n)


def list_local_sgd() -> Iterator[ScheduleCase]:
    """Yield replicas that update by themselves and average, and their outer optimizers."""
    sizes = [
        (3, 2, "convolution"),
        (4, 3, "residual"),
        (1, 2, "mlp"),
        (5, 1, "mlp"),
        (2, 9, "convolution"),
    ]
    for R, K, model in sizes:
        args = {"replicas": R, "local_steps": K}
        for way in ("plain", "clip-stage", "adamw"):
            yield make_schedule_case(
                way, f"local_sgd-{R}", f"{way} local_sgd", "local_sgd", args, R, model
            )
    outers: List[Tuple[str, str, Dict[str, Any]]] = [
        ("plain", "convolution", {"mix": 0.25}),
        ("channels", "residual", {"fragments": 2, "delay": 1, "mix": 0.5}),
        ("adamw", "mlp", {"fragments": "per_stage", "offset": 1}),
    ]
    for way, model, outer in outers:
        args = {"replicas": 3, "local_steps": 4, "outer": outer}
        yield make_schedule_case(way, "outer", f"{way} outer", "local_sgd", args, 3, model)


def list_mixed() -> Iterator[ScheduleCase]:
    """Yield bfloat16_mixed, by autocast or with masters."""
    rules = {"pipemare": RULES["t1+t2"].args, "pipelined_backprop": COMPENSATE_AND_PREDICT}
    methods = "gpipe pipedream_flush pipedream pipedream_2bw pipemare pipelined_backprop spectrain"
    for method in methods.split():
        args = rules.get(method, {})
        for model in ("mlp", "residual"):
            kind = f"mixed {method}"
            yield make_schedule_case("mixed", f"{method}-{model}", kind, method, args, 4, model)
    yield make_schedule_case("mixed", "recompute", "mixed recompute", "pipemare", RECOMPUTE, 4)
    compensation = RULES["compensation-adaptive"].args
    yield make_schedule_case(
        "mixed", "compensation", "mixed compensation", "pipedream", compensation, 4, "mlp"
    )
    yield make_schedule_case(
        "mixed", "adamw", "mixed adamw", "pipemare", {}, 4, "mlp", optimizer=ADAMW
    )
    rounds = {"replicas": 3, "local_steps": 2}
    yield make_schedule_case("channels", "local_sgd", "channels local_sgd", "local_sgd", rounds, 3)


def list_shared_weights() -> Iterator[ScheduleCase]:
    """Yield weights that several stages use, and modules that run or draw again."""
    for method in (name for name, row in PLAYED.items() if row.one_version):
        n = 1 if method == "naive" else 4
        clips = ["clip-global"] if METHODS[method].flushes else ["clip-stage", "clip-delayed"]
        models = ["tied", "thrice", "twice", "tied", "thrice"]
        for way, model in zip(["plain", "channels", "adamw", *clips], models):
            kinds = {"channels": "channels tied", "adamw": "a module that runs again"}
            kind = kinds.get(way, f"tied {method}")
            yield make_schedule_case(way, f"{method}-{model}", kind, method, {}, n, model)
    for method in ("gpipe", "pipedream"):
        for model in ("checkpointed", "redrawing"):
            yield make_schedule_case("plain", f"{method}-{model}", model, method, {}, 4, model)
    yield ScheduleCase("warm-up-thrice", "tied warm-up", "pipedream_2bw", {}, 4, "thrice", 3)


def list_rules() -> Iterator[ScheduleCase]:
    """Yield the update rules whose delays are the pipeline's own."""
    for name, row in RULES.items():
        if resolve_method(row.method, row.args).delay:
            continue
        args = dict(row.args)
        if "recompute" in args:  # no more segments than the smallest placement has stages
            args["recompute"] = {"segments": min(args["recompute"]["segments"], 2)}
        kind = f"rule {name}"
        keys = {"warmup": row.switch}
        yield ScheduleCase(f"rule-{name}", kind, row.method, args, 1, "residual", **keys)
        yield ScheduleCase(f"rule-{name}-4", kind, row.method, args, 4, "mlp", **keys)
        if len(row.optimizers) > 1:
            yield make_schedule_case(
                "adamw", name, kind, row.method, args, 4, "convolution", **keys
            )


def list_schedule_cases() -> List[ScheduleCase]:
    """Return all cases with unique names."""
    every: List[Iterable[ScheduleCase]] = [
        list_methods(),
        list_orders(),
        list_clips(),
        list_local_sgd(),
        list_mixed(),
        list_shared_weights(),
        list_rules(),
    ]
    cases = []
    for case in (case for cases_of_kind in every for case in cases_of_kind):
        method = resolve_method(case.method, case.args)
        # two buffered versions need as many microbatches as stages
        if method.forward_reads is not Reads.DOUBLE_BUFFERED or case.microbatches >= 4:
            cases.append(case)
    assert len({case.name for case in cases}) == len(cases)
    return cases


# stage -> rank, and every how many-th case trains with it: one stage on a device; neighbors together; V-shaped; interleaved;
# all on one
PLACEMENTS: Dict[Tuple[int, ...], int] = {
    (0, 1): 1,
    (0, 1, 2, 3): 1,
    (0, 0, 1, 1): 3,
    (0, 1, 1, 0): 3,
    (0, 1, 0, 1): 4,
    (0, 0, 0, 0): 6,
}


def list_case_rows() -> Dict[str, Comparison]:
    """Return the rows of cases that have every pair of attributes. Quick are the last case of each kind's first word on two
    stages, and PipeDream's last on four.
    """
    cases, quick = list_placed_cases()
    chosen = cover_pairs({name: describe_case(*row) for name, row in cases.items()}, quick)
    return {name: make_case_row(*cases[name], name in quick) for name in chosen}


def list_placed_cases() -> Tuple[Dict[str, Tuple[ScheduleCase, Tuple[int, ...]]], Set[str]]:
    """Return all cases on their placements, and the names of those that are quick."""
    rows = {}
    quick: Dict[Any, str] = {}
    for placement, every in PLACEMENTS.items():
        for case in [case for case in list_schedule_cases() if can_share(case, placement)][::every]:
            name = f"{case.name} on {''.join(map(str, placement))}"
            rows[name] = case, placement
            if placement == (0, 1):
                quick[case.kind.split()[0]] = name
            elif case.method == "pipedream":
                quick[placement] = name
    return rows, set(quick.values())


def describe_case(case: ScheduleCase, placement: Tuple[int, ...]) -> List[Any]:
    """Return the attributes of a case, of which every pair is tested."""
    return [placement, *case[2:]]


def make_case_row(case: ScheduleCase, placement: Sequence[int], is_quick: bool) -> Comparison:
    """Compare weights, losses and the number of weight versions."""
    return Comparison(
        ranks=max(placement) + 1,
        is_quick=is_quick,
        train_on_emulator=lambda folder: interpreter_runs.emulate_case(case, len(placement)),
        train_on_rank=lambda rank, folder: interpreter_runs.interpret_case(rank, case, placement),
    )


# ---- LOOPS: pipelines in a loop of one's own


QUICK_LOOPS = {
    "pipedream", "pipemare_t1_t2", "pipedream_clip_delayed", "pipedream_replicas", "pb_virtual_split", "recompute",
    "local_overlapping", "diloco", "zbv",
}  # fmt: skip


def list_loop_rows() -> Dict[str, Comparison]:
    """Return the rows of loops."""
    rows = {}
    for name in ON_PROCESSES:
        run = functools.partial(run_loop, name)
        on_rank = functools.partial(run_loop_on_rank, name)
        rows[f"loop-{name}"] = Comparison(2, name in QUICK_LOOPS, run, on_rank)
    return rows


def run_loop(name: str, folder: Path, **keys: Any) -> Dict[str, Any]:
    """Return weights, losses, and which updates leave in which step."""
    loop = Loop(ON_PROCESSES[name], **keys)
    loop.run()
    state = loop.close().state_dict()
    return {**state, "losses": loop.losses, "left": loop.left}


def run_loop_on_rank(name: str, rank: int, folder: Path) -> Dict[str, Any]:
    """Return the same on each rank: `close` gives all of them the whole model."""
    keys: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
    return run_loop(name, folder, share=take_share, **keys)


# ---- RUNS: configs


class ConfigRun(NamedTuple):
    """A config: settings over `keys`, by default over SHORT and the digits' file; "FOLDER" stands for the row's folder."""

    ranks: int
    settings: List[str]
    keys: Dict[str, Any] = {}
    files: Dict[str, str] = {}
    is_quick: bool = True
    missing: str = ""


GROUPS = (
    "{groups: [{match: '*weight', ndim: 2, name: torch.optim.Muon, lr: 0.02}, {name: adamw, lr: 0.002, "
    "by_stage: {betas: {from: [0.9, 0.99], to: [0.99, 0.999]}}}]}"
)
PLATEAU = "{name: plateau, warmup_steps: 3, args: {factor: 0.5, patience: 0, threshold: 0.02, cooldown: 1}}"
TIED: Dict[str, Any] = {
    "model": {"entry": "tests.tied_models:make_language_model"}, "data": {"name": "tests.tied_models:make_random_tokens"},
    "micro_batch_size": 2, "gradient_accumulation": 4, "steps": 6, "backend": {"threads": 1},
    "log": {"every": 1, "tensorboard": False}, "checkpoint": {"every": 3, "keep": 9},
}  # fmt: skip
HAS_NO_TRANSFORMERS = "" if importlib.util.find_spec("transformers") else "needs transformers"
GPT2 = {"entry": "tests.tied_models:Gpt2", "args": {"dropout": 0.1, "layers": 4}}
RUNS: Dict[str, ConfigRun] = {
    "t1-t2": ConfigRun(
        4,
        ["method=pipemare", "stages=4", "method_args={t1: {anneal_updates: 5}, t2: {decay: 0.5}}"],
    ),
    "momentum": ConfigRun(
        4, ["method=gpipe", "stages=4", "optimizer.momentum=0.9"], is_quick=False
    ),
    "replicas": ConfigRun(4, ["method=pipedream", "stages=2", "replicas=2", "log.every=1"]),
    # a sum of two gradients has but one order
    "three-replicas": ConfigRun(
        3, ["method=pipedream", "stages=2", "replicas=3", "gradient_accumulation=2", "log.every=1"]
    ),
    # each rank has a whole pipeline
    "replicas-alone": ConfigRun(2, ["method=pipedream", "stages=2", "replicas=2"]),
    "pipedream": ConfigRun(2, ["method=pipedream", "stages=2"], is_quick=False),
    "early-stopping": ConfigRun(
        2, ["method=pipedream", "stages=4", "early_stopping={metric: loss, patience: 9}"]
    ),
    "delayed-norm": ConfigRun(
        2, ["method=pipemare", "stages=4", "clip={norm: 0.5, scope: delayed_global}"]
    ),
    "global-norm": ConfigRun(
        2, ["method=gpipe", "stages=4", "clip={norm: 0.5, scope: global}"], is_quick=False
    ),
    "interleaved": ConfigRun(
        2, ["method=interleaved_1f1b", "stages=4", "stages_per_device=2"], is_quick=False
    ),
    "V-shaped": ConfigRun(2, ["method=zbv", "stages=4"], is_quick=False),
    "two-directions": ConfigRun(2, ["method=dualpipe_v", "stages=4"]),
    "split": ConfigRun(
        2,
        [
            "method=pipedream",
            "stages=4",
            "stages_per_device=2",
            "method_args={split_backward: true}",
        ],
    ),
    "finest": ConfigRun(2, ["method=pipedream", "stages=finest"], is_quick=False),
    "outer": ConfigRun(
        2,
        [
            "method=local_sgd",
            "stages=4",
            "gradient_accumulation=1",
            "method_args={replicas: 3, local_steps: 4, outer: {}}",
        ],
        is_quick=False,
    ),
    "rows-of-a-file": ConfigRun(
        2,
        ["stages=2", "method=rows", "method_args.file=FOLDER/rows.csv"],
        files={"rows.csv": PASSES_OF_ROWS},
    ),
    # shared, unused and in-place modules
    "odd-modules": ConfigRun(
        4,
        [
            "model.entry=tests.staged_models:OddModel",
            "model.args={}",
            'stages=["2", "3", "5"]',
            "method=pipedream",
        ],
    ),
    # a replica that does not reach a weight counts as zero
    "unreached-weight": ConfigRun(
        4,
        [
            "model.entry=tests.staged_models:make_gate",
            "model.args={}",
            "stages=null",
            "replicas=2",
            "gradient_accumulation=1",
            "method=pipedream",
        ],
    ),
    "optimizers-by-group": ConfigRun(
        2,
        [
            "method=pipemare",
            "clip={norm: 0.5, scope: delayed_global}",
            "stages=4",
            f"optimizer={GROUPS}",
            *[f"optimizer.{key}=null" for key in ("name", "lr", "momentum")],  # the file's
        ],
        is_quick=False,
        missing="" if hasattr(torch.optim, "Muon") else "needs torch.optim.Muon",
    ),
    "gap-and-rotation": ConfigRun(
        2,
        [
            "method=pipedream",
            "stages=4",
            "gradient_accumulation=2",
            "method_args={gap_aware: {decay: 0.9}}",
            "optimizer={groups: [{ndim: 2, name: 'models.optimizers:BasisRotation', "
            "lr: 0.002, args: {frequency: 2}}, {name: adamw, lr: 0.002}]}",
            *[f"optimizer.{key}=null" for key in ("name", "lr", "momentum")],  # the file's
        ],
    ),
    "plateau": ConfigRun(
        2,
        [
            "method=spectrain",
            "stages=2",
            "gradient_accumulation=1",
            "evaluate.steps=2",
            "log.every=1",
            f"lr_schedule={PLATEAU}",
        ],
        is_quick=False,
    ),
    "tied-replicas": ConfigRun(
        4,
        [
            "method=pipedream_flush",
            "optimizer={name: adam, lr: 0.01, weight_decay: 0.01}",
            "clip={norm: 0.3, scope: global}",
            "stages=[block2]",
            "replicas=2",
            "steps=4",
            "checkpoint.every=2",
        ],
        TIED,
    ),
    "tied-dropout": ConfigRun(
        4,
        [
            "method=pipedream_2bw",
            "optimizer={name: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01}",
        ],
        {**TIED, "model": GPT2},
        is_quick=False,
        missing=HAS_NO_TRANSFORMERS,
    ),
}
# models that are cut: forwards that differentiate, write a weight, or begin a stage inside of a checkpoint
CUT: Dict[str, Any] = {
    "data": {"name": "digits", "subset": 64, "test_subset": 32}, "loss": "cross_entropy", "steps": 3, "micro_batch_size": 4,
    "gradient_accumulation": 2, "evaluate": {"subset": 6}, "log": {"tensorboard": False},
    "checkpoint": {"every": 3, "keep": 1}, "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
    "backend": {"threads": 1},
}  # fmt: skip
# a gradient inside a forward once failed in observations without gradients, and each observation on
# each process once wrote weights
for _entry, _method in (
    ("make_forces", "pipedream"),
    ("ShrinkingModel", "gpipe"),
    ("make_cut_checkpoint", "gpipe"),
):
    _model = {"entry": f"tests.staged_models:{_entry}"}
    RUNS[f"cut-{_entry}"] = ConfigRun(
        2, [f"method={_method}"], {**CUT, "model": _model}, is_quick=_entry == "make_forces"
    )
REPORTED = ("forward_delay", "backward_delay", "weight_copies", "optimizer_bytes")  # by stage


def list_run_rows() -> Dict[str, Comparison]:
    """Return the rows of configs."""
    rows = {}
    for name, run in RUNS.items():
        on_emulator = functools.partial(train_config_on_emulator, name)
        on_rank = functools.partial(train_config_on_rank, name)
        rows[f"run-{name}"] = Comparison(run.ranks, run.is_quick, on_emulator, on_rank, run.missing)
    return rows


def train_config(name: str, backend: str, folder: Path) -> None:
    """Train a run of RUNS into `folder/BACKEND`."""
    run = RUNS[name]
    settings = [setting.replace("FOLDER", str(folder)) for setting in run.settings]
    file = folder / "config.yaml" if run.keys else DIGITS
    base = [] if run.keys else SHORT
    config = load_config(file, [*base, f"backend.name={backend}", *settings])
    train(config, folder / backend, quiet=True)


def read_run(out: Path) -> Dict[str, Any]:
    """Return weights and optimizer state of the last checkpoint, metrics, results and the stages' report."""
    summary = read_summary(out)
    assert find_checkpoint(out).name == f"step-{summary['steps']}"
    report = [{key: stage[key] for key in REPORTED} for stage in summary["stages"]]
    results = {key: summary[key] for key in ("initial", "final")}
    return {**read_state(out), "metrics": read_numbers(out), "stages": report, **results}


def train_config_on_emulator(name: str, folder: Path) -> Dict[str, Any]:
    """Write the run's files, which the ranks read, too, and train."""
    run = RUNS[name]
    (folder / "config.yaml").write_text(json.dumps(run.keys))  # which is YAML
    for file, text in run.files.items():
        (folder / file).write_text(text)
    train_config(name, "emulator", folder)
    return read_run(folder / "emulator")


def train_config_on_rank(name: str, rank: int, folder: Path) -> Dict[str, Any]:
    """Train as a rank; rank 0 returns what it has written for all."""
    train_config(name, "distributed", folder)
    return read_run(folder / "distributed") if rank == 0 else {}


# ---- FEATURES: arguments of `ipu_pipe.train`, made where a feature is tested


class Feature(NamedTuple):
    """A function "module:name" that returns the arguments, and what it is called with. `item`: of the runs that it returns."""

    entry: str
    arguments: Tuple[Any, ...] = ()
    keys: Dict[str, Any] = {}
    item: str = ""
    ranks: int = 2
    missing: str = ""

    def make_arguments(self) -> Dict[str, Any]:
        """Return the arguments of a run, with new objects each time."""
        module, _, name = self.entry.partition(":")
        result = getattr(importlib.import_module(module), name)(*self.arguments, **self.keys)
        return result[self.item]() if self.item else result


COMPLEX = "tests.test_complex_buffers:make_case_arguments"
LOSS = "tests.test_loss_reads_model:make_counted_run"
HEAD = "tests.test_unread_weights:make_head_run"
MODES = "tests.test_modes:list_runs"
BATCHES = "tests.test_batches:make_batch_arguments"
WEIGHTS = "tests.test_loss_weight:describe_run"
UNEVEN = [1, 9, 4, 10, 3, 0, 7, 2, 0, 0, 0, 0, 0, 5, 0, 8]  # tokens of microbatches
FEATURES: Dict[str, Feature] = {
    "complex-buffer-gpipe": Feature(COMPLEX, ((True, "gpipe"),)),
    "complex-buffer-not-saved": Feature(COMPLEX, ((False, "gpipe"),)),
    "complex-buffer-zb_h1": Feature(COMPLEX, ((True, "zb_h1"),)),
    "complex-buffer-pipedream": Feature(COMPLEX, ((False, "pipedream"),)),
    **{f"loss-reads-model-{m}": Feature(LOSS, (m,)) for m in ("gpipe", "zb_h1", "pipedream")},
    **{
        f"head-in-loss-{m}": Feature(HEAD, (m,))
        for m in ("gpipe", "pipedream", "pipedream_2bw", "pipemare")
    },
    **{
        f"modes-{run}": Feature(MODES, item=run)
        for run in ("gpipe", "pipedream", "recompute", "checkpoint", "local")
    },
    **{f"batches-{run}": Feature(BATCHES, (run,)) for run in ("three", "own", "noisy", "seeded")},
    **{
        f"batches-{run}": Feature(BATCHES, (run,), missing=HAS_NO_TRANSFORMERS)
        for run in ("bert", "gpt2", "vit", "blocks")
    },
    **{
        f"loss-weight-{method}": Feature(WEIGHTS, (method,))
        for method in ("gpipe", "pipedream", "pipedream_2bw", "zb_h1", "pipedream_flush")
    },
    "loss-weight-pipemare": Feature(
        WEIGHTS, ("pipemare",), {"method_args": {"recompute": {"segments": 1}}}
    ),
    "loss-weight-interleaved_1f1b": Feature(
        WEIGHTS, ("interleaved_1f1b",), {"stages": ["1", "2", "3"], "stages_per_device": 2}
    ),
    "loss-weight-local_sgd": Feature(WEIGHTS, ("local_sgd",), {"gradient_accumulation": 1}),
    "loss-weight-replicas": Feature(
        WEIGHTS, (), {"counts": [*UNEVEN, *UNEVEN[::-1]], "replicas": 2, "stages": 1}
    ),
    "loss-weight-four-ranks": Feature(
        WEIGHTS,
        ("pipedream", [*UNEVEN, 0, 5, 0, 9, 0, 1, 0, 4, *UNEVEN[:8]]),
        {"replicas": 2},
        ranks=4,
    ),
    "loss-weight-blocks": Feature("tests.test_loss_weight:describe_blocks"),
    **{
        f"cut-{model}": Feature(f"{__name__}:describe_cut_model", (model,))
        for model in ("torchvision-convnext", "timm-cait", "hf-mixtral")
    },
}
QUICK_FEATURES = {
    "complex-buffer-zb_h1",
    "loss-reads-model-pipedream",
    "head-in-loss-pipemare",
    "batches-three",
    "loss-weight-pipedream",
}


def describe_cut_model(name: str) -> Dict[str, Any]:
    """Return a run of a model of another library; skip the test without the library."""
    pytest.importorskip("tests.vision_libraries")
    from tests.third_party_models import CASES

    case = CASES[name]
    model = {"entry": f"tests.third_party_models:{case.entry}"}
    keys = {**CUT, "model": model, "data": case.data, "stages": case.list_stages(2)}
    return {"config": configure(method="gpipe", **keys)}


def list_feature_rows() -> Dict[str, Comparison]:
    """Return the rows of features; one of each kind is quick."""
    rows = {}
    for name, feature in FEATURES.items():
        on_emulator = functools.partial(train_feature, name, "emulator", True)
        on_rank = functools.partial(train_feature_on_rank, name)
        rows[f"feature-{name}"] = Comparison(
            feature.ranks, name in QUICK_FEATURES, on_emulator, on_rank, feature.missing
        )
    return rows


def train_feature(name: str, backend: str, is_writer: bool, folder: Path) -> Dict[str, Any]:
    """Train and return what `read_run` returns, if this process writes the run."""
    arguments = FEATURES[name].make_arguments()
    settings = BackendConfig(name=backend, threads=1)  # type: ignore[arg-type]
    arguments["config"] = arguments["config"].model_copy(update={"backend": settings})
    train(out=folder / backend, quiet=True, **arguments)
    return read_run(folder / backend) if is_writer else {}


def train_feature_on_rank(name: str, rank: int, folder: Path) -> Dict[str, Any]:
    """Train as a rank; rank 0 returns what it has written for all."""
    return train_feature(name, "distributed", rank == 0, folder)


TABLE: Dict[str, Comparison] = {
    **list_run_rows(),
    **list_loop_rows(),
    **list_feature_rows(),
    **list_case_rows(),
}


def train_row(rank: int, name: str, folder: Path) -> Dict[str, Any]:
    """Train a row of the table as a rank."""
    return TABLE[name].train_on_rank(rank, folder)


def mark_row(name: str) -> Any:
    """Return the parameter of a row, with its markers."""
    row = TABLE[name]
    marks: List[Any] = [] if row.is_quick else [pytest.mark.slow]
    marks.append(pytest.mark.skipif(bool(row.missing), reason=row.missing))
    return pytest.param(name, marks=marks, id=name)


@pytest.fixture(scope="module")
def groups() -> Iterator[RankGroups]:
    """Return the groups of ranks of this file."""
    groups = RankGroups()
    yield groups
    groups.close()


@pytest.mark.parametrize("name", [mark_row(name) for name in TABLE])
def test_processes_give_the_emulators_bits(name: str, groups: RankGroups, tmp_path: Path) -> None:
    row = TABLE[name]
    expected = row.train_on_emulator(tmp_path)
    results = groups.call(row.ranks, train_row, name, tmp_path)
    assert set().union(*results) == set(expected)
    for rank, values in enumerate(results):
        for key, value in values.items():
            assert is_same_value(value, expected[key]), f"rank {rank}: {key}"


def test_every_pair_of_attributes_is_in_the_table() -> None:
    cases, quick = list_placed_cases()
    assert quick <= set(TABLE)
    tested = set().union(
        *(list_pairs(describe_case(*cases[name])) for name in TABLE if name in cases)
    )
    assert tested == set().union(*(list_pairs(describe_case(*row)) for row in cases.values()))


def is_same_value(value: Any, expected: Any) -> bool:
    """Return whether two tensors have one dtype and the same bits, or two other values are equal."""
    if isinstance(expected, torch.Tensor):
        return value.dtype == expected.dtype and torch.equal(value, expected)
    return bool(value == expected)
