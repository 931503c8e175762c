"""Export the weights of a run: as one safetensors file, or as a folder that Hugging Face's
libraries read.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch import nn

from ipu_pipe.errors import BadInput, guard_writing
from ipu_pipe.files import atomic_file, parse_path
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.local.blocks import HEADS
from ipu_pipe.run.predict import load_model
from ipu_pipe.run.resume import choose_step
from ipu_pipe.store import checkpoint
from ipu_pipe.text import describe_kind
from ipu_pipe.update.apply import AVERAGE

BEST = "best"


def export(
    run: str | Path,
    to: str | Path,
    step: None | int | str = None,
    into: nn.Module | None = None,
) -> Path:
    """Write the weights of a run under the names of the unsplit model, and return their
    checkpoint's folder.

    run: the folder of a run or of a checkpoint
    to: a file that ends in .safetensors, or a folder into which the model's own `save_pretrained`
        writes (config.json and model.safetensors for a model of transformers, the adapters for one
        of PEFT)
    step: the step of a checkpoint, "best" for the best evaluation, or None for the newest. "best"
        is refused for a run with `ema`, because its evaluations measure the averaged weights
    into: an instance of the model, required if the run's config does not name its class

    Auxiliary heads of local losses are left out. Raise `BadInput` if the export is not possible,
    `RunFault` if the file cannot be written.
    """
    run = parse_path(run, "export: run")
    to = parse_path(to, "--to")
    path = find_checkpoint(run, step)
    # the current folder cannot be replaced, even where it is empty
    if os.path.exists(to) and (not os.path.isdir(to) or not to.name or any(to.iterdir())):
        raise BadInput(
            f"--to: {to}: exists already: must be a new file that ends in .safetensors, or a new "
            f"folder"
        )
    # the checkpoint's tensors as they are: no model is built, whose code may be missing here
    if to.suffix == ".safetensors":
        weights = {
            name: value
            for name, value in checkpoint.read_weights(path).items()
            if not name.startswith(HEADS)
        }
        with guard_writing(to):
            to.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(to) as temporary:
            checkpoint.save_tensors(temporary, weights)
        return path
    model = load_model(path, into)
    if not callable(getattr(model, "save_pretrained", None)):
        why = (
            "has no save_pretrained, as models of transformers and PEFT have: must be a file "
            "that ends in .safetensors"
        )
        raise BadInput(f"--to: {to}: a folder, but the run's model, {describe_kind(model)}, {why}")
    # beside the target, because a rename works in one step only within a file system
    temporary = to.with_name(f".{to.name}.part")
    with guard_writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        # an export that was killed may have left it
        shutil.rmtree(temporary, ignore_errors=True)
        with attribute_faults(lambda: "export"):
            model.save_pretrained(temporary)  # type: ignore[operator]
        os.replace(temporary, to)
    return path


def find_checkpoint(run: Path, step: None | int | str) -> Path:
    """Return the folder of a run's checkpoint: of `step`, of the best evaluation, or the newest if
    None. Raise `BadInput`.
    """
    path = checkpoint.find_newest(run)
    # find_newest returns a folder that is no run's as it is
    if not (path / checkpoint.MANIFEST).is_file():
        raise BadInput(
            f"{run}: contains no checkpoint: must be the folder of a run, or of a checkpoint"
        )
    if step is None:
        return path
    if step == BEST:
        newest = checkpoint.load(path)
        step = newest.manifest.get("position", {}).get("best_step")
        if step is None:
            raise BadInput(
                f"--step: {BEST}: {run}: no evaluation came before its newest checkpoint"
            )
        if any(key.endswith(f"/{AVERAGE}") for key in newest.optimizer):
            why = (
                f"evaluations measured the averages of ema, in {checkpoint.OPTIMIZER} of step "
                f"{step} as NAME/{AVERAGE}"
            )
            raise BadInput(
                f"--step: {BEST}: {run}: {why}: give the step for the weights themselves"
            )
    # not `parent`: that of the current folder would be itself
    folder = Path(os.path.normpath(path / ".."))
    return folder / f"step-{choose_step(folder, int(step), '--step')}"
