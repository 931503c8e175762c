"""Devices and links as data; the time and bytes of a unit of a model on them; the memory of a stage by method.

    description       devices, links, host; the time of messages
    measuring         measures this machine for a description
    precision         bytes of each kind of number
    unit_costs        the seconds and bytes of a unit of a model
    model_units       counts or measures a model's units (with torch)
    memory            the memory formula of a stage
    paper_figures     the papers' own figures of memory
"""
