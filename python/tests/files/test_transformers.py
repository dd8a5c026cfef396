"""transformers reads what is written here, and the other way round, to the last bit of the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow

DECAY = 0.75


def llama(tied: bool, seed: int = 0) -> Any:
    """Rows 65 and 33: uneven on two ranks. transformers is imported where it is used: that takes seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=65, hidden_size=32, intermediate_size=33, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)  # norms too: they begin as ones, all alike
    return model


def fsdp2(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


#: {kind: (ranks, how the model is shared among them)}
KINDS: dict[str, tuple[int, Callable[[Any], Any]]] = {"plain": (1, lambda model: model), "fsdp2": (2, fsdp2)}

TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
SIZES = pytest.mark.parametrize("max_shard_size", [None, "10KB"], ids=["one-file", "several-files"])


def save(kind: str, tied: bool, directory: str, max_shard_size: str | None) -> None:
    shardow.save(KINDS[kind][1](llama(tied)), directory, max_shard_size=max_shard_size)


@torch.no_grad()
def export(kind: str, tied: bool, directory: str, max_shard_size: str | None) -> None:
    """From the weights of one seed, a step to those of another."""
    model, after = KINDS[kind][1](llama(tied, seed=1)), KINDS[kind][1](llama(tied))
    ema = shardow.EMA(model, DECAY)
    for p, new in zip(model.parameters(), after.parameters(), strict=True):
        p.copy_(new)
    ema.update()
    ema.export(directory, max_shard_size=max_shard_size)


@torch.no_grad()
def averaged(tied: bool) -> Any:
    """What export() is to have written, by torch alone."""
    model = llama(tied, seed=1)
    for average, new in zip(model.parameters(), llama(tied).parameters(), strict=True):
        average.lerp_(new, 1 - DECAY)
    return model


def load(kind: str, tied: bool, directory: str) -> list[str]:
    """What is wrong on this rank. Torch cuts the expected model the same way."""
    model, expected = KINDS[kind][1](llama(tied, seed=1)), KINDS[kind][1](llama(tied))
    report = shardow.load(model, directory)
    return [*report["missing"], *report["unexpected"], *differing(model, expected)]


def differing(model: Any, expected: Any) -> list[str]:
    """Names of weights that are not here, differ in a bit, or are tied in one model alone."""
    found, wanted = (
        {name: getattr(p, "_local_tensor", p).detach() for name, p in one.named_parameters(remove_duplicate=False)}
        for one in (model, expected)
    )
    wrong = set(found) ^ set(wanted)
    wrong |= {name for name in set(found) & set(wanted) if not same(found[name], wanted[name])}
    ties = [one.lm_head.weight is one.model.embed_tokens.weight for one in (model, expected)]
    return sorted(wrong | ({"the tie"} if ties[0] != ties[1] else set()))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(torch.int32).equal(b.contiguous().view(torch.int32))
    )


def num_files(directory: Path) -> int:
    return len(list(directory.glob("*.safetensors")))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(40).view(2, 20) % 65).logits


@TIED
@SIZES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("write", "expected"), [(save, llama), (export, averaged)], ids=["save", "export"])
def test_from_pretrained_reads_what_is_written_beside_a_configuration(
    write: Callable[..., None],
    expected: Callable[[bool], Any],
    kind: str,
    max_shard_size: str | None,
    tied: bool,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    model = expected(tied)
    model.config.save_pretrained(tmp_path)
    ranks.run(KINDS[kind][0], write, kind, tied, str(tmp_path), max_shard_size)
    assert (num_files(tmp_path) > 1) == (max_shard_size is not None)
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {what: found for what, found in info.items() if found} == {}
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= set(info)
    assert differing(read, model) == []
    assert torch.equal(logits(read.eval()), logits(model))
    assert set(shardow.open(tmp_path)) == {name for name, _ in model.named_parameters()}


@TIED
@SIZES
@pytest.mark.parametrize("kind", KINDS)
def test_load_reads_what_save_pretrained_writes(
    kind: str, max_shard_size: str | None, tied: bool, tmp_path: Path
) -> None:
    model = llama(tied)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size or "5GB")
    assert (num_files(tmp_path) > 1) == (max_shard_size is not None)
    assert ranks.run(KINDS[kind][0], load, kind, tied, str(tmp_path)) == [[]] * KINDS[kind][0]
    assert set(shardow.open(tmp_path)) == {name for name, _ in model.named_parameters()}


def merge(inputs: list[str], out: str) -> None:
    shardow.merge(inputs, out)


@pytest.mark.parametrize("world", [1, 2])
def test_from_pretrained_reads_a_merge_of_what_save_pretrained_wrote(world: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    models = [llama(tied=True, seed=seed) for seed in (1, 2)]
    for step, model in enumerate(models, 1):
        model.save_pretrained(tmp_path / f"step-{step}")
    ranks.run(world, merge, [str(tmp_path / f"step-{step}") for step in (1, 2)], str(tmp_path / "soup"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "soup")
    for weight, *parts in zip(read.parameters(), *(model.parameters() for model in models), strict=True):
        assert torch.equal(weight, (parts[0].double() + parts[1].double()).div(2).float())


def architecture(name: str, tied: bool) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    make = {"llama": LlamaConfig, "qwen": Qwen2Config}[name]
    config = make(
        vocab_size=65, hidden_size=32, intermediate_size=33, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def without_memory(name: str, tied: bool, directory: str) -> bool:
    """On meta, sharded by wrap(), filled from what save_pretrained() wrote; the logits of from_pretrained(), sharded
    the same way.
    """
    from transformers import AutoModelForCausalLM

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = fsdp2(AutoModelForCausalLM.from_pretrained(directory).eval())
    with shardow.meta_init():
        model = architecture(name, tied)
    assert all(p.is_meta for p in model.parameters())
    shardow.wrap(model, mesh, source=directory)
    assert not differing(model, expected)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        return same(model(tokens).logits, expected(tokens).logits)


@TIED
@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_model_built_without_memory_has_the_logits_of_from_pretrained(name: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    architecture(name, tied).save_pretrained(tmp_path / "hub")
    assert ranks.run(2, without_memory, name, tied, str(tmp_path / "hub")) == [True, True]
