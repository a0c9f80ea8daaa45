"""Layers for the checkers, by name, and what an error says of the wrong ones."""

from __future__ import annotations

import jax
import pytest

from tests.registry import CASES

CASE = {case.name: case for case in CASES}

# Whose backward is the gradient of their forward.
TRUE = ["OneTuple", "FreshStatics", "MixedOutputs", "NoneForMissing", "MarkedOutput", "VariableArguments", "Trees"]
TRUE += ["AskedLinear"]

# Whose backward is meant to be another one.
MEANT = ["Round", "InputReturned", "DoubledTanh", "Reversal", "RouterLoss"]

AT_SECOND_ORDER = ["second order", "no second order"]

# What an error says, whatever the checker.
SAYS = {
    "sign": r"first order: the gradient of args\[0\] (at index|when)",
    "one index": r"first order: the gradient of args\[0\] at index \(1, 2\) is .* wrong at 1 of 6 places",
    "second order": r"second order: .*args\[0\]",
    "no second order": r"second order: .*args\[0\]",
    "dropped None": r"args\[0\].* with a cotangent for output 0 alone",
    "dropped argument": r"args\[0\].* when args\[0\] alone is differentiated",
    "leak": r"a tracer is leaked: ",  # JAX tells by what, except in a large process
    "global": r"args\[0\].* when the layer ran on other values before backward",
    "counter": r"args\[0\]",
    "jit": r"args\[0\].* under jit",
    "conjugate": r"args\[0\] at index",
    "three times": r"args\[0\] at index .*(in float32, but|by the reference)",
    "nan": r"args\[0\] at index .* is nan",
    "table": r"for other values",
    "absolute": r"args\[0\]( at index| with cotangents of the other sign)",
    "absolute scalar": r"args\[0\]",
    "clipped": r"args\[0\] .*with cotangents 1048576 times as large",
    "no transposes": r"for other values \(random sizes\): the gradient of args\[\d\]",
    "swapped": r"for other values \(random sizes and signs\): the gradient of args\[\d\]",
    "swapped scalars": r"for other values \(random sizes\): the gradient of args\[\d\]",
    "small values": r"args\[0\] at index \(0,\) is .* wrong at 1 of 2 places",
    "small units": r"args\[0\] at index .*e-09",
}

on_host = pytest.mark.skipif(jax.config.jax_custom_vjp3, reason="forward has to be traceable")
