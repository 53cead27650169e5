"""A frozen weight kept in FP8 alone: its bytes, what layers compute with it, and everything that reads or writes it."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foundry_fp8 import apply_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, in_high_precision, keep_in_fp8
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import quantize_block, quantize_mx
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, MXFP8Scaling

CURRENT = {"name": "current", "power_2_scales": True}
RECIPES = {"current": CURRENT, "block": "block", "mxfp8": "mxfp8"}
DTYPES = [torch.float32, torch.bfloat16]


def weight(rows=160, columns=96, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-9, 4, (rows, 1), generator=generator).float())
    return nn.Parameter(
        (torch.randn(rows, columns, generator=generator) * spread).to(dtype), requires_grad=False
    )


class Adapted(nn.Module):
    """LoRA's shape: a frozen base, and an adapter that trains."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 96)).to(dtype)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(96, 96).to(dtype)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def converted(recipe, dtype=torch.float32, backend="emulated", **options):
    model = Adapted(dtype)
    apply_fp8(model, recipe=recipe, backend=backend, include=["base.*"], **options)
    return model


def step(model, dtype=torch.float32):
    x = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    loss = model(x).float().square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


class TestTheWeight:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("recipe", "reference"),
        [
            (CurrentScaling(power_2_scales=True), lambda w: quantize_block(w, (256, 256), E4M3)),
            (BlockScaling(), lambda w: quantize_block(w, (128, 128), E4M3)),
            (MXFP8Scaling(), lambda w: quantize_mx(w, (1, 32), E4M3)),
        ],
        ids=lambda x: getattr(x, "name", ""),
    )
    def test_it_is_what_the_recipe_makes_of_the_weight_in_one_byte_an_element(self, recipe, reference, dtype):
        p, before = weight(dtype=dtype), weight(dtype=dtype)
        keep_in_fp8(p, recipe)
        assert type(p) is FrozenFP8Weight and isinstance(p, nn.Parameter) and not p.requires_grad
        assert (p.shape, p.dtype) == (before.shape, dtype)
        assert p.codes.dtype == torch.float8_e4m3fn and p.codes.numel() == before.numel()
        wanted = reference(before).dequantize()
        assert torch.equal(p.unpacked(torch.float32), wanted)
        assert torch.equal(p.unpacked(torch.bfloat16).float(), wanted)  # a code and a power of two fit

    @pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
    def test_what_is_written_back_stays_as_it_is(self, recipe):
        model = converted(recipe, torch.bfloat16, frozen_weights="fp8")
        p = model.base[0].weight
        codes, scale = p.codes.clone(), p.scale.clone()
        values = p.unpacked(torch.bfloat16)
        p.data = values
        assert torch.equal(p.unpacked(torch.bfloat16), values)
        with torch.no_grad():
            p.copy_(values)
            p.mul_(2.0)
            p += 0
        assert torch.equal(p.unpacked(torch.bfloat16), 2 * values)
        assert torch.equal(p.codes.float() * 0, codes.float() * 0) and p.scale.shape == scale.shape

    def test_nan_and_inf_stay_visible(self):
        for bad in (torch.nan, torch.inf, -torch.inf):
            p = weight()
            p.data[3, 5] = bad
            keep_in_fp8(p, BlockScaling())
            assert not torch.isfinite(p.unpacked(torch.float32)[3, 5])

    def test_it_moves_is_copied_and_saved_as_itself(self):
        model = converted("block", frozen_weights="fp8")
        p, values = model.base[0].weight, model.base[0].weight.unpacked(torch.float32)
        twin = copy.deepcopy(model)
        for moved in (twin.base[0].weight, model.to("cpu").base[0].weight, p.detach(), p.clone()):
            assert isinstance(moved, FrozenFP8Weight) and torch.equal(moved.unpacked(torch.float32), values)
        model.to(torch.bfloat16)
        assert (
            isinstance(model.base[0].weight, FrozenFP8Weight) and model.base[0].weight.dtype == torch.bfloat16
        )
        assert torch.equal(in_high_precision(model.base[0].weight, torch.float32), values)

    def test_it_stays_the_object_that_an_optimizer_holds(self):
        model = Adapted()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = model.base[0].weight
        apply_fp8(model, recipe="block", backend="emulated", include=["base.*"], frozen_weights="fp8")
        assert model.base[0].weight is before and type(before) is FrozenFP8Weight
        step(model)
        values = before.unpacked(torch.float32)
        optimizer.step()
        assert torch.equal(before.unpacked(torch.float32), values)


class TestLayers:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
    def test_loss_and_gradients_are_those_of_the_run_that_keeps_the_weight(self, recipe, dtype):
        for ours, theirs in zip(
            step(converted(recipe, dtype, frozen_weights="fp8"), dtype),
            step(converted(recipe, dtype), dtype),
            strict=True,
        ):
            assert torch.equal(ours, theirs)

    def test_high_precision_reads_the_rounded_weight_and_differentiates_by_it(self):
        model = converted("block", frozen_weights="fp8")
        plain = Adapted()
        with torch.no_grad():
            for i in (0, 2):
                plain.base[i].weight.copy_(model.base[i].weight.unpacked(torch.float32))
                model.base[i].set_recipe(None)
        for ours, theirs in zip(step(model), step(plain), strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(model.eval()(torch.ones(2, 96)), plain(torch.ones(2, 96)))

    def test_checkpoints_are_plain_and_come_back_bit_for_bit(self):
        for dtype in DTYPES:
            model = converted("block", dtype, frozen_weights="fp8")
            state, plain = model.state_dict(), Adapted(dtype).state_dict()
            assert {k: (v.shape, v.dtype, type(v)) for k, v in state.items()} == {
                k: (v.shape, v.dtype, type(v)) for k, v in plain.items()
            }
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            again = converted("block", dtype, frozen_weights="fp8")
            with torch.no_grad():
                again.base[0].weight.mul_(3)
            again.load_state_dict(torch.load(file, weights_only=True))
            assert torch.equal(again.base[0].weight.codes.float(), model.base[0].weight.codes.float())
            for ours, theirs in zip(step(again, dtype), step(model, dtype), strict=True):
                assert torch.equal(ours, theirs)
            Adapted(dtype).load_state_dict(state)  # and the run in high precision takes them

    def test_recompute_is_bit_identical(self):
        from torch.utils.checkpoint import checkpoint

        model, twin = (converted("block", frozen_weights="fp8") for _ in range(2))
        base = model.base.forward
        model.base.forward = lambda x: checkpoint(base, x, use_reentrant=False)
        for ours, theirs in zip(step(model), step(twin), strict=True):
            assert torch.equal(ours, theirs)

    def test_the_backward_keeps_one_byte_an_element(self):
        """Saved tensors are the weight itself, not what it was unpacked to."""
        for recipe in RECIPES.values():
            model = converted(recipe, frozen_weights="fp8")
            saved: list[torch.Tensor] = []

            def pack(x: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
                saved.append(x)
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                model.base(torch.randn(48, 96, requires_grad=True))
            assert not any(type(x) is torch.Tensor and x.shape in ((160, 96), (96, 160)) for x in saved)
            assert sum(isinstance(x, FrozenFP8Weight) for x in saved) == 2


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"recipe": "delayed"}, "powers of two"),
            ({"recipe": "current"}, "power_2_scales: true"),
            ({"recipe": {"name": "current", "granularity": "row", "power_2_scales": True}}, "not of rows"),
            ({"recipe": "block", "include": ["adapter"]}, "every converted linear's weight trains"),
        ],
        ids=str,
    )
    def test_what_cannot_be(self, options, message):
        model = Adapted()
        names = [type(m) for m in model.modules()]
        with pytest.raises(ConfigError, match=r"algorithms\.fp8\.frozen_weights") as error:
            apply_fp8(model, backend="emulated", frozen_weights="fp8", **options)
        assert message in str(error.value) and [type(m) for m in model.modules()] == names

    def test_shared_weights_and_those_that_train_stay(self):
        model = Adapted()
        model.twin = nn.Linear(96, 160, bias=False)
        model.twin.weight = model.base[0].weight
        report = apply_fp8(model, recipe="block", backend="emulated", frozen_weights="fp8")
        assert type(model.base[2].weight) is FrozenFP8Weight
        assert type(model.base[0].weight) is type(model.adapter.weight) is nn.Parameter
        assert "kept in FP8 alone" in next(r.reason for r in report.rows if r.name == "base.2")


def test_peft_merges_into_it_and_says_what_it_merged():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    apply_fp8(model, recipe="block", backend="emulated", frozen_weights="fp8")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    kept = layer.base_layer.weight
    assert type(kept) is FrozenFP8Weight
    before, delta = kept.unpacked(torch.float32), layer.get_delta_weight("default").detach()
    for safe in (False, True):
        layer.merge(safe_merge=safe)
        merged = layer.base_layer.weight
        assert type(merged) is FrozenFP8Weight
        wanted = quantize_block(before + delta, (128, 128), E4M3).dequantize()
        assert torch.equal(merged.unpacked(torch.float32), wanted)
        layer.unmerge()
        with torch.no_grad():
            layer.base_layer.weight.copy_(
                before
            )  # merging rounds, so that taking it out does not give it back
    x = torch.randint(64, (2, 16))
    assert torch.isfinite(model(input_ids=x, labels=x).loss)
    assert F.linear(torch.ones(1, 64), layer.base_layer.weight).shape == (1, 64)
