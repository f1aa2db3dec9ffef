"""Imitation for proof.py where `offbook sft` is not there: demonstrations with their own reminders, and the trainer."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from offbook.config import TrainConfig, load_config
from offbook.loop.models import model_to_train
from offbook.pocket.demonstrations import make_demonstrations
from offbook.pocket.model import _batches
from offbook.pocket.script import LONG_HABITS, Habits
from offbook.runfolder import whole_folder
from offbook.taskgen.pocket import level_named
from offbook.train.checkpoint import copy_tokenizer
from offbook.train.lora import adapter_of, adapter_tensors, save_adapter
from offbook.train.schedule import learning_rate_share
from offbook.train.trainer import Trainer

EPISODES_A_STEP = 8


def imitate_here(settings: dict[str, str], source: str, count: int, learning_rate: float, out: Path) -> None:
    own = {key: value for key, value in settings.items() if not key.startswith("sft.")}
    config, base, level = load_config(["standard"], own), Path(settings["model"]), level_named(source)
    assert level is not None
    habits = LONG_HABITS if level.is_long else Habits()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    samples = make_demonstrations(tokenizer, config.seed, count, habits, lambda share: None, level)
    for sample in samples:
        sample.ce_weight = [weight if weight == 1.0 else 0.0 for weight in sample.ce_weight]
    batches = _batches(samples, EPISODES_A_STEP, random.Random(config.seed))
    update = {"steps": len(batches), "learning_rate": learning_rate, "schedule": "cosine", "warmup_steps": 5}
    train: TrainConfig = config.train.model_copy(update=update).settled()
    model = model_to_train(config, base)
    trainer = Trainer(model, train)
    for step, batch in enumerate(batches, start=1):
        row = trainer.step(batch, lr_scale=learning_rate_share(train, step)).metrics
        if step % 20 == 1 or step == len(batches):
            print(f"  imitation, step {step} of {len(batches)}: loss {row['ce/loss']:.3f}", flush=True)
    with whole_folder(out) as part:
        if adapter_of(model) is not None:
            save_adapter(model, adapter_tensors(model), part)
        else:
            model.save_pretrained(part)
            copy_tokenizer(base, part)
