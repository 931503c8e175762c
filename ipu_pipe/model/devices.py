"""What a kind of device offers: the one place that knows what torch calls these things.

A kind is the type of a torch.device: "cpu", "cuda", "xpu", "npu", "hpu", "tpu" and so on. torch has
a module for each kind that it has here (torch.cuda, torch.xpu; an extension adds its own), with the
same functions under the same names. From 2.6 on, torch.accelerator has them for the kind that it
drives; it comes first, because an extension may keep its module for torch alone. A kind without one
of the functions does without it: it pins no memory, has no clock of its own, or has no process
group, and then the host does the work. All of this is read when it is asked for, so that naming a
device starts none.

Only "cpu" and "cuda" were ever run on hardware. What belongs to NVIDIA alone asks
`DeviceKind.is_cuda`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Tuple

import torch
import torch.distributed as dist

# those that compute on the host or not at all: nothing to wait for, no memory of their own
HOSTS = ("cpu", "meta")
# the kinds that torch or a known extension of it names; there may be others
KNOWN_KINDS = ("cuda", "xpu", "npu", "hpu", "tpu", "mps", "mtia")
# functions of a kind's module that torch.accelerator calls otherwise
ACCELERATOR_NAMES = {
    "current_device": "current_device_index",
    "set_device": "set_device_index",
    "mem_get_info": "get_memory_info",
}
# (kind, whether autocast is on for it, its dtype)
Autocast = Tuple[str, bool, torch.dtype]


class ModuleGenerator:
    """The random generator of a device whose module has functions in place of generators."""

    def __init__(self, module: Any, index: int) -> None:
        self._module = module
        self._index = index

    def get_state(self) -> torch.Tensor:
        """Return the generator's state."""
        state: torch.Tensor = self._module.get_rng_state(self._index)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        """Put the generator into a state."""
        self._module.set_rng_state(state, self._index)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator; the module seeds that of its current device, which trains."""
        self._module.manual_seed(seed)


class DeviceKind(NamedTuple):
    """What torch offers for one kind of device; `name`: the type of its torch.device."""

    name: str

    @property
    def is_accelerator(self) -> bool:
        """Whether work is queued on a device with a memory of its own, beside the host."""
        return self.name not in HOSTS

    @property
    def is_cuda(self) -> bool:
        """Whether this is torch's "cuda": cuDNN, cuBLAS, TF32 and the CUDA runtime's variables."""
        return self.name == "cuda"

    @property
    def module(self) -> Any:
        """The module with the functions of this kind, such as torch.cuda; None without one."""
        return getattr(torch, self.name, None)

    def find(self, function: str) -> Callable[..., Any] | None:
        """Return a function of torch.accelerator if it drives this kind, else of the kind's module,
        by the module's name for it; None without one.
        """
        if not self.is_accelerator:
            return None
        # torch.cuda has all functions in every version of torch, torch.accelerator from 2.6 on
        if not self.is_cuda and _drives(self.name):
            name = ACCELERATOR_NAMES.get(function, function)
            of_accelerator: Callable[..., Any] | None = getattr(torch.accelerator, name, None)
            if of_accelerator is not None:
                return of_accelerator
        of_module: Callable[..., Any] | None = getattr(self.module, function, None)
        return of_module if callable(of_module) else None

    def offers(self, function: str) -> bool:
        """Tell whether torch has a function of this name for this kind."""
        return self.find(function) is not None

    def call(self, function: str, *args: Any, default: Any = None) -> Any:
        """Call a function if torch has it for this kind, else return `default`."""
        here = self.find(function)
        return default if here is None else here(*args)

    # ---- the devices

    def is_available(self) -> bool:
        """Tell whether torch has a device of this kind here."""
        if not self.is_accelerator:
            # a meta tensor has no values, so that nothing is trained there
            return self.name == "cpu"
        if self.offers("is_available"):
            return bool(self.call("is_available"))
        return self.count_devices() > 0

    def count_devices(self) -> int:
        """Return the number of devices of this kind; 0 for the CPU."""
        return int(self.call("device_count", default=0))

    def get_name(self, index: int) -> str:
        """Return the name of a device as its maker calls it, or such as "npu:0"."""
        return str(self.call("get_device_name", index, default=f"{self.name}:{index}"))

    def get_current(self) -> int:
        """Return the number of the device on which work runs that names none."""
        return int(self.call("current_device", default=0))

    def set_current(self, device: int | torch.device) -> None:
        """Make a device the one on which work runs that names none."""
        self.call("set_device", device)

    def synchronize(self) -> None:
        """Wait until the current device has done all that is queued on it; errors appear here."""
        self.call("synchronize")

    # ---- its memory

    def count_memory(self, device: torch.device) -> int | None:
        """Return the bytes of a device's memory; None if torch does not tell."""
        if self.offers("get_device_properties"):
            # an extension decides itself what its properties contain
            total = getattr(self.call("get_device_properties", device), "total_memory", None)
            if total is not None:
                return int(total)
        # (free, all)
        pair = self._read_memory("mem_get_info", device)
        return None if pair is None else int(pair[1])

    def read_allocated_bytes(self, device: torch.device) -> int | None:
        """Return the bytes that tensors occupy on a device now; None if torch does not tell."""
        size = self._read_memory("memory_allocated", device)
        return None if size is None else int(size)

    def read_peak_bytes(self, device: torch.device) -> int | None:
        """Return the most bytes that tensors occupied on a device since the process began or
        `reset_peak_bytes`; None if torch does not tell.
        """
        size = self._read_memory("max_memory_allocated", device)
        return None if size is None else int(size)

    def reset_peak_bytes(self, device: torch.device) -> None:
        """Count the peak of a device's memory from now on."""
        self._read_memory("reset_peak_memory_stats", device)

    def _read_memory(self, function: str, device: torch.device) -> Any:
        """Call a function of a device's memory; None if it cannot tell."""
        if self.is_cuda:
            return self.call(function, device)
        # torch.accelerator has the functions for devices whose allocator counts nothing, too
        with contextlib.suppress(RuntimeError):
            return self.call(function, device)
        return None

    def pins_memory(self) -> bool:
        """Tell whether the host's memory can be pinned, so that copying it does not wait."""
        if self.is_cuda:
            return True
        return self.is_accelerator and _can_pin(self.name)

    # ---- random numbers

    def list_generators(self, index: int | None) -> list[Any]:
        """Return the random generators of a device besides the CPU's; None: the current device."""
        if not self.is_accelerator:
            return []
        index = self.get_current() if index is None else index
        generators = getattr(self.module, "default_generators", None)
        if generators is not None:
            return [generators[index]]
        if hasattr(self.module, "get_rng_state") and hasattr(self.module, "set_rng_state"):
            return [ModuleGenerator(self.module, index)]
        return []

    # ---- clocks and process groups

    def has_events(self) -> bool:
        """Tell whether the device's streams have events that tell times."""
        return self.is_accelerator and callable(getattr(self.module, "Event", None))

    def make_event(self) -> Any:
        """Return a new event that, once recorded, tells its time on the current stream."""
        return self.module.Event(enable_timing=True)

    def get_group_backend(self) -> str | None:
        """Return the backend of torch.distributed that moves this kind's tensors between devices,
        such as "nccl"; None if tensors go through the host.
        """
        if not (self.is_accelerator and dist.is_available()):
            return None
        if self.is_cuda:
            return "nccl" if dist.is_nccl_available() else None
        by_kind = getattr(dist.Backend, "default_device_backend_map", {})
        backend = by_kind.get(self.name)
        # gloo takes tensors of the CPU
        if backend in (None, "gloo"):
            return None
        is_here = getattr(dist, "is_backend_available", lambda name: True)
        return str(backend) if is_here(backend) else None


def get_accelerator_name() -> str:
    """Return the kind that torch.accelerator drives; "" without one, and before torch 2.6."""
    accelerator = getattr(torch, "accelerator", None)
    # a build for CUDA names it on machines without a GPU, too
    if accelerator is None or not accelerator.is_available():
        return ""
    return str(accelerator.current_accelerator().type)


def _drives(name: str) -> bool:
    """Tell whether torch.accelerator drives this kind."""
    return get_accelerator_name() == name


@functools.lru_cache(maxsize=None)
def _can_pin(name: str) -> bool:
    """Tell whether torch pins memory for the accelerator that it has here, if that is `name`."""
    if not _drives(name):
        return False
    try:
        torch.zeros(1).pin_memory()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def get_kind(device: str | torch.device) -> DeviceKind:
    """Return what the kind of a device offers."""
    return DeviceKind(device if isinstance(device, str) else device.type)


def find_kind(tensors: Iterable[torch.Tensor]) -> DeviceKind:
    """Return the kind of the first tensor that is on an accelerator; the CPU's if none is."""
    kinds = (get_kind(tensor.device) for tensor in tensors)
    return next((kind for kind in kinds if kind.is_accelerator), DeviceKind("cpu"))


def list_accelerators() -> list[DeviceKind]:
    """Return the kinds of accelerators that torch has here, CUDA first; usually one or none."""
    names = [*KNOWN_KINDS]
    # an extension may give the kind of its own another name
    get_own_name = getattr(torch._C, "_get_privateuse1_backend_name", lambda: "")
    names += [get_own_name(), get_accelerator_name()]
    kinds = [DeviceKind(name) for name in dict.fromkeys(names) if name]
    return [kind for kind in kinds if kind.is_available()]


def list_generators(device: torch.device) -> list[Any]:
    """Return the generators from which a module on `device` may draw: the CPU's (stochastic depth
    uses it everywhere), and the device's own."""
    return [torch.default_generator, *get_kind(device).list_generators(device.index)]


def seed_random(seed: int, device: torch.device | None) -> None:
    """Seed the CPU's generator, and that of `device` if it has one: those that `fork_random` puts
    back.
    """
    # not torch.manual_seed, which seeds the caller's generators of all devices, too
    torch.default_generator.manual_seed(seed)
    if device is not None:
        # of CUDA the module waits until the device is used, so that seeding starts none
        get_kind(device).call("manual_seed", seed)


@contextlib.contextmanager
def fork_random(device: torch.device | None) -> Iterator[None]:
    """Put the CPU's generator, and that of `device` if it has one, back into its state at the end
    of the context.
    """
    kind = DeviceKind("cpu") if device is None else get_kind(device)
    # fork_rng of torch 2.0 knows the CPU and CUDA alone
    if kind.is_cuda:
        with torch.random.fork_rng(devices=[device]):
            yield
        return
    generators = [] if device is None else kind.list_generators(device.index)
    states = [generator.get_state() for generator in generators]
    # without a list it would save the states of all CUDA devices, too
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for generator, state in zip(generators, states):
                generator.set_state(state)


def read_autocast() -> tuple[Autocast, ...]:
    """Return the state of autocast for the CPU, for CUDA and for the accelerators here."""
    if not hasattr(torch, "get_autocast_dtype"):
        cpu = ("cpu", torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype())
        return (cpu, ("cuda", torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()))
    return tuple(
        (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
        for name in _list_autocast_kinds()
    )


@functools.lru_cache(maxsize=None)
def _list_autocast_kinds() -> tuple[str, ...]:
    # get_autocast_dtype raises for a kind that autocast does not know
    others = [kind.name for kind in list_accelerators() if not kind.is_cuda]
    return ("cpu", "cuda", *filter(torch.amp.is_autocast_available, others))
