"""A pipeline on one dimension of a DeviceMesh, FSDP2 on the other: torchrun --nproc_per_node 4 examples/mesh_loop.py"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ipu_pipe

torch.set_num_threads(1)
dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
# two stages, each sharded over two ranks
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))

torch.manual_seed(0)  # the same weights on every rank
widths = [64, 128, 128, 128]
hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:])]
model = nn.Sequential(*hidden, nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def shard(stage, index):
    for module in stage.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])


pipe = ipu_pipe.Pipeline(
    model,
    cross_entropy,
    optimizer,
    "pipedream_2bw",
    stages=["2"],
    microbatches=4,
    backend="distributed",
    process_group=mesh["pp"].get_group(),
    data_group=mesh["dp"].get_group(),
    prepare_stage=shard,
)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
train_set = TensorDataset(images[:1500], labels[:1500])
# the ranks of a pipeline read the same batches, and each pipeline its own
sampler = DistributedSampler(train_set, num_replicas=pipe.replicas, rank=pipe.replica)
loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        pipe.step(x, y)
measured = pipe.evaluate([(images[1500:], labels[1500:])], ["accuracy"])
state = pipe.state_dict()  # whole, on the first rank of each pipeline
if dist.get_rank() == 0:
    print(f"test accuracy {measured['accuracy']:.3f}, {len(state['model'])} tensors in the state")
pipe.close()
dist.destroy_process_group()
