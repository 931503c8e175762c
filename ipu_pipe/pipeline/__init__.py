"""The pipeline as one object: `Pipeline(model, loss, optimizer, method).step(x, y)`, from a loop of the caller's own.

    build         make a model, its stages, schedule and rules from a config and objects, all checked
    checks        the settings that cannot be combined, and models that cannot be trained
    flow          the batches on their way: which were given, which have left, where the pipeline ran empty
    cuts          where each batch ends in the schedule
    pipeline      `Pipeline` and `Update`
    arguments     the arguments that a config words otherwise
    batches       divide a batch into microbatches; hand them to the backend
    optimizer     the caller's optimizer: its groups, settings and state, shared with the one that steps
    trace         the page of what the devices did
"""
