"""From the gradients of stale weights to the next weights.

    rules         the table of update rules against staleness, as pure functions
    apply         applies a run's rules around the passes and the updates of one torch.optim optimizer
    optimizer     parameter groups by stage, optimizers, their state in checkpoints
    rates         learning rates as functions of the update
    clipping      clipping by the norm of a stage or of all stages
"""
