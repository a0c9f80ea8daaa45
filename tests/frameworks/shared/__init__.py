"""One text of a layer, run by Paddle, by torch and by this library. Importing these modules fills the tables."""

from . import agree, differences, hooks  # noqa: F401
