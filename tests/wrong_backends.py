"""Backends that are wrong on purpose, each in one way in which real ones were, and the check that must notice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from attnreg import NATIVE, AttentionCall, Backend, Capabilities, Feature, Reason
from attnreg.kernels.reference import reference, run_reference
from attnreg.visibility import alibi_bias, cleaned, real_keys, real_queries, slots, visible

INFINITY = float("inf")


class Wrong(NamedTuple):
    """A wrong backend and the check of the ci profile that catches it."""

    backend: Backend
    caught_by: str


WRONG: dict[str, Wrong] = {}


def wrong(caught_by: str, *, but: tuple[Feature, ...] = (), rules: tuple = ()) -> Callable:
    """Makes a backend of a run function. It claims what the reference does, but for `but`."""

    def made(run: Callable[[AttentionCall], object]) -> Callable:
        features = {f: NATIVE for f in reference.claims.features if f not in but}
        claims = Capabilities(features=features, dtypes=reference.claims.dtypes, rules=rules)
        name = run.__name__
        WRONG[name] = Wrong(Backend(name=name, run=run, capabilities=claims, layout="bhsd"), caught_by)
        return run

    return made


def formula(call, *, scores_of=None, weights_of=None, clean=True, scale=None):
    """The formula again, with places to go wrong: `scores_of(call, raw, bias)` and `weights_of(weights)`."""
    query, key, value = (t.double() for t in (call.query, call.key, call.value))
    queries = real_queries(call)
    if clean:
        query, key, value = cleaned(query, key, value, queries, real_keys(call))
    group = call.query_heads // call.key_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    raw = (call.scale if scale is None else scale) * (query @ key.transpose(-1, -2))
    bias = 0.0 if call.bias is None else call.bias.double()
    if call.alibi_slopes is not None:
        bias = bias + alibi_bias(call, torch.float64)
    capped = raw if call.softcap is None else call.softcap * torch.tanh(raw / call.softcap)
    scores = capped + bias if scores_of is None else scores_of(call, raw, bias)
    if (seen := visible(call)) is not None:
        scores = scores.masked_fill(~seen, -INFINITY)
    column = scores.new_full((*scores.shape[:3], 1), -INFINITY)
    if call.sinks is not None:
        column = call.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    both = torch.cat([scores, column], -1)
    empty = (both == -INFINITY).all(-1, keepdim=True)
    weights = torch.softmax(both.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)[..., :-1]
    weights = weights if weights_of is None else weights_of(weights)
    weights = torch.nn.functional.dropout(weights, call.dropout_p)
    lse = torch.logsumexp(both.masked_fill(empty, 0.0), -1).masked_fill(empty[..., 0], -INFINITY)
    output = weights @ value
    if queries is not None:
        output = output.masked_fill(~queries[:, None, :, None], 0.0)
        lse = lse.masked_fill(~queries[:, None], -INFINITY)
    return finished(call, output, lse)


def finished(call, output, lse):
    output = output.to(call.query.dtype)
    return (output, lse.to(torch.promote_types(call.query.dtype, torch.float32))) if call.return_lse else output


def parts(call):
    """Output and lse of the reference, lse or not."""
    return run_reference(call.replaced(return_lse=True))


def both(call, output, lse):
    return (output, lse) if call.return_lse else output


def empty_rows(call):
    """(B, Hq, Sq) bool: nothing is seen, by masks or bias."""
    seen = torch.ones(call.batch, call.query_heads, call.query_length, call.key_length, dtype=torch.bool)
    seen = seen if (allowed := visible(call)) is None else seen & allowed
    return ~(seen if call.bias is None else seen & (call.bias != -INFINITY)).any(-1)


# ---------------------------------------------------------------------- what a row sees


@wrong("equals_reference[mask]")
def mask_ignored(call):
    return run_reference(call.replaced(mask=None))


@wrong("equals_reference[mask]")
def mask_polarity(call):
    return run_reference(call if call.mask is None else call.replaced(mask=~call.mask))


@wrong("equals_reference[mask]")
def mask_of_first_head(call):
    return run_reference(call if call.mask is None else call.replaced(mask=call.mask[:, :1]))


@wrong("equals_reference[key_mask]")
def key_mask_ignored(call):
    return run_reference(call.replaced(key_mask=None))


@wrong("equals_reference[query_mask]")
def query_mask_ignored(call):
    return run_reference(call.replaced(query_mask=None))


@wrong("equals_reference[causal]")
def causal_dropped(call):
    return run_reference(call.replaced(causal=False))


@wrong("equals_reference[unequal_lengths]")
def top_left_alignment(call):
    if not call.causal or call.spec.packed:
        return run_reference(call)
    i, j = torch.arange(call.query_length)[:, None], torch.arange(call.key_length)
    mask = (j <= i)[None, None]
    return run_reference(call.replaced(causal=False, mask=mask if call.mask is None else mask & call.mask))


@wrong("equals_reference[window]")
def window_off_by_one(call):
    left, right = call.window or (None, None)
    # The libraries that count the query's own slot.
    return run_reference(call.replaced(window=call.window and (left if not left else left - 1, right)))


@wrong("equals_reference[window]")
def window_right_side_dropped(call):
    return run_reference(call.replaced(window=call.window and (call.window[0], None)))


@wrong("equals_reference[key_lengths]")
def key_lengths_ignored_for_diagonal(call):
    if call.key_lengths is None:
        return run_reference(call)
    real = torch.arange(call.key_length)[None] < call.key_lengths[:, None]
    return run_reference(call.replaced(key_lengths=None, key_mask=real if call.key_mask is None else real & call.key_mask))


@wrong("equals_reference[query_lengths]")
def query_lengths_ignored_for_diagonal(call):
    if call.query_lengths is None:
        return run_reference(call)
    real = torch.arange(call.query_length)[None] < call.query_lengths[:, None]
    return run_reference(call.replaced(query_lengths=None, query_mask=real if call.query_mask is None else real & call.query_mask))


@wrong("equals_reference[key_starts]")
def key_starts_move_the_diagonal(call):
    if call.key_starts is None or not call.causal:
        return run_reference(call)
    p = slots(call)[:, :, None] + call.key_starts[:, None, None]
    mask = (torch.arange(call.key_length) <= p)[:, None]
    return run_reference(call.replaced(causal=False, mask=mask if call.mask is None else mask & call.mask))


@wrong("equals_reference[packed]")
def segments_leak(call):
    if call.cu_seqlens is None:
        return run_reference(call)
    # All segments but the last become one.
    cu = tuple(torch.cat([c[:1], c[-1:]]) if c.shape[0] > 1 else c for c in call.cu_seqlens)
    return run_reference(call.replaced(cu_seqlens=cu))


@wrong("equals_reference[packed]")
def packed_tail_not_zeroed(call):
    output, lse = parts(call)
    if call.cu_seqlens is not None:
        tail = torch.arange(call.query_length) >= call.cu_seqlens[0][-1]
        output = torch.where(tail[None, None, :, None], call.value.mean().to(output), output)
    return both(call, output, lse)


# ---------------------------------------------------------------------- scores


@wrong("equals_reference")
def scale_one_percent_off(call):
    return run_reference(call.replaced(scale=call.scale * 1.01))


@wrong("equals_reference")
def default_scale_of_padded_head_dim(call):
    padded = math.ceil(call.head_dim / 8) * 8
    return run_reference(call if call.spec.scale else call.replaced(scale=1 / math.sqrt(padded)))


@wrong("equals_reference[softcap]")
def softcap_after_bias(call):
    capped = lambda call, raw, bias: raw + bias if call.softcap is None else call.softcap * torch.tanh((raw + bias) / call.softcap)
    return formula(call, scores_of=capped)


@wrong("equals_reference[softcap]")
def softcap_on_unscaled_scores(call):
    def scores(call, raw, bias):
        return raw + bias if call.softcap is None else call.scale * call.softcap * torch.tanh(raw / call.scale / call.softcap) + bias

    return formula(call, scores_of=scores)


@wrong("equals_reference[alibi]")
def alibi_from_the_query_index(call):
    if call.alibi_slopes is None:
        return run_reference(call)
    distance = (torch.arange(call.query_length)[:, None] - torch.arange(call.key_length)).abs()
    slopes = call.alibi_slopes if call.alibi_slopes.dim() == 2 else call.alibi_slopes[None]
    added = -slopes.double()[:, :, None, None] * distance
    return run_reference(call.replaced(alibi_slopes=None, bias=added if call.bias is None else added + call.bias))


@wrong("equals_reference[alibi]")
def alibi_of_first_row(call):
    two = call.alibi_slopes is not None and call.alibi_slopes.dim() == 2
    return run_reference(call.replaced(alibi_slopes=call.alibi_slopes[0]) if two else call)


@wrong("equals_reference[bias]")
def bias_dropped_beside_mask(call):
    return run_reference(call if call.mask is None else call.replaced(bias=None))


@wrong("equals_reference[bias]")
def bias_scaled(call):
    return formula(call, scores_of=lambda call, raw, bias: raw + call.scale * bias)


@wrong("equals_reference")
def float16_softmax(call):
    return formula(call, weights_of=lambda weights: weights.half().double())


# ---------------------------------------------------------------------- heads, rows, memory


@wrong("equals_reference[grouped_heads]")
def interleaved_heads(call):
    group = call.query_heads // call.key_heads
    return run_reference(call.replaced(key=call.key.repeat(1, group, 1, 1), value=call.value.repeat(1, group, 1, 1)))


@wrong("equals_reference[grouped_heads]")
def only_first_key_head(call):
    return run_reference(call.replaced(key=call.key[:, :1], value=call.value[:, :1]))


@wrong("equals_reference")
def strides_ignored(call):
    query = call.query
    whole = query.storage_offset() == 0 and query.untyped_storage().nbytes() >= query.numel() * query.element_size()
    dense = torch.empty(query.shape).stride()
    return run_reference(call.replaced(query=query.as_strided(query.shape, dense)) if whole else call)


@wrong("equals_reference")
def input_changed_in_place(call):
    with torch.no_grad():
        call.query.mul_(call.scale)
    return run_reference(call.replaced(scale=1.0))


@wrong("equals_reference")
def output_in_float32(call):
    output, lse = parts(call)
    return both(call, output.float(), lse)


@wrong("rows_permute")
def padding_of_first_row(call):
    return run_reference(call if call.key_mask is None else call.replaced(key_mask=call.key_mask[:1].expand_as(call.key_mask)))


# ---------------------------------------------------------------------- empty rows, sinks, lse


@wrong("empty_rows_are_zero")
def nan_on_empty_rows(call):
    output, lse = parts(call)
    return both(call, output.masked_fill(empty_rows(call)[..., None], float("nan")), lse)


@wrong("empty_rows_are_zero")
def mean_over_empty_rows(call):
    output, lse = parts(call)
    mean = call.value.nan_to_num().mean(2, keepdim=True).repeat_interleave(call.query_heads // call.key_heads, 1)
    return both(call, torch.where(empty_rows(call)[..., None], mean.to(output), output), lse)


@wrong("empty_rows_are_zero")
def empty_rows_left_unwritten(call):
    output, lse = parts(call)
    written = torch.empty_like(output.detach())
    seeing = ~empty_rows(call)
    written[seeing] = output.detach()[seeing]
    return both(call, output + (written - output).detach(), lse)


@wrong("equals_reference[sinks]")
def sink_added_to_output(call):
    output, lse = parts(call)
    return both(call, output if call.sinks is None else output + call.sinks.to(output)[:, None, None], lse)


@wrong("equals_reference[sinks]")
def sink_ignored(call):
    return run_reference(call.replaced(sinks=None))


@wrong("equals_reference[lse]")
def lse_in_base_two(call):
    output, lse = parts(call)
    return both(call, output, lse / math.log(2))


@wrong("empty_rows_are_zero")
def lse_of_empty_rows_is_zero(call):
    output, lse = parts(call)
    return both(call, output, lse.masked_fill(lse == -INFINITY, 0.0))


@wrong("equals_reference[lse]")
def lse_without_the_sink(call):
    output, _ = parts(call)
    return both(call, output, parts(call.replaced(sinks=None))[1])


# ---------------------------------------------------------------------- leaks


@wrong("poison_does_not_leak[key_mask]")
def leak_from_padding(call):
    return formula(call, clean=False)


@wrong("hidden_changes_nothing")
def leak_from_hidden_slots(call):
    output, lse = parts(call)
    return both(call, output + 1e-7 * call.value.nan_to_num().amax((1, 2, 3))[:, None, None, None].detach(), lse)


class _SlightLeak(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, real):
        ctx.save_for_backward(real)
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        (real,) = ctx.saved_tensors
        return gradient + 1e-3 * (~real), None


@wrong("hidden_changes_nothing")
def gradient_to_padding(call):
    keys = real_keys(call)
    if keys is None:
        return run_reference(call)
    return run_reference(call.replaced(value=_SlightLeak.apply(call.value, keys[:, None, :, None].expand(call.value.shape))))


# ---------------------------------------------------------------------- gradients


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


@wrong("equals_reference[backward]")
def gradient_of_key_one_percent_off(call):
    return run_reference(call.replaced(key=_Doubled.apply(call.key)))


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        # As kernels whose backward runs outside autograd.
        return gradient.detach()


@wrong("second_derivative")
def gradient_is_a_constant(call):
    return run_reference(call.replaced(query=_Constant.apply(call.query)))


@wrong("equals_reference[bias_gradient]")
def bias_gets_no_gradient(call):
    return run_reference(call if call.bias is None else call.replaced(bias=call.bias.detach()))


class _Unwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, bias, hidden):
        ctx.save_for_backward(hidden)
        return bias.clone()

    @staticmethod
    def backward(ctx, gradient):
        (hidden,) = ctx.saved_tensors
        written = torch.empty_like(gradient)
        written[~hidden] = gradient[~hidden]
        return written, None


@wrong("equals_reference[bias_gradient]")
def bias_gradient_of_hidden_slots_left_unwritten(call):
    if call.bias is None or not call.causal or not call.query_length * call.key_length:
        return run_reference(call)
    bias = call.bias.expand(call.batch, call.query_heads, call.query_length, call.key_length)
    return run_reference(call.replaced(bias=_Unwritten.apply(bias, ~visible(call).expand(bias.shape))))


@wrong("equals_reference[sinks_gradient]")
def sinks_get_no_gradient(call):
    return run_reference(call if call.sinks is None else call.replaced(sinks=call.sinks.detach()))


@wrong("equals_reference[alibi_gradient]")
def slopes_get_no_gradient(call):
    return run_reference(call if call.alibi_slopes is None else call.replaced(alibi_slopes=call.alibi_slopes.detach()))


@wrong("lse_is_detached", but=(Feature.LSE_GRADIENT,))
def lse_gradient_unclaimed_but_wrongly_kept(call):
    output, lse = parts(call)
    return both(call, output, _Kept.apply(lse, call.query))


class _Kept(torch.Tensor):
    """A tensor that can't be detached: what a wrapper type of a kernel library might do."""

    @staticmethod
    def apply(lse, query):
        kept = lse.detach().as_subclass(_Kept)
        return kept.requires_grad_(True)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.detach:
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


# ---------------------------------------------------------------------- modes


@wrong("same_bits_twice")
def nondeterministic(call):
    output, lse = parts(call)
    return both(call, output * (1 + 1e-6 * torch.rand(())).to(output), lse)


@wrong("dropout")
def dropout_not_scaled(call):
    output, lse = parts(call)
    return both(call, output * (1 - call.dropout_p), lse)


@wrong("dropout")
def dropout_rate_off(call):
    return run_reference(call.replaced(dropout_p=call.dropout_p * 0.9))


@wrong("dropout")
def dropout_ignored(call):
    return run_reference(call.replaced(dropout_p=0.0))


@wrong("dropout")
def dropout_the_same_in_every_row(call):
    p = call.dropout_p
    if p == 0:
        return run_reference(call)
    return formula(call.replaced(dropout_p=0.0), weights_of=lambda w: w * (torch.rand(w.shape[-1]) >= p) / (1 - p))


@wrong("dropout")
def dropout_changes_lse(call):
    output, lse = parts(call)
    return both(call, output, lse if call.dropout_p == 0 else lse + math.log(1 - call.dropout_p))


@wrong("compiles")
def breaks_the_graph(call):
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
    return run_reference(call)


@wrong("public_call")
def remembers_the_first_call(call):
    if not call.spec.gradients and not call.return_lse:
        key = (call.query.shape, call.key.shape, call.spec)
        return _first.setdefault(key, run_reference(call))
    return run_reference(call)


_first: dict = {}


# ---------------------------------------------------------------------- claims


@wrong("equals_reference[window]", rules=(lambda spec: Reason("window", "yes", "no") if spec.window else None,))
def claims_a_window_and_refuses_every_one(call):
    return run_reference(call)


@wrong("equals_reference[sinks]")
def claims_sinks_and_raises(call):
    if call.sinks is not None:
        raise NotImplementedError("sinks")
    return run_reference(call)


@wrong("refuses[window]", but=(Feature.WINDOW,))
def unclaimed_window_runs(call):
    return run_reference(call)


# A backend that overrides what decides: without its own reasons, an unclaimed feature would run.
class _Eager(Capabilities):
    def reasons_against(self, spec):
        return ()


_claims = WRONG["unclaimed_window_runs"].backend.claims
WRONG["unclaimed_window_runs"] = Wrong(
    Backend(
        name="unclaimed_window_runs",
        run=run_reference,
        capabilities=_Eager(features=_claims.features, dtypes=_claims.dtypes),
        layout="bhsd",
    ),
    "refuses[window]",
)


def _batch_dependent(call):
    output, lse = parts(call)
    return both(call, output * (1 + 1e-6 * call.batch), lse)


WRONG["claims_batch_invariance_and_depends_on_the_batch"] = Wrong(
    Backend(
        name="batch_dependent",
        run=_batch_dependent,
        capabilities=Capabilities(features={**reference.claims.features, Feature.BATCH_INVARIANT: NATIVE}, dtypes=reference.claims.dtypes),
        layout="bhsd",
    ),
    "batch_invariant",
)


# ---------------------------------------------------------------------- pages


def pages_of_four(spec):
    if spec.page_size % 4:
        return Reason("paged", f"pages of {spec.page_size} slots", "pages of a multiple of 4 slots")
    if spec.page_size and spec.gradients:
        return Reason("paged", "with gradients", "inference")
    return None


def paged_backend(name, places):
    """Reads pages itself: `places(call, slots)` are the page and the place in it, (B, Sk) each, of the slots (Sk,) of every row."""

    def run(call):
        if call.pages is None:
            return run_reference(call)
        pages = call.pages
        page, place = places(call, torch.arange(call.key_length))
        key, value = (pool[page, place].transpose(1, 2) for pool in (pages.keys, pages.values))
        return run_reference(call.replaced(key=key, value=value, pages=None))

    asked = (Feature.CAUSAL, Feature.UNEQUAL_LENGTHS, Feature.WINDOW, Feature.KEY_LENGTHS, Feature.PAGED, Feature.SOFTCAP, Feature.LSE)
    more = (Feature.SCALE, Feature.GROUPED_HEADS, Feature.VALUE_DIM, Feature.BACKWARD)
    claims = Capabilities(features=dict.fromkeys(asked + more, NATIVE), rules=(pages_of_four,))
    return Backend(name=name, run=run, capabilities=claims, layout="bhsd")


def by_table(call, slots, size=None):
    size = call.pages.keys.shape[1] if size is None else size
    return call.pages.block_table[:, slots // size].long(), (slots % size).expand(call.batch, -1)


def _table_ignored(call, slots):
    # Row after row, as in a cache that was filled once.
    size = call.pages.keys.shape[1]
    width = call.pages.block_table.shape[1]
    return (1 + width * torch.arange(call.batch)[:, None] + slots // size) % call.pages.keys.shape[0], (slots % size).expand(call.batch, -1)


def _table_without_strides(call, slots):
    table = call.pages.block_table
    dense = table.as_strided(table.shape, (table.shape[1], 1))
    return by_table(call.replaced(pages=call.pages._replace(block_table=dense)), slots)


def _sizes_of_four(call, slots):
    page, place = by_table(call, slots.clamp(max=4 * call.pages.block_table.shape[1] - 1), 4)
    return page, place


def _one_length_for_all(run):
    def wrong(call):
        longest = None if call.key_lengths is None else call.key_lengths.amax().expand(call.batch)
        return run(call if call.pages is None else call.replaced(key_lengths=longest))

    return wrong


def _whole_pages(run):
    def wrong(call):
        if call.pages is None or call.key_lengths is None:
            return run(call)
        size = call.pages.keys.shape[1]
        moved = ((call.key_lengths + size - 1) // size * size).clamp(max=call.key_length)
        return run(call.replaced(key_lengths=moved))

    return wrong


def _changing_pages(run):
    def wrong(call):
        if call.pages is not None:
            call.pages.keys[0] += 1.0
        return run(call)

    return wrong


paged = paged_backend("paged", by_table)
"""The right one."""

for _backend in (
    paged_backend("table_ignored", _table_ignored),
    paged_backend("table_without_strides", _table_without_strides),
    paged_backend("page_size_misread", _sizes_of_four),
    dataclasses.replace(paged, name="reads_past_the_length", run=_whole_pages(paged.run)),
    dataclasses.replace(paged, name="length_of_longest_row", run=_one_length_for_all(paged.run)),
    dataclasses.replace(paged, name="writes_into_the_pages", run=_changing_pages(paged.run)),
):
    WRONG[_backend.name] = Wrong(_backend, "equals_reference[paged]")
