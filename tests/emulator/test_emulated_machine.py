"""Each check of the emulator, on a small kernel with one fault (probes_sm90.cu, probes_sm100.cu) and on the same kernel
without it."""

from __future__ import annotations

import re
from pathlib import Path

import host_build
import numpy as np
import pytest
import reference as ref
from host import Emulator, EmulatorError, aligned

HERE = Path(__file__).parent

# kernel: (threads, blocks of a cluster, what the faulty form ends with)
SM90 = {
    "read_unwritten": (32, 1, r"ld.shared reads shared\+0x[0-9A-F]+ of block 0, which nobody has written"),
    "no_syncthreads": (64, 1, r"(race: )?ld.shared reads .*, (written by thread \d+|which nobody has written)"),
    "no_syncwarp": (32, 1, r"race: ld.shared reads .*, written by thread \d+ of block 0 without an order"),
    "overwrite_while_read": (64, 1, r"race: a (store overwrites .*, read|load reads .*, written) by thread \d+"),
    "beyond_shared": (
        32,
        1,
        r"4 bytes at shared address 0x00010400 \(shared\+0x10000\) lie outside the block's 65536",
    ),
    "beyond_global": (32, 1, r"a store: 1 bytes at .* 0 bytes after the end of 'g' \(4096 bytes\)"),
    "misaligned_global": (32, 1, r"misaligned access at .*probes_sm90.cu:\d+"),
    "named_barrier_count": (
        64,
        1,
        r"bar.\w+ 1: counts \d+ threads, but an earlier arrival of this phase counted \d+",
    ),
    "divergent_collective": (32, 1, r"lanes of one warp meet in different instructions"),
    "mbarrier_uninitialised": (64, 1, r"mbarrier.arrive: there is no initialised mbarrier at shared\+0x0"),
    "mbarrier_init_not_seen": (64, 1, r"nothing orders the initialisation|there is no initialised mbarrier"),
    "mbarrier_too_many_arrivals": (32, 1, r"1 arrivals at the mbarrier .* whose phase 0 still expects 0"),
    "mbarrier_bytes_overflow": (
        32,
        1,
        r"byte count of the mbarrier at shared\+0x0 of block 0 leaves its range: 1048576",
    ),
    "deadlock": (
        64,
        1,
        r"(?s)deadlock.*warp  1 lanes 0xFFFFFFFF: mbarrier.try_wait on shared\+0x0, for phase 0; it is "
        r"in phase 0 with 1 of 2 arrivals and 0 bytes missing.*probes_sm90.cu:\d+",
    ),
    "registers": (384, 1, r"(?s)deadlock.*setmaxnreg.inc"),
    "barrier_without_fence": (32, 1, r"was initialised without fence.mbarrier_init"),
    "read_before_wait": (32, 1, r"race: ld.shared reads .*, written by copies that report to the mbarrier"),
    "copy_over_readers": (32, 1, r"race: cp.async.bulk.tensor overwrites .*, read by thread \d+"),
    "too_few_bytes_expected": (32, 1, r"deadlock"),
    "store_without_proxy_fence": (64, 1, r"ordinary store: that thread's fence.proxy.async is missing"),
    "exit_before_store_is_done": (64, 1, r"cp.async.bulk.wait_group is missing"),
    "wgmma_without_fence": (128, 1, r"wgmma.fence is missing"),
    "wgmma_registers_touched": (128, 1, r"accumulator register 2 of lane 0 was written while a product"),
    "wgmma_not_waited_for": (128, 1, r"wgmma.wait_group is missing"),
    "wgmma_operand_overwritten": (128, 1, r"race: cp.async.bulk.tensor overwrites .*, read by wgmma of warp 0"),
    "wgmma_foreign_rows": (128, 1, r"uses a product of row (56|57|58|59|6\d) of operand A of a wgmma"),
    "remote_store_without_cluster_scope": (
        32,
        2,
        r"of another block: the barrier between the two has no cluster scope",
    ),
    "store_to_a_block_that_left": (32, 2, r"block 1 of the cluster has exited"),
    "store_async_counts_bytes": (32, 2, r"(?s)deadlock.*8 bytes missing"),
}


# fault of probes_sm100.cu: what it ends with
SM100 = {
    "NO_PROXY_FENCE": r"tcgen05.cp reads .*, written by thread \d+ of block 0 with an ordinary store: .*fence.proxy.async",
    "NO_COMMIT_WAIT": r"race: tcgen05.ld reads tensor memory .*, written by tcgen05 operations of thread 0",
    "NO_FENCE_AFTER": r"race: tcgen05.ld reads tensor memory .*fence::after_thread_sync",
    "REGISTERS_TOO_EARLY": r"uses registers of a tcgen05.ld before its tcgen05.wait::ld",
    "NO_DEALLOC": r"block 0 ends with 64 columns of tensor memory allocated",
    "FOREIGN_LANES": r"tcgen05.ld: warp \d reaches lanes \d+ to \d+, the address names lane \d+",
    "SCALES_OVERWRITTEN": r"race: tcgen05.cp overwrites tensor memory .*, (read|written) by tcgen05 operations of thread 0",
    "NO_FENCE_BEFORE": r"race: tcgen05.mma \(D\) overwrites tensor memory .*, read by tcgen05 loads of thread \d+",
    "ODD_COLUMNS": r"number of columns must be a power of two from 32 to 512, got 48",
    "TWO_GROUPS": r"cta_group::2, but an earlier instruction of the kernel used cta_group::1",
    "FIRST_ACCUMULATES": r"tcgen05.mma \(D\) reads tensor memory .*, which nobody has written",
    "DEALLOC_UNDER_WAY": r"tcgen05.dealloc: tcgen05 operations of thread 0 are still under way",
    "ALLOC_AFTER_RELINQUISH": r"tcgen05.alloc after relinquish_alloc_permit",
    "BEYOND_ALLOCATION": r"columns 504 to 519 of tensor memory; block 0 has allocated 64 columns from 448",
    "OPERAND_OVERWRITTEN": r"race: cp.async.bulk.tensor overwrites .*, read by tcgen05 operations of thread 0",
    "COMMIT_BY_ANOTHER": r"race: (tcgen05.ld reads|cp.async.bulk.tensor overwrites) .* by tcgen05 operations of thread 0",
}


def library(arch: int) -> Path:
    return host_build.kernel_library(HERE / f"probes_sm{arch}.cu")


class Probe:
    """Launches probes of one file on a buffer `g` of 4096 bytes."""

    def __init__(self, arch: int):
        self.emulator = Emulator(kernels=[])
        self.path = library(arch)
        self.device = Emulator.HOPPER if arch == 90 else Emulator.BLACKWELL
        self.g = aligned(4096, np.uint8, 0x38)  # ones in e4m3

    def launch(self, kernel: str, wrong: int, *, threads=32, cluster=1, blocks=None, overlaps=False):
        tile = self.emulator.tensor_map(self.g, (128, 32), (128,), (128, 8), 128)
        self.emulator.launch(
            self.path,
            kernel,
            self.g,
            tile,
            np.int32(wrong),
            grid=blocks or cluster,
            block=threads,
            cluster=cluster,
            shared_bytes=65536,
            overlaps=overlaps,
            device=self.device,
        )

    def session(self, **options):
        return self.emulator.session(self.device, options=options, g=self.g)


@pytest.fixture
def probe():
    return Probe(90)


@pytest.mark.parametrize("delivery", [0, 1, 2])
@pytest.mark.parametrize("kernel", SM90)
def test_faults_are_found(probe, kernel, delivery):
    threads, cluster, message = SM90[kernel]
    with probe.session(delivery=delivery, seed=delivery):
        probe.launch(kernel, False, threads=threads, cluster=cluster)
        with pytest.raises(EmulatorError, match=message) as error:
            probe.launch(kernel, True, threads=threads, cluster=cluster)
    assert kernel in str(error.value)


@pytest.mark.parametrize(
    ("fault", "delivery"),
    [(f, d) for f in SM100 for d in (0, 1, 2) if (f, d) != ("DEALLOC_UNDER_WAY", 1)],  # 1: nothing stays under way
)
def test_tensor_memory_faults_are_found(fault, delivery):
    number = re.search(rf"\b{fault} = (\d+)", (HERE / "probes_sm100.cu").read_text())[1]
    probe = Probe(100)
    with probe.session(delivery=delivery, seed=delivery), pytest.raises(EmulatorError, match=SM100[fault]):
        probe.launch("tensor_core", int(number), threads=128)


@pytest.mark.parametrize("delivery", [0, 1, 2])
def test_tensor_core_product(delivery):
    """All ones: each of 128 x 16 sums is K = 128, in BF16 0x4300."""
    probe = Probe(100)
    with probe.session(delivery=delivery, seed=delivery):
        probe.launch("tensor_core", 0, threads=128)
    assert (probe.g.view(np.uint16) == 0x4300).all()


def test_a_fault_leaves_nothing_behind(probe):
    """A launch that failed does not disturb the next one."""
    with probe.session():
        for _ in range(3):
            with pytest.raises(EmulatorError):
                probe.launch("deadlock", True, threads=384)
            probe.launch("deadlock", False, threads=384)


def test_values(probe):
    with probe.session():
        probe.launch("values", False)
    out = probe.g[: 16 * 128].view(np.uint32).reshape(16, 32)
    lane = np.arange(32)
    bits = sum(1 << i for i in range(0, 32, 3))
    bf16 = ref.bf16_encode((1 + lane / 256.0).astype(np.float32))
    expected = [
        np.full(32, 5),
        lane // 8 * 8 + 3,
        np.where(lane >= 2, lane - 2, lane),
        np.where(lane % 16 + 3 < 16, lane + 3, lane),
        lane ^ 9,
        np.full(32, bits),
        np.ones(32),
        np.zeros(32),
        np.full(32, 496),
        np.where(lane < 16, 15, 31),
        lane == 0,
        np.where(lane % 2, 0x77553322, 0x77553311),
        np.array([(0x80000000 + i) * 6 >> 32 for i in range(32)]),
        np.array([max(i, 5) << 16 | max(7, i) for i in range(32)]),
        bf16.astype(np.int64) | int(ref.bf16_encode(np.array([-3.0e38], np.float32))[0]) << 16,
        ref.e4m3_encode(0.4375 * lane).astype(np.int64) | 0x7E00,
    ]
    for row, want in zip(out, expected, strict=True):
        assert np.array_equal(row, np.asarray(want).astype(np.uint32))


def test_elected_lane_is_an_option(probe):
    with probe.session(elect_lane=7):
        probe.launch("values", False)
    assert np.array_equal(probe.g.view(np.uint32).reshape(-1, 32)[10], np.arange(32) == 7)


@pytest.mark.parametrize("kernel", ["reads_before_wait", "copies_before_wait"])
def test_dependent_launch(probe, kernel):
    """What an earlier kernel of the chain wrote may be read after griddepcontrol.wait only."""
    with probe.session():
        probe.launch("writes", False, overlaps=True)
        probe.launch(kernel, False, overlaps=True)
    with probe.session():
        probe.launch("writes", False, overlaps=True)
        with pytest.raises(
            EmulatorError, match=r"'g' \+ 0, which an earlier kernel wrote, before griddepcontrol.wait"
        ):
            probe.launch(kernel, True, overlaps=True)
    with probe.session():
        probe.launch("writes", False, overlaps=True)
        probe.launch(kernel, True, overlaps=False)  # an ordinary launch starts after its predecessor


def test_every_kernel_of_a_chain_must_wait(probe):
    with probe.session():
        probe.launch("never_waits", False, overlaps=True)
        probe.launch("never_waits", True)
        with pytest.raises(EmulatorError, match=r"ended without griddepcontrol.wait"):
            probe.launch("never_waits", True, overlaps=True)


@pytest.mark.parametrize(("wrong", "access"), [(1, r"reads 'g' \+ 0"), (2, r"overwrites 'g' \+ 7")])
def test_blocks_have_no_order(probe, wrong, access):
    with probe.session():
        probe.launch("blocks_share_memory", False, blocks=2)
        with pytest.raises(EmulatorError, match=access + ", which another cluster of the same launch writes"):
            probe.launch("blocks_share_memory", wrong, blocks=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 416}, "416 threads a block, allowed are 1 to 384"),
        ({"cluster": 2, "blocks": 3}, "grid of 3 blocks along x does not consist of clusters of 2"),
    ],
)
def test_launch_limits(probe, arguments, message):
    with probe.session(), pytest.raises(EmulatorError, match=message):
        probe.launch("writes", False, **arguments)


def test_maps_must_be_grid_constants():
    source = (HERE / "probes_sm90.cu").read_text().replace("const __grid_constant__ CUtensorMap", "const CUtensorMap")
    changed = host_build.kernel_library(HERE / "probes_sm90.cu", source)
    probe = Probe(90)
    probe.path = changed
    with probe.session(), pytest.raises(EmulatorError, match="parameter 1 is a tensor map but not __grid_constant__"):
        probe.launch("writes", False)


def test_every_probe_is_tested():
    names = set(re.findall(r"^PROBE\((\w+)\)", (HERE / "probes_sm90.cu").read_text(), re.M))
    elsewhere = {"values", "writes", "reads_before_wait", "copies_before_wait", "never_waits", "blocks_share_memory"}
    assert names == set(SM90) | elsewhere
    faults = set(re.findall(r"^    ([A-Z_]+) = \d+,", (HERE / "probes_sm100.cu").read_text(), re.M))
    assert faults == set(SM100) | {"CORRECT"}
