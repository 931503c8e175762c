"""Test models with frozen parts, as PEFT makes them: training, resuming, saved adapters."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from safetensors.torch import load_file

import ipu_pipe
from ipu_pipe.model.modes import enter_training
from tests.support.processes import run_in_group
from tests.support.runs import assert_same, read_json, read_summary

# imported by the tests themselves: both take seconds
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "peft", "accelerate"))),
    reason="needs transformers, peft and accelerate",
)

# where adapters are: on both stages, on the second alone
BOTH, LAST = r".*c_attn", r"transformer\.h\.1\.attn\.c_attn"
RUNS = [("gpipe", BOTH), ("pipedream_2bw", LAST)]
STAGE = "base_model.model.transformer.h.1"


def make_adapted_gpt2(where: str, dropout: float = 0.1) -> Any:
    """Return GPT-2 with adapters; the first stage's frozen embedding is also the output layer."""
    import peft
    import transformers

    config = transformers.GPT2Config(
        vocab_size=31, n_embd=8, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    adapters = peft.LoraConfig(
        r=2,
        lora_dropout=dropout,
        target_modules=where,
        fan_in_fan_out=True,
        init_lora_weights=False,
    )
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)


def draw_token_batches() -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(0, 31, (8, 4, 10), generator=generator)
    ]


def train_adapters(
    model: torch.nn.Module, method: str, out: Path, backend: str, **how: Any
) -> Dict[str, Any]:
    config = ipu_pipe.configure(
        method=method, stages=[STAGE], micro_batch_size=4, gradient_accumulation=2, epochs=1, loss="model", metrics=[],
        backend={"name": backend}, checkpoint={"every": 2}, log={"trace": None, "tensorboard": False},
        ema={"decay": 0.5} if method == "pipedream_2bw" else None,  # the weight on both stages is frozen, and has no average
    )  # fmt: skip
    batches, optimizer = draw_token_batches(), functools.partial(torch.optim.AdamW, lr=0.01)
    data = ipu_pipe.from_loader(batches, batches[:1])
    return ipu_pipe.train(
        config, out, model=model, data=data, optimizer=optimizer, quiet=True, **how
    )


def train_runs_on_rank(rank: int, folder: Path) -> None:
    for number, (method, where) in enumerate(RUNS):
        model = make_adapted_gpt2(where)
        train_adapters(model, method, folder / str(number), "distributed")
        torch.save(model.state_dict(), folder / f"{number}.{rank}")


@pytest.fixture(scope="module")
def runs_on_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the runs on two processes. Return their folder."""
    folder = tmp_path_factory.mktemp("processes")
    run_in_group(2, train_runs_on_rank, folder)
    return folder


def test_a_pretrained_model_in_adapters_is_trained_in_training_mode() -> None:
    """Dropouts of the wrapped model are on in training.

    PEFT's wrapper is in training mode, but the model in it as `from_pretrained` returned it: its
    dropouts stayed off.
    """
    model = make_adapted_gpt2(BOTH)
    model.get_base_model().eval()
    assert model.training and enter_training(model)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_processes_train_adapters_as_the_emulator_and_runs_resume(
    number: int, runs_on_processes: Path, tmp_path: Path
) -> None:
    method, where = RUNS[number]
    fields = ("parameters", "weight_copies", "weight_bytes", "optimizer_bytes")
    model, first_weights = make_adapted_gpt2(where), make_adapted_gpt2(where).state_dict()
    summary = train_adapters(model, method, tmp_path / "run", "emulator")
    for rank in range(2):
        assert_same(torch.load(runs_on_processes / f"{number}.{rank}"), model.state_dict())
    for name, p in model.named_parameters():
        assert torch.equal(p, first_weights[name]) != p.requires_grad, name
    process_summary = read_summary(runs_on_processes / str(number))
    rows, others = (
        [[row[key] for key in fields] for row in one["stages"]]
        for one in (summary, process_summary)
    )
    assert rows == others
    if where == LAST:  # no gradient crosses to the first stage
        assert summary["links"] == process_summary["links"] and summary["links"][1]["bytes"] == 0
    resumed = make_adapted_gpt2(where)
    train_adapters(resumed, method, runs_on_processes / str(number), "emulator", resume_from=2)
    assert_same(resumed.state_dict(), model.state_dict())


def test_a_frozen_stage_has_one_version_no_gradient_and_no_state(tmp_path: Path) -> None:
    model = make_adapted_gpt2(LAST)
    stages = train_adapters(model, "pipedream", tmp_path / "run", "emulator")["stages"]
    memory = read_json(tmp_path / "run" / "memory.json")["stages"]
    frozen, trained = stages
    tied = model.get_parameter("base_model.model.transformer.wte.weight").numel()  # on both stages
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    figures = frozen["weight_copies"], frozen["optimizer_bytes"], memory[0]["gradient_bytes"]
    assert figures == (1, 0, 0)
    assert frozen["weight_bytes"] == 4 * frozen["parameters"]
    assert trained["weight_bytes"] == 4 * (trained["parameters"] + tied)
    assert memory[1]["gradient_bytes"] == 4 * adapters


def train_adapters_plainly(model: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    batches = draw_token_batches()
    for pair in zip(batches[::2], batches[1::2]):
        for batch in pair:
            (model(**batch).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def read_adapters(folder: Path) -> Tuple[List[str], Dict[str, torch.Tensor]]:
    return sorted(path.name for path in folder.iterdir()), load_file(
        folder / "adapter_model.safetensors"
    )


def test_saved_adapters_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    ours, plain = make_adapted_gpt2(BOTH, dropout=0.0), make_adapted_gpt2(BOTH, dropout=0.0)
    train_adapters(ours, "gpipe", tmp_path / "run", "emulator")
    train_adapters_plainly(plain)
    for model, name in ((ours, "ours"), (plain, "plain")):
        model.save_pretrained(str(tmp_path / name))
    (files, adapters), (plain_files, plain_adapters) = (
        read_adapters(tmp_path / name) for name in ("ours", "plain")
    )
    assert files == plain_files
    assert_same(adapters, plain_adapters)


def test_the_trainer_saves_adapters_as_transformers_own(tmp_path: Path) -> None:
    import transformers

    from ipu_pipe.integrations.transformers import PipelineTrainer

    saved_adapters = []
    samples = [
        {"input_ids": ids, "labels": ids}
        for batch in draw_token_batches()
        for ids in batch["labels"]
    ]
    ours = {"pipeline": {"method": "gpipe", "stages": [STAGE]}}
    for trainer_class, pipeline in ((transformers.Trainer, {}), (PipelineTrainer, ours)):
        out = tmp_path / trainer_class.__name__
        args = transformers.TrainingArguments(
            str(out / "run"), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3, report_to=[],
            use_cpu=True, disable_tqdm=True, learning_rate=0.01, save_strategy="steps", save_steps=2,
        )  # fmt: skip
        trainer = trainer_class(
            make_adapted_gpt2(BOTH, dropout=0.0), args, train_dataset=samples, **pipeline
        )
        trainer.train(resume_from_checkpoint=None)
        trainer.save_model(str(out / "model"))
        assert "adapter_model.safetensors" in read_adapters(out / "run" / "checkpoint-2")[0]
        saved_adapters.append(read_adapters(out / "model"))
    (files, adapters), (our_files, our_adapters) = saved_adapters
    assert files == our_files and adapters.keys() == our_adapters.keys()
    for name, value in adapters.items():
        torch.testing.assert_close(value, our_adapters[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_run_is_exported_as_adapters(runs_on_processes: Path, tmp_path: Path) -> None:
    import peft

    ipu_pipe.export(runs_on_processes / "0", tmp_path / "adapters", into=make_adapted_gpt2(BOTH))
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    model = make_adapted_gpt2(BOTH)
    model.load_state_dict(torch.load(runs_on_processes / "0.0"))
    expected = peft.get_peft_model_state_dict(model)
    assert_same(load_file(tmp_path / "adapters" / "adapter_model.safetensors"), expected)
    adapted = peft.PeftModel.from_pretrained(
        make_adapted_gpt2(BOTH).unload(), tmp_path / "adapters"
    )
    assert_same(peft.get_peft_model_state_dict(adapted), expected)
