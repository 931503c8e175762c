"""Measure this machine's FLOP/s, memory bandwidth and link speed, for the description of its
hardware.

    rates     the faster of a matrix product and a convolution, forward, in each arithmetic that runs here; slower / faster
              estimates the achievable share in training
    memory    a copy of 64 MiB (on a GPU 256) counts as read and written; memory per device = machine memory / devices
    links     round trips between two processes by gloo: short messages give the latency, long ones the bandwidth; the fastest
              of several counts, since a process that waits for a core says nothing about the link

On a CPU, one device is one process of N threads; the two that measure links also compute at the
same time where the machine has room for both. With CUDA a device is a GPU, and links are copies
between two (not run: no GPU was at hand).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import signal
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from ipu_pipe.errors import RunFault
from ipu_pipe.launcher import end_with
from ipu_pipe.model.devices import DeviceKind, get_kind

# a short message takes the latency alone; on a long one it hardly counts
SHORT_BYTES = 4
LONG_BYTES = 2**22
TIMEOUT_SECONDS = 120.0


class Sizes(NamedTuple):
    """Sizes that just occupy a kind of device.

    `copied_bytes` of a tensor; `rows`, and as many columns, of the matrices; `images` of (64, 28,
    28) for a 3 x 3 convolution.
    """

    arithmetic: tuple[str, ...]
    copied_bytes: int
    rows: int
    images: int


CPU_SIZES = Sizes(("float32", "float64", "bfloat16"), 2**26, 256, 2)
GPU_SIZES = Sizes(("float32", "float64", "bfloat16", "float16"), 2**28, 4096, 256)


def measure(threads: int, device: str = "cpu", seconds: float = 0.3) -> dict[str, Any]:
    """Measure this machine's devices, processes of `threads` threads or GPUs; return the keys of
    their description.

    Each figure takes at least `seconds`. Raise `RunFault` if a process fails.
    """
    kind = get_kind(device)
    # as many processes as have cores of their own
    here = max(1, (os.cpu_count() or 1) // threads)
    devices = kind.count_devices() if kind.is_accelerator else here
    with tempfile.TemporaryDirectory() as folder:
        # a forked process would inherit thread pools and a CUDA context that do not work in it
        context = multiprocessing.get_context("spawn")
        arguments = (folder, os.getpid(), threads, device, devices > 1, seconds)
        processes = [
            context.Process(target=_run_process, args=(rank, *arguments), daemon=True)
            for rank in range(2)
        ]
        # now, since it would lift the mask below
        resource_tracker.ensure_running()
        # the processes inherit it: Ctrl-C reaches all of a terminal, and on it the parent ends, and
        # they with it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RunFault("measure_hardware: a process that measures failed: see above")
        figures: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
    return describe(figures, devices, threads, device)


def describe(
    figures: dict[str, Any],
    devices: int,
    threads: int,
    device: str,
) -> dict[str, Any]:
    """Return the keys of a description with these measured figures."""
    source = f"measured {time.strftime('%Y-%m-%d')} on {platform.node()}, torch {torch.__version__}"

    def make_figure(value: float) -> dict[str, Any]:
        # a measurement does not repeat to more digits
        return {"value": float(f"{value:.4g}"), "source": source, "confirmed": True}

    rates = {
        name: {
            "peak_flops": make_figure(max(pair)),
            "achievable_share": make_figure(min(pair) / max(pair)),
        }
        for name, pair in figures["rates"].items()
    }
    kind = get_kind(device)
    plural = "GPUs" if kind.is_cuda else f"{device} devices"
    devices_text = f"{devices} processes of {threads} threads each"
    if kind.is_accelerator:
        devices_text = f"{devices} {plural}"
    link = {
        "bandwidth": make_figure(figures["bandwidth"]),
        "latency": make_figure(figures["latency"]),
    }
    return {
        "about": f"{platform.node()}: {devices_text}",
        "measured_on": {"name": platform.node(), "device": device, "threads": threads},
        "devices": devices,
        "device": {
            # processes share the machine's memory, GPUs have their own
            "memory_bytes": make_figure(figures["memory"] / (devices if device == "cpu" else 1)),
            "usable_share": {"value": 0.9, "source": "estimate"},
            "memory_bandwidth": make_figure(figures["copied"]),
            "rates": rates,
        },
        "links": [{"name": f"copies between {plural}" if kind.is_accelerator else "gloo", **link}],
    }


# ---- in the processes


def _run_process(
    rank: int,
    folder: str,
    parent: int,
    threads: int,
    device: str,
    compute_together: bool,
    seconds: float,
) -> None:
    # a command that is killed must not leave processes which load the machine
    end_with(parent)
    torch.set_num_threads(threads)
    # a file needs no free port
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    torch_device = torch.device(device)
    kind = get_kind(device)
    if kind.is_accelerator:
        # there are two processes even on a machine with one GPU
        torch_device = torch.device(device, rank % kind.count_devices())
        # a timer synchronizes the current device only
        kind.set_current(torch_device)
    figures = _time_computing(torch_device, seconds) if rank == 0 or compute_together else None
    dist.barrier()
    link: dict[str, float] = {}
    # with one GPU there is no other one to copy to
    if device == "cpu" or not compute_together:
        link = _time_gloo(rank, seconds)
    elif rank == 0:
        link = _time_copies(device, seconds)
    figures_by_rank: list[Any] = [None, None]
    dist.all_gather_object(figures_by_rank, figures)
    if rank == 0:
        mean = average([figures for figures in figures_by_rank if figures is not None])
        (Path(folder) / "figures.json").write_text(
            json.dumps({**mean, **link, "memory": _count_memory(torch_device)})
        )
    dist.barrier()
    dist.destroy_process_group()


def average(figures_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of several processes' figures."""
    names = figures_by_rank[0]["rates"]
    by_name = {
        name: zip(*(figures["rates"][name] for figures in figures_by_rank)) for name in names
    }
    rates = {name: [statistics.mean(values) for values in pairs] for name, pairs in by_name.items()}
    return {
        "rates": rates,
        "copied": statistics.mean(figures["copied"] for figures in figures_by_rank),
    }


def _count_memory(torch_device: torch.device) -> int:
    """Return the bytes of memory of a GPU, or of the machine if torch does not tell."""
    size = get_kind(torch_device).count_memory(torch_device)
    if size is not None:
        return size
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def time_median(
    work: Callable[[], Any], seconds: float, device: torch.device | None = None
) -> float:
    """Return the median seconds of `work`, repeated for `seconds` after a warm-up; wait for a GPU
    to end each.
    """
    kind = DeviceKind("cpu") if device is None else get_kind(device)

    def read_clock() -> float:
        kind.synchronize()
        return time.perf_counter()

    threads = torch.get_num_threads()
    timer = Timer("work()", globals={"work": work}, num_threads=threads)
    # the default clock waits for CUDA, and only in newer versions for others
    if kind.is_accelerator and not kind.is_cuda:
        timer = Timer("work()", timer=read_clock, globals={"work": work}, num_threads=threads)
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def _time_computing(torch_device: torch.device, seconds: float) -> dict[str, Any]:
    """Return FLOP/s in each arithmetic that has products and convolutions here, and bytes copied
    per second.
    """
    sizes = GPU_SIZES if get_kind(torch_device).is_accelerator else CPU_SIZES
    rates = {}
    for name in sizes.arithmetic:
        # a device that lacks an arithmetic says so by an error of its kernels
        with contextlib.suppress(RuntimeError):
            rates[name] = _time_products(getattr(torch, name), torch_device, sizes, seconds)
    a = torch.ones(sizes.copied_bytes // 4, device=torch_device)
    b = torch.empty_like(a)
    return {
        "rates": rates,
        # each byte is read and written
        "copied": 2 * sizes.copied_bytes / time_median(lambda: b.copy_(a), seconds, torch_device),
    }


def _time_products(
    dtype: torch.dtype, torch_device: torch.device, sizes: Sizes, seconds: float
) -> list[float]:
    """Return the FLOPs per second of a matrix product and of a convolution."""
    a = torch.ones(sizes.rows, sizes.rows, dtype=dtype, device=torch_device)
    x = torch.ones(sizes.images, 64, 28, 28, dtype=dtype, device=torch_device)
    kernel = torch.ones(64, 64, 3, 3, dtype=dtype, device=torch_device)
    product = 2 * sizes.rows**3 / time_median(lambda: a @ a, seconds, torch_device)
    convolution = time_median(
        lambda: torch.nn.functional.conv2d(x, kernel, padding=1), seconds, torch_device
    )
    # 64 x 9 products for each number of an output of the input's size
    return [product, 2 * x.numel() * 64 * 9 / convolution]


def _time_gloo(rank: int, seconds: float) -> dict[str, float]:
    """Return latency and bandwidth from half of a round trip; both ranks run the same fixed number
    of rounds.
    """
    seconds_by_size = []
    for size in (SHORT_BYTES, LONG_BYTES):
        message = torch.ones(size // 4)
        times = []
        # a fixed number, since a rank that stopped by its clock would leave the other waiting
        for _ in range(max(4, int(seconds / 0.01))):
            start = time.perf_counter()
            for turn in range(2):
                # there in the first turn, and back in the second
                (dist.send if rank == turn else dist.recv)(message, 1 - rank)
            times.append(time.perf_counter() - start)
        seconds_by_size.append(min(times[1:]) / 2)
    return split_latency(*seconds_by_size)


def _time_copies(device: str, seconds: float) -> dict[str, float]:
    """Return latency and bandwidth of copies between two devices of a kind."""
    seconds_by_size = []
    for size in (SHORT_BYTES, LONG_BYTES):
        a, b = (torch.ones(size // 4, device=torch.device(device, index)) for index in range(2))
        seconds_by_size.append(time_median(lambda a=a, b=b: b.copy_(a), seconds, b.device))  # type: ignore[misc]
    return split_latency(*seconds_by_size)


def split_latency(short: float, long: float) -> dict[str, float]:
    """Return latency and bandwidth from the seconds of a short and a long message, which include
    the short one's.
    """
    return {
        "latency": short,
        # a difference of times that are nearly equal would be noise
        "bandwidth": LONG_BYTES / (long - short if long > 2 * short else long),
    }
