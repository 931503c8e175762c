"""Devices and links as data; the time and bytes of a model's units on them; a stage's memory.

description     devices, links, host; the time of messages: `Hardware`, `read_hardware`
measuring       measures this machine for a description: `measure`
precision       the bytes of each kind of number: `Precision`
unit_costs      the seconds and bytes of a unit of a model: `Unit`
model_units     counts or measures a model's units, with torch: `count_units`
memory          the memory formula of a stage: `compute_stage_memory`
paper_figures   the papers' own figures of memory
"""
