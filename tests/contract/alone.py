"""Prints what an import of the package changes or starts: python -m tests.contract.alone changes (or starts)."""

import importlib
import pkgutil
import socket
import sys


def changes() -> None:
    """Print each rule, and each attribute of a class, of JAX that the import changes."""
    import jax
    import jax.experimental.buffer_callback
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir, partial_eval

    def attributes(owner):
        return {name: value for name, value in vars(owner).items() if not name.startswith("__")}

    def snapshot():
        # `batching.primitive_batchers` is a view of the table of fancy batchers.
        modules = {module.__name__: attributes(module) for module in (ad, batching, mlir, partial_eval)}
        modules["lowerings"] = mlir._platform_specific_lowerings
        found = {
            f"{module}.{name}": dict(table)
            for module, members in modules.items()
            for name, table in members.items()
            if isinstance(table, dict)
        }
        primitives = {key for table in found.values() for key in table if isinstance(key, Primitive)}
        classes = {c for p in primitives for c in type(p).__mro__ if c.__module__.startswith("jax")}
        owners = {*primitives, *classes, jax.custom_vjp, jax.custom_jvp}
        return found | {repr((x, id(x))): attributes(x) for x in owners}

    before = snapshot()
    tables = "ad.primitive_jvps", "batching.fancy_primitive_batchers", "mlir._lowerings", "partial_eval.dce_rules"
    assert all(before[f"jax.interpreters.{table}"] for table in tables)
    import pylayer_jax

    for module in pkgutil.walk_packages(pylayer_jax.__path__, "pylayer_jax."):
        importlib.import_module(module.name)
    after = snapshot()
    for name, entries in before.items():
        for key in entries.keys() | after[name].keys():
            if key in entries or not isinstance(key, Primitive):
                was, now = entries.get(key), after[name].get(key)
                if was is not now and not isinstance(was, dict):
                    print(f"{name}[{key}]: {was} is now {now}")


def starts() -> None:
    """Import all with jax and NumPy alone; `jax.distributed.initialize` refuses to run once a backend has started."""
    for name in ("optax", "sklearn", "tqdm", "torch", "paddle", "equinox", "flax"):
        sys.modules[name] = None  # cannot be imported
    import jax

    for name in ("pylayer_jax", "pylayer_jax.packers", "pylayer_jax.testing"):
        importlib.import_module(name)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
    assert jax.process_count() == 1
    jax.distributed.shutdown()


if __name__ == "__main__":
    {"changes": changes, "starts": starts}[sys.argv[1]]()
