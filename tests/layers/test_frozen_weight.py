"""A frozen weight kept in FP8 alone: its bytes, what layers compute with it, and everything that reads or writes it."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foundry_fp8 import apply_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import (
    FrozenFP8Weight,
    in_high_precision,
    keep_in_fp8,
    quantized_weight,
)
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import quantize_block, quantize_mx
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, MXFP8Scaling
from foundry_fp8.numerics.scalings import Blocks, OneScale, Rows

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


WRITES = {
    "row": lambda w: w[3].fill_(7),
    "setitem": lambda w: w.__setitem__((slice(2, 5), 3), 7.0),
    "mask": lambda w: w.__setitem__(w > 0, 7.0),
    "transpose": lambda w: w.t().mul_(2),
    "flat": lambda w: w.view(-1)[5:9].zero_(),
    "unbind": lambda w: w.unbind()[2].zero_(),
    "chunk of data": lambda w: w.data.chunk(2, 1)[1].add_(1),
    "diagonal": lambda w: nn.init.zeros_(w.detach().diagonal()),
    "bits": lambda w: w.view(torch.int32)[0].zero_(),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "foreach of rows": lambda w: torch._foreach_zero_(list(w.unbind())[:3]),
    "foreach copy": lambda w: torch._foreach_copy_([w], [torch.ones_like(w)]),
    "out": lambda w: torch.mul(w, 2.0, out=w),
    "out row": lambda w: torch.add(w[1], w[2], out=w[0]),
    "init": lambda w: nn.init.constant_(w, 0.5),
    "double": lambda w: w.copy_(torch.full((96,), 0.25, dtype=torch.float64)),
    "integers": lambda w: w.copy_(torch.ones(160, 96, dtype=torch.int64)),
    "index_add": lambda w: w.index_add_(0, torch.tensor([1]), torch.ones(1, 96)),
    "lerp": lambda w: w.lerp_(torch.zeros(160, 96), 0.5),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_takes_effect_as_on_a_plain_weight(write):
    """And is quantised; blocks that it does not touch keep their codes."""
    kept = weight()
    keep_in_fp8(kept, BlockScaling())
    plain = nn.Parameter(kept.unpacked(torch.float32), requires_grad=False)
    before = plain.clone()
    with torch.no_grad():
        write(kept), write(plain)
    assert not torch.equal(plain, before) and type(kept) is FrozenFP8Weight
    assert torch.equal(
        kept.unpacked(torch.float32), quantize_block(plain.data, (128, 128), E4M3).dequantize()
    )


REFUSED = {
    "requires_grad_": lambda w: w.requires_grad_(),
    "requires_grad": lambda w: setattr(w, "requires_grad", True),
    "Parameter": lambda w: nn.Parameter(w),
    "of a row": lambda w: w[0].requires_grad_(),
    "dtype of data": lambda w: setattr(w, "data", w.data.bfloat16()),
    "shape of data": lambda w: setattr(w, "data", torch.zeros(96)),
    "resize_": lambda w: w.resize_(3),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "transpose_": lambda w: w.transpose_(0, 1),
    "set_": lambda w: w.set_(torch.zeros(3)),
    "storage": lambda w: w.storage().fill_(0),
    "numpy": lambda w: w.numpy().fill(0),
    "dlpack": lambda w: torch.from_dlpack(w).zero_(),
    "apply_": lambda w: w.apply_(lambda x: 0.0),
    "safetensors": lambda w: pytest.importorskip("safetensors.torch").save({"w": w}),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_what_would_be_lost_is_refused_with_the_way_out(use):
    kept = weight()
    keep_in_fp8(kept, BlockScaling())
    before = kept.unpacked(torch.float32)
    with pytest.raises(RuntimeError, match=r"kept in FP8 alone.*state_dict\(\)"):
        use(kept)
    assert torch.equal(kept.unpacked(torch.float32), before)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_an_optimizer_that_holds_a_gradient_for_it_moves_it(options):
    kept = weight()
    keep_in_fp8(kept, BlockScaling())
    plain = nn.Parameter(kept.unpacked(torch.float32))
    for p in (kept, plain):
        p.grad = torch.ones(160, 96)
        torch.optim.AdamW([p], lr=0.1, **options).step()
    # An optimizer may write twice (decay, then the step), which is rounded twice: half of an ulp of E4M3 each.
    torch.testing.assert_close(kept.unpacked(torch.float32), plain.detach(), rtol=2 * 2**-4, atol=2 * 2.0**-9)


def test_a_collective_that_would_not_reach_it_is_refused():
    pytest.importorskip("composer")
    from tests.one_rank import one_rank

    one_rank()
    kept = weight()
    keep_in_fp8(kept, BlockScaling())
    with pytest.raises(RuntimeError, match="kept in FP8 alone"):
        torch.distributed.broadcast(kept.data, 0)


def test_a_model_is_unfrozen_by_an_error():
    with pytest.raises(RuntimeError, match="frozen_weights: high_precision"):
        converted("block", frozen_weights="fp8").requires_grad_(True)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_loading_takes_the_values_and_keeps_the_form(assign, swapped):
    model, other = (converted("block", frozen_weights="fp8") for _ in range(2))
    with torch.no_grad():
        other.base[0].weight.mul_(3)
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    try:
        model.load_state_dict(other.state_dict(), assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert type(model.base[0].weight) is FrozenFP8Weight
    for ours, theirs in zip(step(model), step(other), strict=True):
        assert torch.equal(ours, theirs)


def test_other_processes_and_files_get_it_as_it_is():
    import pickle
    from multiprocessing.reduction import ForkingPickler

    model = converted("block", frozen_weights="fp8")
    kept = model.base[0].weight
    model.share_memory()
    assert kept.codes.is_shared() and kept.scale.is_shared()
    there = pickle.loads(ForkingPickler.dumps(kept))  # as a queue sends it
    there[0].fill_(3)
    assert torch.equal(kept.unpacked(torch.float32), there.unpacked(torch.float32)) and float(kept[0, 0]) == 3
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(kept)), torch.load(file, weights_only=False), copy.deepcopy(kept)):
        assert type(twin) is FrozenFP8Weight and isinstance(twin, nn.Parameter) and not twin.requires_grad
        twin[1].fill_(5)
        assert float(twin[1, 0]) == 5 != float(kept[1, 0])
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    with torch.no_grad():
        kept.zero_()
    for _ in range(3):
        average.update_parameters(model)
    assert float(average.module.base[0].weight[0].float().abs().max()) < 3


def test_a_linear_in_high_precision_keeps_one_byte_an_element_for_backward():
    kept = weight()
    keep_in_fp8(kept, BlockScaling())
    x, dy, bias = torch.randn(5, 7, 96, requires_grad=True), torch.randn(5, 7, 160), torch.randn(160)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = F.linear(x, kept, bias)
    reference = F.linear(x, kept.unpacked(torch.float32), bias)
    assert torch.equal(y, reference)
    assert all(type(t) is not torch.Tensor or t.numel() != kept.numel() for t in saved)
    (ours,), (theirs,) = (torch.autograd.grad(out, x, dy) for out in (y, reference))
    assert torch.equal(ours, theirs)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scaling", [OneScale(), Rows(1), Blocks((128, 128), power_2=False), Blocks((128, 128))], ids=str
)
def test_what_is_added_and_taken_out_many_times_leaves_it_in_place(scaling, dtype):
    """TRL's GRPO merges adapters in every step, and takes them out again."""
    torch.manual_seed(0)
    weight = quantized_weight((torch.randn(256, 256) / 16).to(dtype), scaling)
    before, delta = weight.unpacked(torch.float32), (torch.randn(256, 256) / 300).to(dtype)
    moved = []
    for _ in range(20):
        weight.add_(delta)
        assert (weight.unpacked(torch.float32) - before - delta).norm() < 0.04 * before.norm()
        weight.sub_(delta)
        moved.append(float((weight.unpacked(torch.float32) - before).norm() / before.norm()))
    assert moved[-1] < 0.03 and len({*moved[10:]}) == 1, moved  # it was 0.18 of scales of rows


@pytest.mark.parametrize("scaling", [OneScale(), Rows(1), Blocks((128, 128), power_2=False)], ids=str)
def test_values_of_other_scales_are_taken_with_those(scaling):
    """A checkpoint's, by ``load_state_dict``; also after a weight that was not finite."""
    torch.manual_seed(0)
    weight, other = (quantized_weight(torch.randn(256, 256) * size, scaling) for size in (1.0, 1.3))
    wanted, broken = other.unpacked(torch.float32), torch.randn(256, 256)
    broken[0, 0] = torch.inf
    for value in (wanted, broken, wanted):
        weight.copy_(value)
        if value is wanted:
            torch.testing.assert_close(weight.unpacked(torch.float32), wanted, rtol=1e-6, atol=0.0)
        else:
            assert not weight.unpacked(torch.float32).isfinite().all()
