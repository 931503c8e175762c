"""A backend that runs the stages of a model on several processes, over torch.distributed."""
