"""A first layer's weights as an image (Laskin et al. 2020, Figure 7)."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_pipe.config.load import load_recorded
from ipu_pipe.errors import BadInput
from ipu_pipe.files import atomic_file
from ipu_pipe.report.plots import describe_sizes
from ipu_pipe.run import checkpoint

GAP = 2  # pixels between filters
WHITE = 255


def read_weights(path: Path) -> Tuple[Path, Dict[str, torch.Tensor]]:
    """The file or checkpoint folder read, and its weights: `path` is a state dict's file, a checkpoint folder, or the folder of a
    run, of which the newest checkpoint counts. Raises BadInput."""
    path = checkpoint.find_newest(path)
    return path, checkpoint.read_weights(path)


def first_layer(
    tensors: Mapping[str, torch.Tensor],
    place: str,
    name: Optional[str] = None,
    shape: Optional[Sequence[int]] = None,
) -> Tuple[str, torch.Tensor]:
    """The name and the filters (n, C, H, W), C 1 or 3, of a state dict's first layer: the tensor `name`, else the only one of
    such a shape; with `shape` (C, H, W) the rows of a linear layer's weights (n, C H W). Raises BadInput, beginning with `place`.
    """
    inputs = None if shape is None else int(np.prod(list(shape)))

    def fits(tensor: torch.Tensor) -> bool:
        if inputs is not None:
            return tensor.dim() == 2 and tensor.shape[1] == inputs
        return tensor.dim() == 4 and tensor.shape[1] in (1, 3)

    if shape is not None and (len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1):
        raise BadInput(f"--shape: {' '.join(map(str, shape))}: must be C H W, with 1 or 3 channels")
    wanted = "(n, 1 or 3, H, W)" if inputs is None else f"(n, {inputs})"
    if name is not None and name not in tensors:
        raise BadInput(f"{place}: {name}: not there")
    own = {key: t for key, t in tensors.items() if not key.startswith(checkpoint.HEADS)}
    found = [name] if name is not None else [key for key, t in own.items() if fits(t)]
    if len(found) != 1:
        shown = f"{len(found)} tensors: {', '.join(found[:4])}" if found else "no tensor"
        raise BadInput(f"{place}: {shown} of shape {wanted}, one is wanted: say which by --name")
    filters = tensors[found[0]]
    if not fits(filters):
        raise BadInput(f"{place}: {found[0]}: its shape is {tuple(filters.shape)}, must be {wanted}")
    if not bool(torch.isfinite(filters).all()):
        raise BadInput(f"{place}: {found[0]}: holds values that are not finite")
    return found[0], filters.float() if shape is None else filters.float().view(-1, *shape)


def filters_image(filters: torch.Tensor, enlarge: Optional[int] = None, columns: Optional[int] = None) -> np.ndarray:
    """Filters (n, C, H, W), C 1 or 3, as an image of bytes (height, width, 3): each one between its own least (0) and greatest
    value (255; one that is constant is grey), row by row in a grid of `columns` (default: about a square), 2 white pixels around
    each. `enlarge`: a weight is a square of so many pixels a side (default: filters of about 40 pixels)."""
    n, _, height, width = filters.shape
    columns = min(n, columns or math.ceil(math.sqrt(n)))
    enlarge = enlarge or max(1, -(-40 // max(height, width)))
    low, high = filters.amin(dim=(1, 2, 3), keepdim=True), filters.amax(dim=(1, 2, 3), keepdim=True)
    shares = torch.where(high > low, (filters - low) / (high - low), torch.full_like(filters, 0.5))
    pixels = (shares * WHITE).round().to(torch.uint8).expand(n, 3, height, width)
    pixels = pixels.repeat_interleave(enlarge, dim=2).repeat_interleave(enlarge, dim=3)
    down, across = pixels.shape[2] + GAP, pixels.shape[3] + GAP
    image = np.full((-(-n // columns) * down + GAP, columns * across + GAP, 3), WHITE, dtype=np.uint8)
    for i, each in enumerate(pixels.permute(0, 2, 3, 1).numpy()):  # (H, W, 3)
        top, left = i // columns * down + GAP, i % columns * across + GAP
        image[top : top + down - GAP, left : left + across - GAP] = each
    return image


def note_of(paths: Sequence[Path]) -> str:
    """What is to be said below the filters of these checkpoints and files: sizes and seeds of runs, and how they are shown."""
    configs = [path.parent.parent / "config.yaml" for path in paths]
    runs = [load_recorded(config) for config in configs if config.is_file()]
    told = dict.fromkeys(f"{describe_sizes(config)}; seed {config.seed} alone" for config in runs)
    return "; ".join([*told, "each filter from its least weight (dark) to its greatest (bright)"])


def draw_filters(panels: Sequence[Tuple[str, np.ndarray]], file: Path, title: str = "", note: str = "") -> None:
    """Images of `filters_image`, titles above, side by side, pixel by pixel: the first one's upper left corner is at (0, 24), and
    24 lower under a `title` of all; a `note` is below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    line, between, letter, dots = 24, 16, 7, 100  # pixels: of a line of text, between two images, of a letter; an inch
    widths = [max(image.shape[1], letter * len(text)) for text, image in panels]
    width = sum(widths) + between * (len(panels) - 1)
    notes = textwrap.wrap(note, max(width // letter, 1))
    above = line if not title else 2 * line
    height = above + max(image.shape[0] for _, image in panels) + line * len(notes)
    figure = Figure(figsize=(width / dots, height / dots), dpi=dots)
    FigureCanvasAgg(figure)
    left = 0
    for (text, image), own in zip(panels, widths):
        figure.figimage(image, left, height - above - image.shape[0], origin="upper")  # counted from below
        figure.text(left / width, 1 - (above - line / 2) / height, text, fontsize=9, va="center")
        left += own + between
    figure.text(0.5, 1 - line / 2 / height, title, fontsize=10, va="center", ha="center")
    for i, words in enumerate(notes):
        figure.text(
            0.5, (len(notes) - i - 0.5) * line / height, words, fontsize=8, va="center", ha="center", color="dimgray"
        )
    with atomic_file(file) as temporary:
        figure.savefig(temporary, dpi=dots, format="png")
