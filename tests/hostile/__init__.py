"""Seeded hostile inputs for the command lines: what each kind mutates, and how the cases run (see tools/hostile.py).

A case is determined by its kind, its number and the seed alone, so that a failing one can be run again by itself.
"""
