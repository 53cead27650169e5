"""Worker of test_memory.py: plans for models in FSDP units, two gloo ranks (FSDP1 on a CPU device)."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist

from foundry_fp8.config import ConfigError
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from foundry_fp8.planning.memory.plan import MemoryPlan
from foundry_fp8.planning.memory.planner import apply_plan, choose, measure, plan_memory
from tests.multiprocess.run_memory import build as plain
from tests.multiprocess.run_memory import wrap


def build(kind: str) -> torch.nn.Module:
    return wrap(kind, plain(width=128))


def loss_of(model: torch.nn.Module):
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
    return lambda: model(input_ids=tokens, labels=tokens).loss


def peak_of(model: torch.nn.Module) -> int:
    for _ in range(2):  # the first step lays out what later ones share
        model.zero_grad(set_to_none=True)
        with LiveBytes() as meter:
            loss_of(model)().backward()
            peak = meter.peak
    return peak


def main() -> None:
    results = {}
    for kind in ("fsdp1", "fsdp2"):
        model = build(kind)
        state = torch.get_rng_state()
        measured = measure(model, loss_of(model), compression="int8", rounds=1)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for p in model.parameters())
        predicted = {}
        for option in measured.options[0]:
            frame = measured.lean if option.formats and measured.lean else measured.frame
            everywhere = MemoryPlan(measured, (option.name,) * 4, frame, 0, False)
            planned = build(kind)
            apply_plan(planned, everywhere)
            bytes_here = everywhere.predicted_peak - frame.static
            predicted[option.name] = (bytes_here, peak_of(planned))

        texts: list[str] = [""] * dist.get_world_size()
        plan = choose(measured, f"{measured.peak('block')}B")
        dist.all_gather_object(texts, str(plan))
        assert len(set(texts)) == 1, texts

        # The model that was measured on trains as a fresh one with the same plan.
        losses = []
        for trained in (model, build(kind)):
            apply_plan(trained, plan)
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = loss_of(trained)()
                loss.backward()
                optimizer.step()
            losses.append(loss_of(trained)().item())
        held = build(kind)
        loss_of(held)().backward()
        with pytest.raises(ConfigError, match=r"hold gradients\. Under FSDP plan before the first"):
            plan_memory(held, loss_of(held), budget=0.9)
        static = sum(p.numel() * p.element_size() for p in plain(width=128).parameters())
        results[kind] = {
            "predicted": predicted,
            "losses": losses,
            "static": measured.frame.static,
            "unsharded": static,
        }
    if dist.get_rank() == 0:
        with open(os.environ["RESULT_FILE"], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()  # and no destroy_process_group: ranks.py says why
