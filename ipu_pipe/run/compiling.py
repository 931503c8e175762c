"""Compile the passes of a config's stages for TPUs that are not here, and read from the compiler
what memory they take there.

libtpu contains the compiler and needs no TPU. It pads tensors to the lanes of the chip, so a stage
takes several times the bytes that its shapes say. Nothing is run: times are those of compiling.
Every compiled pass is kept in the user's cache, by its program, the topology and the versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch

from ipu_pipe.backends.xla.devices import import_jax
from ipu_pipe.config.load import dump_yaml, read_yaml
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.cut.graphs import StageGraphs, trace_stages
from ipu_pipe.errors import BadInput, guard_writing, raise_faults, summarize
from ipu_pipe.files import write_json, write_text
from ipu_pipe.hardware.description import HARDWARE_FOLDER, SizeFigure
from ipu_pipe.job.record import Job
from ipu_pipe.pipeline.build import build
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.run.planning import replace_missing_data
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.text import format_bytes, list_some, show

KEY = "--compile-for"
WEIGHTS = "weights"
# without a TPU, libtpu would ask a cloud's server for these
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class CompiledPass:
    """What the compiler says of one pass: FLOPs, bytes on the device, and the seconds that it took.

    `argument`, `output`: with padding. `temporary`: besides them, while the pass runs. `code`: of
    the program. `fault`: why it does not compile; the figures are 0 then.
    """

    flops: float = 0.0
    argument: int = 0
    output: int = 0
    temporary: int = 0
    code: int = 0
    seconds: float = 0.0
    fault: str = ""


@dataclass(frozen=True)
class Topology:
    """Devices of one kind that are not here. `memory_bytes`: what programs may fill on each, None
    if the compiler does not tell; `versions`: of the compilers.
    """

    name: str
    devices: Sequence[Any]
    memory_bytes: int | None
    versions: str


@dataclass(frozen=True)
class CompiledStage:
    """A stage: its passes by kind, the bytes that a device needs (`needed`) and those by the shapes
    of torch's tensors (`by_shape`). `saved`: of a microbatch in flight, likewise `saved_by_shape`.
    """

    passes: dict[str, CompiledPass]
    needed: int
    by_shape: int
    saved: int
    saved_by_shape: int


# ---- the topology


def find_topology(name: str) -> Topology:
    """Return the devices of a topology such as v5e:2x2. Raise `BadInput` if there is no such, or no
    compiler for it.
    """
    jax = import_jax()
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise BadInput(f"{KEY}: {name}: needs libtpu: pip install 'ipu_pipe[xla-tpu]'") from None
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # jax would look for a TPU
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    # the plugin raises errors of several kinds
    except Exception as error:
        raise BadInput(
            f"{KEY}: {show(name)}: libtpu has no such topology, must be like v5e:2x2: "
            f"{summarize(error)}"
        ) from None
    versions = f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}"
    return Topology(name, devices, _find_memory(devices[0]), versions)


def _find_memory(device: Any) -> int | None:
    """Return the bytes that programs may fill on a device: the compiler names them when it refuses
    a larger one.
    """
    import jax

    shape = jax.ShapeDtypeStruct((2**45,), "int8", sharding=_place_on(device))
    try:
        jax.jit(lambda x: x + 1).lower(shape).compile()
    except Exception as error:
        match = re.search(r"available HBM \(([0-9.]+)([KMGT])", str(error))
        return int(float(match[1]) * _UNITS[match[2]]) if match else None
    return None


def _place_on(device: Any) -> Any:
    from jax.sharding import SingleDeviceSharding

    return SingleDeviceSharding(device)


# ---- compiling


def _compile(
    graph: Callable[..., Any], arguments: Iterable[torch.Tensor], where: Topology, device: Any
) -> CompiledPass:
    """Compile a function of tensors, or read from the cache what the compiler said."""
    import jax

    from ipu_pipe.backends.xla.lower import DTYPES

    shapes = [
        jax.ShapeDtypeStruct(tuple(t.shape), DTYPES[t.dtype], sharding=_place_on(device))
        for t in arguments
    ]
    lowered = jax.jit(graph).lower(*shapes)
    key = f"{where.name} {where.versions} {lowered.as_text()}"
    file = find_cache() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    try:
        return CompiledPass(**json.loads(file.read_text(encoding="utf-8")))
    # another version's, or a damaged one
    except (OSError, ValueError, TypeError):
        pass
    begin = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return CompiledPass(fault=summarize(error))
    memory = program.memory_analysis()
    compiled = CompiledPass(
        float((program.cost_analysis() or {}).get("flops", 0)),
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        time.perf_counter() - begin,
    )
    with guard_writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, asdict(compiled))
    return compiled


def find_cache() -> Path:
    """Return the folder of what was compiled."""
    return Path.home() / ".cache" / "ipu_pipe" / "compiled"


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
        compiled[kind] = _compile(lower(graph), places, where, device)
    weights = list(graphs.forward.graph.nodes)[: len(graphs.weights)]
    tensors = [node.meta["val"] for node in weights]
    # how many bytes one version takes
    compiled[WEIGHTS] = _compile(lambda *w: [x + 1 for x in w], tensors, where, device)
    return compiled


def compile_config(
    config: Config, where: Topology, say: Callable[[str], None] = lambda line: None
) -> tuple[Job, list[CompiledStage]]:
    """Compile the passes of all stages of a config, whatever its backend is. Raise `BadInput`.

    `say` gets a line for each stage.
    """
    import_jax()
    if config.precision != "float32":
        raise BadInput(f"precision: {config.precision}: must be float32 with {KEY}")
    config, _ = replace_missing_data(config)
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
    padding = passes[WEIGHTS].argument / weight_bytes if weight_bytes else 1.0
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
    )


# ---- the answer


def format_stages(job: Job, where: Topology, stages: Sequence[CompiledStage]) -> str:
    """Return the table of the stages and the verdict of each device."""
    title = (
        f"{job.config.method}, microbatches of {job.config.micro_batch_size}, compiled for "
        f"{where.name} by {where.versions}: not run on hardware"
    )
    kinds = ("FLOPs", "arguments", "outputs", "temporary", "code", "compiled in")
    lines = [title, "", f"{'stage':>5}  {'pass':15}" + "".join(f"{kind:>12}" for kind in kinds)]
    for s, stage in enumerate(stages):
        for kind, one in stage.passes.items():
            if kind == WEIGHTS:
                continue
            sizes = (one.argument, one.output, one.temporary, one.code)
            cells = [f"{one.flops:.3g}", *map(format_bytes, sizes), f"{one.seconds:.1f} s"]
            text = one.fault or "".join(f"{cell:>12}" for cell in cells)
            lines.append(f"{s:>5}  {kind:15}{text}")
    lines += ["", "bytes of a stage on its device: by the compiler, and by the shapes of torch"]
    for s, stage in enumerate(stages):
        lines.append(
            f"  stage {s}: {format_bytes(stage.needed)}, by shapes {format_bytes(stage.by_shape)}; "
            f"a microbatch in flight {format_bytes(stage.saved)}, by shapes "
            f"{format_bytes(stage.saved_by_shape)}"
        )
    for device in sorted(set(job.placement)):
        lines.append(_judge(device, job, where, stages))
    return "\n".join(lines)


def _judge(device: int, job: Job, where: Topology, stages: Sequence[CompiledStage]) -> str:
    """Return the line that says whether the stages of a device fit in its memory."""
    here = [stage for s, stage in enumerate(stages) if job.placement[s] == device]
    faulty = any(one.fault for stage in here for one in stage.passes.values())
    total = sum(stage.needed for stage in here)
    if where.memory_bytes is None:
        return (
            f"device {device}: needs {format_bytes(total)}; the compiler does not tell its memory"
        )
    fits = not faulty and total <= where.memory_bytes
    return (
        f"device {device}: {'fits' if fits else 'does not fit'}: "
        f"{'a pass does not compile' if faulty else format_bytes(total)} of "
        f"{format_bytes(where.memory_bytes)}"
    )


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
    return its file, None if no description of the family is shipped.
    """
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
    raw["device"]["usable_share"] = state(1.0)
    raw["device"]["activation_padding"] = state(max(1.0, round(saved / by_shape, 3)))
    file = find_cache() / f"{where.name.replace(':', '_')}.yaml"
    return write_text(file, dump_yaml(raw))
