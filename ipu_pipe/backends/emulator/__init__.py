"""The exact emulator: one process runs all stages of the whole, unsplit model.

replay   runs replays one after another: `Emulator`
engine   the emulator as a backend, and its timing of stages
"""
