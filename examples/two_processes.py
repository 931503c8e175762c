"""One stage on each of two processes: torchrun --nproc_per_node 2 examples/two_processes.py [UPDATES]

Both processes run this file, and both have the whole model after training. Rank 0 prints, writes files and runs the callbacks.
The run ends when the test loss no longer falls, and leaves the best weights in the model.
"""

import functools
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe
from ipu_pipe import begin_stage

updates = int(sys.argv[1]) if sys.argv[1:] else 400

x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
x = x.float() / 16
train_set, test_set = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

torch.manual_seed(0)  # every process needs the same initial model
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), begin_stage(nn.Linear(128, 128)), nn.ReLU(), nn.Linear(128, 10)
)
summary = ipu_pipe.train(
    ipu_pipe.configure(
        backend={"name": "distributed"},
        method="pipedream",
        micro_batch_size=16,
        gradient_accumulation=2,
        steps=updates,
    ),
    "runs/two_processes",
    model=model,
    data=ipu_pipe.from_loader(
        DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True),
        DataLoader(test_set, batch_size=64),
    ),
    loss=nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    callbacks=[ipu_pipe.EarlyStopping(patience=2, restore_best=True)],
    overwrite=True,
)
right = ipu_pipe.predict(model, x[1500:]).argmax(dim=1) == y[1500:]
if torch.distributed.get_rank() == 1:
    print(
        f"after {summary['steps']} updates, on rank 1: {right.float().mean():.3f} of the test set are right"
    )
