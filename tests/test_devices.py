"""Test what a kind of device offers, its numeric settings, and which devices `ipu-pipe check` finds to be wrong.

No accelerator is here. A namespace with some of the functions of torch.cuda stands for a device's
module, and operations that save or read the wrong weights stand for a device's kernels.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import ipu_pipe
from ipu_pipe.backends.processes.trace import make_stream_clock
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.job.numerics import CUBLAS, record_numerics, set_numerics
from ipu_pipe.model import devices, flops
from ipu_pipe.model.devices import (
    DeviceKind,
    find_kind,
    fork_random,
    get_accelerator_name,
    get_kind,
    list_accelerators,
    list_generators,
    read_autocast,
    seed_random,
)
from ipu_pipe.model.randomness import restore_random_states
from ipu_pipe.pipeline.checks import require_device
from ipu_pipe.run import machine_check
from ipu_pipe.run.machine_check import run_device_trials
from ipu_pipe.run.train import train
from ipu_pipe.store.checkpoint import find_newest, read_weights
from tests.support.processes import run_in_group
from tests.support.runs import DIGITS, list_faults, needs_processes

CPU = torch.device("cpu")
XYZ: Any = SimpleNamespace(type="xyz", index=None)  # torch cannot make a device of an unknown kind
GIB = 2**30


class Module(SimpleNamespace):
    """Stand for torch.xyz: note the functions that are called, with their arguments."""

    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self.calls: List[Any] = []
        for name, answer in answers.items():
            setattr(self, name, self._make(name, answer))

    def _make(self, name: str, answer: Any) -> Callable[..., Any]:
        def note(*args: Any, **keys: Any) -> Any:
            self.calls.append((name, *args, *keys.items()))
            return answer

        return note


@pytest.fixture
def xyz(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Give torch a module of a device, with all functions."""
    module = Module(
        is_available=True,
        device_count=3,
        current_device=1,
        set_device=None,
        get_device_name="XYZ 9000",
        synchronize=None,
        get_device_properties=SimpleNamespace(total_memory=16 * GIB),
        memory_allocated=5,
        max_memory_allocated=7,
        reset_peak_memory_stats=None,
        Event="an event",
    )
    monkeypatch.setattr(torch, "xyz", module, raising=False)
    return module


def test_a_kind_calls_the_functions_of_its_module(xyz: Module) -> None:
    kind = get_kind(XYZ)
    assert kind.is_accelerator and not kind.is_cuda and kind.is_available()
    assert (kind.count_devices(), kind.get_current(), kind.get_name(2)) == (3, 1, "XYZ 9000")
    kind.set_current(2)
    kind.synchronize()
    assert kind.count_memory(XYZ) == 16 * GIB
    assert (kind.read_allocated_bytes(XYZ), kind.read_peak_bytes(XYZ)) == (5, 7)
    kind.reset_peak_bytes(XYZ)
    assert kind.has_events() and kind.make_event() == "an event"
    assert xyz.calls == [
        ("is_available",), ("device_count",), ("current_device",), ("get_device_name", 2), ("set_device", 2),
        ("synchronize",), ("get_device_properties", XYZ), ("memory_allocated", XYZ), ("max_memory_allocated", XYZ),
        ("reset_peak_memory_stats", XYZ), ("Event", ("enable_timing", True)),
    ]  # fmt: skip


def test_cuda_calls_the_functions_of_torch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 + (device.index or 0))
    device = torch.device("cuda", 2)
    kind = get_kind(device)
    assert kind.is_cuda and kind.pins_memory() and kind.read_allocated_bytes(device) == 7


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_the_host_has_nothing_to_wait_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cpu, "synchronize", fail, raising=False)
    kind, device = DeviceKind(name), torch.device(name)
    kind.synchronize()
    assert not (kind.is_accelerator or kind.pins_memory() or kind.has_events())
    assert kind.is_available() == (name == "cpu")
    assert kind.read_peak_bytes(device) is kind.count_memory(device) is None
    assert kind.get_group_backend() is None and kind.list_generators(None) == []
    assert make_stream_clock(device) is None


def test_a_kind_without_a_module_or_with_an_empty_one_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        kind = get_kind(XYZ)
        kind.synchronize()
        kind.set_current(0)
        assert not kind.is_available() and kind.count_devices() == kind.get_current() == 0
        assert kind.get_name(0) == "xyz:0" and not kind.pins_memory()
        assert kind.count_memory(XYZ) is kind.read_allocated_bytes(XYZ) is None
        assert make_stream_clock(XYZ) is None and list_generators(XYZ) == [torch.default_generator]
        monkeypatch.setattr(torch, "xyz", Module(), raising=False)
    # a module that only counts is available
    monkeypatch.setattr(torch, "xyz", Module(device_count=2, mem_get_info=(1, 9)), raising=False)
    assert get_kind(XYZ).is_available() and get_kind(XYZ).count_memory(XYZ) == 9


def test_the_kind_of_tensors_is_that_of_the_first_on_an_accelerator() -> None:
    on_cpu = SimpleNamespace(device=CPU)
    tensors: Any = [on_cpu, SimpleNamespace(device=XYZ), SimpleNamespace(device=CPU)]
    assert find_kind(tensors).name == "xyz" and find_kind(tensors[:1]).name == "cpu"


class Generators(Module):
    """Stand for a device's module with a generator, which is one of the CPU."""

    def __init__(self, has_list: bool) -> None:
        super().__init__(current_device=0)
        self.own = torch.Generator()
        if has_list:
            self.default_generators = [self.own]
        else:
            self.get_rng_state = lambda index: self.own.get_state()
            self.set_rng_state = lambda state, index: self.own.set_state(state)
        self.manual_seed = self.own.manual_seed


@pytest.mark.parametrize("has_list", [True, False])
def test_random_numbers_of_a_device_are_seeded_and_put_back(
    has_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Generators(has_list)
    monkeypatch.setattr(torch, "xyz", module, raising=False)
    cpu, own = list_generators(XYZ)
    assert cpu is torch.default_generator
    own.manual_seed(5)
    first, states = torch.rand(3, generator=module.own), [own.get_state(), torch.get_rng_state()]
    for context in (fork_random(XYZ), restore_random_states(XYZ)):
        with context:
            seed_random(5, XYZ)
            assert torch.equal(torch.rand(3, generator=module.own), first)
            assert torch.equal(torch.rand(3), first)
        assert all(map(torch.equal, states, [own.get_state(), torch.get_rng_state()]))
    with fork_random(None):
        torch.rand(2)
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("method", ["gpipe", "local_greedy"])
def test_a_step_seeds_no_generator_of_another_device(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: torch.manual_seed seeded the caller's CUDA generators, which nothing put back."""
    seeds: List[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    # optimizers and losses that are not torch's are tried before training
    optimizer = type("Custom", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)

    def compute_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, y)

    with ipu_pipe.Pipeline(model, compute_loss, optimizer, method, stages=["1"]) as pipe:
        pipe.step(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    assert not seeds


def test_autocast_of_the_accelerators_here_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name, is_cast, _ in read_autocast() if is_cast] == []
    with torch.autocast("cpu", torch.bfloat16):
        assert read_autocast()[0] == ("cpu", True, torch.bfloat16)
    assert [name for name, _, _ in read_autocast()][:2] == ["cpu", "cuda"]


def test_group_backends_are_those_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = get_kind(XYZ)
    assert kind.get_group_backend() is None
    by_kind: Dict[str, str] = {**getattr(dist.Backend, "default_device_backend_map", {})}
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", by_kind, raising=False)
    by_kind["xyz"] = "xyzccl"
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True, raising=False)
    assert kind.get_group_backend() == "xyzccl"
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    assert kind.get_group_backend() is None
    by_kind["xyz"] = "gloo"  # of Apple's GPU: its tensors go through the host
    assert kind.get_group_backend() is None
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert DeviceKind("cuda").get_group_backend() == "nccl"


@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="needs torch 2.6")
def test_an_accelerator_that_torch_is_built_for_need_not_be_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Story: with PyTorch's build for CUDA on a machine without a GPU, `compare` trained one after
    another, because trainings would share the accelerator."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: cuda)
    for is_here, name in ((False, ""), (True, "cuda")):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda is_here=is_here: is_here)
        assert get_accelerator_name() == name


def test_the_accelerators_here_are_listed(xyz: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_accelerators()
    monkeypatch.setattr(devices, "KNOWN_KINDS", ("xyz", "abc"))
    assert "xyz" in {kind.name for kind in list_accelerators()} and DeviceKind("abc") not in before
    assert require_device("xyz") == DeviceKind("xyz")


# ---- the config


@pytest.mark.parametrize("name", ["gpu", "CUDA", "cuda:0", "ipu", "", 3])
def test_a_config_does_not_take_what_is_no_kind(name: Any) -> None:
    (fault,) = list_faults(lambda: configure(backend={"device": name}))
    assert "must be cpu, cuda or another kind of device that torch has" in fault


@pytest.mark.parametrize(
    "name, hint", [("npu", ""), ("tpu", "; did you mean backend.name=xla backend.platform=tpu?")]
)
def test_a_kind_that_is_not_here_is_one_line(name: str, hint: str, tmp_path: Path) -> None:
    here = " or ".join(["cpu", *(kind.name for kind in list_accelerators())])
    why = f"torch has no such device here: must be {here}{hint}"
    config = load_config(DIGITS, [f"backend.device={name}"])
    assert list_faults(train, config, tmp_path / "run") == [f"backend.device: {name}: {why}"]


# ---- numeric settings, which runs on other devices leave alone


@pytest.fixture
def restored_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the numeric settings of this process after the test."""
    monkeypatch.setenv(CUBLAS, "")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    yield
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
    torch.use_deterministic_algorithms(deterministic)
    if hasattr(torch.utils, "deterministic"):
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_a_gpu_computes_deterministically_and_in_full_float32_by_default(
    restored_settings: None,
) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, True, True
    set_numerics(BackendConfig(device="cuda"))
    assert os.environ[CUBLAS] == ":4096:8" and torch.are_deterministic_algorithms_enabled()
    assert record_numerics(BackendConfig(device="cuda")) == {
        "deterministic_algorithms": True, "cudnn_deterministic": True, "cudnn_benchmark": False, "cublas_workspace": ":4096:8",
        "tf32_convolutions": False, "tf32_matrix_products": False,
    }  # fmt: skip
    os.environ[CUBLAS] = ":16:8"
    set_numerics(BackendConfig(device="cuda"))
    assert os.environ[CUBLAS] == ":16:8"  # as deterministic, and set by the user
    set_numerics(BackendConfig(device="cuda", deterministic=False, tf32=True))
    assert not torch.are_deterministic_algorithms_enabled() and not cudnn.deterministic
    assert cudnn.allow_tf32 and matmul.allow_tf32


def test_without_a_gpu_nothing_is_set(restored_settings: None) -> None:
    set_numerics(BackendConfig())
    assert not os.environ[CUBLAS] and not torch.are_deterministic_algorithms_enabled()
    assert record_numerics(BackendConfig()) is None


@pytest.mark.parametrize("key", ["backend.tf32=true", "backend.deterministic=false"])
def test_settings_of_gpus_are_refused_elsewhere(key: str) -> None:
    (fault,) = list_faults(load_config, DIGITS, [key])
    assert "belongs to backend.device cuda, not cpu" in fault


# ---- the rule of a device: which weights passes read


class Linear(torch.autograd.Function):
    """A linear layer without bias as of another device: what its forward and its backward read."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, device: Any) -> Any:
        ctx.x, ctx.device, ctx.saved = x.detach(), device, device.save(w)
        return x @ device.read(w).t()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g @ ctx.device.read_saved(ctx.saved), g.t() @ ctx.x, None


class Device:
    """Stand for a device that keeps the rule, and saves the parameter itself: after a swap its
    backward reads the new weight, where the CPU's reads the old one."""

    def __init__(self) -> None:
        self.first: List[Any] = []  # (parameter, its tensor when it was first seen)
        self.newest: Dict[int, torch.Tensor] = {}

    def linear(self, x: Any, w: Any, b: Any = None) -> Any:
        assert b is None
        return Linear.apply(x, w, self)

    def read(self, w: Any) -> Any:
        """Return what the forward reads."""
        return w.data

    def save(self, w: Any) -> Any:
        """Return what the forward saves."""
        return w

    def read_saved(self, saved: Any) -> Any:
        """Return what the backward reads."""
        return saved.data


class SavesCopy(Device):
    """Stand for a device whose backward reads the forward's weights, whatever is written later."""

    def save(self, w: Any) -> Any:
        return w.data.clone()

    def read_saved(self, saved: Any) -> Any:
        return saved


class ReadsFirst(Device):
    """Stand for a device whose forward reads the tensor that the parameter had at first, after a
    swap too."""

    def read(self, w: Any) -> Any:
        for seen, tensor in self.first:
            if seen is w:
                return tensor
        self.first.append((w, w.data))
        return w.data


class ReadsNewest(Device):
    """Stand for a device whose backward reads the weights of the newest forward, though those of
    its own forward were put back."""

    def read(self, w: Any) -> Any:
        self.newest[id(w)] = w.data
        return w.data

    def read_saved(self, saved: Any) -> Any:
        return self.newest[id(saved)]


# device -> the trials of `ipu-pipe check` that it passes
DEVICES = {Device: [102, 103, 104], SavesCopy: [102, 103], ReadsFirst: [102, 104]}


def make_linear_with_bias(device: Device) -> Callable[..., Any]:
    return lambda x, w, b=None: device.linear(x, w) + b


@pytest.mark.slow
@pytest.mark.parametrize("device", list(DEVICES))
def test_the_check_finds_a_device_that_reads_other_weights(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator on a device whose kernels read the weights as they should equals the CPU's."""
    run_alone = machine_check._run_alone

    def run_on_device(trial: Any, backend: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(functional, "linear", make_linear_with_bias(device()))
            return run_alone(trial, backend)

    monkeypatch.setattr(machine_check, "_run_alone", run_on_device)
    rows = list(run_device_trials("cpu"))
    assert [row.number for row in rows if row.verdict == "equal"] == DEVICES[device], rows


STASHING = machine_check.PROCESS_TRIALS[1]


def train_on_device(rank: int, folder: Path, device: Any) -> None:
    functional.linear = make_linear_with_bias(device())
    config = machine_check.configure_trial(STASHING, {"name": "distributed"})
    machine_check._run(STASHING, config, folder / "run")


@needs_processes
@pytest.mark.parametrize("device, verdict", [(Device, "equal"), (ReadsNewest, "different")])
def test_the_checks_processes_find_a_backward_that_reads_the_newest_forward(
    device: Any, verdict: str, tmp_path: Path
) -> None:
    """On the emulator a backward follows its own forward at once."""
    run_in_group(2, train_on_device, tmp_path, device)
    weights = read_weights(find_newest(tmp_path / "run"))
    assert machine_check._attempt(STASHING, "cpu", lambda: weights).verdict == verdict


@pytest.mark.skipif(flops.FlopCounterMode is None, reason="torch 2.0 counts no FLOPs")
def test_a_linear_layer_that_is_one_operation_counts_as_its_products() -> None:
    """Story: a device with a kernel for linear layers had no FLOPs at all. `stages: 4` cut the model
    elsewhere than on the CPU, and methods with old weights gave other numbers."""
    formulas = flops.get_formulas()
    x, w = torch.zeros(2, 5, 8), torch.zeros(3, 8)
    y = functional.linear(x, w)
    products = 2 * 2 * 5 * 8 * 3
    assert formulas[torch.ops.aten.linear](x, w, None, out_val=y) == products
    backward = formulas[torch.ops.aten.linear_backward]
    for needed, count in (((True, True, False), 2), ((False, True, True), 1)):
        assert backward(x, y, w, needed, out_val=None) == count * products
