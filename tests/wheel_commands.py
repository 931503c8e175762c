"""The installed wheel's commands, run outside the clone: python wheel_commands.py, with the environment's own Python.

What fails ends it with the command, its exit code and what it printed. It imports nothing of the clone.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("ipu-pipe"))


def run(*words, code=0, said=""):
    """Run a command in the current folder; what it printed on standard output."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        words, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True
    )
    printed = done.stdout + done.stderr
    if done.returncode != code or said not in printed or "Traceback" in printed:
        sys.exit(
            f"{' '.join(words)}: exit code {done.returncode}, expected {code} and {said!r}\n{printed}"
        )
    print(
        "passed:",
        " ".join(words).replace(COMMAND, "ipu-pipe").replace(sys.executable, "python"),
        flush=True,
    )
    return done.stdout


def check_source_package():
    """See that the source package, beside the wheel, holds no tests, as it does not hold what they need."""
    (file,) = (Path(sys.prefix) / "dist").glob("*.tar.gz")
    with tarfile.open(str(file)) as package:
        folders = {name.split("/")[1] for name in package.getnames() if "/" in name}
    assert {"setup.py", "README.md", "LICENSE", "ipu_pipe", "models", "configs"} <= folders, folders
    assert "tests" not in folders, folders
    print("passed: the source package", flush=True)


def main():
    """Run all of them in an empty folder."""
    check_source_package()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        version = run(COMMAND, "--version")
        assert version == run(sys.executable, "-m", "ipu_pipe", "--version"), version
        commands = (
            "train", "schedule", "plan", "collect", "analyze", "stability", "fetch-data", "measure-hardware",
            "completion", "export",
        )  # fmt: skip
        for command in commands:
            run(COMMAND, command, "--help", said=f"usage: ipu-pipe {command}")
            assert command in run(COMMAND, "--help").replace("\n", "").replace(" ", ""), command
        run(COMMAND, "completion", "bash", code=2, said="pip install shtab")
        schedule = json.loads(
            run(
                COMMAND,
                "schedule",
                "gpipe",
                "--stages",
                "3",
                "--microbatches",
                "4",
                "--format",
                "json",
            )
        )
        assert schedule["slots"] == 12, schedule["slots"]
        run(
            COMMAND,
            "train",
            "configs/mlp_digits.yaml",
            "--set",
            "steps=4",
            "--out",
            "runs/digits",
            said="throughput: ",
        )
        assert json.loads(Path("runs/digits/summary.json").read_text())["steps"] == 4
        run(COMMAND, "analyze", "runs/digits", said="Bottleneck: ")
        run(COMMAND, "export", "runs/digits", "--to", "digits.safetensors", said="step-4")
        again = ("train", "mlp_digits", "--set", "steps=4", "--out", "runs/digits")
        run(COMMAND, *again, code=2, said="--overwrite")
        assert run(COMMAND, *again, "--overwrite", "--quiet") == ""
        run(
            COMMAND,
            "train",
            "configs/none.yaml",
            code=2,
            said="configs/none.yaml: no such config file",
        )
        run(
            COMMAND,
            "train",
            "resnet20_cifar10",
            "--set",
            f"data.root={folder}",
            code=2,
            said="ipu-pipe fetch-data cifar10",
        )
        run(sys.executable, "-m", "ipu_pipe", "train", "resnet50_ipu4", "--dry-run", said="FLOPs")
        planned = run(
            COMMAND,
            "plan",
            "resnet50_ipu4",
            "--hardware",
            "v100x8",
            "--precision",
            "float32",
            "--json",
        )
        assert json.loads(planned)["plans"], planned
        run(
            COMMAND,
            "reproduce",
            code=2,
            said="from a clone of the repository: python tools/reproduce.py",
        )
        run(COMMAND, "stability", "mlp_digits", "--curvature", "1", said="largest stable")
        run(
            COMMAND,
            "collect",
            "mlp_digits",
            "--methods",
            "gpipe,pipedream",
            "--steps",
            "2",
            "--out",
            "runs/compared",
        )
        for name in ("models", "configs", "tools", "tests"):
            run(
                sys.executable,
                "-c",
                f"import importlib.util as u; assert u.find_spec('{name}') is None",
            )
        run(sys.executable, "-c", "import ipu_pipe, ipu_pipe.models.resnet, pathlib as p; "
            "assert p.Path(ipu_pipe.__file__).with_name('py.typed').is_file()")  # fmt: skip
    print("the wheel's commands pass")


if __name__ == "__main__":
    main()
