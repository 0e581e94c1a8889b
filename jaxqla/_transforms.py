"""How the op meets JAX's transformations: differentiation, batching, and the choice of platform.

From the outside in:

* `jax.jit`, so that an eager call is one program;
* `custom_vjp`, with the inputs as the only residuals;
* `custom_vmap`, which makes a mapped axis one more axis of rows, so that nothing below is ever batched by JAX;
* the split over devices, see `_sharding`;
* the per-shard bodies, which see local arrays of the contract's shapes and pick the platform at lowering.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxqla import _dispatch, _sharding, _xla
from jaxqla._checks import Dims, message

# Names of the results in a rematerialisation policy.
RESULT_NAMES = ("jaxqla_o", "jaxqla_final_state")


# Positions in the list of arrays: q, k, v, g, beta, initial_state, segment_ids, cu_seqlens. The backward takes the
# cotangents of o and of the final state after them.
_V, _SEGMENT_IDS, _CU_SEQLENS = 2, 6, 7
_NUM_ARRAYS, _NUM_BACKWARD_ARRAYS = 8, 10


@dataclasses.dataclass(frozen=True)
class Options:
    """The static side of a call."""

    scale: float
    qk_l2norm: bool
    return_final_state: bool
    path: _dispatch.Path
    cuda_only: bool  # implementation="cuda": lowering for another platform is an error


@functools.partial(jax.jit, static_argnums=0)
def gated_delta(options: Options, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The op on checked arrays: q, k, v, g, beta, initial_state, segment_ids, cu_seqlens; g and beta float32."""
    rest = iter(_sharding.vary_together([x for x in arrays if x is not None]))
    return _gated_delta(options, *(None if x is None else next(rest) for x in arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_delta(options, *arrays):
    return _over_rows(_forward_body, options)(*arrays)


def _gated_delta_fwd(options, *primals):
    arrays = tuple(None if x is None else x.value for x in primals)
    # The call is the differentiable one, so that a gradient of a gradient finds a rule here too.
    o, final_state = _gated_delta(options, *arrays)  # pyright: ignore[reportGeneralTypeIssues]
    o = checkpoint_name(o, RESULT_NAMES[0])
    if final_state is not None:
        final_state = checkpoint_name(final_state, RESULT_NAMES[1])
    return (o, final_state), arrays


def _gated_delta_bwd(options, arrays, cotangents):
    do, dfinal_state = cotangents
    if isinstance(do, SymbolicZero):
        do = jnp.zeros_like(arrays[_V])
    # A final state that nothing depends on costs nothing.
    if isinstance(dfinal_state, SymbolicZero):
        dfinal_state = None
    gradients: Any = _gradients(options, *arrays, do, dfinal_state)
    # Integers have no gradient, which None says for whatever tangent type they have.
    return (*gradients, None, None)


_gated_delta.defvjp(_gated_delta_fwd, _gated_delta_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(options, *arrays_and_cotangents):
    return _over_rows(_backward_body, options)(*arrays_and_cotangents)


def _gradients_fwd(options, *arrays_and_cotangents):
    return _gradients(options, *arrays_and_cotangents), arrays_and_cotangents


def _gradients_bwd(options, arrays_and_cotangents, cotangents):
    gradients = _over_rows(_second_order_body, options)(*arrays_and_cotangents, *cotangents)
    return (*gradients[:_SEGMENT_IDS], None, None, *gradients[_SEGMENT_IDS:])


_gradients.defvjp(_gradients_fwd, _gradients_bwd)


# -- batching ----------------------------------------------------------------------------------------------------------


@functools.cache
def _over_rows(body: Callable, options: Options) -> Callable:
    """Wraps `body` so that `vmap` adds rows to it instead of batching what is inside."""

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return _over_devices(body, options, *arrays)

    @call.def_vmap
    def rule(axis_size, in_batched, *arrays):
        if arrays[_CU_SEQLENS] is None:

            def spread(x, batched):
                return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

            out = call(*jax.tree.map(spread, tuple(arrays), tuple(in_batched)))
        else:
            # Packed sequences live in a single row; their boundaries cannot be folded into another row's.
            out = _map_and_call(call, axis_size, in_batched, arrays)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _map_and_call(call: Callable, axis_size: int, in_batched: Any, arrays: Any) -> Any:
    leaves, structure = jax.tree.flatten(tuple(arrays))
    batched = jax.tree.leaves(in_batched)
    mapped = [x for x, b in zip(leaves, batched, strict=True) if b]

    def one(mapped_leaves):
        rest = iter(mapped_leaves)
        merged = [next(rest) if b else x for x, b in zip(leaves, batched, strict=True)]
        return call(*jax.tree.unflatten(structure, merged))

    return lax.map(one, mapped)


# -- devices -----------------------------------------------------------------------------------------------------------


def _over_devices(body: Callable, options: Options, *arrays: jax.Array | None) -> Any:
    """Runs `body` on the shard of each device, its leading axes folded into rows."""
    # Arrays, cotangents of the results, cotangents of the gradients: as many as this body takes.
    kinds = (_sharding.ARRAYS + _sharding.RESULTS + _sharding.ARRAYS[:_SEGMENT_IDS])[: len(arrays)]
    given = tuple(x is not None for x in arrays)
    if body is _forward_body:
        outputs, results = (True, options.return_final_state), _sharding.RESULTS
    else:
        # The gradients of what it differentiates: of what is a float, and there.
        primals = _NUM_ARRAYS if body is _backward_body else _NUM_BACKWARD_ARRAYS
        floats = [i for i in range(primals) if i not in (_SEGMENT_IDS, _CU_SEQLENS)]
        outputs, results = tuple(given[i] for i in floats), tuple(kinds[i] for i in floats)
    if given[_CU_SEQLENS]:
        kinds, results = (
            tuple(_sharding.PACKED_STATE if kind is _sharding.STATE else kind for kind in x) for x in (kinds, results)
        )
    run = _on_given(body, options, given)
    flat = iter(
        _sharding.split(
            run,
            [x for x in arrays if x is not None],
            [kind for kind, there in zip(kinds, given, strict=True) if there],
            [kind for kind, there in zip(results, outputs, strict=True) if there],
        )
    )
    return tuple(next(flat) if there else None for there in outputs)


@functools.cache
def _on_given(body: Callable, options: Options, given: tuple[bool, ...]) -> _sharding.Body:
    """`body` from the arrays that are there, with any number of leading axes, to the results that are there."""

    def run(*local: jax.Array) -> tuple[jax.Array, ...]:
        rest = iter(local)
        arrays = [next(rest) if there else None for there in given]
        lead = local[0].shape[:-3]
        rows, fold = math.prod(lead), not given[_CU_SEQLENS]
        if fold:
            arrays = [None if x is None else x.reshape(rows, *x.shape[len(lead) :]) for x in arrays]
        results = tuple(x for x in body(options, *arrays) if x is not None)
        return tuple(x.reshape(*lead, *x.shape[1:]) for x in results) if fold else results

    return run


# -- per-shard bodies --------------------------------------------------------------------------------------------------


def _forward_body(options, q, k, v, g, beta, initial_state, segment_ids, cu_seqlens):
    """The forward on local arrays."""
    arrays = (q, k, v, g, beta, initial_state, segment_ids, cu_seqlens)
    dims = Dims.of(q, v, cu_seqlens)
    if _is_empty(dims):
        final_state = _state_or_zeros(dims, initial_state) if options.return_final_state else None
        return jnp.zeros(v.shape, v.dtype), final_state

    def xla(*arrays):
        o, final_state = _xla.forward(*arrays, scale=options.scale, qk_l2norm=options.qk_l2norm)
        return o, final_state if options.return_final_state else None

    if options.path == "xla":
        return xla(*arrays)

    from jaxqla import _cuda

    # The plan follows from local sizes: after folding and splitting they are what the device will see.
    plan = _dispatch.make_plan(dims, q.dtype)
    cuda = functools.partial(
        _cuda.forward,
        scale=options.scale,
        qk_l2norm=options.qk_l2norm,
        return_final_state=options.return_final_state,
        inverse_kernel=plan.inverse,
        fused_kernel=plan.fused,
    )
    default = functools.partial(_refuse, xla) if options.cuda_only else xla
    return lax.platform_dependent(*arrays, cuda=cuda, default=default)


def _backward_body(options, q, k, v, g, beta, initial_state, segment_ids, cu_seqlens, do, dfinal_state):
    """The backward on local arrays: gradients of q, k, v, g, beta and initial_state."""
    dims = Dims.of(q, v, cu_seqlens)
    if _is_empty(dims):
        dinitial_state = None if initial_state is None else _state_or_zeros(dims, dfinal_state)
        return (*(jnp.zeros(x.shape, x.dtype) for x in (q, k, v, g, beta)), dinitial_state)
    arrays = (q, k, v, g, beta, initial_state, segment_ids, cu_seqlens, do, dfinal_state)
    xla = functools.partial(_xla.backward, scale=options.scale, qk_l2norm=options.qk_l2norm)
    if options.path == "xla":
        return xla(*arrays)

    from jaxqla import _cuda

    plan = _dispatch.make_plan(dims, q.dtype)
    cuda = functools.partial(
        _cuda.backward,
        scale=options.scale,
        qk_l2norm=options.qk_l2norm,
        coupling_kernel=plan.coupling,
        states_kernel=plan.states,
        gradients_kernel=plan.gradients,
    )
    default = functools.partial(_refuse, xla) if options.cuda_only else xla
    return lax.platform_dependent(*arrays, cuda=cuda, default=default)


def _second_order_body(options, *arrays):
    """Gradients of the backward, by JAX through the plain path, with respect to its floating arguments."""
    options = dataclasses.replace(options, path="xla")
    primals, cotangents = arrays[:_NUM_BACKWARD_ARRAYS], arrays[_NUM_BACKWARD_ARRAYS:]
    segment_ids, cu_seqlens = primals[_SEGMENT_IDS], primals[_CU_SEQLENS]

    def backward(*floats):
        arrays: list[Any] = [*floats[:_SEGMENT_IDS], segment_ids, cu_seqlens, *floats[_SEGMENT_IDS:]]
        return _backward_body(options, *arrays)

    _, vjp = jax.vjp(backward, *primals[:_SEGMENT_IDS], *primals[_CU_SEQLENS + 1 :])
    return vjp(tuple(cotangents))


def _is_empty(dims: Dims) -> bool:
    """Whether no token writes to any state; kernels then have no work and would leave their results unwritten."""
    return 0 in (dims.B, dims.T, dims.N)


def _state_or_zeros(dims: Dims, state: jax.Array | None) -> jax.Array:
    return jnp.zeros((dims.N, dims.HV, dims.K, dims.V), jnp.float32) if state is None else state


# -- implementation="cuda" on another platform -------------------------------------------------------------------------

# Both branches of a platform choice are traced everywhere, so only the lowering of a primitive can refuse a platform.
_cuda_only_p = Primitive("jaxqla_cuda_only")
_cuda_only_p.multiple_results = True
_cuda_only_p.def_abstract_eval(lambda *types: types)


def _refuse_to_lower(ctx, *_):
    got = f"{' and '.join(ctx.module_context.platforms)} (None runs plain JAX there)"
    raise ValueError(message("gated_delta", "implementation='cuda'", "be lowered for cuda", got))


mlir.register_lowering(_cuda_only_p, _refuse_to_lower)


def _refuse(function: Callable, *arrays: Any) -> Any:
    """`function(*arrays)`, but an error where it would be lowered."""
    leaves, structure = jax.tree.flatten(function(*arrays))
    return jax.tree.unflatten(structure, _cuda_only_p.bind(*leaves))
