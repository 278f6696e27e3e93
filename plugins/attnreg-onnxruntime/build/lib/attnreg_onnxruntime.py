"""ONNX Runtime's `Attention` operator, opset 24, on the CPU.

Its causality is aligned to the first key, unless `nonpad_kv_seqlen` is given, which aligns each row to its own last key (from 1.28).
Order of terms: scale, softcap, mask or bias, softmax. A row that sees nothing gives zeros (from 1.28). A mask must be full in its last
two dimensions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attnreg import EMULATED, NATIVE, AttentionCall, AttentionSpec, Backend, Capabilities, Feature, Reason, hookimpl, needs
from attnreg.visibility import added, cleaned, real_keys, real_queries, visible

NEGATIVE_INFINITY = float("-inf")
OPSET, FILE_FORMAT = 24, 10


class Model(NamedTuple):
    """What a session is made for; sizes of tensors are free."""

    dtype: torch.dtype
    mask: torch.dtype | None
    lengths: bool
    causal: bool
    scale: float
    softcap: float
    flat: tuple[int, int, int, int] | None
    """Query and key heads, head and value dim, of (B, S, H*D) tensors; None for (B, H, S, D), where they are free."""
    threads: int


_sessions: dict[Model, Any] = {}


def run_onnxruntime(call: AttentionCall) -> torch.Tensor:
    """Runs the operator on the memory of the call's tensors; anything that is not contiguous in either layout is copied first."""
    query, key, value = (t.detach() for t in (call.query, call.key, call.value))
    queries = real_queries(call) if call.spec.padded else None
    if call.spec.padded and not call.finite_padding:
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        query, key, value = (t.transpose(1, 2) for t in cleaned(*heads_first, queries, real_keys(call)))
    mask, lengths, causal = _mask(call)
    flat = None
    if all(t.transpose(1, 2).is_contiguous() for t in (query, key, value)):
        inputs = [t.transpose(1, 2) for t in (query, key, value)]
        output = query.new_empty(call.batch, call.query_heads, call.query_length, call.value_dim)
    else:
        flat = (call.query_heads, call.key_heads, call.head_dim, call.value_dim)
        inputs = [t.contiguous().flatten(2) for t in (query, key, value)]
        output = query.new_empty(call.batch, call.query_length, call.query_heads * call.value_dim)
    model = Model(
        query.dtype, None if mask is None else mask.dtype, lengths is not None, causal, call.scale, call.softcap or 0.0, flat,
        torch.get_num_threads(),
    )  # fmt: skip
    named = dict(zip(("query", "key", "value"), inputs))
    named |= {} if mask is None else {"mask": mask}
    named |= {} if lengths is None else {"lengths": lengths}
    _run(model, named, output)
    output = output.transpose(1, 2) if flat is None else output.unflatten(2, (call.query_heads, call.value_dim))
    return output if queries is None else output.masked_fill_(~queries[:, :, None, None], 0.0)


def _mask(call: AttentionCall) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """The operator's mask (bool, or floating where something is added), its `nonpad_kv_seqlen`, and its `is_causal`."""
    lengths = None
    causal = call.causal and call.window is None and call.cu_seqlens is None and call.query_lengths is None
    rest = call
    if causal or not (call.causal or call.window is not None):
        if call.key_lengths is not None:
            lengths = call.key_lengths.to(torch.int64)
        elif causal and call.query_length != call.key_length:
            lengths = torch.full((call.batch,), call.key_length, dtype=torch.int64)
        rest = call.replaced(causal=False, key_lengths=None)
    seen = visible(rest)
    mask = added(call, call.query.dtype)
    lowest = torch.finfo(call.query.dtype).min
    if mask is not None and bool((mask == lowest).any()):
        # To the operator the lowest number hides a slot, to a caller it is a number: half of it swallows a score as well.
        mask = mask.masked_fill(mask == lowest, lowest / 2)
    if mask is None:
        mask = seen
    elif seen is not None:
        mask = torch.where(seen, mask, NEGATIVE_INFINITY)
    if mask is not None:
        mask = mask.detach().expand(*mask.shape[:2], call.query_length, call.key_length).contiguous()
    return mask, lengths, causal


def _run(model: Model, inputs: dict[str, torch.Tensor], output: torch.Tensor) -> None:
    session, types = _session(model)
    binding = session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_input(name, "cpu", 0, types[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    binding.bind_output("output", "cpu", 0, types[output.dtype], tuple(output.shape), output.data_ptr())
    session.run_with_iobinding(binding)


def _session(model: Model) -> Any:
    known = _sessions.get(model)
    if known is None:
        import numpy as np
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = model.threads
        session = onnxruntime.InferenceSession(_serialized(model), options, providers=["CPUExecutionProvider"])
        types = {torch.float32: np.float32, torch.float16: np.float16, torch.bool: np.bool_, torch.int64: np.int64}
        known = _sessions[model] = (session, types)
    return known


def _serialized(model: Model) -> bytes:
    """The ONNX model of one node, in memory."""
    from onnx import TensorProto, helper

    types = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bool: TensorProto.BOOL}
    names = ["query", "key", "value"]
    sizes = [[None] * 4] * 4
    if model.flat is not None:
        query_heads, key_heads, head_dim, value_dim = model.flat
        # ONNX infers the output's last size from these, and takes an unknown one for 0.
        sizes = [[None, None, n] for n in (query_heads * head_dim, key_heads * head_dim, key_heads * value_dim, query_heads * value_dim)]
    described = [helper.make_tensor_value_info(name, types[model.dtype], size) for name, size in zip(names, sizes)]
    if model.mask is not None:
        described.append(helper.make_tensor_value_info("mask", types[model.mask], [None] * 4))
    if model.lengths:
        described.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, [None]))
        names += ["mask" if model.mask is not None else "", "", "", "lengths"]
    elif model.mask is not None:
        names.append("mask")
    attributes = {"is_causal": int(model.causal), "scale": model.scale, "softcap": model.softcap}
    if model.flat is not None:
        attributes |= {"q_num_heads": query_heads, "kv_num_heads": key_heads}
    node = helper.make_node("Attention", names, ["output"], **attributes)
    output = helper.make_tensor_value_info("output", types[model.dtype], sizes[3])
    graph = helper.make_graph([node], "attention", described, [output])
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=FILE_FORMAT).SerializeToString()


# ---------------------------------------------------------------------- the claims


def _same_dtype_of_bias(spec: AttentionSpec) -> Reason | None:
    """A wider bias would be rounded, and finfo.min of float32 would become -inf, which hides a slot."""
    if spec.bias is not None and spec.bias_dtype != spec.dtype:
        return Reason(Feature.BIAS.value, f"{spec.bias_dtype} with {spec.dtype}", "a bias of the query's dtype", "convert the bias")
    return None


def _alibi_in_float32(spec: AttentionSpec) -> Reason | None:
    if spec.alibi is not None and spec.dtype != torch.float32:
        return Reason(Feature.ALIBI.value, str(spec.dtype), "float32", "distances would be rounded to the dtype of the query")
    return None


def _notes(spec: AttentionSpec) -> list[str]:
    notes = ["ONNX Runtime's Attention, opset 24; tensors that are contiguous in neither layout are copied"]
    if spec.padded and not spec.finite_padding:
        notes.append("cleans padding in copies of query, key and value; finite_padding=True spares them")
    return notes


_WHOLE_MASK = EMULATED("a (B or 1, Hq or 1, Sq, Sk) mask")


def _unequal(spec: AttentionSpec):
    return _WHOLE_MASK if spec.window is not None or spec.alibi is not None or spec.query_lengths or spec.packed else NATIVE


onnxruntime = Backend(
    name="onnxruntime",
    run=run_onnxruntime,
    capabilities=Capabilities(
        features={
            Feature.CAUSAL: NATIVE,
            Feature.UNEQUAL_LENGTHS: _unequal,
            Feature.WINDOW: _WHOLE_MASK,
            Feature.QUERY_MASK: NATIVE,
            Feature.KEY_MASK: _WHOLE_MASK,
            Feature.MASK: NATIVE,
            Feature.BIAS: NATIVE,
            Feature.KEY_LENGTHS: NATIVE,
            Feature.QUERY_LENGTHS: lambda spec: _WHOLE_MASK if spec.causal or spec.window is not None else NATIVE,
            Feature.KEY_STARTS: _WHOLE_MASK,
            Feature.PACKED: _WHOLE_MASK,
            Feature.ALIBI: EMULATED("a (B or 1, Hq, Sq, Sk) bias"),
            Feature.SOFTCAP: NATIVE,
            Feature.SCALE: NATIVE,
            Feature.GROUPED_HEADS: NATIVE,
            Feature.VALUE_DIM: NATIVE,
            Feature.DETERMINISTIC: NATIVE,
        },
        devices=("cpu",),
        dtypes=(torch.float32, torch.float16),
        rules=(_same_dtype_of_bias, _alibi_in_float32),
    ),
    priority=10,
    missing=needs("onnxruntime>=1.28 | onnxruntime-gpu>=1.28", "onnx>=1.19", remedy="pip install attnreg-onnxruntime[onnxruntime]"),
    notes=_notes,
)


@hookimpl
def attnreg_backends() -> list[Backend]:
    return [onnxruntime]
