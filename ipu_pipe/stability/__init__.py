"""The theory of delayed updates on a quadratic: numbers only, no torch.

recurrences   a rule of the papers as a record of numbers, and the same rule simulated update by update
roots         the characteristic equation of a recurrence: its root radius, its stable steps, its half-lives
advice        the stages of a run: the largest stable learning rate of each, and the changes that would raise it
"""
