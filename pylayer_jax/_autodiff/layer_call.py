"""Static data of one call.

NOTE [hidden tensors]
A function or an object among the arguments may hold traced values where JAX does not look: `model.w`, a variable that a
lambda captures. A rule of `jax.custom_vjp` runs after the trace of such a value may have ended. Therefore a call that
reaches one is staged where it is applied: the value becomes an operand of the function with its rule. `backward` finds
it by an object on the context, and then needs the value of the trace in which it runs: what objects on the context hold
is a residual as well, and stands in its place while `backward` runs. An output that depends on a hidden value that is
differentiated is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import jax

from pylayer_jax._hooks.open_blocks import Hooks
from pylayer_jax._jax.imports import eval_jaxpr
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.run_log import RunLog
from pylayer_jax._jax.tracers import is_differentiated, is_leaked, is_outside_transpose, is_staging, is_tracer
from pylayer_jax._methods.arguments import Arguments
from pylayer_jax._methods.outputs import Outputs
from pylayer_jax._trees.closures import traced_names, tracers_in
from pylayer_jax._trees.messages import innermost, source_of
from pylayer_jax._trees.partition import split

# True while code runs that may be transposed, or differentiated in forward mode: a `backward`, and a `forward` that is
# staged under `jax.jvp`. A layer that this code applies is then no `jax.custom_vjp` function, which allows neither. It
# is part of jit's cache key, since a jitted function may apply the layer.
in_backward: Final = jax.make_user_context(False)


null_context: Final = contextlib.nullcontext()


class LayerCall:
    """Static data of one call of `apply`, which travels through JAX inside a treedef. Holds no array."""

    __slots__ = ("arguments", "hooks", "layer", "log", "name", "outputs", "reaches_traced_values")

    def __init__(self, layer: Any, arguments: Arguments, hooks: Hooks | None, deferred: bool) -> None:
        self.layer = layer
        self.name = arguments.layer
        self.arguments = arguments
        # JAX may run the forward rule long after the block was left. Therefore the call takes the pair.
        self.hooks = hooks
        # Whether `forward` is staged where it is applied, since it may reach traced values by itself.
        self.reaches_traced_values = False
        # Only a call that is staged may be differentiated several times.
        self.log: RunLog[Any] | None = RunLog() if deferred else None
        self.outputs: Outputs | None = None  # set by the binding that ran the layer

    @property
    def source(self) -> str:
        """The class, and where its `forward` is defined: JAX's errors name it for code that is staged."""
        return source_of(self.name, self.layer.forward)

    def scope(self, method: str) -> contextlib.AbstractContextManager[Any]:
        """The operations of a method as `Tanh/forward` in compiled programs and profiles."""
        # JAX compiles an operation of eager mode by itself, without the scopes around it.
        return self.staged_scope(method) if is_staging(include_outer=True) else null_context

    def staged_scope(self, method: str) -> contextlib.AbstractContextManager[Any]:
        """The same in code that is known to be staged."""
        return jax.named_scope(f"{self.layer.__name__}/{method}")

    def names_closed_over(self, predicate: Callable[[object], bool] = is_tracer) -> list[str]:
        """The names under which `forward`, or a static argument, reaches traced values for which `predicate` holds."""
        layer, arguments = self.layer, self.arguments
        methods = [layer.forward, layer.setup_context] if layer._has_setup_context() else [layer.forward]
        statics = [] if arguments.is_plain_call else [x for a in arguments.arguments for x in a.skeleton.statics()]
        if not any(map(predicate, tracers_in([*methods, *statics], but=[layer]))):
            return []
        names = [name for method in methods for name in traced_names(method, predicate, but=[layer])]
        for argument in arguments.arguments:
            for leaf in argument.skeleton.statics():
                names += [f"{name} (in argument {argument.name})" for name in traced_names(leaf, predicate)]
        return names

    def names_closed_over_by_backward(self, predicate: Callable[[object], bool] = is_tracer) -> list[str]:
        return traced_names(innermost(self.layer.backward), predicate, but=[self.layer])

    def closed_over_by_backward_error(self, names: list[str]) -> Exception:
        return jax.errors.UnexpectedTracerError(
            f"{self.name}.backward uses a traced value that it closes over ({', '.join(names)}). backward runs in "
            f"another trace, which does not have it. Pass it as an argument: {self.name}.apply(..., "
            f"{names[0].split()[0]}). Let forward keep it for backward with ctx.save_for_backward."
        )

    def backward_that_checks_closures(self) -> Callable[..., Any]:
        """`backward`; if it closes over values that JAX would lose here, as one that raises where it uses them.

        JAX notices them only when it compiles the program, without a name; or takes their derivative for zero.
        """
        backward = self.layer.backward
        if not self.names_closed_over_by_backward(self._is_lost):
            return backward

        def checked(*args: Any) -> Any:
            __tracebackhide__ = True

            def run() -> tuple[list[Any], Any]:
                __tracebackhide__ = True
                return split(backward(*args))

            jaxpr, consts, skeleton = stage(run, [], f"{self.name}.backward")
            if any(map(self._is_lost, consts)):
                names = self.names_closed_over_by_backward(lambda x: any(x is c for c in consts) and self._is_lost(x))
                raise self.closed_over_by_backward_error(names or self.names_closed_over_by_backward(self._is_lost))
            return skeleton.fill(eval_jaxpr(jaxpr, (), *consts))

        return checked

    def _is_lost(self, value: object) -> bool:
        """Whether a value belongs to a jaxpr that is complete, or is outside of the transpose of a deferred call."""
        return is_leaked(value) or (self.log is not None and is_outside_transpose(value))

    def closed_over_error(self) -> Exception:
        """The error for a value that is differentiated, and that `forward` reaches other than by an argument."""
        predicate = is_differentiated if self.names_closed_over(is_differentiated) else is_tracer
        for argument in self.arguments.arguments:
            for path, leaf in argument.skeleton.static_paths():
                # Names of attributes begin with a point, those of variables of a function do not.
                if held := [name for name in traced_names(leaf, predicate) if name[0] == "."]:
                    return jax.errors.UnexpectedTracerError(
                        f"{self.name}.apply: argument {argument.name}{path} holds a traced value in {', '.join(held)}, "
                        f"but its type {type(getattr(leaf, '__self__', leaf)).__qualname__} is no pytree, so that its "
                        "gradient would be lost. "
                        "Register the type (jax.tree_util.register_dataclass), or pass the array itself."
                    )
        names = self.names_closed_over(predicate)
        found = f" ({', '.join(names)})" if names else ""
        return jax.errors.UnexpectedTracerError(
            f"{self.name}.forward uses a traced value that it closes over{found}. Its gradient would be lost, since "
            "backward returns gradients for the arguments of forward alone. Pass it as an argument: "
            f"{self.name}.apply(..., {names[0].split()[0].lstrip('.') if names else 'value'})."
        )
