"""The command lines of a clone. Importing one runs nothing; `experiments/` holds what only they
use.
"""
