"""The provenance of a run besides its config: the commit, versions, the machine, the command, and
fingerprints of its data.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Mapping

import numpy as np
import torch

from ipu_pipe import __version__
from ipu_pipe.errors import BadInput
from ipu_pipe.files import hash_files
from ipu_pipe.job.record import Job
from ipu_pipe.launcher import read_launch
from ipu_pipe.model.batch import list_tensors
from ipu_pipe.model.devices import list_accelerators

GIT_SECONDS = 5.0
# the settings of a repository that decide whether a file differs, and run nothing
_GIT_SETTINGS = (
    ("core", "filemode"),
    ("core", "symlinks"),
    ("core", "ignorecase"),
    ("core", "autocrlf"),
    ("core", "eol"),
    ("extensions", "objectformat"),
)


def describe_start(data: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the record of a start that begins now; unknown values are None. `data`: the result of
    `fingerprint_data`.
    """
    # looked up: importing it for its version would take seconds
    jax = sys.modules.get("jax")
    return {
        "begun": get_timestamp(),
        "ended": None,
        "command": list(sys.argv),
        "folder": os.getcwd(),
        "commit": find_commit(Path.cwd()),
        "versions": {
            "ipu_pipe": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": str(np.__version__),
            # of the backend xla, which has imported it by now
            **({"jax": str(jax.__version__)} if jax is not None else {}),
        },
        "machine": describe_machine(),
        "job": read_launch().job or None,
        "data": data,
    }


def get_timestamp() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def find_commit(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that holds `folder`, and whether tracked files have
    changed since, None if git cannot tell; None outside of a repository, or without git. No program
    that the repository names is run.
    """
    questions = ("--show-toplevel", "HEAD", "--git-path", "objects", "--git-path", "index")
    try:
        # rev-parse runs no program that the repository names
        repository, commit, objects, index = _ask_git(folder, "rev-parse", *questions).splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    try:
        dirty: bool | None = _has_changes(
            Path(repository), commit, folder / objects, folder / index
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        dirty = None
    return {"repository": repository, "commit": commit, "dirty": dirty}


def name_commit(folder: Path, digits: int = 40) -> str | None:
    """Return the commit of the repository that holds `folder`, and whether tracked files have
    changed since; None where there is no commit.
    """
    known = find_commit(folder)
    if known is None:
        return None
    changes = {False: "", True: " changed", None: " perhaps changed"}
    return f"{known['commit'][:digits]}{changes[known['dirty']]}"


def _has_changes(repository: Path, commit: str, objects: Path, index: Path) -> bool:
    """Return whether tracked files differ from the commit.

    In the repository itself `git status` would run programs that its config names: core.fsmonitor,
    hooks, filters, transports of missing objects. A list of them would never be complete, so git
    gets the files, objects and index of the repository, and a config of ours. Files inside
    submodules are not compared: each submodule has a config, too.
    """
    listed = _ask_git(repository, "config", "--list", "-z").split("\0")
    # -z ends each entry by a NUL, as a value may have line breaks
    settings = dict(entry.partition("\n")[::2] for entry in listed)
    # version 1, because git reads extensions only from it on
    config = ["[core]", "repositoryformatversion = 1"]
    for section, name in _GIT_SETTINGS:
        value = settings.get(f"{section}.{name}", "")
        # any other text could bring in lines of its own
        if re.fullmatch(r"\w+", value, re.ASCII):
            config += [f"[{section}]", f"{name} = {value}"]
    with tempfile.TemporaryDirectory() as git_folder:
        # git takes a folder for a repository if it has HEAD and refs
        (Path(git_folder) / "refs").mkdir()
        (Path(git_folder) / "HEAD").write_text(f"{commit}\n", encoding="ascii")
        (Path(git_folder) / "config").write_text("\n".join(config) + "\n", encoding="ascii")
        environment = {
            "GIT_DIR": git_folder,
            "GIT_WORK_TREE": str(repository),
            # absolute, because git runs in another folder
            "GIT_OBJECT_DIRECTORY": os.path.abspath(objects),
            "GIT_INDEX_FILE": os.path.abspath(index),
        }
        # the first option leaves the index as it is, the second overrides the user's own config
        status = ["--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain"]
        status += ["--untracked-files=no", "--ignore-submodules=dirty", "--no-renames"]
        return bool(_ask_git(repository, *status, environment=environment).strip())


def _ask_git(folder: Path, *command: str, environment: Mapping[str, str] = {}) -> str:
    """Return what a git command prints, run in `folder`. Raise `OSError`, `ValueError` or
    `SubprocessError`.
    """
    finished = subprocess.run(
        ["git", "-C", str(folder), *command],
        # git must not wait for an answer
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=GIT_SECONDS,
        check=True,
        text=True,
        env={**os.environ, **environment},
    )
    return finished.stdout


def describe_machine() -> dict[str, Any]:
    """Describe this machine: its CPU and cores, memory in bytes, GPUs, and the threads of torch."""
    gpus = [kind.get_name(i) for kind in list_accelerators() for i in range(kind.count_devices())]
    try:
        memory: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Windows does not have it
    except (AttributeError, ValueError, OSError):
        memory = None
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "cpu": _find_cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "gpus": gpus,
        "threads": torch.get_num_threads(),
    }


def _find_cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (
        line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")
    )
    # a system without /proc may say it another way
    return next(named, platform.processor() or None)


# of more files only the names are hashed
MOST_FILES = 1000
# digits of a hash in a message
SHOWN = 16


def fingerprint_data(job: Job, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes, types and hash of the first microbatch, and hashes of the files that the data
    source says it reads (`data_files`). A file's hash is taken from `earlier`, the fingerprint of
    an earlier start, where its size and time are the same. Raise `BadInput` where a file cannot be
    read.
    """
    paths = [os.fspath(file) for file in getattr(job.data, "data_files", ())]
    # the common letters may end within a name, so only their folder counts
    folder = os.path.dirname(os.path.commonprefix(paths))
    named = {path[len(os.path.join(folder, "")) if folder else 0 :]: Path(path) for path in paths}
    try:
        files = (
            hash_files(named, _as_mapping(earlier.get("files"))) if len(named) <= MOST_FILES else {}
        )
    except OSError as error:
        raise BadInput(f"data: {error.filename}: {error.strerror or error}") from None
    names = hashlib.sha256("\n".join(sorted(named)).encode()).hexdigest()
    return {
        **_hash_first_microbatch(job),
        "folder": os.path.abspath(folder) if paths else None,
        "files": files,
        "file_names": {"count": len(named), "sha256": names} if named else None,
    }


def compare_data(
    job: Job,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
) -> list[str]:
    """Return a line for each difference between two fingerprints of data, with both values. What
    was not recorded is not compared, nor is the first microbatch of a source that draws another one
    each time.
    """
    faults: list[str] = []

    def compare(what: str, then: Any, today: Any) -> None:
        if None not in (then, today) and then != today:
            faults.append(f"data: {what} was {str(then)[:SHOWN]}, is {str(today)[:SHOWN]}")

    files = [_as_mapping(record.get("files")) for record in (before, now)]
    for name in sorted({*files[0], *files[1]}) if all(files) else ():
        then, today = (_as_mapping(record.get(name)) for record in files)
        if not (then and today):
            faults.append(
                f"data: {name}: was {'not ' if today else ''}read, is {'' if today else 'not '}now"
            )
        elif then.get("sha256") and today.get("sha256"):
            compare(f"{name}: its SHA-256", then["sha256"], today["sha256"])
        else:
            compare(f"{name}: its size", then.get("bytes"), today.get("bytes"))
    names = [_as_mapping(record.get("file_names")).get("sha256") for record in (before, now)]
    # a file that is missing or new has been named above
    if not faults:
        compare("the SHA-256 of the names of its files", *names)
    if not faults and before.get("sha256") != now.get("sha256") and _is_repeatable(job, now):
        compare("the SHA-256 of the first microbatch", before.get("sha256"), now.get("sha256"))
    return faults


def _as_mapping(value: Any) -> Mapping[str, Any]:
    # the record may have been edited by hand
    return value if isinstance(value, Mapping) else {}


def _is_repeatable(job: Job, now: Mapping[str, Any]) -> bool:
    """Return whether the source gives its first microbatch again, after one of another epoch. A
    source that draws from shared random state does not."""
    # there may be no other epoch
    with contextlib.suppress(Exception):
        job.data.train_batch(1, 0, job.config.micro_batch_size)
    return bool(_hash_first_microbatch(job)["sha256"] == now.get("sha256"))


def _hash_first_microbatch(job: Job) -> dict[str, Any]:
    microbatch = list_tensors(job.data.train_batch(0, 0, job.config.micro_batch_size))
    digest = hashlib.sha256()
    for tensor in microbatch:
        digest.update(
            # as bytes, because NumPy has no bfloat16
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    shown = [
        f"{str(tensor.dtype).rpartition('.')[2]} {list(tensor.shape)}" for tensor in microbatch
    ]
    return {"first_microbatch": shown, "sha256": digest.hexdigest()}
