"""Data sets in their official layouts, in a deterministic order, as normalized tensors.

A `DataSource` returns microbatches by (epoch, index). Their samples and augmentations depend only
on the seed, the epoch and the position in the epoch, never on how microbatches are grouped or on
earlier draws, so that a resumed run needs no state of its data.

    sources   batches, and sources in memory: `DataSource`, `TensorData`
    loaders   the user's own loaders as a source: `from_loader`
    sets      the named data sets: `load_data`, `SETS`
    stand_in  random data with the shape of a set whose files are missing: `make_stand_in`
    images    folders of images
    text      text as integers
    fetch     gets a data set: `fetch`
"""

from ipu_pipe.data.fetch import fetch
from ipu_pipe.data.loaders import from_loader
from ipu_pipe.data.sets import SETS, get_default_root, load_data
from ipu_pipe.data.sources import DataSource, TensorData

__all__ = [
    "SETS",
    "DataSource",
    "TensorData",
    "get_default_root",
    "fetch",
    "from_loader",
    "load_data",
]
