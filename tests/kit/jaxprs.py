"""Walks over the equations of a jaxpr."""

from jax.extend import core


def equations(jaxpr):
    """Yield each equation of a jaxpr and of the jaxprs within its equations, in order."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)
