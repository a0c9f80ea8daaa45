"""Settings that every test runs under: several CPU devices, strict dtype promotion."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Thousands of tiny programs are compiled and run once, so that LLVM's optimizations would be most of the time.
FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
