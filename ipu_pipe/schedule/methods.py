"""The table of training methods: each row tells when passes run (pipeline, turn) and which weight
versions they read.

Update rules that some methods add (T1, T2, spike compensation, weight prediction) are not columns
of this table: they change the use of a gradient, not the time of a pass or the version that it
reads. They are in ipu_pipe.update.rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Iterable, Mapping

from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.refusals import Argument, name_key, show_value
from ipu_pipe.schedule.delays import Delay, History
from ipu_pipe.text import show, suggest


class Timeline(Enum):
    """The pipelines: the order of a stage's passes. Each stage does one pass per slot, except in
    DATAFLOW and the LOCAL ones.
    """

    SEQUENTIAL = "sequential"  # one microbatch at a time through all stages and back
    FILL_DRAIN = "fill_drain"  # all forwards of a batch, then all its backwards
    ONE_F_ONE_B_FLUSH = (
        "1f1b_flush"  # one forward, one backward; drains after every batch; at most P-s in flight
    )
    ONE_F_ONE_B = "1f1b"  # never drains; at most P in flight, counted at stage 0 only
    ONE_F_ONE_B_CAPPED = "1f1b_capped"  # never drains; at most P-s in flight on stage s
    # 1F1B over the steps of replicas, which take turns; drains after every round of local steps
    LOCAL_SGD = "local_sgd"
    DATAFLOW = "dataflow"  # a forward and a backward on every stage in each step
    LOCAL = "local"  # a forward and, at once, its backward on every stage in each step; no stage waits for a later one
    LOCAL_SHARED = "local_shared"  # the same, but updates wait for the next stage's gradient of the shared layer
    # generated orders of each device's passes (`schedule.orders`); all but the first drain after
    # every batch
    CONTINUOUS_1F1B = (
        "continuous_1f1b"  # interleaved 1F1B that never drains, of asynchronous methods
    )
    INTERLEAVED_1F1B = "interleaved_1f1b"  # 1F1B with several stages on a device
    LOOPED_BFS = "looped_bfs"  # GPipe with several stages on a device, stage by stage
    INTERLEAVED_ZB = (
        "interleaved_zb"  # interleaved 1F1B with split backwards; with one stage on a device, ZB-H1
    )
    ZB_H2 = "zb_h2"  # the same with twice the warm-up, so that no device waits between its first and its last pass
    ZB_AUTO = "zb_auto"  # planned by durations within a limit of activations
    ZBV = "zbv"  # planned by durations, two stages on a device in a V, with the activations of 1F1B
    V_HALF = "v_half"  # two stages on a device in a V, with half the activations of 1F1B
    V_MIN = "v_min"  # the same with a third
    DUALPIPE_V = "dualpipe_v"  # DeepSeek's DualPipe, cut in half: two stages on a device in a V
    ROWS = "rows"  # read from a file


class Reads(Enum):
    """The rules for the weight version that a pass of a stage reads."""

    NEWEST = "newest"  # after all updates that the stage made in earlier slots
    DOUBLE_BUFFERED = "double_buffered"  # one version behind the batch: max(floor(m/N) - 1, 0), counted from each drain
    STASHED = "stashed"  # a backward reads the version of its microbatch's forward
    OWN = "own"  # after all updates of that stage by the same replica of the model: one per local step
    DELAYED = (
        "delayed"  # a stated or drawn number of updates before the backward, whatever the schedule
    )


class DefaultAccumulate(Enum):
    """The default number of microbatches per update, N."""

    MICROBATCHES = "microbatches"  # one update for the whole run
    STAGES = "stages"  # N = P
    ONE = "one"  # N = 1


@dataclass(frozen=True)
class Structure:
    """The blocks of local-parallel training, each trained by its own loss (Laskin et al. 2020,
    section 3).

    `blocks`: their number, or the names at which the second and later ones begin; None: every stage
    is a block. `overlap`: the number of stages of the next block that a block also trains; the two
    average their gradients. `layers`: only the last `layers` stages train, as one block.
    """

    blocks: None | int | tuple[str, ...] = None
    overlap: int = 0
    layers: int | None = None


@dataclass(frozen=True)
class Outer:
    """The outer optimizer of DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (Douillard et al.
    2025): SGD.

    fragments: the number of groups of neighbouring stages that are synchronized in turn, or
    "per_stage"; offset: the number of the first one; delay: the steps before the end of a round at
    which the replicas' weights are taken; mix: the share that a replica keeps of its own weights.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int | str = 1
    offset: int = 0
    delay: int = 0
    mix: float = 0.0

    def count_fragments(self, stages: int) -> int:
        """Return F, the number of fragments of P `stages`."""
        return self.fragments if isinstance(self.fragments, int) else stages


@dataclass(frozen=True)
class Rounds:
    """The rounds of LocalSGD (Algorithm 2).

    `replicas` R of the whole model (None: R = P) make `steps` K steps each with their own weights;
    then the weights are averaged stage by stage. The default K is the paper's for scaling and for
    its Transformer. A drain ends a round early. With an outer optimizer (DiLoCo) one of F fragments
    is synchronized after each K / F steps.
    """

    replicas: int | None = None
    steps: int = 5
    outer: Outer | None = None

    def interval(self, stages: int) -> int:
        """Return the steps between two drains."""
        return (
            self.steps if self.outer is None else self.steps // self.outer.count_fragments(stages)
        )


@dataclass(frozen=True)
class Order:
    """The settings of a generated order of passes besides the sizes (`schedule.orders`).

    stages_per_device: v. Stages are placed on devices in turn; with `is_v` there and back, in a V.
    fixed: v cannot be changed.
    splits: the backwards of an asynchronous method are split.
    activation_limit: the limit of a device in a planned order, in units of 1F1B's activations (P
    microbatches of a device).
    weight_share: the share of a microbatch's activations that the weight gradient still needs and
    then frees.
    durations: of F, I and W of a device's microbatch; link: duration of a message between devices.
    Only planned orders use them.
    file: a CSV file of rows in PyTorch's format.
    """

    stages_per_device: int = 1
    is_v: bool = False
    fixed: bool = False
    splits: bool = False
    activation_limit: float = 1.0
    weight_share: float = 1.0
    durations: tuple[float, float, float] = (1.0, 1.0, 1.0)
    link: float = 0.0
    file: str = ""

    def place(self, stages: int) -> tuple[int, ...]:
        """Return the device of each stage."""
        devices = stages // self.stages_per_device
        if self.is_v:
            return tuple(min(stage, stages - 1 - stage) for stage in range(stages))
        return tuple(stage % devices for stage in range(stages))


@dataclass(frozen=True)
class Method:
    """One way to train a pipeline.

    turn: for dataflow, the steps between the last stage's forward and its backward (0: both in one
    step).
    flushes: the pipeline drains before every update, so that no pass reads old weights.
    predicts: both passes read weights predicted for the end of the first stage's backward.
    delay: the delays if forward_reads is DELAYED.
    segments: the number of segments of stages whose activations are recomputed from their inputs
    (0: the square root of P).
    structure: gradients stay inside blocks of stages; None: they pass through the whole model.
    history: updates of single stages with gradients at old iterates; the reads above are then the
    schedule's.
    rounds: replicas have their own weights.
    one_version: all stages read one version for a microbatch, so that several stages may use one
    weight.
    holder_decides: so may those of an asynchronous method: all uses of a weight read, in both
    passes of a microbatch, the version that the forward of its first stage reads.
    order: settings of a pipeline that is given by each device's order of passes.
    """

    name: str
    pipeline: Timeline
    turn: int
    forward_reads: Reads
    backward_reads: Reads
    flushes: bool
    default_accumulate: DefaultAccumulate
    source: str
    predicts: bool = False
    delay: Delay | None = None
    segments: int | None = None
    structure: Structure | None = None
    history: History | None = None
    rounds: Rounds | None = None
    one_version: bool = False
    holder_decides: bool = False
    order: Order | None = None

    @property
    def is_stale(self) -> bool:
        """Whether a pass can read older weights than the newest on some number of stages."""
        return not self.flushes and self.structure is None and self.rounds is None

    @property
    def is_pipeline(self) -> bool:
        """Whether the method trains the whole model by one loss, in the order of its schedule."""
        return self.structure is None and self.history is None and self.rounds is None

    def reads_old(self, stages: int) -> bool:
        """Return whether a pass may read older weights than the newest on P = `stages` stages."""
        # also on one stage, where forwards run ahead by an order of their own, or a file's
        has_order = self.order is not None or self.pipeline is Timeline.ROWS
        has_delays = self.delay is not None or self.history is not None
        return self.is_stale and (stages > 1 or has_order or has_delays)

    @property
    def stages_per_device(self) -> int:
        """The number of stages on each device: of its order, else one."""
        return 1 if self.order is None else self.order.stages_per_device

    @property
    def one_stage_reason(self) -> str | None:
        """The reason why all uses of a weight must be in one stage, with remedies; None if they
        need not be.
        """
        if self.one_version or self.holder_decides:
            return None
        why = "stages may read different versions of it, so that it would have two delays"
        if self.structure is not None:
            why = "each block is trained by its own loss, so that it would have two gradients"
        elif self.history is not None or self.rounds is not None:
            why = f"{'single stages' if self.rounds is None else 'replicas'} step by themselves"
        others = ", ".join(
            name for name, method in METHODS.items() if method.one_version and method.order is None
        )
        tied = f", {Argument('method_args', {'tied': 'holder'})}" if self.can_share_weights else ""
        return f"with {self.name} {why}: cut elsewhere, untie them, or use method {others}{tied}"

    @property
    def can_share_weights(self) -> bool:
        """Whether both passes of a microbatch read one version, which a first stage may decide."""
        keeps = self.backward_reads is Reads.STASHED and self.delay is None and not self.predicts
        return self.is_pipeline and keeps

    def accumulate_for(self, stages: int, microbatches: int) -> int:
        """Return the default N, the microbatches per update."""
        return {
            DefaultAccumulate.MICROBATCHES: microbatches,
            DefaultAccumulate.STAGES: stages,
            DefaultAccumulate.ONE: 1,
        }[self.default_accumulate]


def _make_ordered_method(name: str, pipeline: Timeline, source: str, **order: Any) -> Method:
    """Return a row of the table for a method that drains after every batch and is given by its
    devices' orders.
    """
    return Method(
        name,
        pipeline,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        True,
        DefaultAccumulate.MICROBATCHES,
        source,
        one_version=True,
        order=Order(**order),
    )


_V: dict[str, Any] = {"stages_per_device": 2, "is_v": True, "fixed": True}
# The share of activations that weight gradients free in the smallest GPT of Qi et al.: 32 h / (34 h
# + 5 a s), h = 2304, a = 24 heads, s = 1024.
_GPT_WEIGHT_SHARE = 0.366

_ROWS = (
    Method(
        "naive",
        Timeline.SEQUENTIAL,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        True,
        DefaultAccumulate.ONE,
        "inter-layer model parallelism, the baseline of Narayanan et al. 2021 (PipeDream-2BW), "
        "Figure 1",
        one_version=True,
    ),
    Method(
        "gpipe",
        Timeline.FILL_DRAIN,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        True,
        DefaultAccumulate.MICROBATCHES,
        "Huang et al. 2019",
        one_version=True,
    ),
    Method(
        "pipedream_flush",
        Timeline.ONE_F_ONE_B_FLUSH,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        True,
        DefaultAccumulate.MICROBATCHES,
        "Narayanan et al. 2021 (PipeDream-2BW), section 3.2",
        one_version=True,
    ),
    Method(
        "pipedream",
        Timeline.ONE_F_ONE_B,
        0,
        Reads.NEWEST,
        Reads.STASHED,
        False,
        DefaultAccumulate.ONE,
        "Narayanan et al. 2019; timeline of the randomized PipeDream paper, appendix E",
    ),
    Method(
        "pipedream_2bw",
        Timeline.ONE_F_ONE_B_CAPPED,
        0,
        Reads.DOUBLE_BUFFERED,
        Reads.STASHED,
        False,
        DefaultAccumulate.STAGES,
        "Narayanan et al. 2021, section 3.1",
        one_version=True,
    ),
    Method(
        "pipemare",
        Timeline.DATAFLOW,
        1,
        Reads.NEWEST,
        Reads.NEWEST,
        False,
        DefaultAccumulate.ONE,
        "Yang et al. 2021",
    ),
    Method(
        "pipelined_backprop",
        Timeline.DATAFLOW,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        False,
        DefaultAccumulate.ONE,
        "Kosson et al. 2021",
    ),
    Method(
        "spectrain",
        Timeline.DATAFLOW,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        False,
        DefaultAccumulate.ONE,
        "Chen et al. 2018 (SpecTrain), as compared by Kosson et al. 2021",
        predicts=True,
    ),
    Method(
        "local_greedy",
        Timeline.LOCAL,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        False,
        DefaultAccumulate.ONE,
        "Belilovsky et al. 2019; Laskin et al. 2020, Figure 2(b)",
        structure=Structure(),
    ),
    Method(
        "local_chunked",
        Timeline.LOCAL,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        False,
        DefaultAccumulate.ONE,
        "Laskin et al. 2020, Figure 2(d)",
        structure=Structure(blocks=2),
    ),
    Method(
        "local_overlapping",
        Timeline.LOCAL_SHARED,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        False,
        DefaultAccumulate.ONE,
        "Xiong et al. 2020; Laskin et al. 2020, Figure 2(c)",
        structure=Structure(overlap=1),
    ),
    Method(
        "last_layers",
        Timeline.LOCAL,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        False,
        DefaultAccumulate.ONE,
        "the baseline of Laskin et al. 2020, section 4",
        structure=Structure(layers=1),
    ),
    Method(
        "local_sgd",
        Timeline.LOCAL_SGD,
        0,
        Reads.OWN,
        Reads.STASHED,
        False,
        DefaultAccumulate.STAGES,
        "LocalSGD in a pipeline: the randomized PipeDream paper, Algorithm 2 and appendix E.2",
        rounds=Rounds(),
    ),
    Method(
        "randomized_pipedream",
        Timeline.ONE_F_ONE_B,
        0,
        Reads.NEWEST,
        Reads.STASHED,
        False,
        DefaultAccumulate.ONE,
        "the randomized PipeDream paper, Algorithm 1",
        history=History(),
    ),
    _make_ordered_method(
        "interleaved_1f1b",
        Timeline.INTERLEAVED_1F1B,
        "Narayanan et al. 2021 (Megatron-LM), section 2.2",
    ),
    _make_ordered_method(
        "looped_bfs", Timeline.LOOPED_BFS, "Lamy-Poirier 2023, breadth-first pipeline parallelism"
    ),
    _make_ordered_method(
        "zb_h1", Timeline.INTERLEAVED_ZB, "Qi et al. 2023 (Zero Bubble), section 2.1", fixed=True
    ),
    _make_ordered_method("zb_h2", Timeline.ZB_H2, "Qi et al. 2023, section 2.2", fixed=True),
    _make_ordered_method(
        "interleaved_zb",
        Timeline.INTERLEAVED_ZB,
        "ZB-H1 with several stages on a device, as in PyTorch",
    ),
    _make_ordered_method(
        "zb_auto",
        Timeline.ZB_AUTO,
        "Qi et al. 2023, section 3",
        fixed=True,
        weight_share=_GPT_WEIGHT_SHARE,
    ),
    _make_ordered_method("zbv", Timeline.ZBV, "Qi et al. 2023, section 6", **_V),
    _make_ordered_method("v_half", Timeline.V_HALF, "Qi et al. 2024 (Controllable Memory)", **_V),
    _make_ordered_method("v_min", Timeline.V_MIN, "Qi et al. 2024 (Controllable Memory)", **_V),
    _make_ordered_method(
        "dualpipe_v", Timeline.DUALPIPE_V, "DeepSeek-AI 2024; DualPipeV, 2025", **_V
    ),
    _make_ordered_method("rows", Timeline.ROWS, "a file of rows in PyTorch's format"),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


# ---- a method's name and arguments -> its row

# key of method_args -> the one method to which it belongs
METHOD_OF_KEY = {
    "blocks": "local_chunked",
    "overlap": "local_overlapping",
    "layers": "last_layers",
    "delay_bound": "randomized_pipedream",
    "delays": "randomized_pipedream",
    "order": "randomized_pipedream",
    "nag": "randomized_pipedream",
    "replicas": "local_sgd",
    "local_steps": "local_sgd",
    "outer": "local_sgd",
    "file": "rows",
}
# asynchronous methods that take settings of an order: they also run 1F1B with several stages on a
# device, and split backwards
ASYNCHRONOUS_WITH_ORDER = ("pipedream", "pipelined_backprop")
# keys of the settings of an order
ORDER_KEYS = ("stages_per_device", "split_backward", "activation_limit", "durations", "link")
SCHEDULES = tuple(
    row.value for row in (Timeline.ONE_F_ONE_B, Timeline.ONE_F_ONE_B_CAPPED, Timeline.DATAFLOW)
)
AXIS_KEYS = ("schedule", "turn", "stash", "hogwild", "constant_delay", "recompute")


def require_known_methods(names: Iterable[str], key: str) -> None:
    """Raise `BadInput` with a line for each name at `key` that is not a method's, and the nearest
    method.
    """
    unknown = [name for name in names if name not in METHODS]
    allowed = f"must be one of {', '.join(METHODS)}"
    raise_faults([f"{key}: {show(name)}: {allowed}{suggest(name, METHODS)}" for name in unknown])


def resolve_method(name: str, args: Mapping[str, Any] = {}) -> Method:
    """Return the method `name` with its axes changed by `args`.

    Keys of `args`: `tied` holder,
    `schedule` 1f1b|1f1b_capped|dataflow, `turn` 0|1, `stash` true|false, `hogwild`
    {mean, max}, `constant_delay` {updates}, `recompute` {segments}, the keys of ORDER_KEYS, and the
    keys in METHOD_OF_KEY. None means not given. Other keys belong to update rules and are ignored.
    The config has checked the types of the values. Raise `BadInput` for an unknown name, and for
    arguments that do not belong to the method.
    """
    require_known_methods([name], "method")
    method = METHODS[name]
    settings = {
        key: args[key]
        for key in (*AXIS_KEYS, *METHOD_OF_KEY, *ORDER_KEYS)
        if args.get(key) is not None
    }
    # before anything is set, so that one attempt tells all faults
    raise_faults(_find_misfits(method, settings))
    method = _resolve_settings(method, settings)
    # where all stages read one version they share weights anyway
    if args.get("tied") is None or method.one_version:
        return method
    if not method.can_share_weights:
        raise BadInput(
            f"{_format_key('tied')}: {show_value(args['tied'])}: with {method.name} the passes of "
            f"a microbatch do not read one version: leave it out, or use pipedream or "
            f"{Argument('method_args', {'stash': True})}"
        )
    return replace(method, holder_decides=True)


def _resolve_settings(method: Method, settings: dict[str, Any]) -> Method:
    """Return the method with the axes and settings that fit it."""
    if method.order is not None:
        return replace(method, order=replace(method.order, **settings))
    method = _set_order(method, settings)
    settings = {key: value for key, value in settings.items() if key not in ORDER_KEYS}
    if method.history is not None:
        beta = settings.get("nag")
        history = History(
            settings.get("delay_bound"),
            settings.get("delays", History.LAWS[0]),
            settings.get("order", History.ORDERS[0]),
            None if beta is None else float(beta),
        )
        return replace(method, history=history)
    if method.rounds is not None:
        # `Outer` is its only kind, so that its name says nothing more
        outer = {key: value for key, value in settings.get("outer", {}).items() if key != "name"}
        steps = settings.get("local_steps", Rounds.steps)
        return replace(
            method,
            rounds=Rounds(
                settings.get("replicas"), steps, Outer(**outer) if "outer" in settings else None
            ),
        )
    if method.structure is not None:
        changes: dict[str, Any] = {
            key: tuple(v) if isinstance(v, (list, tuple)) else v for key, v in settings.items()
        }
        return (
            replace(method, structure=replace(method.structure, **changes)) if changes else method
        )
    return _change_axes(method, settings)


def find_method(method: str | Method) -> Method:
    """Return the row of a method, which may be its name. Raise `BadInput` for an unknown name."""
    return method if isinstance(method, Method) else resolve_method(method)


def _set_order(method: Method, settings: Mapping[str, Any]) -> Method:
    """Let an asynchronous method run 1F1B on several stages of a device, with whole or split
    backwards.
    """
    splits = bool(settings.get("split_backward"))
    order = Order(
        settings.get("stages_per_device", 1),
        splits=splits,
        activation_limit=settings.get("activation_limit", 1.0),
    )
    if order.stages_per_device == 1 and not splits:
        return method
    return replace(method, pipeline=Timeline.CONTINUOUS_1F1B, turn=0, order=order)


def _change_axes(method: Method, settings: Mapping[str, Any]) -> Method:
    """Return the method with another pipeline, turn, delay, version read by backwards, or
    recomputation.
    """
    if "schedule" in settings:
        pipeline = Timeline(settings["schedule"])
        method = replace(
            method, pipeline=pipeline, turn=method.turn if pipeline is Timeline.DATAFLOW else 0
        )
    if "turn" in settings:
        method = replace(method, turn=settings["turn"])
    # the paper takes the gradient at the delayed weights, so both passes read the same version
    if "hogwild" in settings:
        mean = settings["hogwild"].get("mean")
        means = (
            None if mean is None else tuple(mean) if isinstance(mean, (list, tuple)) else (mean,)
        )
        delay = Delay(settings["hogwild"]["max"], drawn=True, mean=means)
        method = replace(
            method, forward_reads=Reads.DELAYED, backward_reads=Reads.STASHED, delay=delay
        )
    if "constant_delay" in settings:
        method = replace(
            method,
            forward_reads=Reads.DELAYED,
            delay=Delay.make_constant(settings["constant_delay"]["updates"]),
        )
    if "stash" in settings:
        method = replace(
            method, backward_reads=Reads.STASHED if settings["stash"] else Reads.NEWEST
        )
    if "recompute" in settings:
        # null is 0: the square root of P
        method = replace(method, segments=settings["recompute"].get("segments") or 0)
        if method.backward_reads is not Reads.NEWEST or method.pipeline is not Timeline.DATAFLOW:
            raise BadInput(
                f"method_args.recompute: {show(settings['recompute'])}: belongs to methods whose "
                f"passes both read the newest weights on the dataflow schedule (pipemare, "
                f"pipelined_backprop); "
                f"elsewhere set {Argument('recompute', True)}"
            )
    return method


def _format_key(key: str) -> str:
    """Return the place of a method's setting in a refusal."""
    # it stands beside method_args in a config, the others in it
    return key if key == "stages_per_device" else name_key(f"method_args.{key}")


def _find_misfits(method: Method, settings: Mapping[str, Any]) -> list[str]:
    """Return a line for every argument that does not fit the method or another argument."""
    reasons = {
        key: f"belongs to {METHOD_OF_KEY[key]} only"
        for key in settings
        if METHOD_OF_KEY.get(key, method.name) != method.name
    }
    default = method.stages_per_device
    changes_schedule = {"schedule", "turn", "hogwild", "constant_delay", "recompute"} & {*settings}
    takes_order = method.name in ASYNCHRONOUS_WITH_ORDER and not changes_schedule
    is_fixed = not takes_order if method.order is None else method.order.fixed
    if is_fixed and settings.get("stages_per_device", default) != default:
        reasons["stages_per_device"] = f"{method.name} has {default} on each device"
    # false says what is so, except of a method whose order decides by itself
    sets_split = settings.get("split_backward") or (
        "split_backward" in settings and method.order is not None
    )
    if sets_split and not takes_order:
        reasons["split_backward"] = (
            f"belongs to {' and '.join(ASYNCHRONOUS_WITH_ORDER)}, without another schedule, turn "
            f"or delay"
        )
    if (
        "activation_limit" in settings
        and method.name != "zb_auto"
        and not (takes_order and settings.get("split_backward"))
    ):
        reasons["activation_limit"] = (
            f"belongs to zb_auto and to asynchronous methods with "
            f"{Argument('method_args', {'split_backward': True})}"
        )
    fixed = _explain_fixed_axes(method)
    for key in (key for key in settings if key in AXIS_KEYS):
        # a prediction follows whatever schedule there is
        if fixed is not None and not (method.predicts and key in ("schedule", "turn")):
            reasons[key] = fixed
    # the first of both: the other one is refused beside it
    delay_key = (
        "hogwild"
        if "hogwild" in settings
        else "constant_delay"
        if "constant_delay" in settings
        else None
    )
    pipeline = Timeline(settings.get("schedule", method.pipeline))
    # combinations are judged only of arguments that fit by themselves
    if not reasons:
        if "turn" in settings and pipeline is not Timeline.DATAFLOW:
            reasons["turn"] = (
                f"only the dataflow schedule has a turn; set "
                f"{Argument('method_args', {'schedule': 'dataflow'})}"
            )
        if delay_key == "hogwild" and "constant_delay" in settings:
            reasons["hogwild"] = "cannot be combined with constant_delay, which fixes the delays"
        if delay_key is not None and "recompute" in settings:
            reasons[delay_key] = (
                "cannot be combined with recompute, whose weights are defined by the pipeline's "
                "own delays"
            )
        if settings.get("delays") == "schedule":
            if settings.get("order") != "schedule":
                reasons["delays"] = (
                    f"PipeDream's delays need PipeDream's order of updates: set "
                    f"{Argument('method_args', {'order': 'schedule'})}"
                )
            if "delay_bound" in settings:
                reasons["delay_bound"] = "delays schedule has PipeDream's own bound: leave it out"
    return [
        f"{_format_key(key)}: {show_value(settings[key])}: {reason}"
        for key, reason in reasons.items()
    ]


def _explain_fixed_axes(method: Method) -> str | None:
    """Return the reason why the method's schedule and reads cannot be changed, None if they can."""
    if method.structure is not None:
        return f"{method.name} trains blocks by their own losses: no gradient is stale"
    if method.history is not None:
        return f"{method.name} has its own settings of delays: delay_bound, delays, order, nag"
    if method.rounds is not None:
        return f"{method.name} has its own schedule and reads no old weights"
    if method.flushes:
        return (
            f"{method.name} drains the pipeline before every update: its schedule and its "
            f"weights are fixed"
        )
    if method.forward_reads is Reads.DOUBLE_BUFFERED:
        return f"{method.name} is 1F1B with exactly two weight versions: neither can be changed"
    if method.predicts:
        return f"{method.name} predicts the weights that both passes read from the newest ones"
    return None


def require_sizes(method: Method, stages: int, microbatches: int, accumulate: int) -> None:
    """Raise `BadInput`, with every fault, unless P `stages`, M `microbatches` and N = `accumulate`
    are possible.

    M need not be a multiple of N: a last batch that is not full makes no update.
    """
    faults = [
        f"{key}: {show(value)}: must be an integer >= 1"
        for key, value in (
            ("stages", stages),
            ("microbatches", microbatches),
            ("accumulate", accumulate),
        )
        # True is an int, too
        if type(value) is not int or value < 1
    ]
    if not faults and method.forward_reads is Reads.DOUBLE_BUFFERED and accumulate < stages:
        faults.append(
            f"accumulate: {accumulate}: {method.name} keeps two weight versions, which suffice "
            f"only with at least as"
            f" many microbatches per update as stages, here {stages}"
        )
    if not faults and method.rounds is not None and method.rounds.outer is not None:
        outer = method.rounds.outer
        steps = method.rounds.steps
        key = "method_args.outer"
        fragments = outer.count_fragments(stages)
        interval = steps // fragments
        if fragments > stages:
            faults.append(
                f"{key}.fragments: {fragments}: a fragment is a group of stages: must be at most "
                f"{stages}"
            )
        elif steps % fragments:
            faults.append(
                f"method_args.local_steps: {steps}: must be a multiple of the {fragments} "
                f"fragments of outer"
            )
        else:
            if outer.offset >= fragments:
                faults.append(
                    f"{key}.offset: {outer.offset}: must be below {fragments}, the fragments"
                )
            if outer.delay >= interval:
                faults.append(
                    f"{key}.delay: {outer.delay}: must be below {interval}, the steps between two"
                )
    table = method.delay.table if method.delay is not None else None
    if not faults and table is not None and [len(row) for row in table] != [accumulate] * stages:
        faults.append(
            f"method_args.constant_delay.updates: {[list(row) for row in table]}: must have a row "
            f"for each of {stages}"
            f" stages, with a delay for each of {accumulate} microbatches of an update"
        )
    if not faults and method.order is not None and stages % method.order.stages_per_device:
        faults.append(
            f"stages: {stages}: must be a multiple of the {method.order.stages_per_device} stages "
            f"on each device of"
            f" {method.name}"
        )
    raise_faults(faults)
