r"""Read the passes of a pipeline from the names that trainers give them in a profiler's trace.

A row is a regular expression that a whole name must match. Its groups are

    kind         a word of KINDS, in any case: what is computed, or sent
    stage        of the pipeline; without it a rank is a stage
    microbatch   of the update; without it the n-th pass of a kind is microbatch n's

Ranges are of `torch.profiler.record_function`. Functions are Python's, which the profiler records
under `with_stack=True`, as `path/file.py(line): function`: trainers whose own ranges are NVIDIA's
NVTX leave nothing else in its trace. Users add rows by `--passes`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Sequence, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.text import show

Patterns = Tuple["re.Pattern[str]", ...]

_STAGE = r"(?P<stage>\d{1,6})"
_MICROBATCH = r"(?P<microbatch>\d{1,6})"
RANGES = {
    # torch/distributed/pipelining/schedules.py, whose multi-stage runtime torchtitan uses
    "torch": rf"PP:{_STAGE}(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W){_MICROBATCH}",
    # ScheduleGPipe there; Accelerate runs it (src/accelerate/inference.py) and adds no range
    "torch's ScheduleGPipe, Accelerate": rf"(?P<kind>Forward|Backward) {_MICROBATCH}",
    # src/lightning/pytorch/trainer/call.py and profilers/pytorch.py
    "Lightning": r"\[pl\]\[profile\]\[Strategy\]\w+\.(?P<kind>training_step|backward)",
}
FUNCTIONS = {
    # megatron/core/pipeline_parallel/schedules.py; --pytorch-profiler-collect-callstack
    "Megatron-Core": r"(.*/)?megatron/core/pipeline_parallel/schedules\.py\(\d+\): "
    r"(?P<kind>forward|backward)_step",
    # deepspeed/runtime/pipe/engine.py
    "DeepSpeed": r"(.*/)?deepspeed/runtime/pipe/engine\.py\(\d+\): "
    r"_exec_(?P<kind>forward|backward|optimizer)_(pass|step)",
}
# what a kind is, and what a message of it carries
KINDS = {
    **dict.fromkeys(("f", "fwd", "forward", "training_step"), (Kind.FORWARD.word, "")),
    **dict.fromkeys(("b", "bwd", "backward"), (Kind.BACKWARD.word, "")),
    **dict.fromkeys(("i", "input_gradient"), (Kind.INPUT_GRADIENT.word, "")),
    **dict.fromkeys(("w", "weight_gradient"), (Kind.WEIGHT_GRADIENT.word, "")),
    **dict.fromkeys(("u", "step", "update", "optimizer"), (Kind.UPDATE.word, "")),
    "send_f": ("send", "activations"),
    "recv_f": ("recv", "activations"),
    "send_b": ("send", "gradients"),
    "recv_b": ("recv", "gradients"),
}
GROUPS = ("kind", "stage", "microbatch")
_OWN = {
    is_function: tuple(re.compile(text) for text in table.values())
    for is_function, table in ((False, RANGES), (True, FUNCTIONS))
}


class PassName(NamedTuple):
    """What a name says. `stage` and `microbatch` are -1 where it does not say them."""

    kind: str
    carries: str
    stage: int
    microbatch: int


def find_pass(name: str, is_function: bool, patterns: Patterns) -> PassName | None:
    """Return what the name of a range or function says of a pass; None if it names none.

    `patterns`: the user's, which are tried first and may match a part of the name. Raise `BadInput`
    where one of them matches, and a group of it is not what it should be.
    """
    for pattern in patterns:
        match = pattern.search(name)
        if match:
            return _read_user_match(match)
    for pattern in _OWN[is_function]:
        # whole names: "Forward 3 of my data" is none of a trainer's
        match = pattern.fullmatch(name)
        if match:
            return _read_groups(match.groupdict())
    return None


def _read_groups(groups: dict[str, Any]) -> PassName:
    kind, carries = KINDS[groups["kind"].lower()]
    # None of a group that the pattern lacks, or that took no part in the match
    numbers = (int(groups.get(name) or -1) for name in GROUPS[1:])
    return PassName(kind, carries, *numbers)


def _read_user_match(match: re.Match[str]) -> PassName:
    groups = match.groupdict()
    where = f"--passes: {match.re.pattern}: takes from {show(match.string)} the"
    if str(groups["kind"]).lower() not in KINDS:
        raise BadInput(f"{where} kind {show(groups['kind'])}: must be one of {', '.join(KINDS)}")
    for name in GROUPS[1:]:
        text = groups.get(name)
        # six digits, as in our own patterns: the columns are of int32
        if text and not re.fullmatch("[0-9]{1,6}", text):
            raise BadInput(f"{where} {name} {show(text)}: must be a number of up to six digits")
    return _read_groups(groups)


def compile_patterns(texts: str | Sequence[str]) -> Patterns:
    """Compile the user's patterns, or the only one. Raise `BadInput` for one that is not a regular
    expression, has no group `kind`, or has a group that is not of GROUPS.
    """
    return tuple(map(_compile_pattern, [texts] if isinstance(texts, str) else texts))


def _compile_pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise BadInput(f"--passes: {text}: is not a regular expression: {error}") from None
    listed = ", ".join(f"(?P<{name}>...)" for name in GROUPS)
    unknown = ", ".join(sorted({*pattern.groupindex} - {*GROUPS}))
    if unknown:
        raise BadInput(f"--passes: {text}: has a group {unknown}: groups are {listed}")
    if "kind" not in pattern.groupindex:
        raise BadInput(f"--passes: {text}: has no group (?P<kind>...): groups are {listed}")
    return pattern
