"""Objectives whose full loss and optimum are known: quadratics and logistic regression, as functions and as modules."""
