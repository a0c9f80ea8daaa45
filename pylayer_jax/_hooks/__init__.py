"""Saved-tensor hooks, which pack the residuals of layers and of JAX operations.

    @quantize_saved(8)                      F: the forward pass             JAX keeps
    def loss(w, x):                         h = x @ w                       x, w (from outside: not packed)
        return jax.nn.silu(x @ w).sum()     s = logistic h                  q, r (8-bit h, scales)
                                            y = h * s

    In backward, h = unpack(q, r), and then s = logistic h again.

A *pair* is a pack hook and an unpack hook with their options; a *block* is the code inside `with pair:`.

1. A decorated function is staged, and planned as a whole (`planned`). Its forward and backward passes are jaxprs, F and
   B; the residuals are the arrays that B gets from F. Bodies of loops are planned functions too, to which the function
   around them lends what it computes and they read. If the pair leaves values from outside, that function keeps such a
   tensor, in its own way; else the body does.
2. A `Plan` says how backward gets each residual: from outside, kept as it is, packed, or computed again. What is kept
   is a minimum cut of the graph of F (`plan`). The table in `primitives` says what may be computed again.
3. The rule of a planned function runs F without what only residuals need, and packs each kept variable behind the
   equation that makes it, in staged code behind a barrier. JAX keeps the packed arrays as residuals of a linear map.
4. The transpose of this map runs B. A residual is unpacked or computed again before the first equation with a cotangent
   that reads it (what is small or from outside: before each); in staged code, a barrier makes XLA wait for these.
5. In a `with` block, a `BlockTrace` is JAX's current trace, and binds each operation as a planned function of its own
   (`operations`). In a block around a call of `jax.grad` itself, only layers pack.
6. What a layer or a `custom_vjp` function saves is marked for the plan around it; in a `with` block it is packed at
   once (`saving`). A layer unpacks its tensors when its `backward` first reads one.
7. `only` and `by_name` choose by the origin of a tensor (operation, layer, name, source line), which `origins` finds.
"""
