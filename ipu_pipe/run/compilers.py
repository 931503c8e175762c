"""The compilers of devices that are not here: libtpu's, in this process, and Tenstorrent's libtt, in
an environment of its own.

libtpu contains the compiler and needs no TPU. Tenstorrent's plugin registers itself in every jax of
its environment and is tried first there, so it has one that a user makes and nothing else uses; the
programs go there as StableHLO text (`ipu_pipe.run.blackhole`). Every compiled pass is kept in the
user's cache, by its program, the topology and the versions.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch

from ipu_pipe.backends.xla.devices import import_jax
from ipu_pipe.config.values import MOST_STAGES
from ipu_pipe.errors import BadInput, guard_writing, summarize
from ipu_pipe.files import write_json, write_text
from ipu_pipe.run import blackhole
from ipu_pipe.text import show, suggest

KEY = "--compile-for"
BLACKHOLE = "blackhole"
# the generations of TPUs that the compiler knows -> the smallest topology of each
TPUS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
# without a TPU, libtpu would ask a cloud's server for these
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# the compiler of Blackhole as it was tried, and the oldest glibc that it starts with
PLUGIN = "jax-tt-plugin"
PLUGIN_VERSION = "0.1.3"
_OLDEST_GLIBC = (2, 34)
# eight channels of DRAM, as the compiler describes a P150
_BLACKHOLE_BYTES = 8 * 4_278_190_080


@dataclass(frozen=True)
class CompiledPass:
    """What the compiler says of one pass: FLOPs, bytes on the device, and the seconds that it took.

    `argument`, `output`: with padding. `temporary`: besides them, while the pass runs. `code`: of
    the program. `operations`: of the device's own kinds -> how many; `in_dram`: those whose result
    lies in the device's slow memory. 0 or empty if the compiler does not tell. `fault`: why it does
    not compile.
    """

    flops: float = 0.0
    argument: int = 0
    output: int = 0
    temporary: int = 0
    code: int = 0
    seconds: float = 0.0
    fault: str = ""
    operations: dict[str, int] = field(default_factory=dict)
    in_dram: int = 0


def compile_here(lowered: Any) -> CompiledPass:
    """Compile a lowered program in this process."""
    import jax

    begin = time.perf_counter()
    try:
        program = lowered.compile()
    # that a pass does not fit is an answer, not the end of the command
    except jax.errors.JaxRuntimeError as error:
        return CompiledPass(fault=summarize(error))
    memory = program.memory_analysis()
    return CompiledPass(
        float((program.cost_analysis() or {}).get("flops", 0)),
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        time.perf_counter() - begin,
    )


@dataclass(frozen=True)
class Topology:
    """Devices of one kind that are not here. `memory_bytes`: what programs may fill on each, None
    if the compiler does not tell; `versions`: of the compilers. `devices` are jax's, or None where
    only another process has them. `platform`: the name that jax has for it, None for the devices'.
    `description`: of the chip, and of how the compiler's text is read, where these are ours.
    """

    name: str
    devices: Sequence[Any]
    memory_bytes: int | None
    versions: str
    platform: str | None = None
    description: str = ""
    compile: Callable[[Any], CompiledPass] = compile_here


def find_topology(name: str) -> Topology:
    """Return the devices of a topology such as v5e, v5e:2x4 or blackhole. Raise `BadInput` if there
    is no such, or no compiler for it.
    """
    import_jax()
    return _find_blackhole() if name == BLACKHOLE else _find_tpus(TPUS.get(name, name))


# ---- TPUs


def _find_tpus(name: str) -> Topology:
    import jax

    allowed = f"must be {BLACKHOLE}, {', '.join(TPUS)}, or more chips like v5e:4x4"
    # before the user installs what the name does not need
    if name.partition(":")[0] not in TPUS:
        raise BadInput(f"{KEY}: {show(name)}: {allowed}{suggest(name, [BLACKHOLE, *TPUS])}")
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise BadInput(f"{KEY}: {name}: needs libtpu: pip install 'ipu_pipe[xla-tpu]'") from None
    for key, value in _TPU_ENVIRONMENT.items():
        # what the user has set stays
        os.environ.setdefault(key, value)
    # jax would look for a TPU
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    # the plugin raises errors of several kinds
    except Exception as error:
        raise BadInput(
            f"{KEY}: {show(name)}: libtpu has no such topology, {allowed}: {summarize(error)}"
        ) from None
    versions = f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}"
    return Topology(name, devices, _find_memory(devices[0]), versions)


def _find_memory(device: Any) -> int | None:
    """Return the bytes that programs may fill on a device: the compiler names them when it refuses
    a larger one.
    """
    import jax

    # 32 TiB, which no device has
    shape = jax.ShapeDtypeStruct((2**45,), "int8", sharding=_place_on(device))
    try:
        jax.jit(lambda x: x + 1).lower(shape).compile()
    except Exception as error:
        match = re.search(r"available HBM \(([0-9.]+)([KMGT])", str(error))
        return int(float(match[1]) * _UNITS[match[2]]) if match else None
    return None


def _place_on(device: Any) -> Any:
    from jax.sharding import SingleDeviceSharding

    return None if device is None else SingleDeviceSharding(device)


# ---- Tenstorrent's Blackhole


def find_environment() -> Path:
    """Return the folder of the environment that has Tenstorrent's compiler, if the user made it."""
    return Path.home() / ".cache" / "ipu_pipe" / BLACKHOLE


def list_commands() -> list[list[str]]:
    """Return the commands that make the environment."""
    folder = str(find_environment())
    packages = [f"jax=={import_jax().__version__}", f"{PLUGIN}=={PLUGIN_VERSION}"]
    return [
        [sys.executable, "-m", "venv", folder],
        [f"{folder}/bin/python", "-m", "pip", "install", *packages],
    ]


def _find_blackhole() -> Topology:
    """Return any number of P150 chips of Tenstorrent."""
    library, version = platform.libc_ver()
    too_old = library == "glibc" and tuple(map(int, version.split("."))) < _OLDEST_GLIBC
    if library != "glibc" or too_old or platform.machine() != "x86_64":
        raise BadInput(
            f"{KEY}: {BLACKHOLE}: Tenstorrent's compiler needs Linux on x86_64 with glibc 2.34 or "
            f"later, here are {platform.system()}, {platform.machine()}, {library} {version}"
        )
    folders = [str(path) for path in find_environment().glob("lib/python3*/site-packages")]
    packages = importlib.metadata.distributions(path=folders)
    versions = {one.metadata["Name"]: one.version for one in packages}
    if not {"jax", PLUGIN} <= set(versions):
        how = " && ".join(" ".join(command) for command in list_commands())
        raise BadInput(
            f"{KEY}: {BLACKHOLE}: needs {PLUGIN} (600 MB, its package names no licence) in an "
            f"environment of its own: {how}"
        )
    description = f"jax {versions['jax']}, {PLUGIN} {versions[PLUGIN]}"
    return Topology(
        BLACKHOLE,
        # any number of chips, which only the other process can name
        [None] * MOST_STAGES,
        _BLACKHOLE_BYTES,
        description,
        "tt",
        Path(blackhole.__file__).read_text(encoding="utf-8"),
        BlackholeCompiler().compile,
    )


class BlackholeCompiler:
    """The process in Tenstorrent's environment, which begins with the first program and ends with
    this process.
    """

    @functools.cached_property
    def _folder(self) -> Path:
        """The folder of this process alone, for programs and the log: others may compile, too."""
        parent = find_environment() / "tmp"
        parent.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent))
        self._remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(self._remove)
        return folder

    @functools.cached_property
    def _process(self) -> subprocess.Popen[str]:
        folder = find_environment()
        chip = write_text(self._folder / "chip.yaml", blackhole.CHIP)
        # not this process's: its PYTHONPATH would lead to another jax
        environment = {
            "HOME": str(folder),
            "PATH": os.environ.get("PATH", ""),
            # the plugin unpacks itself there: it goes with the environment
            "TMPDIR": str(folder / "tmp"),
            "JAX_PLATFORMS": "cpu,tt",
            "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(chip),
        }
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [f"{folder}/bin/python", blackhole.__file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                # it writes files into its working folder
                cwd=self._folder,
                text=True,
            )
        assert process.stdout is not None
        # an empty line says that it has begun
        if not process.stdout.readline():
            _end(process)
            raise BadInput(
                f"{KEY}: {BLACKHOLE}: Tenstorrent's compiler does not start: {self._read_log(0)}"
            )
        return process

    @property
    def _log(self) -> Path:
        return self._folder / "log.txt"

    def _read_log(self, begin: int) -> str:
        """Return the fault that the compiler's log has after so many characters."""
        log = self._log.read_text(encoding="utf-8", errors="replace")[begin:]
        # the message names the log
        atexit.unregister(self._remove)
        return f"{blackhole.read_reason(log) or 'no reason'} ({self._log})"

    def compile(self, lowered: Any) -> CompiledPass:
        """Compile a lowered program in the other process."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        # what comes before is of earlier programs
        begin = len(self._log.read_text(encoding="utf-8", errors="replace"))
        # with the places in the model, by which the log names the operation at fault
        text = lowered.as_text(debug_info=True)
        file = write_text(self._folder / "program.mlir", text)
        answer = ""
        # the compiler may have ended since its last answer
        with contextlib.suppress(BrokenPipeError):
            print(file, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        if not answer:
            # some faults end the compiler; the next program has another one
            del self._process
            _end(process)
        facts = json.loads(answer or "{}")
        return CompiledPass(**facts) if facts else CompiledPass(fault=self._read_log(begin))


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that has closed its output, close the pipes to it, and wait for it."""
    process.kill()
    # what is still buffered for it is lost
    with contextlib.suppress(BrokenPipeError), process:
        pass


# ---- compiling, and what is kept


def find_cache() -> Path:
    """Return the folder of what was compiled."""
    return Path.home() / ".cache" / "ipu_pipe" / "compiled"


def compile_or_read(
    graph: Callable[..., Any], arguments: Iterable[torch.Tensor], where: Topology, device: Any
) -> CompiledPass:
    """Compile a function of tensors, or read from the cache what the compiler said."""
    import jax

    from ipu_pipe.backends.xla.lower import DTYPES

    shapes = [
        jax.ShapeDtypeStruct(tuple(t.shape), DTYPES[t.dtype], sharding=_place_on(device))
        for t in arguments
    ]
    platforms = where.platform and (where.platform,)
    lowered = jax.jit(graph).trace(*shapes).lower(lowering_platforms=platforms)
    # with what reads the compiler's text: a change of that must not find old figures
    key = f"{where.name} {where.versions} {where.description} {lowered.as_text()}"
    # the key has the whole text of a program, too long for a name
    file = find_cache() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    try:
        return CompiledPass(**json.loads(file.read_text(encoding="utf-8")))
    # another version's, or a damaged one
    except (OSError, ValueError, TypeError):
        pass
    compiled = where.compile(lowered)
    # a fault may come from this machine, such as a full disk, and is tried again
    if not compiled.fault:
        with guard_writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(compiled))
    return compiled
