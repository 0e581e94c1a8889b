"""What `make demo` runs, on what this machine has.

The operator: its path and why, its error against the oracle, tokens/s. Then a tiny model that learns for a minute.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxqla
from jaxqla import reference

NAMES = ("q", "k", "v", "g", "beta")
SMALL = {"B": 2, "T": 300, "H": 2, "HV": 6, "K": 128, "V": 128}
# A layer of a 27B hybrid model: 16 key heads, 48 value heads. A CPU gets fewer tokens of it.
REALISTIC = {"B": 1, "T": 16384, "H": 16, "HV": 48, "K": 128, "V": 128}
REALISTIC_CPU = {**REALISTIC, "T": 1024}
SECONDS = 10.0


def make_inputs(B: int, T: int, H: int, HV: int, K: int, V: int) -> dict[str, Any]:
    """Random inputs as a trained layer would give them: bf16 values, gates mostly near 0, beta in (0, 1)."""
    keys = jax.random.split(jax.random.key(0), 5)
    return {
        "q": jax.random.normal(keys[0], (B, T, H, K), jnp.bfloat16),
        "k": jax.random.normal(keys[1], (B, T, H, K), jnp.bfloat16),
        "v": jax.random.normal(keys[2], (B, T, HV, V), jnp.bfloat16),
        "g": jax.nn.log_sigmoid(jax.random.normal(keys[3], (B, T, HV)) + 3),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, HV))),
    }


def forward(inputs: dict[str, Any]) -> tuple[jax.Array, jax.Array | None]:
    """Outputs and final state; the operator normalises q and k itself."""
    return jaxqla.gated_delta(**inputs, qk_l2norm=True, return_final_state=True)


def gradients(inputs: dict[str, Any], do: jax.Array) -> dict[str, Any]:
    """Gradients of sum(o * do) for every input."""
    _, vjp = jax.vjp(lambda inputs: jaxqla.gated_delta(**inputs, qk_l2norm=True)[0], inputs)
    return vjp(do)[0]


@contextmanager
def float64_on_the_cpu() -> Iterator[None]:
    """Where the oracle runs: token by token in float64, on the host."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def relative_rms(got: jax.Array, want: np.ndarray) -> float:
    """Root mean square of the error over that of what was wanted."""
    error = np.asarray(got, np.float64) - want
    return float(np.sqrt(np.mean(error**2) / np.mean(want**2)))


def show_errors() -> None:
    """Forward and gradients of a small case against the oracle, on the same bf16 inputs."""
    inputs = make_inputs(**SMALL)
    do = jax.random.normal(jax.random.key(1), inputs["v"].shape, jnp.bfloat16)
    o, state = jax.jit(forward)(inputs)
    grads = jax.jit(gradients)(inputs, do)
    host, host_do = jax.tree.map(lambda x: np.asarray(x, np.float64), (inputs, do))

    def oracle(inputs):
        return reference.gated_delta(**inputs, qk_l2norm=True, return_final_state=True, dtype=jnp.float64)

    with float64_on_the_cpu():
        (want_o, want_state), vjp = jax.vjp(jax.jit(oracle), host)
        (want_grads,) = vjp((host_do, np.zeros(want_state.shape)))
        want = jax.tree.map(np.asarray, {"o": want_o, "final_state": want_state, **want_grads})
    got = {"o": o, "final_state": state, **grads}
    print(f"error against the float64 oracle (relative RMS), bf16, {SMALL}:")
    for name in ("o", "final_state", *NAMES):
        label = f"d{name}" if name in NAMES else name
        error = relative_rms(got[name], want[name])
        print(f"    {label:12s} {error:.2e}")
        if not error < 2e-2:
            raise AssertionError(f"demo: error of {label} must be below 2e-2 in bf16, got {error:.2e}")


def bar(label: str, seconds: float):
    """A progress bar over a time budget; without tqdm an object that shows nothing."""
    try:
        from tqdm import tqdm
    except ImportError:
        from types import SimpleNamespace

        return SimpleNamespace(update=lambda _: None, close=lambda: None)
    form = "    {desc} {percentage:3.0f}% |{bar:30}| {elapsed}"
    return tqdm(total=seconds, desc=label, bar_format=form, leave=False)


def time_call(label: str, call: Callable[[], object]) -> float:
    """Median seconds of one call, over as many as `SECONDS` allow (3 at least), after one that compiles."""
    print(f"    {label}: compiling ...", end="\r", flush=True)
    jax.block_until_ready(call())
    times: list[float] = []
    progress = bar(label, SECONDS)
    while len(times) < 3 or (sum(times) < SECONDS and len(times) < 200):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
        progress.update(min(times[-1], max(0.0, SECONDS - sum(times[:-1]))))
    progress.close()
    return statistics.median(times)


def show_speed() -> None:
    """Tokens a second of one layer, forward and forward with gradients."""
    dims = REALISTIC if jax.default_backend() != "cpu" else REALISTIC_CPU
    inputs = make_inputs(**dims)
    do = jnp.ones_like(inputs["v"])
    run_forward, run_gradients = jax.jit(forward), jax.jit(gradients)
    print(f"speed of one layer, bf16, {dims}:")
    for label, call in (
        ("forward", lambda: run_forward(inputs)),
        ("forward and gradients", lambda: run_gradients(inputs, do)),
    ):
        seconds = time_call(label, call)
        tokens = dims["B"] * dims["T"] / seconds
        print(f"    {label:22s} {seconds * 1e3:10.3f} ms  {tokens:14,.0f} tokens/s")


def show_a_model() -> None:
    """Trains a tiny hybrid model for a minute and has it write something."""
    missing = [name for name in ("flax", "optax", "safetensors", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"a tiny model that learns: left out, {', '.join(missing)} must be installed (pip install 'jaxqla[demo]')"
        )
        return
    import tiny_model

    tiny_model.main()


def main() -> None:
    """Runs all of it."""
    device = jax.devices()[0]
    print(f"jaxqla {jaxqla.__version__}, jax {jax.__version__}, {device.platform}: {device.device_kind}")
    inputs = jax.eval_shape(lambda: make_inputs(**REALISTIC))
    print(jaxqla.explain(**inputs, qk_l2norm=True, return_final_state=True))
    show_errors()
    show_speed()
    show_a_model()


if __name__ == "__main__":
    main()
