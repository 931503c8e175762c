"""The theory of delayed updates on a quadratic: numbers only, no torch.

recurrences   a rule of the papers as numbers, and simulated: `Recurrence`, `simulate`
roots         its characteristic equation: root radius, stable steps
advice        each stage's largest stable rate, and what would raise it: `StabilityMargin`
"""
