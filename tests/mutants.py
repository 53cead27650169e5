"""Breaks the core on purpose, one line at a time, and expects a test to notice: ``make mutants``.

    python tests/mutants.py [--only SUBSTRING] [--workers 2]

Each mutant is a textual change of one file. It is made in a copy of the package, and the tests named for it run against that
copy: one has to fail. First they all have to pass on an unchanged copy. A mutant whose text is not found once is an error,
so that the list follows the code.

torch and what tests import besides are imported once; every mutant runs in a fork of that process.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` in ``foundry_fp8/{file}``; ``tests`` (below tests/) must notice."""

    file: str
    old: str
    new: str
    tests: str


QUANTIZE, FORMATS, RECIPES = "numerics/quantize.py", "numerics/formats.py", "numerics/recipes.py"
DELAYED, LINEAR, MASK = "layers/delayed_scaling.py", "layers/gemm_layer.py", "layers/attention_mask.py"
LINEARS, PACKING, WIRE = "surgery/linears.py", "activations/compression/packing.py", "distributed/wire.py"
POLICY, T_POLICY = "surgery/policy.py", "surgery/test_policy.py"
SOLVER = "planning/memory/solver.py"
T_QUANTIZE, T_FORMATS, T_RECIPES = (f"numerics/test_{name}.py" for name in ("quantize", "formats", "recipes"))
T_DELAYED, T_PASSES, T_EMULATED = (
    "layers/test_delayed_scaling.py",
    "layers/test_passes.py layers/test_state.py",
    "backends/test_emulated.py",
)
T_LINEARS, T_PACKING = "surgery/test_linears.py", "activations/compression/test_packing.py"
T_WIRE, T_SOLVER = "distributed/test_wire.py", "planning/memory/test_solver.py"
T_ATTENTION = "backends/test_emulated_attention.py"
T_DRIFTING = "multiprocess/test_drifting.py"
T_GUARD, T_PROBE = "observe/guard", "observe/test_precision_probe.py"
MUS, STEP, MEMORY = "models/mus", "planning/communication/step.py", "planning/memory"
T_UNIT, T_MUS, T_RATES = (
    "layers/test_unit_linear.py",
    "models/mus/test_modeling.py",
    "models/mus/test_optimizer.py",
)
COMPRESSION = "activations/compression"
T_STEP, T_PLANNER = "planning/communication/test_step.py", "planning/memory/test_planner.py"

MUTANTS = [
    Mutant(
        "export/layout.py",
        "quantized.scale_inv * layer.output_multiplier",
        "quantized.scale_inv",
        "export/test_apply.py",
    ),
    Mutant("export/layout.py", '.detach()).to(device, dtype)\n', '.detach()).to(device)\n', "cli/test_export.py"),
    # Contract 6: what is not finite stays visible; and the bytes of the recipes.
    Mutant(QUANTIZE, "self.amax == torch.inf, torch.nan", "self.amax == torch.inf, 1.0", T_QUANTIZE),
    Mutant(QUANTIZE, "usable = (amax > 0) & (amax < torch.inf)", "usable = amax > 0", T_QUANTIZE),
    Mutant(QUANTIZE, "torch.where(usable, amax, largest)", "torch.where(usable, amax, 1.0)", T_QUANTIZE),
    Mutant(QUANTIZE, "& -0x800000)", "& -0x400000)", T_QUANTIZE),
    Mutant(QUANTIZE, "scale == torch.inf, value_for_inf", "scale == torch.inf, 1.0", T_QUANTIZE),
    Mutant(
        QUANTIZE,
        "torch.div(largest, torch.where(usable, amax, largest))",
        "torch.where(usable, amax, largest).reciprocal() * fmt.max",
        T_QUANTIZE,
    ),
    Mutant(QUANTIZE, "[:rows].repeat_interleave(self.block[1]", "[:rows].repeat_interleave(self.block[0]", T_QUANTIZE),
    Mutant(FORMATS, ".clamp(-fmt.max, fmt.max)", ".clamp(-fmt.max / 2, fmt.max)", T_FORMATS),
    Mutant(FORMATS, "(mantissa > 0) & (exponent", "(mantissa > 1) & (exponent", T_FORMATS),
    Mutant(FORMATS, "torch.isinf(x), 254", "torch.isinf(x), 255", T_FORMATS),
    Mutant(FORMATS, "code == 0, 0x400000", "code == 0, 0x800000", T_FORMATS),
    Mutant(RECIPES, 'operand == "dy" and', 'operand == "x" and', T_RECIPES),
    Mutant(RECIPES, 'amax_compute_algo: Literal["max", "most_recent"] = "max"', 'amax_compute_algo: Literal["max", "most_recent"] = "most_recent"', f"{T_RECIPES} {T_DELAYED}"),
    # Contracts 2 and 4: delayed scaling's state, and that a recompute changes nothing.
    Mutant(DELAYED, "torch.fmax(self.amax, amax, out=self.amax)", "self.amax.copy_(amax)", f"{T_DELAYED} {T_EMULATED}"),
    Mutant(DELAYED, "2.0**-recipe.margin", "2.0**recipe.margin", T_DELAYED),
    Mutant(DELAYED, "torch.where(seen, rolled, history)", "rolled", T_DELAYED),
    Mutant(DELAYED, "seen & torch.isfinite(amax)", "seen", T_DELAYED),
    Mutant(DELAYED, "history[0].zero_()", "pass", T_DELAYED),
    Mutant(DELAYED, "torch.fmax(history[1:].amax(dim=0), current)", "history[1:].amax(dim=0)", T_DELAYED),
    Mutant(DELAYED, "if trains and not inside_backward():", "if trains:", T_PASSES),
    Mutant(DELAYED, "if candidate.start <= node < end:", "if True:", T_PASSES),
    Mutant(DELAYED, "forward.waiting = False", "pass", T_PASSES),
    Mutant("layers/module_scales.py", "torch.isfinite(scale) & (scale > 0)", "torch.isfinite(scale) & (scale >= 0)", T_LINEARS),
    Mutant(LINEAR, 'return ("dy",)', 'return ("x", "w", "dy")', f"{T_EMULATED} {T_DELAYED} activations/compression/test_apply.py"),
    # Contract 3: the ledger is what ran.
    Mutant(LINEAR, '"wgrad": low if self.wgrad == "fp8" else hp', '"wgrad": low', f"{T_EMULATED} observe"),
    Mutant(LINEAR, 'precisions["fprop"], recompute=inside_backward())', 'precisions["fprop"])', T_EMULATED),
    Mutant("layers/ledger.py", "2 * m * n * k\n        self.calls", "m * n * k\n        self.calls", f"{T_EMULATED} observe"),
    Mutant(LINEAR, 'self.training or self.evaluate == "fp8"', "True", T_EMULATED),
    # Contract 1: the same parameters; contract 5: what is left out, and why.
    Mutant(LINEARS, "if linear not in made:", "if True:", T_LINEARS),
    Mutant("layers/experts.py", "order % len(top_experts)", "order // len(top_experts)", "surgery/test_experts.py"),
    Mutant("layers/grouped_linear.py", "weights.unbind(),", "weights.flip(0).unbind(),", "surgery/test_experts.py"),
    Mutant("surgery/left_out.py", "return LeftOut(TIED)", "pass", T_LINEARS),
    Mutant(LINEARS, "found |= dict.fromkeys(names, deciding[0])", "pass", T_LINEARS),
    Mutant(POLICY, "chosen |= {first + block for", "chosen |= {block for", T_POLICY),
    Mutant(POLICY, "if rules and len(kept) == count:", "if False:", T_LINEARS),
    Mutant(POLICY, "found[name] = (*found.get(name, ()), key)", "found[name] = (key, *found.get(name, ()))", "run/test_times.py"),
    Mutant(POLICY, "if key in self.listed and not taken:", "if False:", T_POLICY),
    Mutant("layers/recipe_table.py", '"wgrad": module.wgrad}', '"wgrad": "fp8"}', T_POLICY),
    Mutant("layers/state.py", "for n, m in self.modules.items() if history in m.recipes", "for n, m in self.modules.items()", T_POLICY),
    Mutant("observe/measured_policy.py", "self.pick[unit] = place", "self.pick[unit] = len(self.choices[unit]) - 1", "observe/test_measured_policy.py"),
    Mutant("model_structure/selection.py", "fnmatch.fnmatchcase(name, pattern) for pattern", "pattern in name for pattern", T_LINEARS),
    # The emulated GEMM.
    Mutant("backends/emulated/gemm.py", "torch.mul(product, b_scale.t(), out=buffer)", "torch.mul(product, b_scale.mean(), out=buffer)", "backends/test_emulated.py"),
    Mutant("backends/emulated/gemm.py", "torch.mul(product, a_scale * b_scale", "torch.mul(product, a.scale_inv * b.scale_inv", T_EMULATED),
    Mutant("backends/emulated/gemm.py", "torch.add(product, bias,", "torch.add(product, bias.bfloat16(),", "backends/test_emulated_gemm.py"),
    # FP8 attention's masks.
    Mutant(MASK, "rules.append(columns <= rows)", "rules.append(columns < rows)", T_ATTENTION),
    Mutant(MASK, "columns >= rows - left", "columns > rows - left", "layers/test_attention_mask.py"),
    Mutant(MASK, "min(last, stop + shift)", "min(last, stop + shift - 1)", T_ATTENTION),
    # Packed activations.
    Mutant(PACKING, "torch.where(finite, scale_inv, torch.nan)", "scale_inv", T_PACKING),
    Mutant(PACKING, "torch.maximum(blocks.amax(1), blocks.amin(1).neg_())", "blocks.amax(1)", T_PACKING),
    Mutant(PACKING, "torch.maximum(scaled, scaled.sign(), out=scaled)", "pass", f"{T_PACKING} activations/compression/test_saved.py"),
    Mutant(PACKING, "nibbles[..., 1] << 4", "nibbles[..., 1] << 3", T_PACKING),
    Mutant("activations/compression/saved.py", "or number == reader.mask", "", "activations/compression/test_readers.py"),
    # Checkpoints.
    Mutant("compat/selective_checkpoint.py", "kept.val = x.clone()", "pass", "activations/checkpointing/test_apply.py"),
    Mutant("activations/checkpointing/targets.py", "or name == root)", "or True)", "activations/checkpointing/test_targets.py"),
    # The wire.
    Mutant(WIRE, "amax.masked_fill_(~finite, torch.nan)", "pass", T_WIRE),
    Mutant(WIRE, "if divisor != 1:", "if divisor > 2:", T_WIRE),
    Mutant("numerics/wire_format.py", "4 * self.blocks(numel) if self.quantized", "4 * numel if self.quantized", T_WIRE),
    # Configuration and plans.
    Mutant("config/rules.py", "return Rule(f\"of at least {minimum}\", lambda value: value >= minimum)", "return Rule(f\"of at least {minimum}\", lambda value: value > minimum)", f"config {T_RECIPES}"),
    Mutant("config/rules.py", "\"KiB\": 2**10", "\"KiB\": 10**3", "config"),
    Mutant(SOLVER, "peak = max(peak, held - leaving + cached + cost.forward_peak + in_forward, backward)", "peak = max(peak, backward)", T_SOLVER),
    Mutant(SOLVER, "forward - leaving + frame.head_peak <= room and", "", T_SOLVER),
    Mutant(STEP, "network.overlap_slowdown * hidden", "0.0 * hidden", T_STEP),
    Mutant(STEP, "slowest(gpus, network)", "slowest(shard, network)", T_STEP),
    Mutant(STEP, "one_forward - gather - forward)", "one_forward - gather)", T_STEP),
    Mutant(f"{MEMORY}/optimizer_state.py", "if not parameter.requires_grad:", "if False:", f"{MEMORY}/test_optimizer_state.py"),
    Mutant(f"{MEMORY}/optimizer_state.py", "isinstance(value, Tensor) and value.dim()", "isinstance(value, Tensor)", f"{MEMORY}/test_optimizer_state.py"),
    Mutant(f"{MEMORY}/measure.py", "static=frame.static + total", "static=frame.static", T_PLANNER),
    Mutant(f"{MEMORY}/measure.py", "frame.end_peak - total + embedding", "frame.end_peak - total", T_PLANNER),
    # µnit Scaling: the residual, the rates of hidden weights, the multipliers, and casts that measure nothing.
    Mutant(f"{MUS}/residual.py", "return stream * math.sqrt(1 - tau) + branch", "return stream * (1 - tau) + branch", T_MUS),
    Mutant(f"{MUS}/residual.py", "stream * (math.sqrt(1 - tau) - 1)", "stream * math.sqrt(1 - tau)", T_MUS),
    Mutant(f"{MUS}/modeling.py", "output_multiplier=1 / width", "output_multiplier=width**-0.5", T_MUS),
    Mutant(f"{MUS}/modeling.py", "if type(new_embeddings) is nn.Linear:", "if False:", T_MUS),
    Mutant(f"{MUS}/adapters.py", "return delta / base.output_multiplier", "return delta", T_MUS),
    Mutant(f"{MUS}/optimizer.py", "math.sqrt(base_width / described.width)", "(base_width / described.width)", T_RATES),
    Mutant(f"{MUS}/optimizer.py", 'group["weight_decay"] / factor', 'group["weight_decay"]', T_RATES),
    Mutant(f"{MUS}/optimizer.py", 'group["initial_lr"] * factor', 'group["initial_lr"]', T_RATES),
    Mutant(f"{MUS}/config.py", "final_norm: bool = True", "final_norm: bool = False", "models/mus"),
    Mutant(f"{MUS}/structure.py", "nn.init.normal_(weight)", "pass", "models/mus"),
    Mutant("algorithms/unit_scaling/algorithm.py", "if name in state and state[name] != value:", "if name in state and state[name] < value:", T_RATES),
    Mutant("algorithms/unit_scaling/algorithm.py", "check_groups(optimizer, state.model, self._described)", "pass", T_RATES),
    Mutant(RECIPES, "max(1, tokens * width)", "max(1, tokens)", T_UNIT),
    Mutant(QUANTIZE, "torch.where(torch.isinf(wide), torch.nan, wide * scale), fmt)", "wide * scale, fmt)", T_UNIT),
    Mutant("layers/unit_linear.py", "and self.chosen_gradient_scale is not None", "and False", T_UNIT),
    Mutant("backends/emulated/gemm.py", "b_scale * alpha", "b_scale", T_UNIT),
    Mutant("backends/emulated/backend.py", "kept[0]).mul(ctx.module.output_multiplier)", "kept[0])", T_UNIT),
    Mutant("observe/kurtosis.py", "counted = s2 != 0", "counted = s2 >= 0", "callbacks/test_kurtosis_monitor.py"),
    # What gave wrong results once, and no sign of it.
    Mutant("backends/emulated/backend.py", "        ctx.save_for_backward(weight, *kept)", "        ctx.save_for_backward(*((weight, *kept) if keep is None else keep((weight, *kept))))", f"{COMPRESSION}/test_fp8.py"),
    Mutant("backends/emulated/gemm.py", "torch.mul(product, a_scale * b", "torch.mul(product.to(out_dtype), a_scale * b", "backends/test_emulated_gemm.py"),
    Mutant("backends/emulated/hopper.py", "return (total.view(torch.int32) & -(1 << (23 - BITS))).view(torch.float32)", "return total", "backends/test_emulated_hopper.py"),
    Mutant(f"{COMPRESSION}/matching.py", "(name not in LAYER_NORMS and name not in RMS_NORMS)", 'type(module).__name__ not in {n.rpartition(".")[2] for n in LAYER_NORMS | RMS_NORMS}', f"{COMPRESSION}/test_matching.py"),
    Mutant(f"{COMPRESSION}/readers.py", "return _KNOWN.get(node.name(), Reads.EXACTLY)", "return _KNOWN.get(node.name(), Reads.SMOOTHLY)", f"{COMPRESSION}/test_readers.py"),
    Mutant(DELAYED, "if trains and not self._inside_root and not inside_backward():", "if False:", T_PASSES),
    Mutant(DELAYED, "        self.__dict__.update(state)\n        self._start()", "        self.__dict__.update(state)\n        self._start()\n        self.amaxes = [amax.clone() for amax in self.amaxes]", T_PASSES),
    Mutant("model_structure/blocks.py", "return attending or largest", "return largest", "model_structure/test_blocks.py"),
    Mutant("model_structure/blocks.py", "if not blocks or expert_count(name, module) or not all", "if not blocks or not all", "model_structure/test_blocks.py"),
    Mutant("model_structure/wrappers.py", "return model.module if isinstance(model, DistributedDataParallel) else model", 'return getattr(model, "module", model)', "model_structure/test_wrappers.py"),
    Mutant("model_structure/wrappers.py", "if child is old and parent is not new:", "if child is old and parent is not new and all(m is not new for m in model.modules()):", "activations/checkpointing/test_apply.py"),
    Mutant("model_structure/wrappers.py", 'return type(module).forward is not nn.Module.forward or "forward" in vars(module)', "return True", "activations/checkpointing/test_targets.py"),
    Mutant("layers/second_derivative.py", "if torch.is_grad_enabled():", "if False:", "layers/test_linear.py"),
    Mutant("layers/second_derivative.py", "if batched():", "if False:", "layers/test_transforms.py"),
    Mutant("layers/frozen_weight.py", "fits = off.isfinite() & (", "fits = off.isinf() & (", "layers/test_frozen_weight.py"),
    Mutant("layers/frozen_weight.py", "fits = off.isfinite() & (", "fits = (off <= 0) | (", "layers/test_frozen_weight.py"),
    Mutant("surgery/published.py", "elif (scale == 0).any() and", "elif False and", "export/test_load.py"),
    Mutant("kernels/norms.py", "of_bias * PROGRAMS + rows", "rows", "kernels/test_producers.py"),
    Mutant("observe/unchanged_state.py", "slot.amax_history.zero_()", "pass", T_GUARD),
    Mutant("observe/guard/schedule.py", "sum(self._bad) < 2", "sum(self._bad) < 3", T_GUARD),
    Mutant("observe/guard/guard.py", "ask=bool(of_second)", "ask=True", T_GUARD),
    Mutant("observe/guard/guard.py", "self._healthy + 1 if well else 0", "self._healthy + 1", T_GUARD),
    Mutant("observe/gradient_sample.py", "(numel / max(len(b), 1))", "1.0", T_PROBE),
    Mutant("observe/gradient_sample.py", "math.sqrt(max(own, floor * numel))", "math.sqrt(own)", T_PROBE),
    Mutant("algorithms/compressed_communication/algorithm.py", "check_replicas(state.model, KEY)", "pass", T_DRIFTING),
    Mutant("algorithms/hybrid_sharding/algorithm.py", "check_replicas(state.model, KEY)", "pass", T_DRIFTING),
    Mutant("algorithms/hybrid_sharding/algorithm.py", "self._checked or event == Event.BATCH_END", "True", T_DRIFTING),
    Mutant("distributed/compression/fsdp1.py", "None if full_precision else compressed", "None if full_precision or __import__(\"torch\")._C._current_graph_task_id() != -1 else compressed", "combinations/test_pairs.py"),
    Mutant("distributed/compression/config.py", "if sum(size > 1 for size in shape) < 2:", "if False:", "distributed/compression/test_config.py"),
    Mutant("distributed/rows.py", "(exact or joined[-1][0] % block_size == 0)", "True", "distributed/test_rows.py"),
    Mutant("distributed/rows.py", "seed=noise.seed() if noise and section.quantized else None", "seed=None", "distributed/test_rows.py"),
    Mutant("distributed/traffic.py", "(wait or self._events[0][2].query())", "wait", "distributed/test_traffic.py"),
    Mutant("backends/native/backend.py", "@functools.cache\ndef _watching", "def _watching", "backends/native/test_lifetime.py"),
    Mutant("backends/native/ahead.py", " and _state(weight) == state", "", "backends/native/test_ahead.py"),
    Mutant("backends/native/ahead.py", "weight is module.weight and ", "weight is not None and ", "backends/native/test_ahead.py"),
    Mutant("backends/native/ahead.py", " or not is_alone(reader)", "", "backends/native/test_ahead.py"),
    Mutant("layers/produced.py", "torch.inference_mode(False)", "torch.set_grad_enabled(torch.is_grad_enabled())", "backends/native/test_fused_models.py"),
    Mutant("layers/produced.py", "x._written_by, x.changed = x._plain.grad_fn, True", "continue", "backends/native/test_fused_calls.py"),
    Mutant("activations/offload/store.py", "            x = in_memory(x)\n", "", "backends/native/test_fused_models.py"),
    Mutant("activations/compression/saved.py", "        x = in_memory(x)\n", "", "backends/native/test_fused_models.py"),
    Mutant("backends/native/fused.py", "if others or not (self.training and _kernels_run(x))", "if not (self.training and _kernels_run(x))", "backends/native/test_fused_calls.py"),
    Mutant("backends/native/fused.py", "watched(child) or ", "", "backends/native/test_fused_calls.py"),
    Mutant("backends/native/inputs.py", 'if "parametrizations" in member._modules:', "if False:", "backends/native/test_fused_calls.py"),
    Mutant("kernels/tensorwise.py", "pid - programs, OTHERS_MAX", "pid - programs, FMT_MAX", "kernels/test_tensorwise.py"),
    Mutant("activations/checkpointing/apply.py", 'compression: PlannedCompression = "exact"', 'compression: PlannedCompression = "int8"', "activations/checkpointing"),
    Mutant("observe/kurtosis.py", "[1].clamp(-126, 126)", "[1].clamp(0, 0)", "observe/test_kurtosis.py"),
    # What the report and the comparison say.
    Mutant("surgery/apply.py", "    attention = None\n    if config.attention:", "    attention = None\n    linears.carry_out(model)\n    if config.attention:", "surgery/test_apply.py"),
    Mutant("surgery/first_batch.py", 'and (kind := trace.kind_of(row.shared_with or row.name)) in ran:', 'and (kind := next(iter(ran))):', "surgery/test_first_batch.py"),
    Mutant("surgery/same_as_linear.py", "return form if alone and all(", "return form if alone or all(", "surgery/test_same_as_linear.py"),
    Mutant("surgery/left_out.py", "if adapter is not None:", "if False:", "surgery/test_left_out.py"),
    Mutant("model_structure/experts.py", "if _rows(leaf) in counts or (part in _ROUTERS and _rows(leaf) in lists):", "if _rows(leaf) in counts or part in _ROUTERS:", "surgery/test_left_out.py"),
    Mutant("surgery/attention_inputs.py", "true = [i for i, found in enumerate(answers) if found is not None and bool(found)]", "true: list[int] = []", "surgery/test_attention_inputs.py"),
    Mutant("report/comparison.py", " and other.same_model(run)", "", "report/test_comparison.py"),
    Mutant("report/sources/run_log.py", "header = line\n", 'header = {**line, "hyperparameters": {**header.get("hyperparameters", {}), **line["hyperparameters"]}}\n', "report/test_runs.py"),
    Mutant("report/judgement.py", "bad = at[~np.isfinite(run.loss[run.has_loss])]", "bad = at[:0]", "report/test_verdict.py"),
    Mutant("report/verdict.py", "_BEST_FIRST.index(judged.outcome), ", "", "report/test_verdict.py"),
    Mutant("report/sources/build.py", "if steps[index] < bound:", "if True:", "report/sources/test_lines.py"),
    Mutant("config/check.py", "if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _FLOAT32_MAX:", "if isinstance(value, int | float) and abs(value) < _FLOAT32_MAX:", "config"),
]  # fmt: skip


def copy_of_the_checkout(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("foundry_fp8", "tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "yamls").symlink_to("foundry_fp8/yamls")


def run_pytest(folder: Path, tests: list[str]) -> int:
    """Run the tests against the package in ``folder``, and not against the one that is installed."""
    os.chdir(folder)
    ours = (ROOT, ROOT / "tests")
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p).resolve() not in ours)]
    sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in repr(f)]
    import foundry_fp8

    assert Path(foundry_fp8.__file__).is_relative_to(folder), foundry_fp8.__file__
    import pytest

    os.environ["PYTHONPATH"] = str(folder)
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not full", f"--rootdir={folder}"]
    return int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))


def in_a_fork(folder: Path, tests: list[str], output: Path) -> int:
    """Start the tests in ``folder``; returns the process id. Its exit code is pytest's."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        sink = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(sink, 1), os.dup2(sink, 2)
        code = run_pytest(folder, tests)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def made(mutant: Mutant | None, folder: Path) -> None:
    copy_of_the_checkout(folder)
    if mutant is not None:
        path = folder / "foundry_fp8" / mutant.file
        text = path.read_text()
        found = text.count(mutant.old)
        if found != 1:
            raise SystemExit(
                f"{mutant.file}: {mutant.old!r} is there {found} times, not once. Update tests/mutants.py."
            )
        path.write_text(text.replace(mutant.old, mutant.new))


def outcomes(mutants: list[Mutant | None], tests: list[list[str]], workers: int):
    """Yield ``(mutant, exit code, output, seconds)`` as they end."""
    waiting, running = list(zip(mutants, tests, strict=True)), {}
    with tempfile.TemporaryDirectory() as top:
        number = 0
        while waiting or running:
            while waiting and len(running) < workers:
                mutant, names = waiting.pop(0)
                folder = Path(top) / str(number)
                number += 1
                made(mutant, folder)
                child = in_a_fork(folder, names, folder / "output")
                running[child] = mutant, folder, time.monotonic()
            child, status = os.wait()
            mutant, folder, begin = running.pop(child)
            output = (folder / "output").read_text(errors="replace")
            shutil.rmtree(folder)
            yield mutant, os.waitstatus_to_exitcode(status), output, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="mutants whose file, text or tests contain this")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if any(args.only in t for t in (m.file, m.old, m.new, m.tests))]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.remove(str(ROOT / "tests"))  # where tests/multiprocess would hide a package that datasets wants
    for module in ("torch.distributed.fsdp", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)

    everything = sorted({test for mutant in chosen for test in mutant.tests.split()})
    for _, code, output, seconds in outcomes([None], [everything], 1):
        if code != 0:
            raise SystemExit(f"The unchanged copy fails ({code}):\n{output[-3000:]}")
        print(f"unchanged: passes ({seconds:.0f} s)", flush=True)
    survivors = 0
    tests = [mutant.tests.split() for mutant in chosen]
    for mutant, code, output, seconds in outcomes(list(chosen), tests, args.workers):
        died = code == 1  # a test failed; anything else is no verdict
        survivors += not died
        by = next((line.split(" - ")[0] for line in output.splitlines() if line.startswith("FAILED")), "")
        print(
            f"{'died' if died else 'SURVIVED' if code == 0 else f'ERROR {code}'}  {mutant.file}: {mutant.new}  {by} ({seconds:.0f} s)",
            flush=True,
        )
        if not died and code:
            print(output[-2000:])
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants died.")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
