from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foreword.gpu.checkpoint.huggingface_checkpoint import HuggingFaceCheckpoint
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.scheduler.errors import CheckpointError


def tiny_llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).to(dtype)


def edit_json(path: Path, **changes: Any) -> None:
    contents = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(contents | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_shard_size", ["1GB", "10KB"])
def test_tensors_are_what_transformers_saved(tmp_path: Path, dtype: torch.dtype, max_shard_size: str) -> None:
    model = tiny_llama(dtype, attention_bias=True)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() is (max_shard_size == "10KB")
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.config["num_key_value_heads"] == 2
    state = model.state_dict()
    assert checkpoint.tensor_names() == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor.float().numpy(), err_msg=name)


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in open_checkpoint(tmp_path).tensor_names()


def test_end_tokens(folder: Path) -> None:
    assert open_checkpoint(folder).eos_token_ids == (2,)
    edit_json(folder / "generation_config.json", eos_token_id=[7, 0, 7])
    assert open_checkpoint(folder).eos_token_ids == (0, 7)
    edit_json(folder / "generation_config.json", eos_token_id=0)
    assert open_checkpoint(folder).eos_token_ids == (0,)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).eos_token_ids == (2,)
    edit_json(folder / "config.json", eos_token_id=None)
    assert open_checkpoint(folder).eos_token_ids == ()
    edit_json(folder / "config.json", eos_token_id="</s>")
    with pytest.raises(CheckpointError, match="eos_token_id must be"):
        open_checkpoint(folder)


def test_chat_template_places(folder: Path) -> None:
    assert open_checkpoint(folder).chat_template is None
    config = folder / "tokenizer_config.json"
    edit_json(config, chat_template="in the configuration", bos_token="<s>", eos_token={"content": "</s>"})
    template = open_checkpoint(folder).chat_template
    assert template is not None
    assert (template.source, template.bos_token, template.eos_token) == ("in the configuration", "<s>", "</s>")
    edit_json(folder / "chat_template.json", chat_template="in its own JSON")
    template = open_checkpoint(folder).chat_template
    assert template is not None
    assert template.source == "in its own JSON"
    (folder / "chat_template.jinja").write_text("in its own file")
    template = open_checkpoint(folder).chat_template
    assert template is not None
    assert template.source == "in its own file"


def test_named_chat_templates(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    template = open_checkpoint(folder).chat_template
    assert template is not None
    assert template.source == "chat"


def test_tokenizer_json(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        open_checkpoint(folder).tokenizer_json()
    (folder / "tokenizer.json").write_text('{"version": "1.0", "ü": 1}', "utf-8")
    assert open_checkpoint(folder).tokenizer_json() == '{"version": "1.0", "ü": 1}'


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=f"only there as pickle \\({name}\\).*convert them to safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(folder: Path, name: str) -> None:
    edit_json(folder / name, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    with pytest.raises(CheckpointError, match=f"{name}: auto_map asks for Python code"):
        open_checkpoint(folder)


def test_quantised_folders_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="quantization_config is not supported"):
        open_checkpoint(folder)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(folder)


def test_broken_configuration(folder: Path) -> None:
    for text, reason in (("{", "not valid JSON"), ("[]", "not a JSON object"), ('{"a": 1}', "architectures must be")):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"config\.json: {reason}"):
            open_checkpoint(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config\.json: not UTF-8"):
        open_checkpoint(folder)


def test_broken_shard_index(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name, shard = next(iter(weight_map.items()))
    edit_json(index, weight_map=weight_map | {name: "../outside.safetensors"})
    with pytest.raises(CheckpointError, match="is not a file of this folder"):
        open_checkpoint(tmp_path)
    edit_json(index, weight_map=weight_map | {"missing.weight": shard})
    with pytest.raises(CheckpointError, match=r"tensor 'missing\.weight' is missing"):
        open_checkpoint(tmp_path)
    edit_json(index, weight_map=weight_map)
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(tmp_path)


def test_unknown_tensor(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        open_checkpoint(folder).tensor("x")
