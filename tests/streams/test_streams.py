"""What the package does on CUDA streams, as a happens-before graph without a race, and three planted races that are found by name."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import foundry_fp8
from foundry_fp8.activations.compression.fused_activation import _xielu_backward
from foundry_fp8.activations.offload import store
from foundry_fp8.backends.native import NativeBackend, products
from foundry_fp8.distributed.background_collectives import CollectiveQueue
from foundry_fp8.distributed.collectives import all_reduce
from foundry_fp8.distributed.compression.adapt import Adaptation
from foundry_fp8.distributed.traffic import CountingGroup, Traffic
from foundry_fp8.kernels.zeros import statistics
from foundry_fp8.numerics.wire_format import WireFormat
from foundry_fp8.planning.memory.live_bytes import meter_for
from foundry_fp8.planning.memory.measure import clock
from foundry_fp8.surgery.attention_inputs import BatchMasks, _Check
from tests.kernels.interpreter import interpret
from tests.one_rank import one_rank
from tests.streams.device import GPU, fake_gpu, off


@pytest.fixture
def gpu(monkeypatch):
    interpret(monkeypatch)
    with fake_gpu(monkeypatch) as running:
        yield running


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(32), nn.GELU()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stack(blocks=3):
    torch.manual_seed(0)
    return Stack(blocks).to("cuda")


def train(model, steps=2):
    for _ in range(steps):
        x = torch.randn(64, 32, device="cuda")
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-2 * p.grad
                p.grad = None


def offloaded():
    model = stack()
    foundry_fp8.apply_activation_checkpointing(model, policy="offload")
    return model


def test_offload(gpu):
    train(offloaded())
    no_races(gpu)
    streams = {name for name in gpu.graph.clocks if name.startswith("stream")}
    assert streams  # copies ran beside the computation


def found(gpu, kind):
    """The races of a kind, as ``memory | first | second``."""
    return [f"{r.memory} | {r.first} | {r.second}" for r in gpu.graph.races if r.kind == kind]


def test_planted_a_copy_that_does_not_wait_for_what_it_reads(gpu, monkeypatch):
    def copy(self, target, source):
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    monkeypatch.setattr(store.CudaCopyQueue, "copy", copy)
    train(offloaded())
    races = found(gpu, "read before written")
    assert any("activations/offload/store.py" in race and "| default, " in race for race in races), races


def test_planted_memory_that_is_freed_under_a_copy(gpu, monkeypatch):
    def let_go(self, copy):
        while copy.memory is not None:
            self._flying.popleft().memory = None

    monkeypatch.setattr(store.HostStore, "_wait", let_go)
    train(offloaded())
    races = found(gpu, "freed while in use")
    assert any("activations/offload/store.py" in race for race in races), gpu.graph.races


class Future:
    """``torch.futures.Future(devices=...)``: who waits for it waits for the stream that set it, and the stream is recorded
    (``ivalue_inl.h``, ``synchronizeWithCurrentStreams``)."""

    def __init__(self, *, devices):
        assert devices == [GPU]

    def set_result(self, value):
        self.value, self.event = value, torch.cuda.current_stream().record_event()

    def wait(self):
        torch.cuda.current_stream().wait_event(self.event)
        self.value.record_stream(torch.cuda.current_stream())
        return self.value


@pytest.fixture
def group(gpu, monkeypatch):
    """One rank of gloo, whose collectives are CUDA's to the package."""
    monkeypatch.setattr(torch.futures, "Future", Future)
    with off():
        one_rank()
    return CountingGroup(dist.group.WORLD, Traffic())


def reduced_in_the_background(group, steps=3, wait=True):
    """As DDP does it: a bucket that is used again by the next step, and the gradients that are read from it."""
    queue, wire = CollectiveQueue(group, GPU), WireFormat(name="int8", block_size=32)
    bucket, weight = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
    residual = torch.zeros(256, device="cuda")
    for step in range(steps):
        bucket.copy_(torch.randn(256, device="cuda") * (step + 1))
        future = queue.submit(lambda: all_reduce(bucket, group, wire, residual=residual))
        if wait:
            weight -= future.wait()
    return weight


def test_collectives_in_the_background(gpu, group):
    with group.traffic.timed("reduce", GPU):
        reduced_in_the_background(group)
    group.traffic.settle()
    no_races(gpu)


def test_planted_a_bucket_that_is_used_again_while_it_is_sent(gpu, group):
    reduced_in_the_background(group, wait=False)
    races = found(gpu, "written while in use")
    assert any("test_streams.py" in race and "stream " in race for race in races), gpu.graph.races


def no_races(gpu):
    assert gpu.graph.races == [], "\n".join(map(str, gpu.graph.races))


def waits(gpu):
    """Where the package makes the host wait for the device."""
    return [(what, place) for what, place in gpu.graph.syncs if not place.startswith("streams/")]


def define_products(monkeypatch):
    """The interpreter has no GEMM of cuBLASLt."""
    monkeypatch.setattr(products, "defined", lambda a: True)


@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(name, marks=pytest.mark.full) for name in ("current", "block"))]
)
def test_native_linears(gpu, recipe, monkeypatch):
    define_products(monkeypatch)
    model = stack(blocks=2)
    foundry_fp8.apply_fp8(
        model, recipe=recipe, backend="native", fuse=False
    )  # a norm without memory asks torch for the real device
    train(model)
    del gpu.graph.syncs[:]
    train(model)
    no_races(gpu)
    assert waits(gpu) == []


@pytest.mark.parametrize("format", ["int8", pytest.param("exact", marks=pytest.mark.full)])
def test_compressed_activations(gpu, format):
    model = stack(blocks=2)
    foundry_fp8.apply_activation_compression(model, format=format, min_numel=0)
    train(model)
    assert gpu.kernels
    no_races(gpu)
    assert waits(gpu) == []


def test_a_measurement_of_the_guard_waits_and_a_step_does_not(gpu, monkeypatch):
    define_products(monkeypatch)
    model = stack(blocks=2)
    foundry_fp8.apply_fp8(model, recipe="current", backend="native", fuse=False)

    def loss_of(model, x):
        return model(x).square().mean()

    x = torch.randn(64, 32, device="cuda")
    loss_of(model, x).backward()
    del gpu.graph.syncs[:]
    foundry_fp8.precision_gap(model, loss_of, x)
    no_races(gpu)
    assert {place.split(":")[0] for _, place in waits(gpu)} <= {
        "observe/precision_probe.py",
        "observe/gradient_sample.py",
        "observe/unchanged_state.py",
    }, waits(gpu)


def test_masks_of_a_known_kind_are_compared_without_waiting(gpu):
    checks = [_Check(torch.ones((), device="cuda").eq(1)) for _ in range(3)]
    assert waits(gpu) == [] and not checks[0].arrived
    assert all(check.answer for check in checks)  # which waits
    assert {what for what, _ in waits(gpu)} == {"Event.synchronize"}
    no_races(gpu)


def test_pieces_of_zeros_belong_to_a_stream(gpu):
    here = statistics(GPU, 2)
    with torch.cuda.stream(torch.cuda.Stream()):
        (there,) = statistics(GPU, 1)
        there.stats.add_(1)
    here[0].stats.add_(1)
    no_races(gpu)
    assert here[0].stats.untyped_storage()._cdata == here[1].stats.untyped_storage()._cdata
    assert here[0].stats.untyped_storage()._cdata != there.stats.untyped_storage()._cdata
    gpu.capturing = True
    (captured,) = statistics(GPU, 1)
    assert captured.stats.untyped_storage()._cdata not in {
        piece.stats.untyped_storage()._cdata for piece in (*here, there)
    }


def test_who_waits_for_a_collective_waits_for_its_stream(gpu, group):
    """Also where the work is finished by this package: an average on gloo, a compressed collective."""
    x, side = torch.ones(64, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        work = group.allreduce([x], options)
    work.wait()
    x.add_(1)
    no_races(gpu)


def test_nothing_asks_an_event_while_a_graph_is_captured(gpu, group):
    """``cudaEventQuery`` is an error then."""
    inputs = BatchMasks()
    inputs._checks.append(_Check(torch.ones((), device="cuda").eq(1)))
    with group.traffic.timed("before", GPU):
        pass
    gpu.capturing = True
    inputs._read_checks()
    with group.traffic.timed("captured", GPU):
        pass
    gpu.capturing = False
    assert len(inputs._checks) == 1
    group.traffic.settle()
    assert set(group.traffic.seconds) == {"before"}


def test_the_meter_of_a_plan_waits_before_it_reads(gpu):
    with meter_for(GPU) as meter:
        torch.ones(1024, device="cuda").sum()
        meter.reset_peak()
    assert meter.live >= 0 and meter.peak >= 0
    assert {what for what, _ in waits(gpu)} == {"Stream.synchronize"} and len(waits(gpu)) == 2


def test_the_gradient_of_xielu(gpu):
    x, dh, slopes = (torch.randn(size, device="cuda") for size in ((8, 48), (8, 48), (2,)))
    dx, dslopes = _xielu_backward(dh, x, slopes.abs())
    assert dx.is_cuda and dslopes.is_cuda and gpu.kernels
    no_races(gpu)
    assert waits(gpu) == []


def test_a_captured_step_waits_for_nothing(gpu, monkeypatch):
    """Every wait is an error while a graph is captured; weights that were quantised before are quantised again, for every replay."""
    define_products(monkeypatch)
    model = stack()
    foundry_fp8.apply_fp8(model, recipe="current", backend="native", cache_weights=True, fuse=False)
    train(model)
    cached, ask = [], NativeBackend.cached_weight
    monkeypatch.setattr(NativeBackend, "cached_weight", lambda *a: cached.append(ask(*a)) or cached[-1])
    train(model, steps=1)
    assert len(cached) == 6 and None not in cached
    gpu.capturing = True
    train(model, steps=1)
    gpu.capturing = False
    assert cached[6:] == [None] * 6
    no_races(gpu)


def test_clocks_wait_before_they_are_read(gpu, group):
    """That of the planner, always; that of compression only in the batches that it measures. The peaks' is torch's own Timer."""
    clock(GPU)
    assert len(waits(gpu)) == 1
    del gpu.graph.syncs[:]
    adaptation = Adaptation("int8", 0, group.traffic)
    for batch in range(10):
        adaptation.start_batch(batch, GPU)
    assert waits(gpu) == []
    adaptation.start_batch(adaptation.first, GPU)
    assert [place.split(":")[0] for _, place in waits(gpu)] == ["distributed/compression/adapt.py"]
