"""Seeded hostile inputs for the command lines, a module for each kind of mutation; tools/hostile.py runs them.

A case is determined by its kind, its number and the seed alone, so that a failing one can be run again by itself.
"""
