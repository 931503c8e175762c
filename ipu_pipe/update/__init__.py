"""From the gradients of stale weights to the next weights.

rules       the table of update rules against staleness, as pure functions: `Rule`
apply       applies a run's rules around passes and updates: `UpdateRules`
optimizer   parameter groups by stage, optimizers, their state in checkpoints: `make_groups`
coupling    what an optimizer shares between parameters, on a small copy: `find_coupling`
rates       learning rates as functions of the update
clipping    clipping by the norm of a stage or of all stages: `GradientClipping`
"""
