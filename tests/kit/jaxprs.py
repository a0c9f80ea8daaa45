"""The equations of a jaxpr."""

import jax


def equations(jaxpr):
    """Yield each equation of a jaxpr and of the jaxprs within its equations, in order."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)
