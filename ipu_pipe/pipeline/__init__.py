"""The pipeline as one object: `Pipeline(model, loss, optimizer, method).step(x, y)`, from a loop of the caller's own.

    pipeline      `Pipeline` and `Update`
    batches       divide a batch into microbatches; hand them to the backend
    cuts          where each step ends in the schedule
    trace         the page of what the devices did
    optimizer     the caller's optimizer: its groups, settings and state, shared with the one that steps
"""
