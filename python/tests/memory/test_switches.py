"""memory.apply(): less memory in training steps, the same names and, where it says so, the same numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        mixed: torch.Tensor = hidden + self.mix(hidden)
        return mixed


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(4, 16)
        self.blocks = nn.ModuleList([Block(16, dropout) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inside(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


X = torch.linspace(-1, 1, 2 * 8 * 4).view(2, 8, 4)
OFF: dict[str, Any] = {"bf16": False, "activation_checkpointing": False, "attention_weights": True}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(X).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def kept_bytes(model: nn.Module) -> int:
    """What autograd keeps at the end of forward, each storage once."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(X)
    return sum(kept.values())


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "blocks", [True, "blocks", lambda name, module: name.startswith("blocks.") and isinstance(module, Block)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_blocks_keep_less_and_have_the_same_gradients(blocks: Any, dropout: float) -> None:
    model = Model(dropout)
    expected, much = gradients(model), kept_bytes(model)
    with shardow.memory.apply(model, **{**OFF, "activation_checkpointing": blocks}):
        assert same(gradients(model), expected)
        assert kept_bytes(model) < 0.4 * much
    assert kept_bytes(model) == much
    assert same(gradients(model), expected)


def test_bf16_is_autocast_in_training_alone() -> None:
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(X)
    model.zero_grad()
    output.float().square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    plain = model.eval()(X)
    with shardow.memory.apply(model, **{**OFF, "bf16": True}):
        assert torch.equal(model.eval()(X), plain)
        assert same(gradients(model.train()), expected)
        assert not same(expected, gradients(Model()))
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert same(gradients(model), gradients(Model()))


class Answer(NamedTuple):
    hidden: torch.Tensor
    rest: dict[str, Any]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(self.linear(x), {"all": [self.linear(x), 7], "ids": torch.ones(2, dtype=torch.int64)})


def test_bf16_outputs_of_the_outermost_forward_are_float32() -> None:
    model = Structured()
    with shardow.memory.apply(model, **{**OFF, "bf16": True}):
        answer = model(X[0])
        assert isinstance(answer, Answer)
        dtypes = [answer.hidden.dtype, answer.rest["all"][0].dtype, answer.rest["ids"].dtype]
        assert dtypes == [torch.float32, torch.float32, torch.int64]
        assert answer.rest["all"][1] == 7
        with torch.autocast("cpu", torch.bfloat16):  # the caller's: what follows is autocast too
            assert model(X[0]).hidden.dtype == torch.bfloat16
    with shardow.memory.apply(model, **{**OFF, "bf16": True}, bf16_outputs=True):
        assert model(X[0]).hidden.dtype == torch.bfloat16


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_on_a_device_without_it_stays_off_with_a_warning(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: asked.append(options) or supported)
    seen: list[bool] = []
    model = nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(4, device="cuda"))
        model.forward = lambda x: seen.append(torch.is_autocast_enabled("cuda")) or x  # type: ignore[method-assign]
        says = contextlib.nullcontext() if supported else pytest.warns(RuntimeWarning, match="no bfloat16")
        with shardow.memory.apply(model, **{**OFF, "bf16": True}), says:
            model(torch.empty(1, device="cuda"))
    assert seen == [supported]
    assert asked[0] == {"including_emulation": False}  # autocast asks once more


def test_a_deep_copy_has_its_own_weights_and_evaluation_keeps_the_callers_autocast() -> None:
    model = Model()
    with shardow.memory.apply(model, attention_weights=True):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for p in copied.parameters():
                p.zero_()
        assert not copied(X).any()
        assert model(X).any()
        with torch.autocast("cpu", torch.bfloat16):
            assert model.eval().inside(X).dtype == torch.bfloat16
            found = model(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(X), found)


def test_attention_weights_are_not_built_unless_asked_for() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 8, 16)
    lean = attention(x, x, x, need_weights=False)[0]
    with shardow.memory.apply(attention, **{**OFF, "attention_weights": False}):
        output, weights = attention(x, x, x)
        assert weights is None
        assert torch.equal(output, lean)
        assert attention(x, x, x, need_weights=True)[1].shape == (2, 8, 8)
        assert attention(x, x, x, None, True)[1].shape == (2, 8, 8)
        attention.eval()
        assert attention(x, x, x)[1] is None
    assert attention(x, x, x)[1].shape == (2, 8, 8)
    model = Model()
    much = kept_bytes(model)
    with shardow.memory.apply(model, **{**OFF, "attention_weights": False}):
        assert kept_bytes(model) < much


def test_names_and_state_are_those_of_before_and_remove_ends_it() -> None:
    model = Model()
    names, forward = list(model.state_dict()), model.forward.__func__  # type: ignore[attr-defined]
    handle = shardow.memory.apply(model)
    assert list(model.state_dict()) == names
    handle.remove()
    handle.remove()
    assert model.forward.__func__ is forward  # type: ignore[attr-defined]
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 2, 1)])
def test_several_are_removed_in_any_order(order: tuple[int, ...]) -> None:
    model = Model()
    handles = [shardow.memory.apply(model) for _ in order]
    inner = [module for module in model.modules() if "forward" in module.__dict__]
    for i in order:
        assert all("forward" in module.__dict__ for module in inner)
        handles[i].remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_forward_that_was_the_objects_own_comes_back() -> None:
    model = Model()
    own: Callable[..., torch.Tensor] = lambda x: x  # noqa: E731
    model.forward = own  # type: ignore[method-assign]
    with shardow.memory.apply(model, **{**OFF, "bf16": True}):
        assert model.forward is not own
    assert model.forward is own


def test_an_error_in_forward_leaves_autocast_off() -> None:
    model = Model()
    with shardow.memory.apply(model), pytest.raises(RuntimeError):
        model(torch.ones(2, 8, 5))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ("layers", "give True, False, 'blocks' or a test"),
        (lambda *_: False, "chose no module"),
        (True, "no ModuleList or Sequential"),
    ],
)
def test_blocks_that_are_not_there(blocks: Any, said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=said):
        shardow.memory.apply(model, activation_checkpointing=blocks)
    assert "forward" not in model.__dict__


def sharded(_: object) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made() -> nn.Module:
        model = Model()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    expected = gradients(made())
    model = made()
    ema = shardow.EMA(model, 0.5)
    with shardow.memory.apply(model, bf16=False, attention_weights=True):
        found = gradients(model)
        ema.update()
        with ema.swapped():
            model.eval()(X)
    return all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(found, expected, strict=True))  # type: ignore[attr-defined]


def test_sharded_models_take_the_switches() -> None:
    assert ranks.run(2, sharded, None) == [True, True]


@pytest.mark.parametrize(
    "chooses",
    [
        lambda name, module: isinstance(module, (Block, nn.Sequential, nn.Linear)) and name != "inside",
        lambda name, module: name.startswith("blocks"),  # the list, its blocks and all that is in them
    ],
)
def test_of_blocks_in_chosen_blocks_the_outermost_are_run_again(chooses: Callable[[str, nn.Module], bool]) -> None:
    model = Model()
    before, kept = gradients(model), kept_bytes(model)
    with shardow.memory.apply(model, bf16=False, activation_checkpointing=chooses, attention_weights=True):
        after, less = gradients(model), kept_bytes(model)
        assert [name for name, module in model.named_modules() if "forward" in vars(module)] == [
            "blocks.0",
            "blocks.1",
            "blocks.2",
        ]
    assert less < kept
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
