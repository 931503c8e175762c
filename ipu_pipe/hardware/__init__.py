"""Devices and links as data; the time and bytes of a unit of a model on them; the memory of a stage by method. No torch here."""
