"""Theory of delayed updates on a quadratic: which steps are stable, how fast errors shrink, what bounds say. Numbers only,
no torch.

recurrences   the papers' rules as records                        simulation   their updates, one after another
loops         a record's characteristic equation                  roots        its root radii, stable steps
half_lives    how fast errors shrink over condition numbers       bounds       of randomized PipeDream and LocalSGD
advice        of a run's stages: the largest stable rates, and what would raise them
"""
