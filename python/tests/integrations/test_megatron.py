"""Averages of the masters of Megatron-Core's distributed optimizer, with Megatron-Core itself on gloo ranks.

Its optimizer knows devices only. Here torch answers as if CPU tensors were on one: what runs is Megatron's own code, on
CPUs.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import shardow
from shardow.integrations.megatron import ema

State = dict[str, torch.Tensor]


class OnADevice(TorchFunctionMode):
    """``device="cuda"`` is the CPU, whose tensors say that they are torch.cuda's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and isinstance(found, str) else found


def megatron(bucket: int = 600) -> tuple[Any, Any]:
    """(DistributedDataParallel of a Net in bfloat16, its distributed optimizer). ``bucket``: parameters of one,
    about."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=bucket
    )
    model = DistributedDataParallel(config, wrapping, engines.Net().bfloat16())
    model.broadcast_params()
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=0.0
    )
    return model, get_megatron_optimizer(options, [model])


def whole(model: Any, optimizer: Any) -> State:
    """Masters put together by Megatron's own range maps; of what it does not train, the weights."""
    inner, found = optimizer.chained_optimizers[0], {}
    for name, p in model.module.named_parameters():
        value = p.detach().float().clone()
        if hasattr(p, "main_param"):
            value.zero_()
            if p.main_param is not None:
                own = inner._get_model_param_range_map(p)["param"]
                value.view(-1)[own.start : own.end] = p.main_param.detach()
            dist.all_reduce(value)
        found[name] = value
    return found


def step(model: Any, optimizer: Any, number: int) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    draw = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    model(torch.randn(4, 7, generator=draw).bfloat16()).float().square().mean().backward()
    model.finish_grad_sync()
    successful, *_ = optimizer.step()
    assert successful


def averaged(bucket: int, path: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    with OnADevice():
        model, optimizer = megatron(bucket)
        averages = ema(model, optimizer, decay=0.9)
        plain = engines.Net()
        plain.load_state_dict(whole(model, optimizer), strict=False)
        beside = shardow.EMA(plain, 0.9)
        for number in range(3):
            step(model, optimizer, number)
            if number == 1:  # as where an optimizer comes back from the host
                for p in model.module.parameters():
                    if getattr(p, "main_param", None) is not None:
                        p.main_param.data = p.main_param.data.clone()
            averages.update()
            plain.load_state_dict(whole(model, optimizer), strict=False)
            beside.update()
        want = beside.state_dict()["averages"]
        weights = [p.clone() for p in model.module.parameters()]
        with averages.swapped():
            inside = {name: p.detach().clone() for name, p in model.module.named_parameters() if p.requires_grad}
        averages.save(path)
        return {
            "alike": equal(averages.full_state_dict(complete=False), want) or dist.get_rank() != 0,
            "inside": equal(inside, {name: value.bfloat16() for name, value in want.items()}),
            "back": all(torch.equal(p, was) for p, was in zip(model.module.parameters(), weights, strict=True)),
            "own": averages.stats()["elements"], "total": sum(value.numel() for value in want.values()), "want": want,
        }  # fmt: skip


def equal(one: State, other: State) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("bucket", [600, 10_000] if os.environ.get("SHARDOW_ALL") else [600])
def test_averages_are_those_of_a_plain_model_with_the_masters_as_weights(bucket: int, tmp_path: Path) -> None:
    path = str(tmp_path / "averages.safetensors")
    zero, one = engines.run(2, averaged, bucket, path)
    for found in (zero, one):
        assert found["alike"]
        assert found["inside"]
        assert found["back"]
    assert zero["own"] + one["own"] == zero["total"]
    again = shardow.EMA(engines.Net(), 0.9)
    again.load(path)
    assert equal(dict(again.state_dict()["averages"]), zero["want"])


def _optimizer(**odd: Any) -> Any:
    config = SimpleNamespace(use_precision_aware_optimizer=False, optimizer_cpu_offload=False)
    return SimpleNamespace(**{"model_param_gbuf_map": {}, "config": config, "data_parallel_group": None, **odd})


def _model(**sizes: int) -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(**sizes)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "optimizer", "says"),
    [
        (_model(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), "use_distributed_optimizer=True"),
        (_model(), SimpleNamespace(chained_optimizers=[_optimizer(), _optimizer()]), "2 distributed optimizers"),
        (
            _model(),
            _optimizer(config=SimpleNamespace(use_precision_aware_optimizer=True)),
            "use_precision_aware_optimizer",
        ),
        (_model(tensor_model_parallel_size=2), _optimizer(), "tensor_model_parallel_size=2"),
        (_model(pipeline_model_parallel_size=4), _optimizer(), "pipeline_model_parallel_size=4"),
        ([_model(), _model()], _optimizer(), "a list of one"),
    ],
)
def test_what_is_not_averaged_is_refused(model: Any, optimizer: Any, says: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=re.escape(says)):
        ema(model, optimizer)
