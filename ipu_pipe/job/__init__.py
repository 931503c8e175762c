"""One run, resolved: the objects that a config names, and what all backends do with them.

record       the validated model, data, stages, schedule and versions of a run: `Job`
factories    makes the objects that a config names, and places stages on a model: `Placed`
overrides    objects from Python in place of a config's keys: `Overrides`
numerics     the settings of a GPU's arithmetic
metrics      the metrics of an evaluation
evaluation   evaluates the current weights: `evaluate`, `EvaluationResult`
user_code    finds the file and line of a fault in the user's own code
stability    the stages of a job in the theory of delayed updates
"""
