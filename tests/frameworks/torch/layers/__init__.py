"""Functions that people really write in torch. Each is one text, which runs under real torch and under this library.

T and a number name the layer in the list of layers that they are taken from. What had to change: parameters are
explicit inputs (Reversible), and what torch changes in place goes through `xp.changed`.
"""

from types import SimpleNamespace

from tests.kit import names

from . import activations, losses, static_arguments, steps, tutorials


def layers(xp):
    found = {}
    for module in (activations, losses, static_arguments, steps, tutorials):
        found |= module.define(xp)
    return SimpleNamespace(**found)


ported = names.text(layers, names.JAX)
