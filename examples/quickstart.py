"""The example of the README: Gated DeltaNet inside a jitted loss, with its gradient, on whatever device jax has."""

import jax
import jax.numpy as jnp

import jaxqla

B, T, H, HV, K, V = 2, 512, 4, 8, 128, 128  # rows, tokens, key heads, value heads, key and value width
keys = jax.random.split(jax.random.key(0), 5)
q = jax.random.normal(keys[0], (B, T, H, K), jnp.bfloat16)
k = jax.random.normal(keys[1], (B, T, H, K), jnp.bfloat16)
v = jax.random.normal(keys[2], (B, T, HV, V), jnp.bfloat16)
g = jax.nn.log_sigmoid(jax.random.normal(keys[3], (B, T, HV)) + 4)  # natural log of the decay, never above 0
beta = jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, HV)))  # how much of the error a token writes


def loss(q, k, v, g, beta):
    o, _ = jaxqla.gated_delta(q, k, v, g, beta, qk_l2norm=True)
    return jnp.mean(jnp.square(o.astype(jnp.float32)))


value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))(q, k, v, g, beta)
print(f"loss {value:.6f}; gradients", *(f"{grad.dtype}{list(grad.shape)}" for grad in grads))
print(jaxqla.explain(q, k, v, g, beta, qk_l2norm=True))
