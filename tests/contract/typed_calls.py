"""What a type checker accepts and what it refuses: `test_package.py` gives this file to pyright. Nothing imports it.

A comment `# error: RULE` stands on each line that pyright has to refuse, with the rule that it breaks. It has to accept
all others.
"""

from typing import Any, assert_type

import jax
import jax.numpy as jnp

from pylayer_jax import (
    Function,
    FunctionCtx,
    PyLayer,
    PyLayerContext,
    compare_programs,
    once_differentiable,
    saved_tensors_hooks,
    saved_tensors_report,
)
from pylayer_jax.packers import cast_saved

x = jnp.ones(3)


# -- PyLayer --------------------------------------------------------------------------------------


class Typed(PyLayer):
    @staticmethod
    def forward(ctx: PyLayerContext, x: jax.Array, scale: float = 1.0, *, mode: str = "same") -> tuple[jax.Array, int]:
        return x * scale, len(mode)


class Untyped(PyLayer):
    @staticmethod
    def forward(ctx, x, axis=0):
        return "text"

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return dy


class OfClass(PyLayer):
    @classmethod
    def forward(cls, ctx: PyLayerContext, x: jax.Array) -> jax.Array:
        return x


class Variadic(PyLayer):
    @staticmethod
    def forward(ctx: PyLayerContext, *xs: jax.Array, **sizes: int) -> jax.Array:
        return xs[0]


assert_type(Typed.apply(x), tuple[jax.Array, int])
assert_type(Typed.apply(x, 2.0, mode="other"), tuple[jax.Array, int])
assert_type(Typed().apply(x=x, scale=2), tuple[jax.Array, int])
assert_type(OfClass.apply(x), jax.Array)
assert_type(Variadic.apply(x, x, rows=3), jax.Array)
assert_type(Untyped.apply(x, axis=1), str)
jax.jit(Typed.apply)(x)
jax.grad(OfClass.apply)(x)

Typed.apply()  # error: reportCallIssue
Typed.apply(x, 1.0, "other")  # error: reportCallIssue
Typed.apply(x, size=2)  # error: reportCallIssue
Typed.apply("x")  # error: reportArgumentType
Typed.apply(x, scale="2")  # error: reportArgumentType
OfClass.apply(y=x)  # error: reportCallIssue
Variadic.apply(x, rows="3")  # error: reportArgumentType
Untyped.apply(x, axes=1)  # error: reportCallIssue


def of_any_layer(layer: type[PyLayer]) -> Any:
    return layer.apply(x, anything=3)


# -- Function, whose forward takes a context or none ----------------------------------------------


class WithContext(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: jax.Array, n: int = 2) -> jax.Array:
        return x**n


class WithoutContext(Function):
    @staticmethod
    def forward(x: jax.Array, n: int = 2) -> jax.Array:
        return x**n

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[jax.Array, int], output: jax.Array) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: FunctionCtx, dy: jax.Array) -> tuple[jax.Array, None]:
        return dy, None


assert_type(WithContext.apply(x, n=3), jax.Array)
assert_type(WithoutContext.apply(x, n=3), jax.Array)
WithContext.apply(x, m=3)  # error: reportCallIssue
WithContext.apply(x, "3")  # error: reportArgumentType
WithoutContext.apply(x, m=3)  # error: reportCallIssue
WithoutContext.apply(x, "3")  # error: reportArgumentType
WithoutContext.apply(x, 3, 4)  # error: reportCallIssue


# -- functions that are decorated with hooks ------------------------------------------------------


@cast_saved(jnp.float16)
def loss(x: jax.Array, power: int = 2) -> jax.Array:
    return jnp.sum(x**power)


@saved_tensors_hooks(lambda x: x, lambda x: x, host=True)
def shifted(x: jax.Array) -> tuple[jax.Array, str]:
    return x, "text"


assert_type(loss(x, power=3), jax.Array)
assert_type(shifted(x), tuple[jax.Array, str])
with cast_saved() as packer:
    assert_type(packer, cast_saved)
loss(x, exponent=3)  # error: reportCallIssue
loss("x")  # error: reportArgumentType
shifted()  # error: reportCallIssue
cast_saved(type=jnp.float16)  # error: reportCallIssue
saved_tensors_hooks(len)  # error: reportCallIssue


# -- reports --------------------------------------------------------------------------------------

assert_type(saved_tensors_report(loss, x).total_bytes, int)
comparison = compare_programs({"plain": loss, 8: cast_saved()(loss)}, x, rounds=3)
assert_type(comparison.rows[0].held_bytes, int)
assert_type(compare_programs(loss, x).within("2 GiB").peak_bytes, int | None)
compare_programs([loss], x)  # error: reportArgumentType
comparison.within(None)  # error: reportArgumentType
compare_programs({"plain": loss}, x, round=3)  # error: reportCallIssue
