"""The public operators."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxqla import _checks, _dispatch, _launch, _sequence, _sharding, _transforms


def gated_delta(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "N HV K V"] | None = None,
    return_final_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    qk_l2norm: bool = False,
    implementation: str | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
    sequence_axis: str | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"] | None]:
    """Computes the gated delta rule, a linear attention with decay and error correction.

    Every value head has a state `S` of shape `[K, V]`, zero or `initial_state` at first. For each token, with
    `alpha_t = exp(g_t)`:

        S   = alpha_t S                     decay
        u_t = beta_t (v_t - S^T k_t)        error of what the state holds for this key, times the step size
        S   = S + k_t u_t^T                 write
        o_t = scale S^T q_t                 read

    Letters: `B` rows of `T` tokens, `H` heads of `q` and `k`, `HV` heads of `v`, widths `K` and `V`, `N` sequences:
    `N = B`, or one less than the length of `cu_seqlens`. (`jax.nn` uses `N`, `H` and `K` for other things.)

    Numerics: the state, the gates, their cumulative sums and every accumulation are float32. Tokens are
    computed in chunks of 64; no exponent is ever positive, so strong decay cannot overflow. Results are deterministic.
    Kernels, and plain JAX on accelerators with bfloat16, multiply operands in the dtype of `q`, `k` and `v`; plain JAX
    with float16 or float32 in float32, at the precision of `jax.default_matmul_precision` on accelerators. As an
    operand of a kernel the state is rounded too: with float16 a state beyond 65504 overflows there.

    Transformations: `jit`, `vmap` over any subset of the arguments, `grad` (also of a `grad`), `remat`, `scan`. Forward
    mode (`jvp`) raises. The inputs are the only residuals of the forward. In a policy of `jax.checkpoint` the results
    are named `OUTPUT_NAME` and `FINAL_STATE_NAME`; `save_residuals` keeps them. Rows and heads may be split over a
    mesh, H and HV together, by the arrays' shardings or by `mesh`. `jax.export` needs `export_checks`.

    Args:
        q: Queries, bfloat16, float16 or float32. Value head `h` reads the query and key of head `h // (HV // H)`.
        k: Keys, of the dtype of `q`. Their norm should not exceed one (see `qk_l2norm`): where
            `beta_t |k_t|^2 > 2` the state grows without bound.
        v: Values, of the dtype of `q`. `HV` is a multiple of `H`.
        g: Decay of the state at each token as a natural logarithm, `g <= 0`, any floating dtype. 0 keeps the state;
            `-inf`, or anything so small that its exponential is zero, forgets it. Positive values are outside the
            contract: they are not checked, and the results are undefined.
        beta: Step size, any floating dtype, usually in [0, 1]; it is not clipped, and values up to 2 are legal.
        scale: Factor of the output, a Python number. The default is `K ** -0.5`.
        initial_state: State before the first token of each sequence, float32. The default is zero. With `segment_ids`
            the first segment of a row takes it.
        return_final_state: Whether to return the state after the last token of each sequence. Where it is False, no
            final state is written.
        segment_ids: Int32; several sequences in one row. A token whose id differs from that of the last token before
            it that is no padding starts from a state of zero. Id 0 is padding: it neither reads nor writes, its output
            and gradients are exactly 0, and its inputs may hold anything, NaN included.
        cu_seqlens: Int32, non-decreasing, from 0 to at most `T`; sequence `n` is the rows `cu_seqlens[n]` to
            `cu_seqlens[n + 1]` of the only batch row (`B = 1`), with states of its own. Empty sequences hand their
            state through. Tokens past the last boundary are padding as above. Only the length is checked, never the
            values. Not together with `segment_ids`.
        qk_l2norm: Whether to scale each query and key first, by `1 / sqrt(|x|^2 + 1e-6)` computed in float32; the
            result has the dtype of `q`. Gradients go through it.
        implementation: None runs the kernels where they can run this call and plain JAX elsewhere, as `explain`
            tells. `"cuda"` runs the kernels or raises. `"xla"` runs plain JAX.
        mesh: Runs the call over the devices of this mesh, split over the three axes that follow, whatever the sharding
            of the arguments; for programs that are exported or come from the persistent compilation cache, which a
            split that the compiler finds cannot be. By default the shardings of the arguments decide. Not inside
            `jax.shard_map`.
        batch_axis: Of `mesh`, the axis or axes over which rows are split; their size divides `B`.
        head_axis: Of `mesh`, the axis or axes over which heads are split; their size divides `H`.
        sequence_axis: The axis over which tokens are split (context parallelism): of `mesh`; or without one, of the
            `jax.shard_map` around the call, where each device has `T` tokens of each row, in the order of the axis.
            Exact, at the work of three calls; the devices exchange `[K, K + V]` float32 a row and value head.
            `initial_state` and the final state are those of the whole rows, the same on all devices. Not together with
            `cu_seqlens`.

    Returns:
        `o` of the shape and dtype of `v`, and the final state in float32, or None where it was not asked for.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape or a value breaks a rule above; or `implementation="cuda"`, and the kernels cannot run this
            call: the message says which rule failed.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025, equation 10.
    """
    arrays = (q, k, v, g, beta, initial_state, segment_ids, cu_seqlens)
    _checks.check_are_arrays("gated_delta", *arrays)
    q, k, v, g, beta, initial_state, segment_ids, cu_seqlens = jax.tree.map(jnp.asarray, arrays)
    dims = _checks.check(
        "gated_delta",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        return_final_state=return_final_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        qk_l2norm=qk_l2norm,
        implementation=implementation,
    )
    sizes = {"batch_axis": (batch_axis, "B", dims.B), "head_axis": (head_axis, "H", dims.H)}
    if mesh is not None:
        sizes["sequence_axis"] = (sequence_axis, "T", dims.T)
    placement = _sharding.placement_on(mesh, sizes)
    axes = _sharding.manual_axes() if mesh is None else list(mesh.axis_names)
    _checks.check_sequence_axis("gated_delta", sequence_axis, axes, cu_seqlens)
    choice = _choose("gated_delta", dims, q.dtype, implementation)
    options = _transforms.Options(
        scale=dims.K**-0.5 if scale is None else float(scale),
        qk_l2norm=bool(qk_l2norm),
        return_final_state=bool(return_final_state),
        path=choice.path,
        cuda_only=implementation == "cuda",
    )
    arrays = (q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32), initial_state, segment_ids, cu_seqlens)
    if placement is not None:
        return _on_mesh(options, placement, *arrays)
    return _local(options, sequence_axis, *arrays)


def _local(options: _transforms.Options, sequence_axis: str | None, *arrays: Any) -> Any:
    """The call on checked arrays, split as they are; over `sequence_axis` each has this device's tokens."""
    if sequence_axis is None:
        return _transforms.gated_delta(options, *arrays)
    return _sequence.gated_delta(options, sequence_axis, *arrays[:-1])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(options: _transforms.Options, placement: _sharding.Placement, *arrays: jax.Array | None) -> Any:
    """The call on checked arrays of all tokens, each on its part of them."""
    local = functools.partial(_local, options, placement.tokens)
    return _sharding.over_mesh(local, placement, arrays)


@dataclass(frozen=True)
class Explanation:
    """What a call of `gated_delta` would run, and why. `str()` of it is a sentence or two.

    Attributes:
        path: `"cuda"`: kernels on CUDA devices, plain JAX on other platforms. `"xla"`: plain JAX everywhere.
        kernels: Names of the kernels of the forward, in the order of their launches.
        backward_kernels: Names of the kernels of the gradients, likewise; gradients take the path of the forward.
        reason: Why this path.
    """

    path: str
    kernels: tuple[str, ...]
    backward_kernels: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        if self.path == "cuda":
            forward, backward = ", ".join(self.kernels), ", ".join(self.backward_kernels)
            what = f"kernels {forward} (gradients: {backward}) on CUDA devices, plain JAX on other platforms"
        else:
            what = "plain JAX on every platform"
        return f"gated_delta runs path {self.path!r}: {what}. Why: {self.reason}."


def explain(
    q: Float[Array | jax.ShapeDtypeStruct, "B T H K"],
    k: Float[Array | jax.ShapeDtypeStruct, "B T H K"],
    v: Float[Array | jax.ShapeDtypeStruct, "B T HV V"],
    g: Float[Array | jax.ShapeDtypeStruct, "B T HV"],
    beta: Float[Array | jax.ShapeDtypeStruct, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array | jax.ShapeDtypeStruct, "N HV K V"] | None = None,
    return_final_state: bool = False,
    segment_ids: Int[Array | jax.ShapeDtypeStruct, "B T"] | None = None,
    cu_seqlens: Int[Array | jax.ShapeDtypeStruct, " N+1"] | None = None,
    qk_l2norm: bool = False,
    implementation: str | None = None,
) -> Explanation:
    """Tells which path `gated_delta` would take with these arguments, with which kernels, and why; runs nothing.

    Args are those of `gated_delta`, which see; arrays may be abstract (`jax.ShapeDtypeStruct`). Inside `jax.vmap` or
    `jax.shard_map` the kernels follow from the folded or local shapes, so ask with those.

    Returns:
        An `Explanation`; print it.

    Raises:
        TypeError, ValueError: As `gated_delta` would.
    """
    arrays = (q, k, v, g, beta, initial_state, segment_ids, cu_seqlens)
    _checks.check_are_arrays("explain", *arrays)
    # Gives every array, NumPy's too, the dtype that it would have inside jax.
    q, k, v, g, beta, initial_state, segment_ids, cu_seqlens = jax.eval_shape(lambda *xs: xs, *arrays)
    dims = _checks.check(
        "explain",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        return_final_state=return_final_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        qk_l2norm=qk_l2norm,
        implementation=implementation,
    )
    choice = _choose("explain", dims, q.dtype, implementation)
    plan = choice.plan
    return Explanation(
        path=choice.path,
        kernels=plan.forward_kernels if plan else (),
        backward_kernels=plan.backward_kernels if plan else (),
        reason=choice.reason,
    )


OUTPUT_NAME, FINAL_STATE_NAME = _transforms.RESULT_NAMES
"""Names of what `gated_delta` returns, for policies of `jax.checkpoint`."""

_save_results = jax.checkpoint_policies.save_only_these_names(*_transforms.RESULT_NAMES)


def save_residuals(primitive: Any, *operands: Any, **parameters: Any) -> Any:
    """A policy of `jax.checkpoint`: keeps what `gated_delta` returned, so that its forward does not run again.

    Pass the function itself, `jax.checkpoint(layer, policy=jaxqla.save_residuals)`; JAX calls it.
    """
    return _save_results(primitive, *operands, **parameters)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What to pass as `disabled_checks` to `jax.export.export`, for programs that call kernels.

    The name of the call in an exported program carries a version, and a later jaxqla keeps serving it.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(_launch.TARGET)]


def _choose(function: str, dims: _checks.Dims, dtype, implementation: str | None) -> _dispatch.Choice:
    kernels = _launch.available_kernels()
    return _dispatch.choose(
        dims,
        dtype,
        implementation=implementation,
        kernels=kernels,
        # Without kernels the answer is known, and no device need be asked.
        capabilities=_cuda_capabilities() if kernels and implementation != "xla" else (),
        function=function,
    )


@functools.cache
def _cuda_capabilities() -> frozenset[str]:
    """Compute capabilities of this process's CUDA devices; empty where there is none."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # what jax raises for a platform that is absent
        return frozenset()
    return frozenset(device.compute_capability for device in devices)
