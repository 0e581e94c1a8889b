"""Does a call become kernels where it is lowered for CUDA, and plain JAX elsewhere? Needs no GPU and no kernels."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxqla
from jaxqla import _launch, ops

TARGET = "jaxqla_launch_v1"
FORWARD = ("gdn_chunk_inverse_{}", "gdn_fused_forward_{}_v64")
BACKWARD = ("gdn_chunk_coupling_{}", "gdn_backward_states_{}_v64", "gdn_backward_gradients_{}")
KERNELS = frozenset(
    name.format(suffix) for suffix in ("bf16", "fp16") for name in (*FORWARD, "gdn_fused_forward_{}_v128", *BACKWARD)
)


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """Kernels as if built, on a machine that need not have them: their calls can be lowered, not run."""
    monkeypatch.setattr(_launch, "available_kernels", lambda: KERNELS)
    monkeypatch.setattr(_launch, "_register", lambda: None)
    monkeypatch.setattr(ops, "_cuda_capabilities", frozenset)


def arguments(*lead, B=2, T=70, K=128, dtype=jnp.bfloat16):
    shapes = ((B, T, 3, K), (B, T, 3, K), (B, T, 6, 128), (B, T, 6), (B, T, 6))
    return tuple(jax.ShapeDtypeStruct((*lead, *shape), dtype) for shape in shapes)


def output(*arguments, **kwargs):
    return jaxqla.gated_delta(*arguments, **kwargs)[0]


def lower(function, *arguments, platforms=("cuda",)):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=platforms).as_text()


def kernels_of(text):
    """Names of the kernels in the order of their calls."""
    assert text.count(f"@{TARGET}(") == text.count("kernel = ")
    return re.findall(r'kernel = "(\w+)"', text)


@pytest.mark.parametrize(("dtype", "suffix"), [(jnp.bfloat16, "bf16"), (jnp.float16, "fp16")])
def test_cuda_lowers_to_the_kernels_that_explain_names(dtype, suffix):
    args = arguments(dtype=dtype)
    names = kernels_of(lower(output, *args))
    assert names == [name.format(suffix) for name in FORWARD]
    assert tuple(names) == jaxqla.explain(*args).kernels


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms_lower_to_plain_jax(platform):
    text = lower(output, *arguments(), platforms=(platform,))
    assert TARGET not in text
    assert "jaxqla" not in re.sub(r"loc\(.*?\)", "", text)


def test_the_compiled_cpu_program_has_no_conditional():
    text = jax.jit(output).trace(*arguments()).lower(lowering_platforms=("cpu",)).compile().as_text()
    assert " conditional(" not in text
    assert TARGET not in text


def test_one_program_for_two_platforms_holds_both():
    assert TARGET in lower(output, *arguments(), platforms=("cpu", "cuda"))


def test_what_kernels_cannot_run_lowers_to_plain_jax():
    assert TARGET not in lower(output, *arguments(K=64))
    assert TARGET not in lower(output, *arguments(dtype=jnp.float32))


def test_asking_for_a_path():
    def cuda(*arguments):
        return output(*arguments, implementation="cuda")

    def xla(*arguments):
        return output(*arguments, implementation="xla")

    assert len(kernels_of(lower(cuda, *arguments()))) == 2
    assert TARGET not in lower(xla, *arguments())
    refusal = r"^gated_delta: implementation='cuda' must be lowered for cuda, got cpu"
    with pytest.raises(ValueError, match=refusal):
        lower(cuda, *arguments(), platforms=("cpu",))
    with pytest.raises(ValueError, match=refusal):
        cuda(*(jnp.zeros(x.shape, x.dtype) for x in arguments(T=3)))
    with pytest.raises(ValueError, match=r"^gated_delta: implementation='cuda' must have K = V = 128, got K = 64"):
        lower(cuda, *arguments(K=64), platforms=("cpu",))


def test_empty_calls_launch_nothing():
    assert TARGET not in lower(output, *arguments(T=0))
    assert TARGET not in lower(output, *arguments(B=0))


def test_vmap_folds_into_one_launch_and_plans_by_the_folded_size():
    args = arguments(11)
    text = lower(jax.vmap(output), *args)
    assert kernels_of(text) == ["gdn_chunk_inverse_bf16", "gdn_fused_forward_bf16_v128"]
    assert "tensor<22x70x6x128xbf16>" in text


def test_vmap_of_packed_sequences_maps_over_them():
    cu_seqlens = jax.ShapeDtypeStruct((11, 4), jnp.int32)
    text = lower(jax.vmap(lambda *a: output(*a[:5], cu_seqlens=a[5])), *arguments(11, B=1), cu_seqlens)
    assert len(kernels_of(text)) == 2
    assert "stablehlo.while" in text


def test_gradients_keep_the_forward_kernels_where_the_output_is_used():
    def loss(*arguments):
        return jnp.square(output(*arguments).astype(jnp.float32)).sum()

    names = kernels_of(lower(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), *arguments()))
    assert names == [name.format("bf16") for name in FORWARD + BACKWARD]


def test_gradients_alone_run_the_backward_kernels_that_explain_names():
    def gradients(do, *arguments):
        return jax.vjp(output, *arguments)[1](do)

    args = arguments()
    names = tuple(kernels_of(jax.jit(gradients).trace(args[2], *args).lower(lowering_platforms=("cuda",)).as_text()))
    assert names[-3:] == jaxqla.explain(*args).backward_kernels == tuple(name.format("bf16") for name in BACKWARD)


def test_a_result_that_nothing_depends_on_has_no_cotangent():
    def gradients(of_state, *arguments):
        def loss(*arguments):
            o, state = jaxqla.gated_delta(*arguments, return_final_state=True)
            return (state if of_state else o).astype(jnp.float32).sum()

        return jax.grad(loss)(*arguments)

    def cotangent_of_the_state(of_state):
        text = lower(functools.partial(gradients, of_state), *arguments())
        call = next(line for line in text.splitlines() if 'kernel = "gdn_backward_states_bf16_v64"' in line)
        operands = re.findall(r"tensor<(\w+)>", call.split(" : ")[-1].split("->")[0])
        return operands[-1]

    assert cotangent_of_the_state(False) == "0x6x128x128xf32"
    assert cotangent_of_the_state(True) == "2x6x128x128xf32"


def test_scalars_are_of_numpy():
    # A Python number would become a 64-bit attribute, whatever the kernel expects.
    attributes = set(re.findall(r"scale = \S+ : (\w+)", lower(lambda *a: output(*a, scale=0.25), *arguments())))
    assert attributes <= {"f32"}


def test_export_for_two_platforms():
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    exported = jax.export.export(jax.jit(output), platforms=("cpu", "cuda"), disabled_checks=checks)(*arguments(T=5))
    loaded = jax.export.deserialize(exported.serialize())
    rng = np.random.default_rng(0)
    args = [jnp.asarray(-abs(rng.standard_normal(x.shape)), x.dtype) for x in arguments(T=5)]
    np.testing.assert_array_equal(loaded.call(*args), jax.jit(output)(*args))


def test_exported_programs_hold_the_kernels_and_run_elsewhere():
    call = jax.jit(output)
    args = arguments()
    with pytest.raises(ValueError, match="custom call"):
        jax.export.export(call, platforms=("cpu", "cuda"))(*args)
    exported = jax.export.export(call, platforms=("cpu", "cuda"), disabled_checks=jaxqla.export_checks())(*args)
    assert kernels_of(exported.mlir_module())
    again = jax.export.deserialize(exported.serialize())
    values = [jnp.full(x.shape, 0.1, x.dtype) for x in args]
    np.testing.assert_array_equal(again.call(*values), jax.jit(output)(*values))


def test_kept_residuals_spare_the_second_forward():
    args = arguments()

    def loss(policy, *arrays):
        q, k, v, g, beta = arrays

        def layer(v, _):
            # The gradient of the sine needs the output again.
            return jnp.sin(output(q, k, v, g, beta)), None

        v, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), v, length=3)
        return jnp.sum(v.astype(jnp.float32))

    def calls(policy):
        # The op is a function of the program, called wherever it runs.
        return len(re.findall(r"call @gated_delta", lower(jax.grad(lambda *x: loss(policy, *x), argnums=2), *args)))

    assert calls(jaxqla.save_residuals) == 2  # forward, and backward
    assert calls(None) == 3


@pytest.mark.parametrize("context", ["explicit", "shard_map", "named", "tokens"])
def test_a_sharded_training_step_launches_on_local_shapes(context):
    # A device has 2 of 4 rows, or with split tokens half of each row; 1 of 4 key heads and 2 of 8 value heads.
    kind = AxisType.Explicit if context == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    spec = P(None, "data", "tensor") if context == "tokens" else P("data", None, "tensor")

    def array(*shape, dtype=jnp.bfloat16, spec=spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    tokens = [array(4, 140, heads, 128) for heads in (4, 4, 8)] + [array(4, 140, 8, dtype=jnp.float32)] * 2
    weight = array(4, 128, spec=P("tensor"))
    named = {
        "named": {"mesh": mesh, "batch_axis": "data", "head_axis": "tensor"},
        "tokens": {"mesh": mesh, "sequence_axis": "data", "head_axis": "tensor"},
    }
    op = functools.partial(output, implementation="cuda", **named.get(context, {}))
    if context == "shard_map":
        op = jax.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec)

    def loss(weight, q, k, v, g, beta):
        return jnp.mean(jnp.square(op(q, k * weight, v, g, beta).astype(jnp.float32)))

    def step(weight, *tokens):
        value, gradient = jax.value_and_grad(loss)(weight, *tokens)
        return value, weight - 0.1 * gradient

    text = lower(step, weight, *tokens)
    calls = 3 if context == "tokens" else 1
    names = [name.format("bf16") for name in (*FORWARD * calls, *BACKWARD * calls)]
    assert kernels_of(text) == names
    for line in text.splitlines():
        if f"@{TARGET}(" in line:
            types = line.rsplit(" : (", 1)[1]
            assert set(re.findall(r"tensor<(\d+x\d+)x128xbf16>", types)) <= {"280x1", "280x2"}
            assert set(re.findall(r"tensor<(\d+x\d+)xf32>", types)) <= {"280x2"}
            # Chunks and states: their heads.
            assert set(re.findall(r"tensor<\d+x(\d+)x\d+x\d+x\w+>", types)) == {"2"}
