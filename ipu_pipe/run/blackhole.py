"""Compile programs for Tenstorrent's Blackhole, and read from the compiler's text what each takes.

    a path on stdin -> the program (StableHLO) -> libtt, for a chip that is described, not here
                    -> TTNN, the operations of the chip -> a line of JSON on stdout

This file runs by its path in an environment that has jax and Tenstorrent's plugin and nothing else,
so it imports nothing of ipu_pipe. A tensor on the chip is of tiles of 32 x 32 numbers, in one of
two memories: DRAM, which all cores share, or L1, 1.5 MB beside each core.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

# a P150 card with all of its cores, in the words of Tenstorrent's driver; the upper bits of a board's
# number are its kind
CHIP = """\
arch: {0: blackhole}
chips: {}
chip_unique_ids: {0: 4466765987840}
ethernet_connections: []
ethernet_connections_to_remote_devices: []
chips_with_mmio: [{0: 0}]
harvesting: {0: {noc_translation: true, harvest_mask: 0, dram_harvesting_mask: 0,
  eth_harvesting_mask: 288, pcie_harvesting_mask: 2, l2cpu_harvesting_mask: 0}}
boards: [[{board_id: 4466765987840}, {board_type: p150}, {chips: [0]}]]
"""
# bytes of a number; a block format shares an exponent among 16 numbers
_WIDTHS = {
    "f32": 4.0,
    "si32": 4.0,
    "u32": 4.0,
    "bf16": 2.0,
    "f16": 2.0,
    "u16": 2.0,
    "u8": 1.0,
    "bfp_bf8": 1.0625,
    "bfp_bf4": 0.5625,
}
_TILE = 32 * 32
_LAYOUT = re.compile(
    r"^(#\w+) = #ttnn\.ttnn_layout<.*?<(\d+x\d+).*?>, "
    r"memref<((?:\d+x)*)(!ttcore\.tile<32x32, (\w+)>|[a-z]\w*), #(\w+)>"
)
_OPERATION = re.compile(r'^(?:(%\w+)(?::(\d+))? = )?"?tt(?:nn|core)\.(\w+)"?\(')
# operations that name, free or keep a tensor
_BOOKKEEPING = ("deallocate", "get_device", "load_cached")
_MAIN = "func.func public @main("


def read_facts(text: str) -> dict[str, Any]:
    """Return what a program of TTNN operations takes: bytes of arguments, outputs and, at most at a
    time, of other tensors, operations by kind, and how many results lie in DRAM.
    """
    layouts: dict[str, tuple[str, int]] = {}
    operations: Counter[str] = Counter()
    in_dram = argument = output = peak = 0
    # tensor -> bytes, from its operation until it is freed
    live: dict[str, int] = {}
    returned = re.findall(
        r"%[\w#]+", text.partition(_MAIN)[2].partition(" return ")[2].split(":")[0]
    )

    def measure(types: str) -> list[tuple[str, int]]:
        return [layouts[name] for name in re.findall(r"#\w+", types) if name in layouts]

    for line in map(str.strip, text.splitlines()):
        if layout := _LAYOUT.match(line):
            name, grid, sizes, element, tile, memory = layout.groups()
            numbers = math.prod(int(n) for n in f"{grid}x{sizes}".split("x") if n)
            width = _WIDTHS.get(tile or element, 4)
            # a memref of tiles counts tiles
            layouts[name] = (memory, int(numbers * width * (_TILE if tile else 1)))
        elif line.startswith(_MAIN):
            arguments, _, results = line.partition(") -> (")
            argument = sum(size for _, size in measure(arguments))
            output = sum(size for _, size in measure(results))
            live = {}
        elif match := _OPERATION.match(line):
            result, count, kind = match.groups()
            if kind == "deallocate":
                # None: arguments and outputs are not among these
                live.pop(line.partition("(")[2].partition(")")[0], None)
                continue
            tensors = measure(line.rpartition("->")[2])
            names = [f"{result}#{i}" for i in range(int(count))] if count else [result]
            # outputs are counted by themselves
            live.update((n, size) for n, (_, size) in zip(names, tensors) if n not in returned)
            peak = max(peak, sum(live.values()))
            if kind not in _BOOKKEEPING:
                operations[kind] += 1
                in_dram += any(memory == "dram" for memory, _ in tensors)
    return {
        "argument": argument,
        "output": output,
        "temporary": peak,
        "operations": dict(operations.most_common()),
        "in_dram": in_dram,
    }


def read_reason(log: str) -> str:
    """Return why a program does not compile, by the compiler's log: the operation and its module,
    and the reason; '' if the log does not say.
    """
    match = re.search(r'^(?:loc\("(?:jit\(\w+\)/)*([^"]*)")?.*?(?i:error|fatal): (.*)', log, re.M)
    return ": ".join(filter(None, match.groups())) if match else ""


def end_with_parent(parent: int) -> None:
    """End this process when the one that has started it is gone, also within a compilation."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Compile the programs whose paths are read, and print a line of JSON for each. The argument is
    the process that asks.
    """
    # not os.getppid(): if that process is gone by now, this one has another parent
    parent = int(sys.argv[1])
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    # line by line: the other process waits for each answer
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # the compiler prints to stdout
    os.dup2(2, 1)
    # two processes that unpack the plugin at once meet halves of its files
    with open(os.path.join(tempfile.gettempdir(), "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        from jax.extend.backend import get_backend
        from jaxlib import xla_client

        client = get_backend("tt")
    # the compiler has begun
    print(file=answers)
    for path in map(str.strip, sys.stdin):
        with tempfile.TemporaryDirectory() as folder:
            options = xla_client.CompileOptions()
            options.env_option_overrides = [("export_path", folder)]
            program = Path(path).read_text(encoding="utf-8")
            begin = time.perf_counter()
            try:
                client.compile_and_load(program, client.devices()[:1], options)
            # the reason is in the log
            except Exception as error:
                print(f"error: {error}", flush=True)
                facts: dict[str, Any] = {}
            else:
                seconds = time.perf_counter() - begin
                (compiled,) = Path(folder).glob("irs/ttnn_[0-9]*.mlir")
                facts = {**read_facts(compiled.read_text(encoding="utf-8")), "seconds": seconds}
        print(json.dumps(facts), file=answers)


if __name__ == "__main__":
    main()
