"""What a run may use and some backend lacks: one table, from which the refusals come, and the table
of docs/reference/unsupported.md.

    Feature("replicas", "replicas", lambda job: ..., {XLA: "xla has one replica"})
    replicas: 2: xla has one replica: use backend.name: emulator or distributed          a refusal

What belongs to devices themselves (their operations, options and number) is refused in a backend's
own folder.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple

import torch

from ipu_pipe.cut.loss_verification import LossTrial, keeps_state
from ipu_pipe.job.record import Job
from ipu_pipe.model.loss import OwnLoss, takes_whole_output
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.refusals import BATCH, NONE, OWN_LOSS, Argument, Words, show_value
from ipu_pipe.schedule.timelines import OPEN
from ipu_pipe.text import list_some
from ipu_pipe.update.optimizer import has_step_hooks, list_parts

EMULATOR = "emulator"
PROCESSES = "distributed"
IPUS = "poptorch"
XLA = "xla"
# the backends that a refusal proposes
GENERAL = (EMULATOR, PROCESSES)


class Feature(NamedTuple):
    """A feature of runs.

    name:      as the page has it.
    argument:  that a refusal names, or words for it.
    find:      what a job has of it, True if a refusal shows no value; "" or another false value if
               nothing.
    lacking:   backend -> why it lacks the feature; not both of `GENERAL`.
    remedy:    besides another backend.
    """

    name: str
    argument: str | Words
    find: Callable[[Job], Any]
    lacking: Mapping[str, str]
    remedy: object = ""

    def explain(self, job: Job) -> str:
        """Return the line that refuses a job of a backend that lacks the feature; "" if the job
        does not use it, or the backend has it.
        """
        why = self.lacking.get(job.config.backend.name)
        # asked only where the backend lacks it: `find` may walk over the model
        value = self.find(job) if why else None
        if not value:
            return ""
        first, *rest = [name for name in GENERAL if name not in self.lacking]
        use = f"use {' or '.join([str(Argument('backend', first)), *rest])}"
        remedy = f", or {self.remedy}" if self.remedy else ""
        reason = f"{why}: {use}{remedy}"
        place = Argument(self.argument) if isinstance(self.argument, str) else self.argument
        return f"{place}: {reason}" if value is True else f"{place}: {show_value(value)}: {reason}"


def list_lacking(job: Job) -> list[str]:
    """Return why a job's backend cannot train it, a line for each feature that it lacks."""
    return list(dict.fromkeys(filter(None, (feature.explain(job) for feature in FEATURES))))


# ---- what a job has of a feature


def _find_hooked(job: Job) -> str:
    # torch has no public list of a module's hooks
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return list_some(
        [
            name or "the model itself"
            for name, module in job.model.named_modules()
            if any(getattr(module, kind) for kind in kinds)
        ]
    )


def _find_hooked_weights(job: Job) -> str:
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    weights = job.model.named_parameters()
    return list_some([name for name, p in weights if any(getattr(p, kind, None) for kind in hooks)])


def _find_rare_precision(job: Job) -> str:
    usual = {torch.float32, torch.float64}
    is_usual = {p.dtype for p in job.model.parameters()} <= usual
    precision = job.config.precision
    return "" if is_usual and precision in ("float32", "float64") else precision


def _find_tied(job: Job) -> str:
    return list_some(list(job.partition.list_tied(job.model)))


def _find_weighed(job: Job, is_alone: bool) -> Any:
    """Return the weights of microbatches, if they are alone in their updates, or not alone."""
    config = job.config
    fits = (config.gradient_accumulation * config.replicas == 1) == is_alone
    # a function has no text
    return job.loss_weight is not None and fits and (config.loss_weight or True)


def _find_other_batch(job: Job) -> bool:
    has_two = all(isinstance(part, torch.Tensor) for part in job.example)
    return not job.requested_fields and not has_two


def _find_part_of_output(job: Job) -> bool:
    takes_part = not takes_whole_output(job.loss) and not isinstance(job.loss, OwnLoss)
    return takes_part and not job.requested_fields


def _find_own_rates(job: Job) -> str:
    # a run of a config has one rate, of which stages take shares; a loop sets that of each group
    differ = any(group["lr"] != job.base_rate for group in job.optimizer.param_groups)
    return "parameter groups with different learning rates" if job.base_rate and differ else ""


def _find_stateful_loss(job: Job) -> str:
    has_copies = job.config.replicas > 1 or job.method.structure is not None
    # a forward of sharded weights cannot be tried
    if not has_copies or job.precision.is_sharded:
        return ""
    randomness = KeyedRandomness(job.model, job.effects.draws, 0, job.device)
    trial = LossTrial(job.model, (), job.loss, job.example, randomness)
    loss = get_user_loss(job.loss)
    try:
        return getattr(loss, "__name__", type(loss).__name__) if keeps_state(trial) else ""
    finally:
        randomness.remove()


_EQUAL = "all microbatches count the same on xla"
_AVERAGES = "PopTorch averages an update's microbatches and replicas itself, and all count the same"
_FLUSHES = "PopTorch flushes at every update"
_HIDES = "no weights are averaged on the devices"
_OWN_DELAYS = "delays are the pipeline's own there"

FEATURES = (
    Feature(
        "replicas that step by themselves (`local_sgd`)",
        "method",
        lambda job: job.method.rounds and job.method.name,
        {IPUS: _FLUSHES, XLA: "xla has one replica"},
    ),
    Feature(
        "stages that step in a drawn order (`randomized_pipedream`)",
        "method",
        lambda job: job.method.history and job.method.name,
        {
            PROCESSES: "no pipeline of processes draws its weight versions",
            IPUS: _FLUSHES,
            XLA: "xla runs pipelines alone",
        },
    ),
    Feature(
        "blocks with losses of their own (`local_greedy` and others)",
        "method",
        lambda job: job.method.structure and job.method.name,
        {XLA: "xla has one loss"},
    ),
    Feature(
        "`method_args.hogwild`",
        "method_args.hogwild",
        lambda job: job.config.method_settings().get("hogwild"),
        {PROCESSES: _OWN_DELAYS, IPUS: _FLUSHES, XLA: _OWN_DELAYS},
    ),
    Feature(
        "`method_args.constant_delay`",
        "method_args.constant_delay",
        lambda job: job.config.method_settings().get("constant_delay"),
        {PROCESSES: _OWN_DELAYS, IPUS: _FLUSHES, XLA: _OWN_DELAYS},
    ),
    Feature(
        "`replicas`",
        "replicas",
        lambda job: job.config.replicas > 1 and job.config.replicas,
        {XLA: "xla has one replica"},
    ),
    Feature(
        "`recompute`",
        "recompute",
        lambda job: job.config.recompute,
        {XLA: "xla stores activations"},
    ),
    Feature(
        "`method_args.recompute`",
        "method_args.recompute",
        lambda job: job.config.method_settings().get("recompute"),
        {IPUS: _FLUSHES, XLA: "xla stores activations"},
    ),
    Feature(
        "`clip`",
        "clip",
        lambda job: job.config.clip and job.config.clip.scope,
        {XLA: "xla does not clip"},
    ),
    Feature(
        "`loss_weight`, an update of one microbatch",
        "loss_weight",
        lambda job: _find_weighed(job, True),
        {IPUS: "a microbatch of weight 0 would train", XLA: _EQUAL},
        NONE,
    ),
    Feature(
        "`loss_weight`, updates of several",
        "loss_weight",
        lambda job: _find_weighed(job, False),
        {IPUS: _AVERAGES, XLA: _EQUAL},
        NONE,
    ),
    Feature(
        "`precision` other than float32 and float64",
        "precision",
        _find_rare_precision,
        {XLA: "must be float32 or float64 on xla"},
    ),
    Feature(
        "a weight in two stages",
        "model",
        _find_tied,
        {XLA: "several stages use this weight"},
        "untie it",
    ),
    Feature(
        "hooks of modules",
        "model",
        _find_hooked,
        {XLA: "has hooks, which a compiled pass would not call"},
    ),
    Feature(
        "hooks of weights",
        "model",
        _find_hooked_weights,
        dict.fromkeys((IPUS, XLA), "has hooks, which no pass on the devices calls"),
    ),
    Feature(
        "hooks of the optimizer's step",
        "optimizer",
        lambda job: any(map(has_step_hooks, list_parts(job.optimizer))),
        dict.fromkeys((IPUS, XLA), "has hooks, which no step on the devices calls"),
    ),
    Feature(
        "complex buffers",
        "model",
        lambda job: list_some([n for n, b in job.model.named_buffers() if b.is_complex()]),
        {IPUS: "PopTorch has no complex numbers", XLA: "xla has no complex buffers"},
    ),
    Feature(
        "`model.compile`",
        "model.compile",
        lambda job: job.compiles_modules,
        dict.fromkeys((EMULATOR, IPUS, XLA), "processes alone compile the modules of their stages"),
    ),
    Feature(
        "`ema`",
        "ema",
        lambda job: job.config.ema and job.config.ema.decay,
        dict.fromkeys((IPUS, XLA), _HIDES),
        NONE,
    ),
    Feature(
        "`ema` of a weight in two stages",
        "ema",
        lambda job: job.config.ema and _find_tied(job) and job.config.ema.decay,
        {
            PROCESSES: "each process has a copy of the weights of several stages",
            **dict.fromkeys((IPUS, XLA), _HIDES),
        },
        "untie them",
    ),
    Feature(
        "an optimizer that is switched for evaluations, with a weight in two stages",
        "optimizer",
        lambda job: (
            hasattr(type(job.optimizer), "eval")
            and _find_tied(job)
            and type(job.optimizer).__name__
        ),
        {PROCESSES: "a switch does not reach the copies"},
        "untie them",
    ),
    Feature(
        "`lr_schedule.name: plateau`",
        "lr_schedule.name",
        lambda job: job.plateau and "plateau",
        {IPUS: "PopTorch's runs have rates that are known before"},
        "another schedule",
    ),
    Feature(
        "a loss that takes more of the batch than labels",
        "loss",
        lambda job: (
            job.requested_fields and f"takes {', '.join(job.requested_fields)} of the batch"
        ),
        {IPUS: "on IPUs a loss takes only outputs and labels"},
    ),
    Feature(
        "a loss that keeps a state, with replicas or blocks with losses of their own",
        "loss",
        _find_stateful_loss,
        {PROCESSES: "keeps a state, of which the process of each replica or block has its own"},
        "a loss without a state",
    ),
    Feature(
        "batches that are not two tensors",
        BATCH,
        _find_other_batch,
        {IPUS: "IPUs take batches (x, y) of two tensors"},
    ),
    Feature(
        "a model that returns more than a tensor",
        "model.output",
        _find_part_of_output,
        {IPUS: "IPUs take a model that returns a tensor"},
    ),
    Feature(
        "a model that returns its own loss",
        OWN_LOSS,
        lambda job: isinstance(job.loss, OwnLoss),
        {IPUS: "IPUs take a model that returns a tensor"},
    ),
    Feature(
        "data without a length, by `train`",
        "data",
        lambda job: job.updates_per_epoch is None and job.updates < OPEN,
        {IPUS: "the training data has no length, which IPUs need"},
    ),
    Feature(
        "learning rates of parameter groups, by `train`",
        # its name is no fault
        Words("optimizer", "optimizer"),
        _find_own_rates,
        {IPUS: "a stage has one rate there"},
    ),
)
