"""docs/migration.md's lines inside twinkle's own TransformersModel, on two ranks, beside twinkle's own strategy.

twinkle-kit and what it imports take 350 MB: SHARDOW_ALL=1 installs them into build/twinkle; else this is skipped by
name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from built import ROOT, succeed
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

FOLDER = ROOT / "build" / "twinkle"
PACKAGES = [
    "twinkle-kit==0.5.1", "datasets", "omegaconf", "antlr4-python3-runtime==4.9.3", "pyarrow", "pandas", "xxhash",
    "multiprocess", "dill", "modelscope", "pyzmq",
]  # fmt: skip
PROGRAM = """
import sys, torch, torch.distributed as dist, twinkle
directory, out, ours = sys.argv[1], sys.argv[2], sys.argv[3] == "ours"
dist.init_process_group("gloo")
mesh = twinkle.DeviceMesh.from_sizes(fsdp_size=2, device_type="cpu")
twinkle.initialize(mode="local", global_device_mesh=mesh)
import twinkle.model.transformers.transformers as twinkle_models
own = twinkle_models.NativeFSDPStrategy
{lines}
if not ours:
    twinkle_models.NativeFSDPStrategy = own
    model = twinkle_models.TransformersModel(
        model_id=directory, device_mesh=mesh, strategy="native_fsdp", memory_efficient_init=True
    )
model.set_optimizer("AdamW", lr=1e-2)
model._lazy_wrap_model()
assert ours == type(model.strategy).__module__.startswith("shardow"), type(model.strategy)
tokens = torch.arange(16).reshape(2, 8) + 16 * dist.get_rank()
begin = model.strategy.get_full_state_dict(model.model)
model.model(input_ids=tokens, labels=tokens).loss.backward()
model.optimizer_group[""].optimizer.step()
model.save("saved", output_dir=out)
if dist.get_rank() == 0:
    from safetensors.torch import save_file
    save_file({{name: tensor.clone() for name, tensor in begin.items()}}, out + "/begin.safetensors")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def packages() -> Path:
    if os.environ.get("SHARDOW_ALL") and not FOLDER.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", FOLDER, *PACKAGES]
        subprocess.run([str(part) for part in pip], check=True)
    if not (FOLDER / "twinkle").exists():
        pytest.skip(f"no twinkle-kit: pip install --no-deps --target {FOLDER} twinkle-kit ... (SHARDOW_ALL=1 does)")
    return FOLDER


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as save_pretrained() writes it, with a tokenizer, which twinkle asks for."""
    from tokenizers import Tokenizer, models

    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="a").save_pretrained(path)
    return path


def trained(packages: Path, directory: Path, out: Path, whose: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Returns the weights at the beginning, and after a step of training as they were saved."""
    page = (ROOT / "docs" / "migration.md").read_text()
    lines = re.findall(r"```python twinkle\n(.*?)```", page, re.S)
    assert len(lines) == 1
    out.mkdir()
    (out / "program.py").write_text(PROGRAM.format(lines=lines[0]))
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    succeed(*torchrun, out / "program.py", directory, out, whose, PYTHONPATH=path, PYTHONSAFEPATH="1")
    saved = transformers.LlamaForCausalLM.from_pretrained(out / "saved").state_dict()
    return load_file(out / "begin.safetensors"), saved


def test_the_strategy_inside_twinkles_own_model_trains_as_twinkles_own_does(
    packages: Path, directory: Path, tmp_path: Path
) -> None:
    written = transformers.LlamaForCausalLM.from_pretrained(directory).state_dict()
    begin, after = trained(packages, directory, tmp_path / "ours", "ours")
    assert begin.keys() == written.keys()
    assert all(torch.equal(begin[name].float(), written[name].float()) for name in written)
    _, expected = trained(packages, directory, tmp_path / "twinkle", "twinkle")
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert any(not torch.equal(after[name], written[name]) for name in written)
