"""The counter on programs of known cost, compiled for a TPU and for GPUs that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.expert_products import expert_product, usual_turns
from model.experts import lay_out
from rlx.chips import CHIPS
from rlx.collectives import Message, replica_groups
from rlx.cost import Cost, cost
from rlx.hlo import array_bytes, parse, turns
from rlx.plan import numbered
from rlx.roofline import beyond, message_seconds, seconds
from rlx.topology import abstract_devices, plugin_installed
from rlx.topology import parse as named

pytestmark = pytest.mark.usefixtures("optimised")

TARGETS = ("cpu:1", "v5e:2x4", "h100:8")
SQUARE = 2 * 64 * 128 * 128


def devices_of(target):
    topology = named(target)
    platform = topology.chip.platform
    if platform != "cpu" and not plugin_installed(platform):
        pytest.skip(f"the plugin for {target} is not installed")
    return abstract_devices(topology)


@functools.cache
def compiled(target, name):
    devices = devices_of(target)
    shape = (4, 2) if len(devices) == 8 else (1, 1)
    mesh = Mesh(np.array(devices).reshape(shape), ("fsdp", "tensor"))
    function, operands = PROGRAMS[name]
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        for x, axes in operands
    ]
    out = NamedSharding(mesh, PartitionSpec(*OUT[name])) if name in OUT else None
    return jax.jit(function, out_shardings=out).lower(*placed).compile().as_text()


def of(shape, *axes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype), axes


def chain(x, squares):
    return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, squares)[0]


def until(x, w, end):
    return jax.lax.while_loop(
        lambda state: state[0] < end, lambda state: (state[0] + 1, jnp.tanh(state[1] @ w)), (0, x)
    )[1]


def usual(x, w, end):
    with jax.named_scope(usual_turns(4)):
        return until(x, w, end)


def twice(x, w, end):
    def turn(state):
        return state[0] + 1, until(state[1], w, end)

    _, first = jax.lax.while_loop(lambda state: state[0] < end, turn, (0, chain(x, w[None])))
    return until(first[:32], w, end)


def nested(x, squares):
    return jax.lax.fori_loop(0, 3, lambda _, carry: chain(carry, squares), x)


def either(x, w, which):
    return jax.lax.cond(which > 0, lambda: x @ w, lambda: (x @ w) @ (w.T @ w))


def attention(query, key, value):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def gradient(squares, x):
    return jax.grad(lambda s: jnp.sum(chain(x, s).astype(jnp.float32)))(squares)


HEADS = of((2, 128, 4, 64))
PROGRAMS = {
    "product": (jnp.matmul, (of((64, 32)), of((32, 48)))),
    "batched": (
        lambda x, y: jnp.einsum("abij,abjk->abik", x, y),
        (of((3, 8, 16, 32)), of((3, 8, 32, 24))),
    ),
    "attention": (attention, (HEADS, HEADS, HEADS)),
    "large": (jnp.matmul, (of((512, 8192)), of((8192, 8192)))),
    "vector": (jnp.matmul, (of((1, 256)), of((256, 512)))),
    "scan": (chain, (of((64, 128)), of((5, 128, 128)))),
    "nested": (nested, (of((64, 128)), of((5, 128, 128)))),
    "until": (until, (of((64, 128)), of((128, 128)), of((), dtype=jnp.int32))),
    "twice": (twice, (of((64, 128)), of((128, 128)), of((), dtype=jnp.int32))),
    "usual": (usual, (of((64, 128)), of((128, 128)), of((), dtype=jnp.int32))),
    "either": (either, (of((64, 32)), of((32, 48)), of((), dtype=jnp.float32))),
    "gathered": (gradient, (of((5, 512, 512), None, "fsdp"), of((64, 512), "fsdp"))),
    "parts": (
        lambda x, w, v: jnp.tanh(x @ w) @ v,
        (of((512, 512), "fsdp"), of((512, 1024), None, "tensor"), of((1024, 512), "tensor")),
    ),
}
OUT = {"gathered": (None, "fsdp"), "parts": ("fsdp",)}
FLOPS = {
    "product": 2 * 64 * 32 * 48,
    "batched": 2 * 3 * 8 * 16 * 32 * 24,
    "attention": 2 * 2 * (2 * 4) * 128 * 128 * 64,
    "vector": 2 * 256 * 512,
    "scan": 5 * SQUARE,
    "nested": 3 * 5 * SQUARE,
    "until": 7 * SQUARE,
    "usual": 4 * SQUARE,
    "either": 2 * 48 * (64 * 32 + 32 * 48 + 64 * 48),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_those_of_the_products_whatever_they_became(target, name):
    # A TPU's batched product is a convolution, of which a plain count takes 24 times as many; a
    # product with a vector is a sum; a loop says nowhere how often it turns.
    found = cost(compiled(target, name), {"while": 7})
    assert found.flops == FLOPS[name]
    assert found.uncounted == {}


@pytest.mark.parametrize("target", TARGETS)
def test_loops_that_follow_one_another_turn_each_as_often_as_it_is_told(target):
    # Nor does a loop within the first one take a place; nor one whose turns the text proves.
    text = numbered(compiled(target, "twice"))
    assert cost(text, {"while": 3, "loop_0": 5, "loop_1": 2}).flops == (1 + 5 * 3 + 1) * SQUARE
    assert cost(text, {"while": 3, "loop_0": 0, "loop_1": 8}).flops == (1 + 4) * SQUARE


@pytest.mark.parametrize("target", TARGETS[1:])
def test_each_device_counts_its_own_part(target):
    assert cost(compiled(target, "parts")).flops == 2 * 2 * 512 * 512 * 1024 // 8
    # Rows are split in four, and every device gathers the whole of each square.
    assert cost(compiled(target, "gathered")).flops == 3 * 5 * 2 * (64 // 4) * 512 * 512


@pytest.mark.parametrize("target", TARGETS[1:])
def test_what_is_gathered_in_a_loop_is_sent_every_turn(target):
    found = cost(compiled(target, "gathered"))
    sent = {}
    for kind, size in found.messages.items():
        assert kind.devices == 4
        sent[kind.kind] = size
    square = 2 * 512 * 512
    # Five turns each way. An exchange that is begun, waited for and computed beside is one.
    assert sent.pop("all-gather") == 2 * 5 * square * 3 / 4
    # A TPU writes a gradient's scatter as a sum of which a part is taken.
    wanted = {"reduce-scatter": 5 * square * 3 / 4}
    if target.startswith("h100"):
        wanted = {"all-reduce": 2 * 5 * square * 3 / 4} if "all-reduce" in sent else wanted
    assert sent == wanted


@pytest.mark.parametrize("target", TARGETS[1:])
def test_parts_of_a_product_are_added_up_once(target):
    found = cost(compiled(target, "parts"))
    assert found.messages == {Message("all-reduce", 2, 2): 2 * (512 // 4) * 512 * 2 / 2}


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("name", ["attention", "large"])
def test_bytes_are_about_those_of_operands_and_results(target, name):
    # A TPU's fusion reads its operands through fusions within it: to miss them counts a third.
    operands = sum(x.size * x.dtype.itemsize for x, _ in PROGRAMS[name][1])
    least = operands + {"attention": operands // 3, "large": 2 * 512 * 8192}[name]
    # No more than the scores beside them, in float32, written and read a few times.
    scores = {"attention": 6 * 4 * 2 * 4 * 128 * 128, "large": 0}[name]
    found = cost(compiled(target, name))
    assert 0.95 * least <= found.bytes <= 1.05 * least + scores


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_each_expert_is_read_once_for_a_few_tokens_on_a_gpu(dtype):
    """A copy of a kernel for each of its tokens' blocks is three times as much. An int8 kernel that
    is cast in memory is read, written and read twice as wide."""
    device = NamedSharding(Mesh(np.array(devices_of("h100:1")), ("all",)), PartitionSpec())
    operands = [
        jax.ShapeDtypeStruct(shape, kind, sharding=device)
        for shape, kind in (((16, 4), jnp.int32), ((176, 1024), jnp.bfloat16))
    ]
    kernels = jax.ShapeDtypeStruct((16, 1024, 512), dtype, sharding=device)

    @jax.jit
    def run(experts, rows, kernels):
        return expert_product(rows, kernels, lay_out(experts, 16), jnp.bfloat16)

    text = run.lower(*operands, kernels).compile().as_text()
    assert " while(" not in text and " conditional(" not in text
    size = kernels.size * kernels.dtype.itemsize
    assert size < cost(text).bytes < 1.5 * size


def program(instruction, operand="f32[8,128]{1,0}"):
    return f"""HloModule m

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (a: f32[8,128]) -> f32[8,128] {{
  %a = {operand} parameter(0)
  {instruction}
}}
"""


SIZE = 4 * 8 * 128
FOUR = "replica_groups={{0,1,2,3},{4,5,6,7}}"


@pytest.mark.parametrize(
    ("instruction", "sent"),
    [
        (f"ROOT %r = f32[32,128]{{1,0}} all-gather(%a), {FOUR}, dimensions={{0}}", 3 * SIZE),
        (f"ROOT %r = f32[2,128]{{1,0}} reduce-scatter(%a), {FOUR}, to_apply=%add", 3 / 4 * SIZE),
        (f"ROOT %r = f32[8,128]{{1,0}} all-reduce(%a), {FOUR}, to_apply=%add", 3 / 2 * SIZE),
        (f"ROOT %r = f32[8,128]{{1,0}} all-to-all(%a), {FOUR}, dimensions={{0}}", 3 / 4 * SIZE),
        (
            "ROOT %r = f32[8,128]{1,0} collective-permute(%a), "
            "source_target_pairs={{0,1},{1,2},{2,0}}",
            SIZE,
        ),
        (
            "ROOT %r = f32[8,128]{1,0} collective-permute(%a), source_target_pairs={{0,0},{1,1}}",
            0,
        ),
        (
            "%s = (f32[8,128]{1,0}, f32[32,128]{1,0}) all-gather-start(%a), channel_id=1, "
            f"{FOUR}, dimensions={{0}}\n"
            "  ROOT %r = f32[32,128]{1,0} all-gather-done(%s)",
            3 * SIZE,
        ),
    ],
)
def test_a_ring_sends_what_its_formula_says(instruction, sent):
    assert cost(program(instruction)).sent == sent


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        (
            "replica_groups=mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b'}",
            [[0, 1], [2, 3]],
        ),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
    ],
)
def test_groups_are_read_in_each_form_that_they_are_written_in(text, groups):
    found = replica_groups(f"(%a), {text}, dimensions={{0}}", 4)
    assert sorted(found) == groups


def test_groups_in_an_unknown_form_are_no_groups_of_one():
    # Which would send nothing.
    with pytest.raises(ValueError, match="unknown form"):
        replica_groups("(%a), replica_groups=ring(4), dimensions={0}", 4)


def test_a_group_across_hosts_is_known_by_the_hosts_of_its_devices():
    text = program(f"ROOT %r = f32[8,128]{{1,0}} all-reduce(%a), {FOUR}, to_apply=%add")
    (kind,) = cost(text, hosts=(0, 0, 1, 1, 0, 0, 1, 1)).messages
    assert (kind.devices, kind.beside) == (4, 2)
    (kind,) = cost(text, hosts=(0, 0, 0, 0, 1, 1, 1, 1)).messages
    assert (kind.devices, kind.beside) == (4, 4)


def test_the_network_is_shared_by_the_devices_of_a_host():
    chip = CHIPS["h100"]
    sent = 1e9
    inside = message_seconds(Message("all-reduce", 8, 8), sent, chip)
    assert inside == sent / chip.link_speed
    # Eight adapters a host carry it between hosts; a single device a host has one of them.
    assert message_seconds(Message("all-reduce", 16, 8), sent, chip) == sent / 400e9
    assert message_seconds(Message("all-reduce", 2, 1), sent, chip) == sent / 50e9
    # In an all-to-all each device has rows of its own for every other: 8 of 15 cross.
    across = message_seconds(Message("all-to-all", 16, 8), sent, chip)
    assert across == pytest.approx(sent * 8 / 15 / 50e9)


def test_padding_to_tiles_is_moved_and_what_lies_beside_the_memory_is_not():
    assert array_bytes("bf16[4,64]{1,0:T(8,128)(2,1)}") == 8 * 128 * 2
    assert array_bytes("bf16[64,4]{0,1:T(8,128)(2,1)}") == 8 * 128 * 2
    assert array_bytes("f32[100]{0:T(128)}") == 4 * 128
    assert array_bytes("(f32[8,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, f32[2]{0})") == 8
    assert array_bytes("f32[8,128]{1,0:T(8,128)S(1)}", True) == 4 * 8 * 128


LOOP = """HloModule m

%body (p: (s32[], s32[])) -> (s32[], s32[]) {{
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}}

%condition (q: (s32[], s32[])) -> pred[] {{
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  ROOT %less = pred[] compare(%j, %m), direction={direction}
}}

ENTRY %main (e: s32[]) -> s32[] {{
  %e = s32[] parameter(0)
  %zero = s32[] constant({begin})
  %end = s32[] {end}
  %start = (s32[], s32[]) tuple(%zero, %end)
  %loop = (s32[], s32[]) while(%start), condition=%condition, body=%body
  ROOT %r = s32[] get-tuple-element(%loop), index=0
}}
"""


@pytest.mark.parametrize(
    ("begin", "step", "end", "direction", "count"),
    [
        (0, 1, "constant(7)", "LT", 7),
        (2, 2, "constant(7)", "LT", 3),
        (0, 1, "constant(7)", "LE", 8),
        (9, 1, "constant(7)", "LT", 0),
        (0, 1, "copy(%e)", "LT", None),
        (0, 1, "constant(7)", "NE", None),
    ],
)
def test_a_loop_over_a_counter_turns_as_often_as_its_text_proves(
    begin, step, end, direction, count
):
    module = parse(LOOP.format(begin=begin, step=step, end=end, direction=direction))
    loop = module.computations["main"]["loop"]
    assert turns(module, loop) == count


def test_the_slowest_of_computing_moving_and_sending_is_the_time():
    chip = CHIPS["v5e"]
    message = (Message("all-gather", 4, 4), "1")
    found = seconds(Cost({"dot": 197e12}, 0.819e12 * 3, {}, {message: 90e9 * 2}), chip)
    assert found == (1, 3, 2)
    assert (found.longest, found.bound) == (3, "memory")
    assert seconds(Cost({"dot": 1.0}), CHIPS["cpu"]).longest is None


def test_a_part_of_a_program_is_what_it_takes_beyond_another():
    whole, part = Cost({"a": 5, "b": 2}, 10, {"x": 1}), Cost({"a": 5}, 4, {"x": 1})
    assert beyond(whole, part) == Cost({"b": 2}, 6, {}, {})
