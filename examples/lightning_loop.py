"""A LightningModule over a pipeline, on the emulator: python examples/lightning_loop.py [UPDATES]"""

import sys

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        self.net = nn.Sequential(*layers)
        self.loaded = None

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)
        loss = nn.functional.cross_entropy
        self.pipe = ipu_pipe.Pipeline(self.net, loss, optimizer, method="pipedream", stages=3)
        if self.loaded is not None:
            self.pipe.load_state_dict(self.loaded)
        # steps of this view change nothing, but Lightning counts them, for max_steps and for checkpoints
        return [self.pipe.optimizer], [torch.optim.lr_scheduler.StepLR(self.pipe.optimizer, 300)]

    def training_step(self, batch, index):
        for update in self.pipe.step(*batch):
            self.log("loss", update.loss, prog_bar=True)
        self.optimizers().step()
        self.lr_schedulers().step()

    def validation_step(self, batch, index):
        self.log("accuracy", self.pipe.evaluate([batch], ["accuracy"])["accuracy"], prog_bar=True)

    def on_save_checkpoint(self, checkpoint):
        # this drains the pipeline; the weights and momenta that Lightning has taken before are references, not copies
        checkpoint["pipeline"] = self.pipe.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["pipeline"]

    def on_train_end(self):
        self.pipe.drain()


x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
x = x.float() / 16
train_loader = DataLoader(TensorDataset(x[:1500], y[:1500]), 32, shuffle=True, drop_last=True)
test_loader = DataLoader(TensorDataset(x[1500:], y[1500:]), 297)
updates = int(sys.argv[1]) if sys.argv[1:] else 460
quiet = {"logger": False, "num_sanity_val_steps": 0}
trainer = lightning.Trainer(max_steps=updates, accelerator="cpu", **quiet)
trainer.fit(Digits(), train_loader, test_loader)
accuracy = trainer.validate(dataloaders=test_loader, verbose=False)[0]["accuracy"]
print(f"after {trainer.global_step} updates: test accuracy {accuracy:.3f}")
