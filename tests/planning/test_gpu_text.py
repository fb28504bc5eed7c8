"""The reader of GPU programs, on a small text in their form whose figures are counted by hand."""

from jaxrl_llm.planning.program import Collective, count_operations, list_loops

AXES = {"data": 2, "fsdp": 4}
LT = 'custom_call_target="__cublas$lt$matmul"'
DIMS = (
    'backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)
BATCHED = DIMS.replace('s":["1"]', 's":["2"]').replace('"lhs_batch_dimensions":[]', '"l":["0"]')
FSDP = "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"
TEXT = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused_dot (p0: bf16[16,32], p1: bf16[32,8]) -> f32[16,8] {
  %p0 = bf16[16,32]{1,0} parameter(0)
  %p1 = bf16[32,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[16,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_add (q0: f32[16,8]) -> f32[16,8] {
  %q0 = f32[16,8]{1,0} parameter(0)
  ROOT %add.1 = f32[16,8]{1,0} add(%q0, %q0)
}

%async_scatter (r0: f32[64,8]) -> f32[16,8] {
  %r0 = f32[64,8]{1,0} parameter(0)
  ROOT %rs = f32[16,8]{1,0} reduce-scatter(%r0), FSDP, dimensions={0}, to_apply=%add
}

%command_buffer (c0: f32[16,8]) -> f32[16,8] {
  %c0 = f32[16,8]{1,0} parameter(0)
  %loop_fusion.1 = f32[16,8]{1,0} fusion(%c0), kind=kLoop, calls=%fused_add
  ROOT %loop_fusion.2 = f32[16,8]{1,0} fusion(%loop_fusion.1), kind=kLoop, calls=%fused_add
}

%body (b: (s32[], bf16[16,32], bf16[8,8])) -> (s32[], bf16[16,32], bf16[8,8]) {
  %b = (s32[], bf16[16,32]{1,0}, /*index=2*/bf16[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = bf16[16,32]{1,0} get-tuple-element(%b), index=1
  %w = bf16[8,8]{1,0} get-tuple-element(%b), index=2
  %all-gather-start.1 = ((bf16[8,8]{1,0}, bf16[4]{0}), (bf16[32,8]{1,0}, bf16[16]{0})) \
all-gather-start(%w, %n), FSDP, dimensions={0}, backend_config={"is_sync":false}
  %all-gather-done.1 = (bf16[32,8]{1,0}, bf16[16]{0}) all-gather-done(%all-gather-start.1)
  %whole = bf16[32,8]{1,0} get-tuple-element(%all-gather-done.1), index=0
  %lt = (f32[16,8]{1,0}, s8[33554432]{0}) custom-call(%x, %whole), LT, DIMS
  %y = f32[16,8]{1,0} get-tuple-element(%lt), index=0
  %gemm = f32[16,8]{1,0} fusion(%x, %whole), kind=kCustom, calls=%fused_dot
  %all-reduce-start.1 = f32[16,8]{1,0} all-reduce-start(%gemm), FSDP, to_apply=%add
  %all-reduce-done.1 = f32[16,8]{1,0} all-reduce-done(%all-reduce-start.1)
  %copy.1 = bf16[16,32]{1,0} copy(%x)
  ROOT %out = (s32[], bf16[16,32]{1,0}, bf16[8,8]{1,0}) tuple(%i, %copy.1, %w)
}

%condition (b: (s32[], bf16[16,32], bf16[8,8])) -> pred[] {
  %b.1 = (s32[], bf16[16,32]{1,0}, bf16[8,8]{1,0}) parameter(0)
  ROOT %less = pred[] fusion(%b.1), kind=kLoop, calls=%fused_less
}

%short (s: f32[16,8]) -> f32[16,8] {
  ROOT %s = f32[16,8]{1,0} parameter(0)
}

%long (t: f32[16,8]) -> f32[16,8] {
  %t = f32[16,8]{1,0} parameter(0)
  ROOT %copy.2 = f32[16,8]{1,0} copy(%t)
}

ENTRY %main (a: bf16[16,32], w: bf16[8,8], g: f32[64,8], h: bf16[5,4,6], k: bf16[5,6,7]) -> f32[] {
  %a = bf16[16,32]{1,0} parameter(0)
  %w.1 = bf16[8,8]{1,0} parameter(1)
  %g = f32[64,8]{1,0} parameter(2)
  %h = bf16[5,4,6]{2,1,0} parameter(3)
  %k = bf16[5,6,7]{2,1,0} parameter(4)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[16,32]{1,0}, bf16[8,8]{1,0}) tuple(%zero, %a, %w.1)
  %while.1 = (s32[], bf16[16,32]{1,0}, bf16[8,8]{1,0}) while(%start), condition=%condition, \
body=%body, metadata={op_name="jit(step)/while"}, backend_config={"known_trip_count":{"n":"3"}}
  %while.2 = (s32[], bf16[16,32]{1,0}, bf16[8,8]{1,0}) while(%while.1), condition=%condition, \
body=%body, metadata={op_name="jit(step)/while.2"}
  %scores = (bf16[5,4,7]{2,1,0}, s8[33554432]{0}) custom-call(%h, %k), LT, BATCHED
  %async-start.1 = ((f32[64,8]{1,0}), f32[16,8]{1,0}) async-start(%g), calls=%async_scatter
  %async-done.1 = f32[16,8]{1,0} async-done(%async-start.1)
  %call.1 = f32[16,8]{1,0} call(%async-done.1), to_apply=%command_buffer
  ROOT %cond = f32[16,8]{1,0} conditional(%p, %call.1, %call.1), true_computation=%short, \
false_computation=%long
}
"""
for name in ("FSDP", "LT", "BATCHED", "DIMS"):
    TEXT = TEXT.replace(f", {name}", f", {globals()[name]}")
TEXT = TEXT.replace("calls=%fused_less", "calls=%fused_add")


def test_what_is_counted_is_what_is_run():
    """Products of libraries and fusions by trip; asynchronous and combined collectives once."""
    counted = count_operations(TEXT, AXES)
    product = 2 * 16 * 8 * 32
    scores = 2 * 5 * 4 * 7 * 6
    assert counted.flops == (3 + 1) * 2 * product + scores

    gather, reduce, scatter = (
        Collective(kind, ("fsdp",), False)
        for kind in ("all-gather", "all-reduce", "reduce-scatter")
    )
    assert counted.sent == {
        gather: 4 * (32 * 8 + 16) * 2 * 3 / 4,
        reduce: 4 * 16 * 8 * 4 * 2 * 3 / 4,
        scatter: 16 * 8 * 4 * 3,
    }
    assert counted.arrays == {gather: 4 * 2, reduce: 4, scatter: 1}
    assert all(sent.leaves_node for sent in count_operations(TEXT, AXES, per_node=2).sent)
    assert not any(sent.leaves_node for sent in count_operations(TEXT, AXES, per_node=4).sent)

    body = 5  # kernels: a gather, two products, a sum over devices, a copy
    entry = 1 + 1 + 2  # scores, a scatter, two in the command buffer
    assert counted.fewest == 4 * body + 1 + entry  # one question after the loop of unknown length
    assert counted.kernels == counted.fewest + 1  # the other branch copies

    known, unknown = list_loops(TEXT, AXES)
    assert (known.source, known.depth, known.trips) == ("jit(step)/while", 0, 3)
    assert (known.once.kernels, unknown.trips) == (body, None)


def test_kernels_read_operands_and_write_results_once():
    words, whole, product = 16 * 32 * 2, 32 * 8 * 2, 16 * 8 * 4
    gather = 8 * 8 * 2 + whole + 16 * 2
    multiply = words + whole + product  # without cuBLAS's workspace
    body = gather + 2 * multiply + 2 * product + 2 * words
    scatter = 64 * 8 * 4 + product
    scores = (5 * 4 * 6 + 5 * 6 * 7 + 5 * 4 * 7) * 2
    fused = 2 * product
    asked, branch = fused, 2 * product
    entry = scatter + scores + 2 * fused + asked + branch
    assert count_operations(TEXT, AXES).moved == 4 * body + entry


def test_a_branch_in_a_loop_is_costly_once_and_cheap_in_other_iterations():
    loop = """%turn (v: f32[16,8]) -> f32[16,8] {
  %v = f32[16,8]{1,0} parameter(0)
  %first = pred[] compare(%v, %v)
  ROOT %c = f32[16,8]{1,0} conditional(%first, %v, %v), true_computation=%short, \
false_computation=%long
}

"""
    while_ = "  %turns = f32[16,8]{1,0} while(%call.1), condition=%condition, body=%turn, "
    known = 'backend_config={"known_trip_count":{"n":"4"}}\n  ROOT %cond'
    text = TEXT.replace("ENTRY", loop + "ENTRY").replace("  ROOT %cond", while_ + known)
    counted, before = count_operations(text, AXES), count_operations(TEXT, AXES)
    assert counted.kernels - before.kernels == 4 + 1  # comparisons, and one copy
    assert counted.fewest - before.fewest == 4


def test_rounds_of_experts_after_the_first_are_not_counted_and_their_kernels_are():
    kernel = (
        'custom_call_target="__gpu$xla.gpu.triton", '
        'metadata={op_name="jit(step)/transpose(jvp(vmap(multiply_groups)))/pallas_call"}'
    )
    further = 'metadata={op_name="jit(step)/further_rounds/while"}'
    text = f"""
%turn (x: bf16[32,8]) -> bf16[32,8] {{
  %x = bf16[32,8]{{1,0}} parameter(0)
  ROOT %more = bf16[32,8]{{1,0}} add(%x, %x)
}}

%needed (y: bf16[32,8]) -> pred[] {{
  %y = bf16[32,8]{{1,0}} parameter(0)
  ROOT %less = pred[] compare(%y, %y)
}}

ENTRY %main (a: bf16[32,16], b: bf16[4,16,8], i: s32[5]) -> bf16[32,8] {{
  %a = bf16[32,16]{{1,0}} parameter(0)
  %b = bf16[4,16,8]{{2,1,0}} parameter(1)
  %i = s32[5]{{0}} parameter(2)
  %g = bf16[32,8]{{1,0}} custom-call(%a, %b, %i), {kernel}
  ROOT %w = bf16[32,8]{{1,0}} while(%g), condition=%needed, body=%turn, {further}
}}
"""
    counted = count_operations(text, {"data": 1})
    assert counted.flops == 2 * 32 * 16 * 8
    assert counted.kernels == 2  # the product, and the question whether there is another round
    assert counted.moved == 2 * (32 * 16 + 4 * 16 * 8 + 32 * 8) + 4 * 5 + (2 * 2 * 32 * 8 + 1)


def test_attention_over_pages_reads_those_of_its_table_and_multiplies_by_them():
    """Three sequences of two pages; of the pool's seven pages no others are read."""
    kernel = (
        'custom_call_target="__gpu$xla.gpu.triton", '
        'metadata={op_name="jit(run)/while/body/attention/attend_pages/pallas_call"}'
    )
    text = f"""
ENTRY %main (q: bf16[3,4,2,32], t: s32[3,2], e: s32[3], k: bf16[7,4,32,16], v: bf16[7,4,16,8]) -> (f32[3,4,5,2,8], f32[3,4,5,2]) {{
  %q = bf16[3,4,2,32]{{3,2,1,0}} parameter(0)
  %t = s32[3,2]{{1,0}} parameter(1)
  %e = s32[3]{{0}} parameter(2)
  %k = bf16[7,4,32,16]{{3,2,1,0}} parameter(3)
  %v = bf16[7,4,16,8]{{3,2,1,0}} parameter(4)
  ROOT %a = (f32[3,4,5,2,8]{{4,3,2,1,0}}, f32[3,4,5,2]{{3,2,1,0}}) custom-call(%q, %t, %e, %e, %k, /*index=5*/%v), {kernel}
}}
"""  # noqa: E501
    counted = count_operations(text, {"data": 1})
    assert counted.flops == 2 * 3 * 8 * (2 * 16) * (32 + 8)
    pages = 2 * 3 * 2 * (4 * 16 * (32 + 8))
    results = 4 * 3 * 4 * 5 * 2 * (8 + 1)
    assert counted.moved == 2 * 3 * 8 * 32 + 4 * (6 + 3 + 3) + pages + results
    assert counted.kernels == 1
