"""Faults put into the library one at a time: the tests that import the changed file must find each.

mutants.txt    the faults: an idea, a file, the text before and the text after
results.json   which test found which, as of the last run of all
run            runs them: python -m tests.mutants.run
"""
