"""The kernel path inside JAX, on a GPU: transformations, compilation, command buffers, tensors shared with PyTorch."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxqla
from tests import cases, tolerance
from tests.test_cuda import assert_bits_equal, op

pytestmark = pytest.mark.gpu

KERNELS = ("gdn_chunk_inverse_bf16", "gdn_fused_forward_bf16_v64")


def small(**options):
    return cases.make(**{"B": 2, "T": 100, "H": 1, "HV": 2, "initial_state": True, **options})


# -- what runs ---------------------------------------------------------------------------------------------------------


def test_explain_names_the_kernels():
    explanation = jaxqla.explain(*small()[:5])
    assert explanation.path == "cuda"
    assert explanation.kernels == KERNELS


def test_the_compiled_program_holds_the_kernels():
    text = op.lower(*small()).compile().as_text()
    for kernel in KERNELS:
        assert kernel in text


def test_no_implementation_named_means_the_kernels():
    inputs = small()
    o, _ = jax.jit(jaxqla.gated_delta)(*inputs[:5], initial_state=inputs.initial_state)
    assert_bits_equal(o, op(*inputs)[0])


def test_the_second_call_compiles_nothing():
    compiled = []

    def listen(event: str, seconds: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    first, second = (small(T=101, seed=seed) for seed in (1, 2))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(jaxqla.gated_delta(*first[:5]))
        assert compiled
        compiled.clear()
        jax.block_until_ready(jaxqla.gated_delta(*second[:5]))
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_an_unsupported_call_falls_back_and_says_so():
    inputs = small(K=64, V=32)
    assert "K = V = 128" in jaxqla.explain(*inputs[:5]).reason
    assert jaxqla.gated_delta(*inputs[:5])[0].shape == inputs.v.shape
    with pytest.raises(ValueError, match="K = 64, V = 32"):
        jaxqla.gated_delta(*inputs[:5], implementation="cuda")


# -- transformations ---------------------------------------------------------------------------------------------------


def test_vmap_over_everything_and_over_some():
    inputs = [small(seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *inputs)
    o, state = jax.vmap(op)(*stacked)
    for i, one in enumerate(inputs):
        assert_bits_equal(o[i], op(*one)[0])
        assert_bits_equal(state[i], op(*one)[1])
    shared = inputs[0]
    o, _ = jax.vmap(op, in_axes=(0, None, None, None, None, None))(stacked.q, *shared[1:6])
    assert_bits_equal(o[2], op(stacked.q[2], *shared[1:6])[0])


def test_vmap_with_cu_seqlens():
    inputs = [small(B=1, seed=seed, cu_seqlens=[0, 30, 100]) for seed in range(2)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *inputs)
    o, _ = jax.vmap(op)(*stacked)
    for i, one in enumerate(inputs):
        assert_bits_equal(o[i], op(*one)[0])


@pytest.mark.parametrize("options", [{}, {"segment_ids": np.repeat([[1, 2], [0, 3]], 50, axis=1)}])
def test_gradients_are_those_of_the_plain_path(options):
    inputs = small(dtype="float16", **options)

    def loss(implementation):
        def value(q, k, v, g, beta, state):
            o, final = jaxqla.gated_delta(
                q,
                k,
                v,
                g,
                beta,
                initial_state=state,
                segment_ids=inputs.segment_ids,
                return_final_state=True,
                implementation=implementation,
            )
            return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final**2)

        return jax.jit(jax.grad(value, argnums=range(6)))

    kernels, plain = loss("cuda")(*inputs[:6]), loss("xla")(*inputs[:6])
    for name, a, b in zip(("dq", "dk", "dv", "dg", "dbeta", "dinitial_state"), kernels, plain, strict=True):
        error = tolerance.relative_rms(a, np.asarray(b, np.float64), per_head=False)
        assert error <= 2 * tolerance.limit("float16", name), name


def test_checkpoint_and_scan_over_layers():
    inputs = small(B=1)

    def gradient(wrap):
        def loss(v):
            def layer(v, _):
                o, _ = jaxqla.gated_delta(inputs.q, inputs.k, v, inputs.g, inputs.beta, implementation="cuda")
                return o, None

            return jax.lax.scan(wrap(layer), v, length=3)[0].astype(jnp.float32).sum()

        return np.asarray(jax.jit(jax.grad(loss))(inputs.v), np.float64)

    plain = gradient(lambda layer: layer)
    assert plain.any()
    assert tolerance.relative_rms(gradient(jax.checkpoint), plain) <= tolerance.limit("bfloat16", "dv")


def test_export_and_back():
    inputs = small()
    exported = jax.export.export(op, platforms=("cuda",), disabled_checks=jaxqla.export_checks())(*inputs)
    again = jax.export.deserialize(exported.serialize())
    for a, b in zip(op(*inputs), jax.jit(again.call)(*inputs), strict=True):
        assert_bits_equal(a, b)


def test_a_process_that_only_loads_a_program_runs_it(tmp_path):
    inputs = small()
    exported = jax.export.export(op, platforms=("cuda",), disabled_checks=jaxqla.export_checks())(*inputs)
    (tmp_path / "program").write_bytes(exported.serialize())
    values = {str(i): np.asarray(x, np.float32) for i, x in enumerate(inputs) if x is not None}
    np.savez(tmp_path / "values.npz", **values)
    code = f"""
import jax, jaxqla, numpy as np
program = jax.export.deserialize(open("{tmp_path}/program", "rb").read())
values = np.load("{tmp_path}/values.npz")
arrays = [jax.numpy.asarray(values[name], x.dtype) for name, x in zip(values.files, program.in_avals)]
args, kwargs = jax.tree.unflatten(program.in_tree, arrays)
o, state = program.call(*args, **kwargs)
np.savez("{tmp_path}/results.npz", o=np.asarray(o, np.float32), state=np.asarray(state))
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=True)
    results = np.load(tmp_path / "results.npz")
    o, state = op(*inputs)
    assert_bits_equal(results["o"], np.asarray(o, np.float32))
    assert_bits_equal(results["state"], state)


def test_donated_states_are_updated():
    inputs = small()
    expected = op(*inputs)
    step = jax.jit(lambda state, *xs: op(*xs, state), donate_argnums=0)
    state = jnp.array(inputs.initial_state)
    for a, b in zip(expected, step(state, *inputs[:5]), strict=True):
        assert_bits_equal(a, b)
    assert state.is_deleted()


def test_two_threads():
    inputs = [small(seed=seed, T=500) for seed in range(2)]
    expected = [jax.tree.map(np.asarray, op(*x)) for x in inputs]
    failures = []

    def work(i):
        for _ in range(20):
            o, state = op(*inputs[i])
            if not (np.array_equal(o, expected[i][0]) and np.array_equal(state, expected[i][1])):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- processes of their own --------------------------------------------------------------------------------------------


def run(code: str, *arguments: str, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# A loop and a chain, on arrays at twenty places: XLA keeps a graph for each of sixteen. Then what ran, as XLA tells it.
GRAPHS = """
import hashlib, json, pathlib, sys
import jax, numpy as np
from tests import cases
from tests.test_cuda import op

@jax.jit
def program(q, k, v, g, beta, state):
    state, o = jax.lax.scan(lambda s, _: op(q, k, v, g, beta, s)[::-1], state, length=10)
    for _ in range(3):
        v, state = op(q, k, v, g, beta, state)
    return o, v, state

inputs = [cases.make(B=1, T=70, H=1, HV=2, initial_state=True, seed=seed)[:6] for seed in range(20)]
digest = hashlib.sha256()
for results in [program(*x) for _ in range(2) for x in inputs]:
    for x in results:
        digest.update(np.asarray(x).tobytes())
thunks = {path.name: path.read_text() for path in pathlib.Path(sys.argv[1]).glob("*jit_program*thunk_sequence*.txt")}
print(json.dumps({"hash": digest.hexdigest(), "thunks": thunks}))
"""


def test_command_buffers_change_nothing(tmp_path):
    results = {}
    for name, flags in {"on": "--xla_gpu_graph_min_graph_size=1", "off": "--xla_gpu_enable_command_buffer="}.items():
        dump = tmp_path / name
        results[name] = run(GRAPHS, str(dump), XLA_FLAGS=f"{flags} --xla_dump_to={dump}")
        assert any("kCustomCall" in text for text in results[name]["thunks"].values()), results[name]["thunks"].keys()
    assert any("kCommandBuffer" in text for text in results["on"]["thunks"].values())
    assert not any("kCommandBuffer" in text for text in results["off"]["thunks"].values())
    assert results["on"]["hash"] == results["off"]["hash"]


FIRST_CALL = """
import json, time
import jax, jax.numpy as jnp
from tests import cases
from tests.test_cuda import op
inputs = cases.make(B=1, T=70, H=1, HV=2, initial_state=True)
jax.block_until_ready(jnp.ones(3) + 1)
compiled = op.lower(*inputs).compile()
start = time.perf_counter()
jax.block_until_ready(compiled(*inputs))
print(json.dumps({"ms": (time.perf_counter() - start) * 1e3}))
"""


def test_the_first_call_is_quick():
    assert run(FIRST_CALL)["ms"] < 100


IMPORT = """
import json, time
import jax
start = time.perf_counter()
import jaxqla
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "devices": bool(jax._src.xla_bridge._backends)}))
"""


def test_the_import_is_quick_and_touches_no_device():
    result = run(IMPORT)
    assert result["seconds"] < 1
    assert not result["devices"]


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def test_torch_tensors_go_through_without_a_copy():
    import torch

    inputs = small()
    host = [np.asarray(x, np.float32) for x in inputs[:6]]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the values come late, on a stream of their own
        dtypes = [torch.bfloat16] * 3 + [torch.float32] * 3
        tensors = [
            torch.from_numpy(x.copy()).cuda(non_blocking=True).to(dtype) for x, dtype in zip(host, dtypes, strict=True)
        ]
        arrays = [jax.dlpack.from_dlpack(x) for x in tensors]
    for array, tensor in zip(arrays, tensors, strict=True):
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    o, state = op(*arrays)
    results = [torch.from_dlpack(x) for x in (o, state)]
    for array, tensor in zip((o, state), results, strict=True):
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    for array, tensor in zip(op(*inputs), results, strict=True):
        assert_bits_equal(np.asarray(array, np.float32), tensor.float().cpu().numpy())


def test_torch_waits_for_results_that_are_still_being_computed():
    import torch

    inputs = small(B=1, T=32000)

    @jax.jit
    def slow(q, k, v, g, beta, state):
        for _ in range(40):
            o, state = op(q, k, v, g, beta, state)
        return o, state

    side = torch.cuda.Stream()

    def copied():
        results = slow(*inputs[:6])
        assert not results[0].is_ready(), "there must be something to wait for"
        with torch.cuda.stream(side):
            return results, [torch.from_dlpack(x).float() + 0 for x in results]

    copied()
    side.synchronize()  # the first time torch loads its kernels, which takes longer than ours run
    results, copies = copied()
    side.synchronize()
    for array, copy in zip(results, copies, strict=True):
        assert_bits_equal(np.asarray(array, np.float32), copy.cpu().numpy())
