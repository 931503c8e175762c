"""This machine's description, measured: what a process computes and copies per second, and messages between two.

    rates     the faster of a matrix product and a convolution, forward, in each arithmetic that runs here; the slower one's part
              of it stands for the share that training reaches
    memory    a copy of 64 MiB (on a GPU 256), its reading and its writing; what a device has is the machine's by the number of
              devices
    links     messages between two processes by gloo, there and back: short ones are the latency, long ones the bandwidth; of
              several the fastest, since a process that waits for a core says nothing of the link

A device is a process of so many threads, as processes run stages on a CPU; the two that measure links compute at the same time
where the machine has room for both. With CUDA a device is a GPU, and links are copies between two (not run: no GPU was at hand).
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
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from ipu_pipe.errors import RunFault
from ipu_pipe.launcher import end_with

SHORT, LONG = 4, 2**22  # bytes of the messages
LIMIT = 120.0  # seconds that a process waits for the other


class Sizes(NamedTuple):
    """Sizes of what is computed and copied on a kind of device: enough to occupy it, not more."""

    arithmetic: Tuple[str, ...]
    copied: int  # bytes of a tensor
    product: int  # rows and columns of the matrices
    images: int  # that are convolved, 64 channels of 28 x 28 by 3 x 3 to as many


SIZES = {
    "cpu": Sizes(("float32", "float64", "bfloat16"), 2**26, 256, 2),
    "cuda": Sizes(("float32", "float64", "bfloat16", "float16"), 2**28, 4096, 256),
}


def measure(threads: int, device: str = "cpu", seconds: float = 0.3) -> Dict[str, Any]:
    """Measure this machine's devices, processes of `threads` threads or GPUs; return the keys of their description.

    `seconds`: the least time for each figure. Raises RunFault where a process fails.
    """
    devices = torch.cuda.device_count() if device == "cuda" else max(1, (os.cpu_count() or 1) // threads)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        arguments = (folder, os.getpid(), threads, device, devices > 1, seconds)
        processes = [context.Process(target=_run_process, args=(rank, *arguments), daemon=True) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RunFault("measure_hardware: a process that measures failed: see above")
        figures: Dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return describe(figures, devices, threads, device)


def describe(figures: Dict[str, Any], devices: int, threads: int, device: str) -> Dict[str, Any]:
    """Return the keys of a description with these measured figures."""
    source = f"measured {time.strftime('%Y-%m-%d')} on {platform.node()}, torch {torch.__version__}"

    def measured(value: float) -> Dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": source, "confirmed": True}

    rates = {
        name: {"peak_flops": measured(max(pair)), "achievable_share": measured(min(pair) / max(pair))}
        for name, pair in figures["rates"].items()
    }
    what = f"{devices} GPUs" if device == "cuda" else f"{devices} processes of {threads} threads each"
    link = {"bandwidth": measured(figures["bandwidth"]), "latency": measured(figures["latency"])}
    return {
        "about": f"{platform.node()}: {what}",
        "measured_on": {"name": platform.node(), "device": device, "threads": threads},
        "devices": devices,
        "device": {
            "memory_bytes": measured(figures["memory"] / (devices if device == "cpu" else 1)),
            "usable_share": {"value": 0.9, "source": "estimate"},
            "memory_bandwidth": measured(figures["copied"]),
            "rates": rates,
        },
        "links": [{"name": "copies between GPUs" if device == "cuda" else "gloo", **link}],
    }


# ---- in the processes


def _run_process(
    rank: int, folder: str, parent: int, threads: int, device: str, together: bool, seconds: float
) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a Ctrl-C: the parent ends, and this one with it
    torch.set_num_threads(threads)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT))
    place = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)  # the timer waits for it
    figures = _time_computing(place, seconds) if rank == 0 or together else None
    dist.barrier()
    link: Dict[str, float] = {}
    if device == "cpu" or not together:
        link = _time_gloo(rank, seconds)
    elif rank == 0:
        link = _time_gpu_copies(seconds)
    both: List[Any] = [None, None]
    dist.all_gather_object(both, figures)
    if rank == 0:
        mean = average([one for one in both if one is not None])
        (Path(folder) / "found.json").write_text(json.dumps({**mean, **link, "memory": _count_memory(place)}))
    dist.barrier()
    dist.destroy_process_group()


def average(figures: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Return the mean of what several processes measured."""
    by_name = {name: zip(*(one["rates"][name] for one in figures)) for name in figures[0]["rates"]}
    rates = {name: [statistics.mean(values) for values in pairs] for name, pairs in by_name.items()}
    return {"rates": rates, "copied": statistics.mean(one["copied"] for one in figures)}


def _count_memory(place: torch.device) -> int:
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def time_median(work: Callable[[], Any], seconds: float) -> float:
    """Return the median seconds of `work`, repeated for `seconds` after a warm-up; a GPU is waited for."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def _time_computing(place: torch.device, seconds: float) -> Dict[str, Any]:
    """Return FLOPs per second by arithmetic, as far as products and convolutions exist in it, and bytes copied per second."""
    sizes = SIZES[place.type]
    rates = {}
    for name in sizes.arithmetic:
        with contextlib.suppress(RuntimeError):
            rates[name] = _time_products(getattr(torch, name), place, sizes, seconds)
    a = torch.ones(sizes.copied // 4, device=place)
    b = torch.empty_like(a)
    return {"rates": rates, "copied": 2 * sizes.copied / time_median(lambda: b.copy_(a), seconds)}


def _time_products(dtype: torch.dtype, place: torch.device, sizes: Sizes, seconds: float) -> List[float]:
    """Return the FLOPs per second of a matrix product and of a convolution."""
    a = torch.ones(sizes.product, sizes.product, dtype=dtype, device=place)
    x = torch.ones(sizes.images, 64, 28, 28, dtype=dtype, device=place)
    kernel = torch.ones(64, 64, 3, 3, dtype=dtype, device=place)
    product = 2 * sizes.product**3 / time_median(lambda: a @ a, seconds)
    convolution = time_median(lambda: torch.nn.functional.conv2d(x, kernel, padding=1), seconds)
    return [product, 2 * x.numel() * 64 * 9 / convolution]


def _time_gloo(rank: int, seconds: float) -> Dict[str, float]:
    """Return latency and bandwidth from half of a round trip; as many rounds on both processes, however long they take."""
    halves = []
    for size in (SHORT, LONG):
        message = torch.ones(size // 4)

        def round_trip(message: torch.Tensor = message) -> None:
            for turn in range(2):
                (dist.send if rank == turn else dist.recv)(message, 1 - rank)

        times = []
        for _ in range(max(4, int(seconds / 0.01))):
            start = time.perf_counter()
            round_trip()
            times.append(time.perf_counter() - start)
        halves.append(min(times[1:]) / 2)
    return split_latency(*halves)


def _time_gpu_copies(seconds: float) -> Dict[str, float]:
    places = [torch.device("cuda", index) for index in range(2)]
    times = []
    for size in (SHORT, LONG):
        a, b = (torch.ones(size // 4, device=place) for place in places)
        times.append(time_median(lambda a=a, b=b: b.copy_(a), seconds))  # type: ignore[misc]
    return split_latency(*times)


def split_latency(short: float, long: float) -> Dict[str, float]:
    """Return latency and bandwidth from the seconds of a short and a long message, which include the short one's."""
    return {"latency": short, "bandwidth": LONG / (long - short if long > 2 * short else long)}
