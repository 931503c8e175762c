"""Compile the passes of a config's stages for devices that are not here, and read from the compiler
what memory they take there.

Compilers pad tensors, to the lanes of a TPU or the tiles of a Tensix core, so a stage takes several
times the bytes that its shapes say. Nothing is run: times are those of compiling.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

from ipu_pipe.backends.xla.devices import import_jax
from ipu_pipe.config.load import dump_yaml, read_yaml
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.cut.graphs import StageGraphs, trace_stages
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.files import write_text
from ipu_pipe.hardware.description import HARDWARE_FOLDER, SizeFigure
from ipu_pipe.job.record import Job
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.run.build import build
from ipu_pipe.run.compilers import KEY, CompiledPass, Topology, compile_or_read, find_cache
from ipu_pipe.run.planning import replace_missing_data
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.text import format_bytes, list_some

WEIGHTS = "weights"


@dataclass(frozen=True)
class CompiledStage:
    """A stage: its passes by kind, the bytes that a device needs (`needed`) and those by the shapes
    of torch's tensors (`by_shape`). `saved`: of a microbatch in flight, likewise `saved_by_shape`;
    `version`: of a version of its weights, likewise `version_by_shape`.
    """

    passes: dict[str, CompiledPass]
    needed: int
    by_shape: int
    saved: int
    saved_by_shape: int
    version: int
    version_by_shape: int

    @property
    def is_compiled(self) -> bool:
        """Return whether all passes compile."""
        return not any(one.fault for one in self.passes.values())


# ---- compiling


def _compile_stage(
    graphs: StageGraphs, is_split: bool, where: Topology, device: Any
) -> dict[str, CompiledPass]:
    from ipu_pipe.backends.xla.lower import lower

    passes = {"forward": graphs.forward, "backward": graphs.backward}
    if is_split:
        passes = {
            "forward": graphs.forward,
            "input gradient": graphs.input_gradient,
            "weight gradient": graphs.weight_gradient,
        }
    compiled = {}
    for kind, graph in passes.items():
        places = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        compiled[kind] = compile_or_read(lower(graph), places, where, device)
    # a stage's graph takes its weights first
    weights = list(graphs.forward.graph.nodes)[: len(graphs.weights)]
    tensors = [node.meta["val"] for node in weights]
    # how many bytes one version takes
    compiled[WEIGHTS] = compile_or_read(lambda *w: [x + 1 for x in w], tensors, where, device)
    return compiled


def compile_config(
    config: Config, where: Topology, say: Callable[[str], None] = lambda line: None
) -> tuple[Job, list[CompiledStage]]:
    """Compile the passes of all stages of a config, whatever its backend is. Raise `BadInput`.

    `say` gets a line for each stage.
    """
    # without jax this ends here, and not after the model was built
    import_jax()
    if config.precision != "float32":
        raise BadInput(f"precision: {config.precision}: must be float32 with {KEY}")
    # shapes are all that compiling needs of the data
    config, _ = replace_missing_data(config)
    # the config's own backend may need devices that are not here
    job = build(config.model_copy(update={"backend": BackendConfig()}))
    needed = max(job.placement) + 1
    raise_faults(
        {
            f"{KEY}: {where.name}: has {len(where.devices)} devices, the stages need "
            f"{needed}": needed > len(where.devices),
            f"method: {job.method.name}: blocks with losses of their own do not run on "
            "xla": job.method.structure is not None,
            "stages: they divide the weights of modules, which xla cannot: use fewer "
            "stages": job.partition.spread,
        }
    )
    all_graphs = trace_stages(job.model, job.partition.begin_names(), job.example, job.loss)
    # of all stages at once, before the first one is compiled
    _refuse_missing(all_graphs)
    is_split = job.schedule.passes == SPLIT_PASSES
    stages = []
    for s, (graphs, row) in enumerate(zip(all_graphs, build_memory_table(job))):
        begin = time.perf_counter()
        passes = _compile_stage(graphs, is_split, where, where.devices[job.placement[s]])
        stage = _sum_stage(passes, row, graphs)
        stages.append(stage)
        say(
            f"stage {s} of {len(all_graphs)}: {time.perf_counter() - begin:.1f} s: "
            f"{format_bytes(stage.needed)} on the device"
        )
    return job, stages


def _refuse_missing(all_graphs: Sequence[StageGraphs]) -> None:
    """Raise `BadInput` if a stage has operations that cannot be lowered."""
    from ipu_pipe.backends.xla.lower import list_missing

    faults = []
    for s, graphs in enumerate(all_graphs):
        names = [*list_missing(graphs.forward), *list_missing(graphs.backward)]
        if names:
            faults.append(f"model: stage {s}: xla has no {list_some([*dict.fromkeys(names)])}")
    raise_faults(faults)


def _sum_stage(
    passes: dict[str, CompiledPass], row: dict[str, int], graphs: StageGraphs
) -> CompiledStage:
    """Return what a stage needs on its device; `row`: its planned memory by shapes.

    All versions, gradients and optimizer state are padded as the weights are. A microbatch in
    flight keeps all outputs of its last pass. Passes take turns, so their temporary bytes do too.
    """
    state = row["weight_bytes"] + row["gradient_bytes"] + row["optimizer_bytes"]
    weight_bytes = sum(
        node.meta["val"].nbytes for node in list(graphs.forward.graph.nodes)[: len(graphs.weights)]
    )
    # some compilers pad results alone; an update's results are the next version
    version = max(passes[WEIGHTS].argument, passes[WEIGHTS].output)
    padding = version / weight_bytes if weight_bytes else 1.0
    # that of the weights only measures them, and never runs
    programs = [one for kind, one in passes.items() if kind != WEIGHTS]
    saved = max(one.output for kind, one in passes.items() if kind in ("forward", "input gradient"))
    needed = state * padding + row["in_flight"] * saved
    needed += max(one.temporary for one in programs) + sum(one.code for one in programs)
    return CompiledStage(
        passes,
        int(needed),
        state + row["activation_bytes"],
        saved,
        row["activation_bytes"] // max(row["in_flight"], 1),
        version,
        weight_bytes,
    )


# ---- the answer

_COLUMNS: dict[str, Callable[[CompiledPass], str]] = {
    "FLOPs": lambda one: f"{one.flops:.3g}",
    "operations": lambda one: str(sum(one.operations.values())),
    "in DRAM": lambda one: str(one.in_dram),
    "arguments": lambda one: format_bytes(one.argument),
    "outputs": lambda one: format_bytes(one.output),
    "temporary": lambda one: format_bytes(one.temporary),
    "code": lambda one: format_bytes(one.code),
    "compiled in": lambda one: f"{one.seconds:.1f} s",
}


def format_stages(job: Job, where: Topology, stages: Sequence[CompiledStage]) -> str:
    """Return the table of the stages and the verdict of each device."""
    title = (
        f"{job.config.method}, microbatches of {job.config.micro_batch_size}, compiled for "
        f"{where.name} by {where.versions}: not run on hardware"
    )
    programs = [
        (s, kind, one)
        for s, stage in enumerate(stages)
        for kind, one in stage.passes.items()
        if kind != WEIGHTS
    ]
    # without those that the compiler does not tell
    columns = {
        name: describe
        for name, describe in _COLUMNS.items()
        if any(describe(one) != describe(CompiledPass()) for _, _, one in programs)
    }
    lines = [title, "", f"{'stage':>5}  {'pass':15}" + "".join(f"{name:>12}" for name in columns)]
    for s, kind, one in programs:
        text = one.fault or "".join(f"{describe(one):>12}" for describe in columns.values())
        lines.append(f"{s:>5}  {kind:15}{text}")
    for s, kind, one in programs:
        if one.operations:
            counts = ", ".join(f"{count} {name}" for name, count in one.operations.items())
            lines.append(f"  stage {s}, {kind}: {counts}")
    lines += ["", "bytes of a stage on its device: by the compiler, and by the shapes of torch"]
    for s, stage in enumerate(stages):
        lines.append(
            f"  stage {s}: {format_bytes(stage.needed)}, by shapes {format_bytes(stage.by_shape)}; "
            f"a microbatch in flight {format_bytes(stage.saved)}, by shapes "
            f"{format_bytes(stage.saved_by_shape)}; a version of its weights "
            f"{format_bytes(stage.version)}, by shapes {format_bytes(stage.version_by_shape)}"
        )
    for device in sorted(set(job.placement)):
        lines.append(_judge(device, job, where, stages))
    return "\n".join(lines)


def _judge(device: int, job: Job, where: Topology, stages: Sequence[CompiledStage]) -> str:
    """Return the line that says whether the stages of a device fit in its memory."""
    here = [stage for s, stage in enumerate(stages) if job.placement[s] == device]
    # the bytes of such a pass are not known, and a sum without them might seem to fit
    if not all(stage.is_compiled for stage in here):
        return f"device {device}: does not fit: a pass does not compile"
    total = sum(stage.needed for stage in here)
    if where.memory_bytes is None:
        return (
            f"device {device}: needs {format_bytes(total)}; the compiler does not tell its memory"
        )
    fits = "fits" if total <= where.memory_bytes else "does not fit"
    return f"device {device}: {fits}: {format_bytes(total)} of {format_bytes(where.memory_bytes)}"


def convert_to_record(job: Job, where: Topology, stages: Sequence[CompiledStage]) -> dict[str, Any]:
    """Return the answer as JSON values."""
    return {
        "topology": where.name,
        "versions": where.versions,
        "memory_bytes": where.memory_bytes,
        "placement": list(job.placement),
        "stages": [asdict(stage) for stage in stages],
    }


def write_hardware(where: Topology, title: str, stages: Sequence[CompiledStage]) -> Path | None:
    """Write the description of the topology's hardware with the compiler's facts, for the planner;
    return its file, None if no description of the family is shipped, or a pass does not compile.
    """
    # such a pass keeps nothing in its sums, and the padding of the others is not that of all
    if not all(stage.is_compiled for stage in stages):
        return None
    family = where.name.partition(":")[0]
    base = HARDWARE_FOLDER / f"{family}.yaml"
    saved = sum(stage.saved for stage in stages)
    by_shape = sum(stage.saved_by_shape for stage in stages)
    if not base.is_file() or where.memory_bytes is None or not by_shape or not saved:
        return None
    raw = read_yaml(base, {})
    source = f"the compiler ({where.versions}), for {title}"

    def state(value: float) -> dict[str, Any]:
        return SizeFigure(value=value, source=source, confirmed=True).model_dump()

    raw["devices"] = len(where.devices)
    raw["device"]["memory_bytes"] = state(where.memory_bytes)
    # the compiler states what programs may use, of which nothing more goes off
    raw["device"]["usable_share"] = state(1.0)
    # a description has no padding below 1, though a compiler that fuses may keep less than torch
    raw["device"]["activation_padding"] = state(max(1.0, round(saved / by_shape, 3)))
    file = find_cache() / f"{where.name.replace(':', '_')}.yaml"
    return write_text(file, dump_yaml(raw))
