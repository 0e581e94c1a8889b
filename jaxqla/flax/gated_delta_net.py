"""The Gated DeltaNet layer of Qwen3-Next and Qwen3.5."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import jaxqla
from jaxqla._checks import message
from jaxqla.flax.cache import GDNState
from jaxqla.flax.norms import GatedRMSNorm
from jaxqla.flax.sharding import axes, constrain

# Calls of at most so many tokens on a state, none of them padding, take the step form of the op.
_MAX_STEP = 16


class GatedDeltaNet(nnx.Module):
    """Mixes the tokens of each row by the gated delta rule.

        q, k, v = silu(conv(x W_qkv))           causal, depthwise
        z, b, a = x W_z, x W_b, x W_a
        g, beta = -exp(A_log) softplus(a + dt_bias), sigmoid(b)
        o       = gated_delta(q, k, v, g, beta), q and k normalised
        y       = (rmsnorm(o) * silu(z)) W_out

    Letters: `H` key heads, `HV` value heads, `R = HV // H`, widths `K` and `V`. Everything that belongs to a key head
    is stored beside it, so that splitting heads over devices moves nothing: `in_proj_qkvz.kernel [D, H, 2K + 2RV]`,
    `in_proj_ba.kernel [D, H, 2R]`, `conv1d [W, H, 2K + RV]`, `A_log [HV]`, `dt_bias [HV]`, `norm.scale [V]`,
    `out_proj.kernel [HV, V, D]`. `A_log`, `dt_bias` and `norm.scale` are float32 whatever `param_dtype` is.

    Args:
        hidden_size: Width `D` of the input and the output.
        num_key_heads: `H`.
        num_value_heads: `HV`, a multiple of `H`.
        key_head_dim: `K`; the kernels need 128.
        value_head_dim: `V`; the kernels need 128.
        conv_kernel_size: Tokens `W` that the convolution sees, 2 to 4.
        norm_eps: Of the norm of the output.
        allow_neg_eigval: Whether `beta` goes up to 2 rather than 1.
        kernel_init: Of projections and convolution.
        dtype: Of the computation; None takes that of input and parameters together.
        param_dtype: Of the parameters, but for those that are float32 always.
        implementation: As in `jaxqla.gated_delta`.
        rngs: Takes `params`.

    Raises:
        ValueError: `num_value_heads` is no multiple of `num_key_heads`.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025; the form of
    Qwen3-Next.
    """

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        *,
        key_head_dim: int = 128,
        value_head_dim: int = 128,
        conv_kernel_size: int = 4,
        norm_eps: float = 1e-6,
        allow_neg_eigval: bool = False,
        kernel_init: nnx.Initializer = nnx.initializers.normal(0.02),  # noqa: B008
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if num_value_heads % num_key_heads:
            rule = f"be a multiple of num_key_heads = {num_key_heads}"
            raise ValueError(message("GatedDeltaNet", "num_value_heads", rule, num_value_heads))
        self.H, self.HV, self.K, self.V = num_key_heads, num_value_heads, key_head_dim, value_head_dim
        self.taps, self.allow_neg_eigval = conv_kernel_size, allow_neg_eigval
        self.dtype, self.implementation = dtype, implementation
        R = num_value_heads // num_key_heads
        channels = 2 * key_head_dim + R * value_head_dim

        def projection(features: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                hidden_size,
                (num_key_heads, features),
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                kernel_metadata=axes("embed", "gdn_heads", None),
                rngs=rngs,
            )

        self.in_proj_qkvz = projection(channels + R * value_head_dim)
        self.in_proj_ba = projection(2 * R)
        shape = (conv_kernel_size, num_key_heads, channels)
        self.conv1d = nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **axes(None, "gdn_heads", None))
        rate = jax.random.uniform(rngs.params(), (num_value_heads,), jnp.float32, minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(rate), **axes("gdn_heads"))
        self.dt_bias = nnx.Param(jnp.ones(num_value_heads, jnp.float32), **axes("gdn_heads"))
        self.norm = GatedRMSNorm(value_head_dim, eps=norm_eps)
        self.out_proj = nnx.LinearGeneral(
            (num_value_heads, value_head_dim),
            hidden_size,
            axis=(-2, -1),
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            kernel_metadata=axes("gdn_heads", None, "embed"),
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: GDNState | None = None,
        return_state: bool = False,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], GDNState]:
        """Runs the layer.

        Args:
            x: Rows of tokens.
            segment_ids: Int32; 0 is padding, on any side: it changes nothing, and its output is exactly 0. A change of
                id starts another document, with no memory of the one before, convolution included. A mask of zeros and
                ones is a legal value.
            state: What the tokens before these left, from `init_state` or an earlier call.
            return_state: Whether to return the state after these tokens as well.

        Returns:
            `y`, in the computation's dtype; with `return_state`, `(y, state)`.
        """
        B, T = x.shape[:2]
        H, HV, K, V = self.H, self.HV, self.K, self.V
        R = HV // H
        if segment_ids is not None:
            x = jnp.where((segment_ids != 0)[..., None], x, 0)
        qkv, z = jnp.split(self.in_proj_qkvz(x), [2 * K + R * V], axis=-1)
        b, a = jnp.split(self.in_proj_ba(x), 2, axis=-1)
        g, beta = jaxqla.gdn_gates(
            a.reshape(B, T, HV),
            b.reshape(B, T, HV),
            self.A_log[...],
            self.dt_bias[...],
            allow_neg_eigval=self.allow_neg_eigval,
        )
        conv, recurrent = (None, None) if state is None else (state.conv, state.recurrent)
        step = segment_ids is None and 0 < T <= _MAX_STEP
        qkv, conv = self._convolve(qkv, conv, segment_ids, step, return_state)
        q, k, v = jnp.split(qkv, [K, 2 * K], axis=-1)
        v = v.reshape(B, T, HV, V)
        if recurrent is not None and step:
            o, recurrent = jaxqla.gated_delta_step(q, k, v, g, beta, recurrent, qk_l2norm=True)
        else:
            o, recurrent = jaxqla.gated_delta(
                q,
                k,
                v,
                g,
                beta,
                initial_state=recurrent,
                return_final_state=return_state,
                segment_ids=segment_ids,
                qk_l2norm=True,
                implementation=self.implementation,
            )
        y = self.out_proj(self.norm(o, z.reshape(B, T, HV, V)))
        if not return_state:
            return y
        assert conv is not None
        assert recurrent is not None
        return y, GDNState(conv, recurrent)

    def init_state(self, batch: int, *, dtype: DTypeLike | None = None) -> GDNState:
        """The state before the first token: zeros.

        Args:
            batch: Rows.
            dtype: Of the state of the convolution; None takes that of the computation, or of the parameters.
        """
        channels = 2 * self.K + (self.HV // self.H) * self.V
        conv = jnp.zeros((batch, self.taps - 1, self.H, channels), dtype or self.dtype or self.conv1d.dtype)
        recurrent = jnp.zeros((batch, self.HV, self.K, self.V), jnp.float32)
        return GDNState(
            constrain(conv, "batch", None, "gdn_heads", None), constrain(recurrent, "batch", "gdn_heads", None, None)
        )

    def _convolve(
        self,
        qkv: Float[Array, "B T H C"],
        state: Float[Array, "B W1 H C"] | None,
        segment_ids: Int[Array, "B T"] | None,
        step: bool,
        return_state: bool,
    ) -> tuple[Float[Array, "B T H C"], Float[Array, "B W1 H C"] | None]:
        B, T, H, channels = qkv.shape
        shape = (B, self.taps - 1, H, channels)
        weight = self.conv1d[...].astype(qkv.dtype).reshape(self.taps, H * channels)
        flat = qkv.reshape(B, T, H * channels)
        before = None if state is None else state.astype(qkv.dtype).reshape(B, self.taps - 1, H * channels)
        if before is not None and step:
            y, after = jaxqla.causal_conv1d_step(flat, weight, state=before, activation="silu")
        else:
            y, after = jaxqla.causal_conv1d(
                flat,
                weight,
                activation="silu",
                initial_state=before,
                return_final_state=return_state,
                segment_ids=segment_ids,
            )
        if after is not None:
            after = after.reshape(shape).astype(qkv.dtype if state is None else state.dtype)
        return y.reshape(qkv.shape), after
