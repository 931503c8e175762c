"""The papers' experiments, predictions and figures. They run from a clone and are not part of the
wheel.

reproduce           the command tools/reproduce.py
catalogue           finds experiments by name
experiment          runs one, several runs at a time, and writes its results
verdicts            judges a paper's claims by the final values of runs
training_grids      trains a table of configurations by seeds: configs/experiments/
measures            what is measured of such runs
vector_grids        learning rates on objectives of one weight vector, run by vector_runs
predicted_*         the planner's predictions beside printed numbers
history_delays      how delays grow in randomized PipeDream
stability           the command tools/stability.py: a run's stages, or the papers' figures
theory_figures      figures of the theory of delayed updates
half_lives          half-lives of errors over a range of curvatures
overview            writes the page of all judged claims from the stored results
bounds, costs       convergence bounds, and FLOPs of local-parallel training
plots               how the figures of experiments are drawn
"""
