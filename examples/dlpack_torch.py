"""PyTorch and jaxqla share tensors: torch -> gated_delta -> torch through DLPack, with no copy and no synchronisation.

Both libraries speak the DLPack protocol with streams: the one that takes a tensor says on which stream it will use it,
and the one that gives it makes that stream wait for the work that is still filling it. Neither side waits on the host.
"""

import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jaxqla

SHAPE = {"B": 1, "T": 2048, "H": 4, "HV": 8, "K": 128, "V": 128}

gated_delta = jax.jit(jaxqla.gated_delta, static_argnames=("qk_l2norm", "return_final_state"))


def through_jax(**tensors):
    """Calls gated_delta on torch tensors and returns torch tensors on jax's buffers; checks that nothing was copied."""
    import torch

    arrays = {name: jax.dlpack.from_dlpack(tensor) for name, tensor in tensors.items()}
    for name, array in arrays.items():
        given, taken = tensors[name].data_ptr(), array.unsafe_buffer_pointer()
        if given != taken:
            raise AssertionError(f"{name}: jax must use torch's memory at {given:#x}, got a copy at {taken:#x}")
    o, state = gated_delta(**arrays, qk_l2norm=True, return_final_state=True)
    results = []
    for name, array in (("o", o), ("final_state", state)):
        tensor = torch.from_dlpack(array)
        if tensor.data_ptr() != array.unsafe_buffer_pointer():
            raise AssertionError(f"{name}: torch must use jax's memory, got a copy")
        results.append(tensor)
    return tuple(results)


def make_tensors(device):
    """Random inputs as torch tensors; the values of q are the last that `device` computes."""
    import torch

    B, T, H, HV, K, V = SHAPE.values()
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    tensors = {
        "k": normal(B, T, H, K).bfloat16(),
        "v": normal(B, T, HV, V).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(B, T, HV) + 4),
        "beta": torch.sigmoid(normal(B, T, HV)),
    }
    q = normal(B, T, H, K)
    if device == "cuda":
        # Work that is still running when jax is called: were the streams not ordered, jax would read q too early.
        busy = normal(4096, 4096)
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        q = q + 0 * busy.sum()
    tensors["q"] = q.bfloat16()
    return tensors


def main() -> None:
    """Runs the round trip on a stream of torch's own, and again after a full synchronisation; the two must be equal."""
    if importlib.util.find_spec("torch") is None:
        sys.exit("dlpack_torch: PyTorch must be installed beside jax (pip install torch), found none")
    import torch

    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    if device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            tensors = make_tensors(device)
            o, state = through_jax(**tensors)
            norm = o.float().norm()  # torch reads o on this stream, behind jax's kernels
        torch.cuda.synchronize()
    else:
        tensors = make_tensors(device)
        o, state = through_jax(**tensors)
        norm = o.float().norm()
    again, state_again = through_jax(**tensors)
    if not (torch.equal(o, again) and torch.equal(state, state_again) and norm == again.float().norm()):
        raise AssertionError("the result must not depend on when it was asked for: a stream did not wait")

    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(str(x.dtype)[6:])) for name, x in tensors.items()
    }
    print(f"torch {device} tensors in and out of jaxqla.gated_delta: pointers equal, streams in order")
    print(f"o {tuple(o.shape)} {o.dtype}, norm {norm:.4f}; final_state {tuple(state.shape)} {state.dtype}")
    print(jaxqla.explain(**arrays, qk_l2norm=True, return_final_state=True))


if __name__ == "__main__":
    main()
