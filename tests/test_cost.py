"""The counter of FLOPs and bytes, on programs whose cost is known, and on the real update."""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from model.errors import BadInput
from model.expert_products import usual_turns
from model.parameters import initialise
from model.qwen import Qwen
from rlx.cost import (
    cost,
    forward_flops,
    rollout_bytes,
    temporary_bytes,
    update_flops,
)
from rlx.state import initial_state
from rlx.update import update

X = jnp.ones((64, 32))
W = jnp.ones((32, 48))
SQUARES = jnp.ones((5, 32, 32))
PRODUCT = 2 * 64 * 32 * 32
CONFIG = dataclasses.replace(
    toy.CONFIG, vocab_size=64, hidden_size=64, intermediate_size=172, num_heads=4, head_dim=16
)
"""Of such proportions that attention is a tenth of the FLOPs, as in models that are trained."""


def counted(function, *operands, trips=None):
    return cost(jax.jit(function).lower(*operands).compile().as_text(), trips)


def chain(x, squares):
    return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, squares)[0]


def until(x, w, end):
    return jax.lax.while_loop(
        lambda state: state[0] < end, lambda state: (state[0] + 1, jnp.tanh(state[1] @ w)), (0, x)
    )[1]


def test_a_product_costs_two_flops_a_multiply_and_each_byte_once():
    found = counted(jnp.matmul, X, W)
    assert found.flops == 2 * 64 * 32 * 48
    assert found.bytes == X.nbytes + W.nbytes + 4 * 64 * 48
    assert found.uncounted == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batched_product_counts_its_batch_once(dtype):
    left, right = jnp.ones((3, 8, 16, 32), dtype), jnp.ones((3, 8, 32, 24), dtype)
    found = counted(lambda x, y: jnp.einsum("abij,abjk->abik", x, y), left, right)
    assert found.flops == 2 * 3 * 8 * 16 * 32 * 24


def test_a_scan_counts_every_turn():
    found = counted(chain, X, SQUARES)
    # XLA's own analysis counts one turn.
    assert found.flops == 5 * PRODUCT


def test_nested_scans_multiply():
    def nested(x, squares):
        return jax.lax.scan(lambda carry, _: (chain(carry, squares), None), x, length=3)[0]

    assert counted(nested, X, SQUARES).flops == 3 * 5 * PRODUCT


def test_a_scan_reads_the_slices_of_what_it_walks_over_not_the_whole_each_turn():
    long = jnp.ones((50, 64, 32))
    found = counted(lambda x: jax.lax.scan(lambda c, w: (c + w, None), X, x)[0], long)
    # 50 slices in, the carry in and out: not 50 times the whole, which is 16 times as much.
    assert found.bytes < 5 * long.nbytes


def test_a_loop_over_data_asks_for_its_turns():
    with pytest.raises(BadInput, match=r"jit\(until\)/while"):
        counted(until, X, SQUARES[0], jnp.int32(7))


def test_a_loop_over_data_counts_the_turns_it_is_given():
    found = counted(until, X, SQUARES[0], jnp.int32(7), trips={"while": 3, "until)/while": 7})
    assert found.flops == 7 * PRODUCT, "the longest name that fits decides"


def named(function, name):
    def scoped(*operands):
        with jax.named_scope(name):
            return function(*operands)

    return scoped


def test_a_loop_counts_the_turns_that_its_own_scope_says_are_usual():
    said = named(until, usual_turns(4))
    assert counted(said, X, SQUARES[0], jnp.int32(7)).flops == 4 * PRODUCT
    # Also where the text proves how many there are at most, and on the way back.
    assert counted(named(chain, usual_turns(2)), X, SQUARES).flops == 2 * PRODUCT
    back = jax.grad(lambda x, w: jnp.sum(named(chain, usual_turns(2))(x, w)))
    assert counted(back, X, SQUARES).flops == 2 * 2 * PRODUCT


def test_a_loop_within_one_whose_turns_are_said_counts_its_own():
    def nested(x, squares):
        return jax.lax.scan(lambda carry, _: (chain(carry, squares), None), x, length=9)[0]

    assert counted(named(nested, usual_turns(3)), X, SQUARES).flops == 3 * 5 * PRODUCT


SCATTER = """HloModule m

%combine (old: f32[], new: f32[]) -> f32[] {{
  %old = f32[] parameter(0)
  %new = f32[] parameter(1)
  ROOT %both = f32[] {combined}
}}

%fused (a: f32[1000,64], i: s32[10], u: f32[10,64]) -> f32[1000,64] {{
  %a = f32[1000,64]{{1,0}} parameter(0)
  %i = s32[10]{{0}} parameter(1)
  %u = f32[10,64]{{1,0}} parameter(2)
  ROOT %s = f32[1000,64]{{1,0}} scatter(%a, %i, %u), update_window_dims={{1}}, to_apply=%combine
}}

ENTRY %main (x: f32[1000,64], j: s32[10], v: f32[10,64]) -> f32[1000,64] {{
  %x = f32[1000,64]{{1,0}} parameter(0)
  %j = s32[10]{{0}} parameter(1)
  %v = f32[10,64]{{1,0}} parameter(2)
  ROOT %r = f32[1000,64]{{1,0}} {called}
}}
"""
ROWS = 4 * 10 * 64


FUSED = "fusion(%x, %j, %v), kind=kInput, calls=%fused"
ADDED = "add(%old, %new)"


@pytest.mark.parametrize(
    "called", [FUSED, "scatter(%x, %j, %v), update_window_dims={1}, to_apply=%combine"]
)
def test_a_scatter_moves_the_rows_that_it_changes_not_the_whole(called):
    assert cost(SCATTER.format(called=called, combined=ADDED)).bytes == 3 * ROWS + 4 * 10


def test_a_scatter_that_replaces_rows_does_not_read_them():
    text = SCATTER.format(called=FUSED, combined=ADDED)
    text = text.replace(f"  ROOT %both = f32[] {ADDED}\n", "")
    replaced = text.replace("%new = f32[] parameter(1)", "ROOT %new = f32[] parameter(1)")
    assert cost(replaced).bytes == 2 * ROWS + 4 * 10


def test_of_a_conditional_the_dearer_branch_counts_and_only_it():
    def either(x, w, which):
        return jax.lax.cond(which > 0, lambda: x @ w, lambda: (x @ w) @ (w.T @ w))

    assert counted(either, X, W, jnp.float32(1)).flops == 2 * 48 * (64 * 32 + 32 * 48 + 64 * 48)


def test_a_convolution_counts_its_kernel():
    x, kernel = jnp.ones((2, 10, 3)), jnp.ones((4, 3, 5))
    found = counted(
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        x,
        kernel,
    )
    assert found.flops == 2 * (2 * 7 * 5) * 4 * 3


GROUPED = """HloModule m

ENTRY %main (x: f32[4,10,3], k: f32[4,3,6]) -> f32[2,7,6] {
  %x = f32[4,10,3]{2,1,0} parameter(0)
  %k = f32[4,3,6]{2,1,0} parameter(1)
  ROOT %r = f32[2,7,6]{2,1,0} convolution(%x, %k), window={size=4}, dim_labels=b0f_0io->b0f, \
batch_group_count=2
}
"""


def test_a_convolution_whose_batch_lies_in_groups_counts_each_group_once():
    """The output's batch is of one group already: to divide by their number again counts half."""
    x, kernel = jnp.ones((4, 10, 3)), jnp.ones((4, 3, 6))
    found = counted(
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), batch_group_count=2
        ),
        x,
        kernel,
    )
    by_hand = 2 * (2 * 7 * 6) * 4 * 3
    assert cost(GROUPED).flops == by_hand
    # A CPU's compiler writes it without groups, a group being an axis that the window skips over.
    assert found.flops == by_hand


@pytest.mark.parametrize(
    "call",
    [
        '(f32[64,48]{1,0}, s8[4]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm"',
        'f32[64,48]{1,0} custom-call(%x, %w), custom_call_target="__onednn$matmul"',
    ],
)
def test_a_product_that_became_a_library_call_counts(call):
    text = f"""HloModule m

ENTRY %main (x: f32[64,32], w: f32[32,48]) -> f32[64,48] {{
  %x = f32[64,32]{{1,0}} parameter(0)
  %w = f32[32,48]{{1,0}} parameter(1)
  %product = {call}, metadata={{op_name="jit(f)/dot"}}
}}
"""
    assert cost(text).products == {"jit(f)/dot": 2 * 64 * 32 * 48}


def test_a_library_call_that_is_no_known_product_is_told():
    text = """HloModule m

ENTRY %main (x: f32[64,32]) -> f32[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  ROOT %y = f32[64,32]{1,0} custom-call(%x), custom_call_target="TopK"
}
"""
    assert cost(text).uncounted == {"TopK": 1}


def test_the_forward_pass_counts_what_its_program_computes():
    rows, prompt, completion = 4, 3, 5
    positions = jnp.broadcast_to(jnp.arange(prompt + completion), (rows, prompt + completion))
    params = jax.eval_shape(lambda: initialise(toy.CONFIG, jax.random.key(0)))

    def forward(params, tokens):
        hidden = Qwen(toy.CONFIG).apply({"params": params}, tokens, positions)
        return hidden[:, prompt - 1 : -1] @ params["embed"]["embedding"].T

    program = counted(forward, params, jax.ShapeDtypeStruct(positions.shape, jnp.int32))
    shape = {"rows": rows, "prompt": prompt, "completion": completion}
    least = forward_flops(toy.CONFIG, **shape).total
    most = forward_flops(toy.CONFIG, **shape, causal=False).total
    # What a mask hides may be computed; nothing else may be.
    assert least <= program.flops <= most


def test_a_shared_prompt_costs_its_tokens_once_a_group():
    shape = {"rows": 8, "prompt": 16, "completion": 4}
    apart, shared = (forward_flops(toy.CONFIG, **shape, samples=n) for n in (1, 8))
    assert shared.projections / apart.projections == (16 + 8 * 4) / (8 * 20)
    assert shared.head == apart.head
    seen = 8 * (16 * 17 / 2 + 4 * 16 + 4 * 5 / 2)
    assert shared.attention / apart.attention == (seen - 7 * 16 * 17 / 2) / seen


def test_causal_attention_is_little_more_than_half_of_the_masked_square():
    shape = {"rows": 1, "prompt": 100, "completion": 100}
    half, whole = (forward_flops(toy.CONFIG, **shape, causal=c).attention for c in (True, False))
    assert half / whole == pytest.approx(201 / 400)


def test_what_an_update_recomputes_counts_once_more():
    forward = forward_flops(toy.CONFIG, rows=2, prompt=4, completion=4)
    rest = forward.total - forward.head
    assert update_flops(forward, chunked=False) == 3 * forward.total
    assert update_flops(forward) == 3 * rest + 4 * forward.head
    assert update_flops(forward, remat=True) == 4 * forward.total


def test_decoding_reads_the_weights_a_step_and_the_prompt_once_a_group():
    c = toy.CONFIG
    weights = sum(leaf.size for leaf in jax.tree.leaves(toy.initial_params()) if leaf.ndim > 1)
    biases = c.num_layers * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    norms = 2 * c.num_layers * c.hidden_size
    column = 2 * c.num_layers * c.num_kv_heads * c.head_dim
    shape = {"rows": 6, "prompt": 10, "completion": 1}
    found = rollout_bytes(c, **shape, samples=3, itemsize=2)
    assert found == 2 * (weights - biases - norms + column * (2 * 10 + 6 * 1))


@functools.cache
def update_program(remat: bool, shared: bool):
    """The compiled update of 16 rows, its learner made as the benchmarks make it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from learner import make_learner

    options = argparse.Namespace(
        dtype="float32",
        remat="block" if remat else "none",
        samples=4,
        micro_batch=8,
        share_prompts=int(shared),
        packing=int(shared),
    )
    learner = make_learner(options, CONFIG, on_policy=False)
    params = initialise(CONFIG, jax.random.key(0))
    state = initial_state(params, learner, jax.random.key(0))
    batch = toy.batch(16, width=24, prompt=8)
    mask = jnp.ones_like(batch.mask)
    signal = batch.signals[0]._replace(mask=mask)
    columns = np.broadcast_to(np.arange(32), batch.positions.shape)
    batch = batch._replace(mask=mask, positions=jnp.asarray(columns), signals=(signal,))
    step = jax.jit(lambda state, batch, key: update(learner, state, batch, key))
    return step.lower(state, batch, jax.random.key(1)).compile()


@pytest.mark.parametrize(("remat", "shared"), [(False, False), (True, True)])
def test_the_update_computes_little_more_than_the_model_needs(remat, shared):
    # 16 rows of full length fill two streams of 8.
    found = cost(update_program(remat, shared).as_text(), {"while": 2})
    samples = 4 if shared else 1
    forward = forward_flops(CONFIG, rows=16, prompt=8, completion=24, samples=samples)
    # A second pass for the old log-probabilities would be 1.33, a layer too many recomputed 1.3.
    assert found.flops <= 1.08 * update_flops(forward, remat=remat)
    assert found.flops >= update_flops(forward)
    assert found.uncounted == {}


def test_temporary_memory_grows_with_what_a_program_holds():
    def held(x):
        return jnp.sum(chain(x, jnp.broadcast_to(SQUARES[:1], (40, 32, 32))))

    def temporary(function):
        return temporary_bytes(jax.jit(function).lower(X).compile())

    # The way back needs the 40 states that the way there passes through.
    assert temporary(jax.grad(held)) > temporary(held) + 30 * X.nbytes
