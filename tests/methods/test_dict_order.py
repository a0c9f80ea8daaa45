"""A dict keeps the order of its keys, which JAX sorts: `a, b = d.values()` means the same in both methods."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from .made import layer


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda *xs: jax.vmap(f)(*xs)])
def test_dicts_keep_the_order_of_their_keys(run):
    seen = []

    def forward(ctx, x, params, **more):
        ctx.kept = {"x": x, "a": params["a"]}
        ctx.statics = {"x": 1, "a": 0}
        ctx.nested = [{"z": {"q": x, "b": 2.0}, "c": 3}]
        ctx.more = more
        ctx.save_for_backward({"x": x, "a": params["a"]})
        assert list(params) == ["w", "a"]
        return {"y": x * params["a"] ** 2, "k": x * params["w"], "static": 1}

    def backward(ctx, d):
        (saved,) = ctx.saved_tensor()
        found = (saved, ctx.kept, ctx.statics, ctx.nested[0], ctx.nested[0]["z"], ctx.more, d)
        seen.append([" ".join(keys) for keys in found])
        x, a = saved.values()
        dy, dk, _ = d.values()
        return dy * a**2, {"a": 2 * dy * x * a, "w": dk * x}, None, None

    made = layer(forward, backward)

    def outputs(x, a):
        return made.apply(x, {"w": x, "a": a}, second=x, first=a)

    x, a = jnp.array([2.0]), jnp.array([3.0])
    gradients = jax.grad(lambda x, a: run(lambda x, a: outputs(x, a)["y"])(x, a).sum(), (0, 1))(x, a)
    assert [float(g[0]) for g in gradients] == [9, 12]
    assert seen[-1] == ["x a", "x a", "x a", "z c", "q b", "second first", "y k static"]
    assert list(outputs(x, a)) == ["y", "k", "static"]
