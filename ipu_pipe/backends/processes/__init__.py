"""One stage a process, over torch.distributed."""
