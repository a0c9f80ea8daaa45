"""The internals of the package that the checkers use; no other module of this folder imports any."""

from pylayer_jax._errors import NoForwardModeError, NotLinearError, OnceDifferentiableError
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.linearity import why_not_linear
from pylayer_jax._jax.tracers import NEEDS_VALUES, is_tracer
from pylayer_jax._jax.types import has_tangent, is_key, is_ref
from pylayer_jax._messages import plural
from pylayer_jax._trees import is_tensor, split

__all__ = [
    "NEEDS_VALUES",
    "NoForwardModeError",
    "NotLinearError",
    "OnceDifferentiableError",
    "has_tangent",
    "is_key",
    "is_ref",
    "is_tensor",
    "is_tracer",
    "plural",
    "split",
    "stage",
    "why_not_linear",
]
