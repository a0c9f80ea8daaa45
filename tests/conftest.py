"""Settings that every test runs under: several CPU devices, strict dtype promotion."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
