"""Code that uses an array as a tensor of torch or Paddle: the error says what to write in JAX."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax._trees import hints
from tests.kit.modes import EAGER_AND_JIT

from .made import layer, loss, text_of

X = jnp.ones((2, 3))

HABITS = {
    "x.size(0)": "x.shape[0]",
    "x.view(3, 2)": "x.reshape(a, b)",
    "x.view(-1)": "x.reshape(a, b)",
    "x.requires_grad": "ctx.needs_input_grad[i]",
    "x.stop_gradient": "ctx.needs_input_grad[i]",
    "x.detach()": "jax.lax.stop_gradient(x)",
    "x.unsqueeze(0)": "jnp.expand_dims(x, axis)",
    "x.add_(1)": "arrays never change in place: y = jnp.add(x, ...)",
    "x.renorm_(2)": "y = x + 1 for x.add_(1), x.at[i].set(v) for a part of x",
    "x.scale_(2)": "y = x * scale + bias",
    "x.scatter_nd_add(x, x)": ".at[tuple(jnp.moveaxis(index, -1, 0))].add(y)",
    "x.det()": "jnp.linalg.det(x, ...)",
    "x.erfinv()": "jax.scipy.special.erfinv(x, ...)",
    "jnp.sigmoid(x)": "In JAX: jax.nn.sigmoid(x, ...)",
    "jnp.to_tensor(x)": "In JAX: jnp.asarray(values)",
    "jnp.cat([x, x])": "In JAX: jnp.concatenate(arrays, axis)",
    "jax.tanh(x)": "In JAX: jnp.tanh(x, ...)",
    "jax.no_grad()": "In JAX: no block: jax.lax.stop_gradient(x) cuts a value",
    "jax.nn.functional.relu(x)": "In JAX: jax.nn.",
    "x.addmm_(x, x)": "y = x + a @ b",
    "x.addcmul_(x, x)": "y = x + value * a * b",
    "x.scatter_add_(0, x, x)": "y = x.at[index].add(y)",
    "x.copy_(x)": "x.at[:].set(y)",
    "x.requires_grad_()": "ctx.needs_input_grad[i]",
    "x.conj_physical()": "jnp.conj(x)",
    "x.multinomial(1)": "jax.random.categorical(key, jnp.log(x))",
    "x.device.type": "jax.default_backend()",
    "x[None].transpose(1, 2)": "jnp.swapaxes(x, 1, 2)",
    "x.max(1).values": "jnp.max(x, axis)",
    "x.flatten(0, 1)": "x.reshape(-1, *x.shape[2:])",
    "x.flatten(1)": "x.reshape(len(x), -1)",
    "x.to(jnp.float32)": "x.astype(dtype)",
    "x.half()": "x.astype(jnp.float16)",
    "x.numpy()": "np.asarray(x), outside of traced code. Code that has to run on the host",
    "x.cuda()": "jax.device_put(x, device)",
    "x.sigmoid()": "jax.nn.sigmoid(x, ...)",
    "x.tile((2, 2))": "jnp.tile(x, ...)",
    "x.sum(dim=1)": "axis",
    "x.mean(axis=1, keepdim=True)": "In JAX: keepdims",
    "x.backward(x)": "jax.vjp(f, x)",
    "x.main_grad": "a jax.Ref",
}
RUNS = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
}


def method_of(code):
    run = eval(f"lambda x: {code}")
    return lambda ctx, x: (run(x), x * 1)[1]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("code", HABITS)
def test_the_error_says_what_to_write(code, run):
    with pytest.raises((AttributeError, TypeError, NotImplementedError, ValueError)) as raised:
        RUNS[run](layer(method_of(code)).apply)
    assert HABITS[code] in text_of(raised.value)
    assert "This happened in Made.forward" in text_of(raised.value)


# Methods of Paddle's and torch's tensors, and functions of these packages that users look for in jax.numpy.
TENSOR_NAMES = """
    scale scatter_nd_add set_value masked_select lerp erfinv greater_than inplace_version retain_grads get_tensor eq lt
    neg frac index_put index_fill gather_nd take_along_dim repeat_interleave movedim swapdims diag_embed digamma lgamma
    erfc logit xlogy inverse cholesky slogdet svd qr pinv sum_to_size reduce_as is_contiguous stride data_ptr is_leaf
    grad_fn byte short char is_complex new_full new_tensor bucketize kthvalue cummax logcumsumexp split_with_sizes
    strided_slice unflatten view_as_complex exponential_ uniform_ index_fill_ lerp_ masked_fill_ clamp_min_ erfinv_
"""
FUNCTION_NAMES = """
    relu gelu softmax silu log_softmax one_hot leaky_relu softplus elu hardswish logsigmoid tensor to_tensor as_tensor
    cat no_grad enable_grad bmm mm clamp rsqrt unsqueeze topk scatter_add index_select masked_fill randn rand randperm
    manual_seed is_tensor Tensor dropout embedding linear conv2d erf logsumexp numel permute autograd nn
"""


@pytest.mark.parametrize(("of", "names"), [("x", TENSOR_NAMES), ("jnp", FUNCTION_NAMES), ("np", FUNCTION_NAMES)])
def test_names_that_have_a_hint(of, names):
    for name in names.split():
        with pytest.raises(AttributeError) as raised:
            layer(method_of(f"{of}.{name}")).apply(X)
        assert "In JAX: " in text_of(raised.value), name


def test_what_hints_name_is_in_jax():
    named = re.findall(r"\b(?:jax|jnp)(?:\.\w+)+", hints._TABLE)
    assert len(named) > 50
    for name in named:
        eval(name)


HOST_CODE = ("np.asarray(x)", "np.sin(x)", "float(x.sum())", "x.sum().item()", "x.tolist()", "x.numpy()")


@pytest.mark.parametrize("run", ["jit", "vmap"])
@pytest.mark.parametrize("code", ["x.clone()", "x.sum() > 0 and x", *HOST_CODE])
def test_what_only_traced_code_refuses(code, run):
    with pytest.raises((AttributeError, TypeError)) as raised:
        RUNS[run](layer(method_of(code)).apply)
    text = text_of(raised.value)
    assert ("x itself, which never changes" in text) == (code == "x.clone()")
    assert ("asks for numbers" in text) == (code not in ("x.clone()", "x.numpy()"))
    assert ("jax.pure_callback" in text) == (code in HOST_CODE)


def test_the_two_lines_for_host_code_work():
    with pytest.raises(TypeError) as raised:
        jax.jit(layer(method_of("np.tanh(x)")).apply)(X)
    lines = "\n".join(line.strip() for line in text_of(raised.value).splitlines() if line.startswith("    "))

    def forward(ctx, x):
        scope = {"jax": jax, "x": x, "function": np.tanh}
        exec(lines, scope)
        return scope["y"]

    np.testing.assert_allclose(jax.jit(jax.vmap(layer(forward).apply))(X), np.tanh(X), rtol=1e-6)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("code", ["jnp.tanh(x)", "jax.nn.sigmoid(x)", "x * 0.5", "x + 1.0", "x**2", "-x"])
def test_an_argument_that_is_a_list_of_numbers(code, kind):
    with pytest.raises(TypeError) as raised:
        layer(method_of(code)).apply(kind([0.5, 1.0]))
    assert "pass an array: Made.apply(jnp.asarray(...))" in text_of(raised.value)


@EAGER_AND_JIT
@pytest.mark.parametrize("code", ["x.detach()", "x.size(0)"])
def test_so_does_that_of_backward(code, mode):
    with pytest.raises((AttributeError, TypeError)) as raised:
        mode(jax.grad(loss(layer(backward=method_of(code)))))(X)
    assert HABITS[code] in text_of(raised.value)
    assert "This happened in Made.backward" in text_of(raised.value)


SAVING = layer(lambda ctx, x: (ctx.save_for_backward(x), x * 2)[1], lambda ctx, dy: dy * ctx.saved_tensors[0])
IN_HOOKS = {
    **{code: HABITS[code] for code in ("x.detach()", "x.cuda()", "jnp.sigmoid(x)")},
    "x.numpy()": "np.asarray(x), outside of traced code.",
}


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("hook", ["pack_hook", "unpack_hook", "only"])
@pytest.mark.parametrize("code", IN_HOOKS)
def test_so_does_that_of_a_hook(code, hook, host, mode):
    hooks = {"pack_hook": lambda x: x, "unpack_hook": lambda x: x, hook: eval(f"lambda x: {code}")}
    # XLA hands on the text of an exception in a compiled program, and not the exception.
    with (
        pytest.raises((AttributeError, jax.errors.JaxRuntimeError)) as raised,
        saved_tensors_hooks(**hooks, host=host),
    ):
        jax.block_until_ready(mode(jax.grad(loss(SAVING)))(X))
    text = text_of(raised.value)
    assert f"{hook}, for Made, saved tensor 0" in text or f"{hook} raised AttributeError for Made" in text
    assert IN_HOOKS[code] in text
    assert text.count("In JAX: ") == 1
    advice = "It may read the shape" if hook == "only" else "host=True"
    assert (advice in text) == (code == "x.numpy()" and (hook == "only" or not host))


def test_what_a_pack_hook_returned_is_no_array():
    hooks = saved_tensors_hooks(lambda x: (x, 2.0), lambda packed: jnp.sin(packed))
    with pytest.raises(TypeError) as raised, hooks:
        jax.grad(loss(SAVING))(X)
    assert "unpack_hook gets what pack_hook returned" in text_of(raised.value)


@pytest.mark.parametrize(
    "code", ["[].detach()", "x.nothing", "x.x", "x.__add_", "len(5)", "{}['view']", "jnp.nothing", "re.relu"]
)
def test_other_errors_get_no_advice(code):
    with pytest.raises((AttributeError, TypeError, KeyError)) as raised:
        layer(method_of(code)).apply(X)
    assert not any("JAX" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize(
    ("method", "attribute", "advice"),
    [
        ("forward", "stop_gradient", "ctx.mark_non_differentiable"),
        ("forward", "note", "nder jit an array takes no attributes. Return the value, as one more output of forward"),
        ("backward", "main_grad", "a jax.Ref, to which backward adds"),
    ],
)
def test_an_attribute_of_an_array(method, attribute, advice, run):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return noting("forward", x)

    def noting(name, x):
        if name == method:
            setattr(x, attribute, 1)
        return x * 1

    made = layer(forward, lambda ctx, dy: noting("backward", ctx.saved_tensors[0]))
    with pytest.raises(AttributeError, match=attribute) as caught:
        run(jax.grad(loss(made)))(X)
    assert advice in text_of(caught.value)
    assert f"Made.{method}" in text_of(caught.value)
    assert not hasattr(X, attribute)
