"""How a pair of hooks shows itself: in one line, with the arguments that it was made with."""

import copy
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu, save_on_disk


def pack(x):
    return x


def is_matrix(x):
    return x.ndim == 2


class Halved(saved_tensors_hooks):
    def __init__(self, scale, *, table=None):
        super().__init__(lambda x: x * scale, lambda x: x / scale)


@pytest.mark.parametrize(
    ("hooks", "text"),
    [
        (saved_tensors_hooks(pack, functools.partial(pack)), "pack_hook=pack, unpack_hook=functools.partial("),
        (saved_tensors_hooks(pack, lambda x: x, host=True), "pack_hook=pack, unpack_hook=<lambda>, host=True)"),
        (cast_saved(), "cast_saved(dtype=bfloat16)"),
        (cast_saved(np.dtype("float16"), only=is_matrix), "cast_saved(dtype=float16, only=is_matrix)"),
        (cast_saved(jnp.float16), "cast_saved(dtype=float16)"),
        (quantize_saved(4), "quantize_saved(bits=4, block_size=128)"),
        (save_on_cpu(), "save_on_cpu()"),
        (save_on_cpu(True), "save_on_cpu(pin_memory=True)"),
        (Halved(0.5, table=np.eye(2)), "Halved(scale=0.5, table=array([[1., 0.], [0., 1.]]))"),
    ],
    ids=lambda x: "" if isinstance(x, str) else type(x).__name__,
)
def test_a_pair_shows_its_arguments_in_one_line(hooks, text):
    assert text in repr(hooks)
    assert repr(hooks).startswith(f"{type(hooks).__name__}(")
    assert "\n" not in repr(hooks)
    assert repr(copy.copy(hooks)) == repr(hooks)


def test_the_directory_of_save_on_disk(tmp_path):
    assert repr(save_on_disk(str(tmp_path))) == f"save_on_disk(directory={str(tmp_path)!r})"
