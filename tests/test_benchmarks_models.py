"""The benchmark of whole models, on a tiny one and plain JAX."""

import dataclasses

import pytest

pytest.importorskip("flax")

from benchmarks import models
from jaxqla.models import QwenConfig

TINY = dataclasses.replace(
    QwenConfig.preset("qwen3.5-0.8b"),
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layer_types=("linear_attention", "full_attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)


@pytest.mark.parametrize("task", ["train", "prefill", "decode"])
def test_each_task_runs_and_is_counted(monkeypatch, task):
    monkeypatch.setattr(QwenConfig, "preset", classmethod(lambda cls, name: TINY))
    line = models.run_jax(models.Case("tiny", task, 2, 128, "xla"))
    assert line["tokens_per_second"] > 0
    assert 0 < line["seconds"]["p20"] <= line["seconds"]["median"] <= line["seconds"]["p80"]
    if task == "train":
        assert line["losses"][1] < line["losses"][0]


def test_documents_fill_the_row():
    assert sum(models.documents(8192)) == 8192
    assert min(models.documents(8192)) == 128


def test_operations_are_those_of_the_products():
    # One token: every weight once, but the norms and the like, which are few; no score but its own.
    weights = TINY.num_parameters()
    state = 6 * 2 * 16 * 16
    assert TINY.num_flops(1, 1) == 2 * weights + state + 4 * 2 * 16
    assert TINY.num_flops(10, 55) == 10 * (2 * weights + state) + 4 * 2 * 16 * 55


def test_device_work_is_summed_by_kind():
    def meta(pid, tid, name):
        return {"ph": "M", "pid": pid, "args": {"name": name}} | ({} if tid is None else {"tid": tid})

    def work(pid, tid, name, us):
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "dur": us}

    events = [
        meta(1, None, "/device:GPU:0"),
        meta(1, 5, "Stream #5(compute)"),
        meta(1, 6, "XLA Modules"),
        meta(2, None, "/host:CPU"),
        meta(2, 5, "Stream of nothing"),
        work(1, 5, "gdn_fused_forward_bf16_v64", 3),
        work(1, 5, "nvjet_tst_128", 20),
        work(1, 5, "loop_multiply_fusion", 100),
        work(1, 5, "gdn_chunk_inverse_bf16", 4),
        work(1, 6, "jit_step", 1000),
        work(2, 5, "gdn_on_the_host", 1000),
    ]
    expected = {"gated delta": 7e-6, "matrix products": 20e-6, "other": 100e-6}
    assert models.device_seconds(events) == pytest.approx(expected)
