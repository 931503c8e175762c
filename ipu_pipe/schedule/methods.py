"""The table of training methods: each name is a preset over *when* (pipeline, turn) and *which weights* (reads).

The update rules that some methods add (T1, T2, spike compensation, weight prediction) are no axis of this table: they
change what is done with a gradient or how a version is corrected when read, not when a pass runs nor which version it
reads. They are in ipu_pipe.update.rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, Union

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule import asynchrony
from ipu_pipe.schedule.asynchrony import History, Rounds
from ipu_pipe.text import find_nearest, show


class Pipeline(Enum):
    """Who does what when. All but DATAFLOW and the local ones do one forward or one backward a stage and slot."""

    SEQUENTIAL = "sequential"  # one microbatch at a time through all stages and back
    FILL_DRAIN = "fill_drain"  # all forwards of a batch, then all its backwards
    ONE_F_ONE_B_FLUSH = "1f1b_flush"  # one forward, one backward; empties after every batch; at most P-s in flight
    ONE_F_ONE_B = "1f1b"  # never empties; at most P in flight, counted at stage 0 only
    ONE_F_ONE_B_CAPPED = "1f1b_capped"  # never empties; at most P-s in flight on stage s
    LOCAL_SGD = (
        "local_sgd"  # 1F1B over the steps of replicas, which take turns; empties after every round of local steps
    )
    DATAFLOW = "dataflow"  # a forward and a backward of every stage in each step
    LOCAL = "local"  # a forward and, at once, its backward of every stage in each step; no stage waits for a later one
    LOCAL_SHARED = "local_shared"  # the same, but updates wait for the next stage's gradient of the shared layer


class Reads(Enum):
    """Which version of its weights a pass of a stage reads."""

    NEWEST = "newest"  # every update of that stage made in earlier slots
    DOUBLE_BUFFERED = "double_buffered"  # a version behind the batch: max(floor(m/N) - 1, 0), from each drain anew
    STASHED = "stashed"  # a backward reads what its microbatch's forward read
    OWN = "own"  # every update of that stage by the same replica of the model: one each of its steps
    DELAYED = "delayed"  # a stated or drawn number of updates before the backward, whatever the schedule


class DefaultAccumulate(Enum):
    """How many microbatches make an update (N) where the user does not say."""

    MICROBATCHES = "microbatches"  # one update for the whole run
    STAGES = "stages"  # N = P
    ONE = "one"  # N = 1


@dataclass(frozen=True)
class Delay:
    """How many updates before its backward a forward reads, where the schedule does not say.

    `greatest` D with `drawn` false: always D (Kosson et al. 2021, appendices F and G.2). With `drawn`: each pass draws
    from the exponential distribution over 0..D (PipeMare, appendix E, in whole updates); its expectation is `mean`, by
    stage or the same for all, and where None the stage's own greatest lag in the method's pipeline.
    """

    greatest: int
    drawn: bool = False
    mean: Optional[Tuple[float, ...]] = None


@dataclass(frozen=True)
class Structure:
    """Local-parallel training: which stages form a block, trained by a loss of its own (Laskin et al. 2020, section 3).

    `blocks`: how many, or the names at which the second and later ones begin; None: every stage is one. `overlap`: so many
    stages before its own are in a block too, their gradients averaged between the blocks that hold them. `layers`: the last
    so many stages are the only block that trains.
    """

    blocks: Union[None, int, Tuple[str, ...]] = None
    overlap: int = 0
    layers: Optional[int] = None


@dataclass(frozen=True)
class Method:
    """One way to train a pipeline.

    `turn`: dataflow only; the steps between the last stage's forward and its backward (0: both in one step).
    `flushes`: the pipeline empties before every update, so that no pass ever reads old weights.
    `predicts`: both passes read weights predicted for one time, that at which the first stage's backward ends.
    `delay`: where forward_reads is DELAYED. `segments`: activations are recomputed, but for the inputs of so many segments.
    `structure`: gradients stay inside blocks of stages; None: they pass through the whole model. `history`: updates of single
    stages, by gradients at old iterates of all (the reads above are then those of the schedule they are drawn from). `rounds`:
    replicas with weights of their own. `one_version`: all stages read one version of a microbatch, so that several may use one
    weight.
    """

    name: str
    pipeline: Pipeline
    turn: int
    forward_reads: Reads
    backward_reads: Reads
    flushes: bool
    default_accumulate: DefaultAccumulate
    source: str
    predicts: bool = False
    delay: Optional[Delay] = None
    segments: Optional[int] = None
    structure: Optional[Structure] = None
    history: Optional[History] = None
    rounds: Optional[Rounds] = None
    one_version: bool = False

    @property
    def is_stale(self) -> bool:
        """Whether there are pipelines on which a pass reads other weights than the newest."""
        return not self.flushes and self.structure is None and self.rounds is None

    @property
    def is_pipeline(self) -> bool:
        """Whether it trains the whole model, as one, by what its schedule says."""
        return self.structure is None and self.history is None and self.rounds is None

    def reads_old(self, stages: int) -> bool:
        """Whether any pass may read other weights than the newest, on a pipeline of so many stages."""
        return self.is_stale and (stages > 1 or self.delay is not None or self.history is not None)

    @property
    def one_stage(self) -> Optional[str]:
        """Why all uses of a weight must lie in one stage, and what else there is; None where they need not."""
        if self.one_version:
            return None
        why = "stages may read different versions of it, so that it would have two delays"
        if self.structure is not None:
            why = "each block is trained by a loss of its own, so that it would have two gradients"
        elif self.history is not None or self.rounds is not None:
            why = f"{'single stages' if self.rounds is None else 'replicas'} step by themselves"
        able = ", ".join(name for name, method in METHODS.items() if method.one_version)
        return f"with {self.name} {why}: cut elsewhere, untie them, or use method {able}"

    def accumulate_for(self, stages: int, microbatches: int) -> int:
        """N, the microbatches an update, where the user does not say."""
        return {
            DefaultAccumulate.MICROBATCHES: microbatches,
            DefaultAccumulate.STAGES: stages,
            DefaultAccumulate.ONE: 1,
        }[self.default_accumulate]


def _table(*methods: Method) -> Dict[str, Method]:
    return {method.name: method for method in methods}


METHODS: Dict[str, Method] = _table(
    Method(
        "naive", Pipeline.SEQUENTIAL, 0, Reads.NEWEST, Reads.NEWEST, True, DefaultAccumulate.ONE,
        "inter-layer model parallelism, the baseline of Narayanan et al. 2021 (PipeDream-2BW), Figure 1", one_version=True,
    ),
    Method(
        "gpipe", Pipeline.FILL_DRAIN, 0, Reads.NEWEST, Reads.NEWEST, True, DefaultAccumulate.MICROBATCHES,
        "Huang et al. 2019", one_version=True,
    ),
    Method(
        "pipedream_flush", Pipeline.ONE_F_ONE_B_FLUSH, 0, Reads.NEWEST, Reads.NEWEST, True,
        DefaultAccumulate.MICROBATCHES, "Narayanan et al. 2021 (PipeDream-2BW), section 3.2", one_version=True,
    ),
    Method(
        "pipedream", Pipeline.ONE_F_ONE_B, 0, Reads.NEWEST, Reads.STASHED, False, DefaultAccumulate.ONE,
        "Narayanan et al. 2019; timeline of the randomized PipeDream paper, appendix E",
    ),
    Method(
        "pipedream_2bw", Pipeline.ONE_F_ONE_B_CAPPED, 0, Reads.DOUBLE_BUFFERED, Reads.STASHED, False,
        DefaultAccumulate.STAGES, "Narayanan et al. 2021, section 3.1", one_version=True,
    ),
    Method(
        "pipemare", Pipeline.DATAFLOW, 1, Reads.NEWEST, Reads.NEWEST, False, DefaultAccumulate.ONE,
        "Yang et al. 2021",
    ),
    Method(
        "pipelined_backprop", Pipeline.DATAFLOW, 0, Reads.NEWEST, Reads.NEWEST, False, DefaultAccumulate.ONE,
        "Kosson et al. 2021",
    ),
    Method(
        "spectrain", Pipeline.DATAFLOW, 0, Reads.NEWEST, Reads.NEWEST, False, DefaultAccumulate.ONE,
        "Chen et al. 2018 (SpecTrain), as compared by Kosson et al. 2021", predicts=True,
    ),
    Method(
        "local_greedy", Pipeline.LOCAL, 0, Reads.NEWEST, Reads.NEWEST, False, DefaultAccumulate.ONE,
        "Belilovsky et al. 2019; Laskin et al. 2020, Figure 2(b)", structure=Structure(),
    ),
    Method(
        "local_chunked", Pipeline.LOCAL, 0, Reads.NEWEST, Reads.NEWEST, False, DefaultAccumulate.ONE,
        "Laskin et al. 2020, Figure 2(d)", structure=Structure(blocks=2),
    ),
    Method(
        "local_overlapping", Pipeline.LOCAL_SHARED, 0, Reads.NEWEST, Reads.NEWEST, False, DefaultAccumulate.ONE,
        "Xiong et al. 2020; Laskin et al. 2020, Figure 2(c)", structure=Structure(overlap=1),
    ),
    Method(
        "last_layers", Pipeline.LOCAL, 0, Reads.NEWEST, Reads.NEWEST, False, DefaultAccumulate.ONE,
        "the baseline of Laskin et al. 2020, section 4", structure=Structure(layers=1),
    ),
    Method(
        "local_sgd", Pipeline.LOCAL_SGD, 0, Reads.OWN, Reads.STASHED, False, DefaultAccumulate.STAGES,
        "LocalSGD in a pipeline: the randomized PipeDream paper, Algorithm 2 and appendix E.2", rounds=Rounds(),
    ),
    Method(
        "randomized_pipedream", Pipeline.ONE_F_ONE_B, 0, Reads.NEWEST, Reads.STASHED, False, DefaultAccumulate.ONE,
        "the randomized PipeDream paper, Algorithm 1", history=History(),
    ),
)  # fmt: skip


AXES = ("schedule", "turn", "stash", "hogwild", "constant_delay", "recompute", "blocks", "overlap", "layers")
OWN_AXIS = {"local_chunked": "blocks", "local_overlapping": "overlap", "last_layers": "layers"}


def resolve_method(name: str, args: Mapping[str, Any] = {}) -> Method:
    """The method called `name`, its axes changed by `args`.

    `schedule` 1f1b|dataflow, `turn` 0|1, `stash` true|false, `hogwild` {mean, max}, `constant_delay` {updates},
    `recompute` {segments}; `blocks` of local_chunked, `overlap` of local_overlapping, `layers` of last_layers; those of
    randomized_pipedream and local_sgd (`ipu_pipe.schedule.asynchrony`). Other keys of `args` belong to the update rules and are
    not looked at; None means not given.
    Raises BadInput for an unknown name and for an argument that the method cannot take, with the reason.
    """
    if name not in METHODS:
        raise BadInput(f"method: {show(name)}: is none of {', '.join(METHODS)}{_nearest(name, METHODS)}")
    method = METHODS[name]
    given = {key: args[key] for key in AXES if args.get(key) is not None}
    own = {key: args[key] for keys in asynchrony.OWN_KEYS.values() for key in keys if args.get(key) is not None}
    faults = asynchrony.faults(name, own) + (_value_faults(given) or _axis_faults(method, given))
    if faults:
        raise BadInput(faults)
    if method.history is not None:
        return replace(method, history=asynchrony.history_of(own))
    if method.rounds is not None:
        return replace(method, rounds=asynchrony.rounds_of(own))
    if method.structure is not None:
        changed: Dict[str, Any] = {key: tuple(v) if isinstance(v, (list, tuple)) else v for key, v in given.items()}
        return replace(method, structure=replace(method.structure, **changed)) if changed else method
    if "schedule" in given:
        pipeline = Pipeline(given["schedule"])
        method = replace(method, pipeline=pipeline, turn=method.turn if pipeline is Pipeline.DATAFLOW else 0)
    if "turn" in given:
        method = replace(method, turn=given["turn"])
    if "hogwild" in given:  # the paper's gradient is that of the delayed weights: both passes read them
        mean = given["hogwild"].get("mean")
        means = None if mean is None else tuple(mean) if isinstance(mean, (list, tuple)) else (mean,)
        delay = Delay(given["hogwild"]["max"], drawn=True, mean=means)
        method = replace(method, forward_reads=Reads.DELAYED, backward_reads=Reads.STASHED, delay=delay)
    if "constant_delay" in given:
        method = replace(method, forward_reads=Reads.DELAYED, delay=Delay(given["constant_delay"]["updates"]))
    if "stash" in given:
        method = replace(method, backward_reads=Reads.STASHED if given["stash"] else Reads.NEWEST)
    if "recompute" in given:
        method = replace(method, segments=given["recompute"].get("segments") or 0)
        if method.delay:
            key = "hogwild" if method.delay.drawn else "constant_delay"
            why = "not together with recompute, whose weights are defined by the pipeline's own delays"
            raise BadInput(f"method_args: {key}: {show(given[key])}: {why}")
        if method.backward_reads is not Reads.NEWEST or method.pipeline is not Pipeline.DATAFLOW:
            raise BadInput(
                f"method_args: recompute: {show(given['recompute'])}: its weights are a matter of the method only where"
                " both passes read the newest weights on the dataflow schedule (pipemare, pipelined_backprop);"
                " elsewhere set recompute: true"
            )
    return method


def _nearest(name: str, known: Iterable[str]) -> str:
    close = find_nearest(name, known)
    return f"; did you mean {close}?" if close else ""


def _value_faults(given: Mapping[str, Any]) -> List[str]:
    faults = []
    for key in ("blocks", "overlap", "layers"):
        value = given.get(key, 1)
        names = key == "blocks" and isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
        if not (names and value) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            words = "a whole number >= 1" + (" or a list of module names" if key == "blocks" else "")
            faults.append(f"method_args: {key}: {show(value)}: must be {words}")
        elif key == "overlap" and value != 1:
            faults.append(
                f"method_args: overlap: {show(value)}: must be 1: a block holds one layer of the block behind"
            )
    if given.get("schedule", "1f1b") not in ("1f1b", "dataflow"):
        faults.append(f"method_args: schedule: {show(given['schedule'])}: must be 1f1b or dataflow")
    turn = given.get("turn", 0)
    if isinstance(turn, bool) or turn not in (0, 1):
        faults.append(f"method_args: turn: {turn}: must be 0 or 1")
    if not isinstance(given.get("stash", True), bool):
        faults.append(f"method_args: stash: {show(given['stash'])}: must be true or false")
    if "hogwild" in given and "constant_delay" in given:
        faults.append(
            f"method_args: hogwild: {show(given['hogwild'])}: not together with constant_delay, which fixes the delays"
        )
    return faults


def _axis_faults(method: Method, given: Mapping[str, Any]) -> List[str]:
    local = {key: value for key, value in given.items() if key in OWN_AXIS.values()}
    other = {key: value for key, value in given.items() if key != OWN_AXIS.get(method.name)}
    if method.structure is not None:
        given, reason = other, f"{method.name} trains blocks by losses of their own: no gradient is stale"
        if local:
            given = {key: value for key, value in local.items() if key in other} or other
            reason = f"{method.name} takes {OWN_AXIS.get(method.name, 'none of these')}"
    elif local:
        given, reason = local, f"{method.name} has no blocks of its own losses: use a local_ method or last_layers"
    elif method.history is not None:
        reason = (
            f"{method.name} reads the history of block updates by delays of its own: delay_bound, delays, order, nag"
        )
    elif method.rounds is not None:
        reason = f"{method.name} has a timeline of its own and reads no old weights"
    elif method.flushes:
        reason = f"{method.name} empties the pipeline before every update: its schedule and its weights are fixed"
    elif method.forward_reads is Reads.DOUBLE_BUFFERED:
        reason = f"{method.name} is 1F1B with exactly two weight versions: neither can be changed"
    elif method.predicts and not given.keys() <= {"schedule", "turn"}:
        given = {key: value for key, value in given.items() if key not in ("schedule", "turn")}
        reason = f"{method.name} predicts the weights that both passes read from the newest ones"
    elif "turn" in given and Pipeline(given.get("schedule", method.pipeline)) is not Pipeline.DATAFLOW:
        return [
            f"method_args: turn: {show(given['turn'])}: only the dataflow schedule has a turn; set schedule: dataflow"
        ]
    else:
        return []
    return [f"method_args: {key}: {show(value)}: {reason}" for key, value in given.items()]


def check(method: Method, stages: int, microbatches: int, accumulate: int) -> None:
    """Refuse (BadInput, every fault) a pipeline of P `stages`, M `microbatches` and N = `accumulate` that cannot be.

    M need not be a multiple of N: a last batch that is not full runs without an update.
    """
    faults = [
        f"{key}: {show(value)}: must be a whole number, at least 1"
        for key, value in (("stages", stages), ("microbatches", microbatches), ("accumulate", accumulate))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    if not faults and method.forward_reads is Reads.DOUBLE_BUFFERED and accumulate < stages:
        faults.append(
            f"accumulate: {accumulate}: {method.name} keeps two weight versions, which suffice only with at least as"
            f" many microbatches an update as stages, here {stages}"
        )
    if faults:
        raise BadInput(faults)
