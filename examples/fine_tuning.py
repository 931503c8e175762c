"""Fine-tuning: train on five digits, then on ten digits with a new head: python examples/fine_tuning.py [UPDATES]"""

import functools
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe
from ipu_pipe import begin_stage

updates = int(sys.argv[1]) if sys.argv[1:] else 200


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), begin_stage(nn.Linear(128, 128)), nn.ReLU()
        )
        self.head = begin_stage(nn.Linear(128, classes))

    def forward(self, x):
        return self.head(self.body(x))


def digits(below, size):
    """Load the images of the digits less than `below`, in microbatches of `size`."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x, y = x[y < below].float() / 16, y[y < below]
    train_set, test_set = TensorDataset(x[:-200], y[:-200]), TensorDataset(x[-200:], y[-200:])
    return ipu_pipe.from_loader(
        DataLoader(train_set, batch_size=size, shuffle=True, drop_last=True),
        DataLoader(test_set, batch_size=100),
    )


def train(folder, classes, rate, **keys):
    """Train a new model on the digits less than `classes`; return the summary of the run."""
    return ipu_pipe.train(
        ipu_pipe.configure(
            method="pipedream", micro_batch_size=16, gradient_accumulation=2, steps=updates, **keys
        ),
        folder,
        model=Net(classes),
        data=digits(classes, 16),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=rate, momentum=0.9),
        overwrite=True,
    )


first = train("runs/five_digits", 5, 0.05)
# Start from the newest checkpoint of that run. Its head has another shape and is left out: the new head keeps its initial values.
second = train(
    "runs/fine_tuning", 10, 0.02, init_from={"path": "runs/five_digits", "strict": False}
)
for summary in (first, second):
    print(
        f"test accuracy {summary['initial']['test_accuracy']:.3f} -> {summary['final']['test_accuracy']:.3f}"
    )
