"""memory.plan() and memory.measure(): bytes on a rank, before and after the model is there."""

from __future__ import annotations

import json
import os
from typing import Any

import plans
import pytest
import torch
import torch.distributed as dist
from plans import KEYS, OFF
from test_switches import Model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardow
from shardow.memory import measure, plan

CASES = [("plain", 1), ("ddp", 2), ("fsdp2", 2)]
if os.environ.get("SHARDOW_ALL"):
    CASES += [("fsdp2", 1), ("fsdp2", 3), ("fsdp2", 4), ("ddp", 4), ("hsdp", 4)]
SHAPE = (4, 8, 4)


def shared(kind: str, dropout: float = 0.1) -> nn.Module:
    model, world = Model(dropout), dist.get_world_size()
    if kind in ("fsdp2", "hsdp"):
        mesh = init_device_mesh(
            "cpu", (2, world // 2) if kind == "hsdp" else (world,), mesh_dim_names=("a", "b")[: 1 + (kind == "hsdp")]
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if kind == "ddp" else model


def make(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    return shared(kind), (torch.randn(SHAPE),), None


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_the_plan_is_what_a_transformer_holds(kind: str, world: int) -> None:
    with torch.device("meta"):
        model = Model(0.1)
    plans.check(model, SHAPE, make, kind, world)


class Odd(nn.Module):
    """3 x 5 trainable weights on top of 4 x 5 frozen ones, a tied weight, a half, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(5, 4, bias=False).requires_grad_(False)
        self.high = nn.Linear(5, 3, bias=False)
        self.tied = self.high
        self.short = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.register_buffer("table", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.low(x).sum() + self.high(x).sum() + self.short.sum()
        return result


def test_frozen_tied_and_half_weights_and_buffers_by_hand() -> None:
    found = plan(Odd(), 2, "fsdp2", optimizer="adamw")
    rows = 4 * 2 * 5 + 2 * 4  # of high, 2 of 3 rows in float32; 4 of 7 of short
    assert found["weights"] == rows + 4 * 2 * 5 + 4 * 6 + 8  # 2 of 4 rows of low; the buffers are whole
    assert found["gradients"] == rows
    assert found["optimizer"] == 2 * rows + 2 * 4  # and a step for each
    assert found["averages"] == 4 * (2 * 5 + 4)
    alone = plan(Odd(), 1, "plain", optimizer="sgd", averages=3)
    assert (alone["gradients"], alone["optimizer"], alone["averages"]) == (4 * 15 + 2 * 7, 0, 3 * 4 * (15 + 7))


def test_shapes_are_enough_for_all_but_activations() -> None:
    model = Model()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for given in (shapes, dict(model.named_parameters()), {name: (shape, "float32") for name, shape in shapes.items()}):
        found = plan(given, 4, "fsdp2")
        assert found["activations"] is None
        assert found == plan(model, 4, "fsdp2")
        assert found["total"] == sum(found[key] for key in KEYS[:4])
    assert "unknown" in str(found)
    assert plan({"a": ((3,), torch.int64), "b": (2, 2)}, optimizer=torch.optim.SGD(model.parameters(),
     momentum=0.9)) == {
        "weights": 40, "gradients": 16, "optimizer": 16, "averages": 16, "activations": None, "total": 88,
        "saves": dict.fromkeys(OFF),
    }  # fmt: skip


def real_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    found: int = measure(model, optimizer)["optimizer"]
    return found


OPTIMIZERS = [
    "AdamW", "Adam", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adafactor",
    "Muon",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cls", "options"),
    [
        ("sgd-momentum", "SGD", {"momentum": 0.9}),
        *((cls.lower(), cls, {}) for cls in OPTIMIZERS if hasattr(torch.optim, cls)),
    ],
)
def test_state_of_optimizers_by_name_class_and_instance(name: str, cls: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
    kind = getattr(torch.optim, cls)
    made = kind(model.parameters(), **options)
    expected = plan(model, optimizer=made)["optimizer"]  # before it has any
    assert all(p.grad is None for p in model.parameters())
    assert expected == plan(model, optimizer=name)["optimizer"] == real_state(made, model)
    if not options:
        assert plan(model, optimizer=kind)["optimizer"] == expected
    assert plan(model, optimizer=None)["optimizer"] == 0


def test_groups_and_hooks_of_an_optimizer() -> None:
    """Each group's own options; what is in no group has no state; fused kernels are not needed; an attached EMA is not
    called.
    """
    model = Model()
    first, *others = model.parameters()
    groups = [{"params": [first], "amsgrad": True}, {"params": others[:3]}]
    optimizer = torch.optim.Adam(groups, fused=True)
    ema = shardow.EMA(model, 0.9)
    ema.attach(optimizer)
    found = plan(model, 1, "plain", optimizer=optimizer)["optimizer"]
    assert found == 4 * 4 + 3 * first.nbytes + sum(2 * p.nbytes for p in others[:3])
    assert ema.stats()["step"] == 0
    assert found == real_state(optimizer, model)


def test_each_saving_is_the_difference_that_the_switch_makes() -> None:
    off, bf16, checkpointing, lean, everything = (plan(Model(0.1), batch=SHAPE, switches=one) for one in plans.SWITCHES)
    assert off == plan(Model(0.1), batch=SHAPE)
    for name, alone in (("bf16", bf16), ("activation_checkpointing", checkpointing), ("attention_weights", lean)):
        assert off["saves"][name] == alone["saves"][name] == off["activations"] - alone["activations"] > 0
    without = plan(Model(0.1), batch=SHAPE, switches={"activation_checkpointing": False})
    assert everything["saves"]["activation_checkpointing"] == without["activations"] - everything["activations"] > 0
    assert plan(nn.Linear(2, 2), batch=(3, 2))["saves"]["activation_checkpointing"] is None


def test_a_plan_allocates_nothing_and_leaves_the_model_alone() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(nn.Linear(10**6, 10**6, bias=False), nn.Linear(10**6, 10**6, bias=False))
    found = plan(huge, 1, batch=(10**6, 10**6), switches={})  # terabytes
    assert found["weights"] == 8 * 10**12
    assert all(p.is_meta and p.grad is None for p in huge.parameters())

    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval(), torch.randn(8, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, attributes = torch.get_rng_state(), [dict(vars(module)) for module in model.modules()]
    plan(model, batch=x, switches={"activation_checkpointing": False})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(module)) for module in model.modules()] == attributes


def test_training_is_planned_whatever_the_mode() -> None:
    found = plan(Model(0.1).eval(), batch=SHAPE, switches={})
    assert found == plan(Model(0.1), batch=SHAPE, switches={})
    model = Model(0.1).eval()
    x = torch.randn(SHAPE)
    assert measure(model, batch=x)["activations"] == measure(Model(0.1), batch=x)["activations"]
    assert not any(module.training for module in model.modules())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(self.table(tokens) * x) * scale
        return mixed


def test_batches_may_be_tensors_shapes_tuples_and_dicts() -> None:
    tokens, x = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 6)
    batches: list[Any] = [
        (tokens, x), [tokens, x], {"tokens": tokens, "x": x}, (((2, 3), torch.int64), (2, 3, 6)),
        [[[2, 3], "int64"], [2, 3, 6]], {"tokens": ((2, 3), "int64"), "x": x, "scale": 2.0},
    ]  # fmt: skip
    found = {plan(Pair(), batch=batch)["activations"] for batch in batches}
    assert (
        found
        == {measure(Pair(), batch=(tokens, x))["activations"]}
        == {measure(Pair(), batch={"tokens": tokens, "x": x})["activations"]}
    )
    assert (
        plan(nn.Linear(6, 6), batch=(2, 6))
        == plan(nn.Linear(6, 6), batch=torch.zeros(2, 6))
        == plan(nn.Linear(6, 6), batch=((2, 6), "float32"))
    )


def test_what_a_loss_keeps_counts_and_inputs_count_as_they_are() -> None:
    x, target = torch.randn(1000, 8)[:4], torch.randn(4, 8)
    model = nn.Linear(8, 8)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    for found in (plan(model, batch=x, loss=loss), measure(model, batch=x, loss=loss)):
        assert found["activations"] == 4 * (4 * 8 + 4 * 8)  # the input, as if it were not a slice; the difference
    assert measure(model, batch=x)["activations"] == plan(model, batch=x)["activations"] == 4 * 4 * 8


def test_a_graph_that_is_gone_keeps_nothing() -> None:
    class Forgets(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x).exp()
            return super().forward(x)

    x = torch.randn(4, 8)
    assert measure(Forgets(8, 8), batch=x)["activations"] == plan(Forgets(8, 8), batch=x)["activations"] == x.nbytes


def test_a_plan_prints_as_a_table_and_is_plain_data() -> None:
    found = plan(
        nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)), 4, batch=(256, 1024)
    )
    assert str(found).splitlines()[:2] == [
        "weights                                    2.00 MiB",
        "gradients                                  2.00 MiB",
    ]
    assert "saved by bf16 " in str(found)
    assert len({len(line) for line in str(found).splitlines()}) == 1
    assert json.loads(json.dumps(found)) == found


class Asks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Stubborn(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("one of a kind")


def switched() -> nn.Module:
    model = Model()
    shardow.memory.apply(model)
    return model


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda: {"ranks": 0}, "ranks=0"),
        (lambda: {"sharding": "zero3"}, "one of 'plain', 'ddp'"),
        (lambda: {"sharding": "hsdp", "ranks": 4}, "a divisor of 4, not None"),
        (lambda: {"sharding": "hsdp", "ranks": 4, "shards": 3}, "a divisor of 4, not 3"),
        (lambda: {"shards": 2}, "shards=2 is for sharding='hsdp'"),
        (lambda: {"averages": -1}, "averages=-1"),
        (lambda: {"optimizer": "lion"}, "names are adadelta"),
        (lambda: {"optimizer": 3}, "optimizer is a int"),
        (lambda: {"optimizer": torch.optim.LBFGS}, "the state of LBFGS is not known"),
        (lambda: {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "has other parameters"),
        (lambda: {"switches": {"fp8": True}}, "not fp8"),
        (lambda: {"switches": {"activation_checkpointing": "layers"}, "batch": SHAPE}, "give True, False, 'blocks'"),
        (lambda: {"batch": 3}, "batch is a int"),
        (lambda: {"batch": (2, 8, 5)}, r"'inside' \(Linear\) refused the batch: RuntimeError"),
        (lambda: {"batch": {"y": SHAPE}}, r"the model \(Model\) refused the batch: TypeError.*'y'"),
        (lambda: {"batch": (SHAPE, "float1")}, "'float1' is no dtype"),
        (
            lambda: {"batch": SHAPE, "loss": lambda output: output.wrong},
            "loss= failed on the model's output: AttributeError",
        ),
        (
            lambda: {"device": "cuda" if not torch.cuda.is_available() else "xpu", "batch": SHAPE},
            "leave it out to plan for",
        ),
        (lambda: {"model_or_shapes": {"a": (2, 2)}, "batch": (2, 2)}, "shapes alone"),
        (lambda: {"model_or_shapes": {"a": "wide"}}, "'a': 'wide' is no shape"),
        (lambda: {"model_or_shapes": 3}, "a module or a mapping"),
        (lambda: {"model_or_shapes": nn.LazyLinear(3)}, "not initialised yet"),
        (lambda: {"model_or_shapes": switched()}, "memory.apply\\(\\) is on this model"),
        (lambda: {"model_or_shapes": Asks(4, 4), "batch": (2, 4)}, r"the model \(Asks\) needs values"),
        (lambda: {"model_or_shapes": Stubborn(4, 4), "batch": (2, 4)}, "can't be copied \\(one of a kind\\)"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: Any, said: str) -> None:
    given = {"model_or_shapes": Model(), **arguments()}
    with pytest.raises(shardow.Error, match=said):
        plan(**given)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def test_recurrent_layers_are_planned_or_refused_by_name() -> None:
    batch = torch.zeros(16, 4, 8)
    for model, name in ((Recurrent(nn.LSTM), "layer"), (nn.LSTM(8, 8), "the model")):
        with pytest.raises(NotImplementedError, match=rf"kernel of {name} keeps memory .* measure\(\)"):
            shardow.memory.plan(model, batch=batch)
    planned = shardow.memory.plan(Recurrent(nn.GRU), batch=batch, device="cpu")
    assert planned["activations"] == shardow.memory.measure(Recurrent(nn.GRU), batch=batch)["activations"]
