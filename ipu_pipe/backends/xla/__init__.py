"""Run stages on XLA devices, through jax. jax is imported when a run names the backend.

devices     the devices of a platform, and the stages on them: `place`, `list_devices`
faults      what the backend refuses, by name: `list_faults`
operations  the table of ATen operations
windows     its convolutions and pools
lower       graphs as functions of jax arrays: `lower`
update      optimizers and update rules as pure functions of arrays
player      the rows of all stages, played on their devices: `Player`
slots       one program for what all stages do in a slot: `SlotPlayer`
engine      the backend's engine: results, evaluation, checkpoints and measurements
backend     the row of the table of backends: `BACKEND`
"""
