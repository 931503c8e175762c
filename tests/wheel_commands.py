"""Run the commands of the installed wheel outside the clone: python wheel_commands.py, with the environment's own Python.

It ends at the first failure with the command, its exit code and its output. It imports nothing from the clone.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("ipu-pipe"))


def run_installed(*words, code=0, expected_output=""):
    """Run a command in the current folder, check its exit code and output, and return its standard output."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        words, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True
    )
    output = process.stdout + process.stderr
    if process.returncode != code or expected_output not in output or "Traceback" in output:
        sys.exit(
            f"{' '.join(words)}: exit code {process.returncode}, expected {code} and {expected_output!r}\n{output}"
        )
    print(
        "passed:",
        " ".join(words).replace(COMMAND, "ipu-pipe").replace(sys.executable, "python"),
        flush=True,
    )
    return process.stdout


def run_words(words, **expected):
    """Run ipu-pipe with these words, as `run_installed` does."""
    return run_installed(COMMAND, *words.split(), **expected)


def check_source_package():
    """Check that the source package has no tests, since it lacks the files that they need."""
    (file,) = (Path(sys.prefix) / "dist").glob("*.tar.gz")
    with tarfile.open(str(file)) as package:
        folders = {name.split("/")[1] for name in package.getnames() if "/" in name}
    assert {"setup.py", "README.md", "LICENSE", "ipu_pipe", "models", "configs"} <= folders, folders
    assert "tests" not in folders, folders
    print("passed: the source package", flush=True)


def main():
    """Run all commands in an empty folder."""
    check_source_package()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        version = run_installed(COMMAND, "--version")
        assert version == run_installed(sys.executable, "-m", "ipu_pipe", "--version"), version
        commands = (
            "train", "schedule", "plan", "compare", "collect", "analyze", "stability", "fetch-data", "measure-hardware",
            "completion", "export",
        )  # fmt: skip
        for command in commands:
            run_installed(COMMAND, command, "--help", expected_output=f"usage: ipu-pipe {command}")
        run_installed(COMMAND, "completion", "bash", code=2, expected_output="pip install shtab")
        schedule = json.loads(run_words("schedule gpipe --stages 3 --microbatches 4 --format json"))
        assert schedule["slots"] == 12, schedule["slots"]
        first = "train configs/mlp_digits.yaml --set steps=4 --out runs/digits"
        again = "train mlp_digits --set steps=4 --out runs/digits"
        run_words(first, expected_output="throughput: ")
        assert json.loads(Path("runs/digits/summary.json").read_text())["steps"] == 4
        run_words("analyze runs/digits", expected_output="Bottleneck: ")
        run_words("export runs/digits --to digits.safetensors", expected_output="step-4")
        run_words(again, code=2, expected_output="--overwrite")
        assert run_words(f"{again} --overwrite --quiet") == ""
        missing = f"train resnet20_cifar10 --set data.root={folder}"
        run_words(missing, code=2, expected_output="ipu-pipe fetch-data cifar10")
        dry_run = ("-m", "ipu_pipe", "train", "resnet50_ipu4", "--dry-run")
        run_installed(sys.executable, *dry_run, expected_output="FLOPs")
        planned = run_words("plan resnet50_ipu4 --hardware v100x8 --precision float32 --json")
        assert json.loads(planned)["plans"], planned
        clone = "from a clone of the repository: python tools/reproduce.py"
        run_words("reproduce", code=2, expected_output=clone)
        run_words("stability mlp_digits --curvature 1", expected_output="largest stable")
        run_words("collect mlp_digits --methods gpipe,pipedream --steps 2 --out runs/compared")
        for name in ("models", "configs", "tools", "tests"):
            code = f"import importlib.util as u; assert u.find_spec('{name}') is None"
            run_installed(sys.executable, "-c", code)
        run_installed(sys.executable, "-c", "import ipu_pipe, ipu_pipe.models.resnet, pathlib as p; "
            "assert p.Path(ipu_pipe.__file__).with_name('py.typed').is_file()")  # fmt: skip
    print("the wheel's commands pass")


if __name__ == "__main__":
    main()
