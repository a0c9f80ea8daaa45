"""The internals of the package that the checkers use; no other module of this folder imports any."""

from pylayer_jax._autodiff.linearity import why_not_linear as why_not_linear
from pylayer_jax._autodiff.transpose_backward import NoForwardModeError as NoForwardModeError
from pylayer_jax._autodiff.transpose_backward import NotDerivableError as NotDerivableError
from pylayer_jax._jax.jaxprs import stage as stage
from pylayer_jax._jax.tracers import NEEDS_VALUES as NEEDS_VALUES
from pylayer_jax._jax.tracers import is_tracer as is_tracer
from pylayer_jax._jax.types import has_tangent as has_tangent
from pylayer_jax._jax.types import is_key as is_key
from pylayer_jax._jax.types import is_ref as is_ref
from pylayer_jax._methods.once_differentiable import OnceDifferentiableError as OnceDifferentiableError
from pylayer_jax._trees.messages import plural as plural
from pylayer_jax._trees.partition import is_tensor as is_tensor
from pylayer_jax._trees.partition import split as split
