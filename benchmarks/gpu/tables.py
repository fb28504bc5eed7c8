"""The tables of `benchmarks.gpu`, from the rows that its jobs have written."""

import json
from collections.abc import Callable, Sequence

from benchmarks.gpu.jobs import ENGINES, Row
from benchmarks.gpu.shapes import Peak, lengths_of, peak_of
from benchmarks.gpu.specs import scored_flops, spec_of
from benchmarks.tables import markdown_table
from jaxrl_llm.models.flops import active_parameters, causal_pairs, update_flops
from jaxrl_llm.models.spec import ModelSpec


def _gb(row: Row) -> str:
    return f"{row['peak_bytes'] / 1e9:.1f}" if row.get("peak_bytes") else "-"


def _share(part: float, peak: float | None) -> str:
    return f"{100 * part / peak:.1f} %" if peak else "-"


def update_table(rows: Sequence[Row], peak: Peak | None) -> str:
    """Return the updates, by micro-batch and lengths."""
    lines = []
    for row in rows:
        case = row["case"]
        lengths = lengths_of(case)
        labels = [f"{case['micro']}", f"{case['lengths']}, mean {sum(lengths) / len(lengths):.0f}"]
        if row["system"] == "torch":
            weights = "float32 masters" if case["masters"] else "all bfloat16"
            again = "checkpointing" if case["checkpointing"] else "none"
            labels += [f"torch, {weights}", again, case["attention"]]
        else:
            attended = row.get("attention", case["attention"]).partition(":")[0]
            labels += ["jaxrl_llm, float32 masters", case["remat"], attended]
        if "error" in row:
            lines.append([*labels, row["error"], "", "", "", ""])
            continue
        speed = f"{sum(lengths) / row['seconds']:.0f}"
        mfu = [
            _share(count(spec_of(case["shape"]), lengths) / row["seconds"], peak and peak.flops)
            for count in (update_flops, scored_flops)
        ]
        lines.append([*labels, f"{row['seconds']:.3f}", speed, *mfu, _gb(row)])
    head = "micro-batch, lengths, system, computed again, attention, s, tokens/s, MFU"
    head += ", of scored tokens, peak GB"
    note = "MFU counts the head for all tokens; the next column for those that are scored."
    return f"{note}\n\n{markdown_table(head.split(', '), lines)}"


def attention_table(rows: Sequence[Row], peak: Peak | None) -> str:
    """Return attention alone: time, and rates of causal attention's operations.

    A pair of tokens costs a product and a sum in scores and in mixing, 4 times the head's width.
    The backward pass has 2.5 times as many.
    """
    lines = []
    for row in rows:
        count, length, segments = row["case"]["case"]
        heads, _, width = row["case"]["heads"]
        labels = [f"{count} × {length}", str(segments), f"{row['system']} {row['case']['by']}"]
        if "error" in row:
            lines.append([*labels, row["error"], "", "", "", ""])
            continue
        ops = 4 * heads * width * causal_pairs(0, *[length // segments] * segments * count)
        rates = ops / row["forward_seconds"], 3.5 * ops / row["seconds"]
        off = f"{row['difference']:.2%}" if "difference" in row else "-"
        lines.append(
            [
                *labels,
                f"{1e3 * row['forward_seconds']:.3f}",
                f"{rates[0] / 1e12:.1f}",
                f"{1e3 * row['seconds']:.3f}",
                f"{rates[1] / 1e12:.1f} ({_share(rates[1], peak and peak.flops)})",
                off,
            ]
        )
    head = "rows, segments, by, forward ms, TFLOP/s, and backward ms, TFLOP/s, off from float32"
    return markdown_table(head.split(", "), lines)


def logprobs_table(rows: Sequence[Row], peak: Peak | None) -> str:
    """Return chunk sizes of log-probs: three products of tokens, width and vocabulary."""
    lines = []
    for row in rows:
        tokens, width, vocabulary = row["case"]["scored"]
        labels = [f"{tokens} × {width} × {vocabulary}", str(row["case"]["chunk"])]
        if "error" in row:
            lines.append([*labels, row["error"], "", ""])
            continue
        rate = 6 * tokens * width * vocabulary / row["seconds"]
        share = _share(rate, peak and peak.flops)
        scratch = f"{row['scratch_bytes'] / 1e9:.2f}"
        lines.append([*labels, f"{1e3 * row['seconds']:.2f}", share, scratch])
    return markdown_table(["tokens × D × V", "chunk", "ms", "of peak", "scratch GB"], lines)


def experts_table(rows: Sequence[Row], peak: Peak | None) -> str:
    """Return grouped products: one forward, three with the backward pass."""
    lines = []
    for row in rows:
        count, experts, width, inner = row["case"]["experts"]
        labels = [f"{count} × {width} × {inner}", str(experts)]
        labels.append(f"{row['system']} {row['case']['by']}")
        if "error" in row:
            lines.append([*labels, row["error"], "", "", ""])
            continue
        ops = 2 * count * width * inner
        rates = ops / row["forward_seconds"], 3 * ops / row["seconds"]
        lines.append(
            [
                *labels,
                f"{1e3 * row['forward_seconds']:.3f}",
                _share(rates[0], peak and peak.flops),
                f"{1e3 * row['seconds']:.3f}",
                _share(rates[1], peak and peak.flops),
            ]
        )
    head = "rows × D × F, experts, by, forward ms, of peak, and backward ms, of peak"
    return markdown_table(head.split(", "), lines)


def parity_table(rows: Sequence[Row], peak: Peak | None) -> str:
    """Return how far log-probs and gradients are from transformers' in float32."""
    lines = []
    for row in rows:
        case = row["case"]
        by = f"engine, {case['engine']}" if case["by"] == "engine" else case["by"]
        labels = [by, case["dtype"], " × ".join(map(str, case["parity"]))]
        if "error" in row:
            lines.append([*labels, row["error"], "", ""])
            continue
        gradient = f"{row['gradient']:.2e}" if "gradient" in row else "-"
        lines.append([*labels, f"{row['mean']:.2e}", f"{row['most']:.2e}", gradient])
    head = ["by", "dtype", "sequences × tokens", "mean of log-probs", "most", "gradient"]
    note = "Differences from transformers in float32; of the gradient, by its norm."
    return f"{note}\n\n{markdown_table(head, lines)}"


def target_table(rows: Sequence[Row], peak: Peak | None) -> str:
    """Return where the device's description is."""
    return "\n".join(row.get("error", "`target.txtpb`, beside this file") for row in rows)


def profile_table(rows: Sequence[Row], peak: Peak | None) -> str:
    """Return where the time of an update went."""
    texts = []
    for row in rows:
        if "error" in row:
            texts.append(row["error"])
            continue
        shares = [[name, f"{100 * part:.1f} %"] for name, part in row["shares_of_busy"].items()]
        outside = f"{100 * row['outside_matrix_products_and_attention']:.1f} %"
        shares += [["outside matrix products and attention", outside]]
        shares += [["device busy, of the step", f"{100 * row['device_busy']:.1f} %"]]
        texts += [markdown_table(["operations", "share"], shares), f"```\n{row['summary']}```"]
    return "\n\n".join(texts)


def decode_table(rows: Sequence[Row], peak: Peak | None) -> str:
    """Return generation, and how near its steps are to the time that reading memory takes."""
    rate = max((row["bandwidth"] for row in rows if "bandwidth" in row), default=None)
    lines = []
    for row in rows:
        (prompt, new), requests = row["case"]["answer"], row["case"]["requests"]
        engine = row["case"].get("engine")
        system = row["system"] if engine is None else f"{row['system']}, {engine}"
        labels = [str(requests), f"{prompt} + {new}", system]
        if "error" in row:
            lines.append([*labels, row["error"], *[""] * 6])
            continue
        settings = ENGINES.get(engine or "", {}).get("settings", {})
        spec = spec_of(row["case"]["shape"])
        read = decoding_bytes(spec, requests, range(prompt + new // 2, prompt + new), **settings)
        steps = row["seconds"] - row["half_seconds"]
        lines.append(
            [
                *labels,
                f"{row['seconds']:.2f}",
                f"{requests * new / row['seconds']:.0f}",
                f"{requests * (new - new // 2) / steps:.0f}",
                f"{1e3 * steps / (new - new // 2):.2f}",
                _share(read / steps, rate),
                str(row.get("compilations", "-")),
                _gb(row),
            ]
        )
    head = "requests, prompt + answer, system, s, tokens/s, second half, ms a step"
    head += ", of the floor, compiled, peak GB"
    source = "given" if any(row["case"].get("bandwidth") for row in rows) else "measured"
    shown = f"{rate / 1e12:.2f} TB/s ({source})" if rate else "a rate that was not measured"
    note = "Tokens/s with prefill, and in the second half of the answers, as the columns after it. "
    note += f"The floor of a step: weights and the keys and values so far, read once at {shown}."
    nominal = f" The memory is said to give {peak.bandwidth / 1e12:.2f} TB/s." if peak else ""
    return f"{note}{nominal}\n\n{markdown_table(head.split(', '), lines)}"


def decoding_bytes(
    spec: ModelSpec,
    requests: int,
    contexts: Sequence[int],
    *,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
) -> int:
    """Count the bytes that the steps of an answer have to read.

    Each reads the weights once, and the keys and values of all tokens up to the one it is given, in
    bfloat16; layers in a byte a number with `fp8`, and keys and values with `int8`, with a scale of
    two bytes for each head.

    Args:
        spec: The model.
        requests: That are decoded at once.
        contexts: Tokens of each of them before each step.
        quantization: Of the weights.
        kv_cache_dtype: Of keys and values.
    """
    layers, logits, _ = active_parameters(spec)
    weights = (1 if quantization == "fp8" else 2) * layers + 2 * logits
    head = spec.head_dim + 2 if kv_cache_dtype == "int8" else 2 * spec.head_dim
    per_token = 2 * spec.layers * spec.kv_heads * head
    return len(contexts) * weights + requests * per_token * sum(contexts)


TABLES: dict[str, tuple[str, Callable[[Sequence[Row], Peak | None], str]]] = {
    "target": ("The device as XLA's compiler knows it", target_table),
    "parity": ("Log-probs and gradients against transformers", parity_table),
    "update": ("Actor updates", update_table),
    "decode": ("Generation", decode_table),
    "experts": ("Grouped products of experts", experts_table),
    "attention": ("Causal attention over packed rows", attention_table),
    "logprobs": ("Gradient of log-probs, by chunk", logprobs_table),
    "profile": ("Where an update's time goes", profile_table),
}
"""The title and table of each part."""


def page(results: Row) -> str:
    """Return all tables as Markdown."""
    peak = peak_of(results["machine"]["device"])
    lines = [f"`{results['command']}`, {results['date']}", json.dumps(results["machine"])]
    if peak:
        lines.append(
            f"Peaks: {peak.flops / 1e12:.0f} TFLOP/s in bfloat16, {peak.bandwidth / 1e12:.2f} TB/s "
            f"({peak.source}). MFU counts 6 operations per parameter and token, causal attention "
            "within sequences, and nothing twice."
        )
    for name, (title, table) in TABLES.items():
        rows = [row for row in results["rows"] if row["part"] == name]
        if rows:
            lines += [f"### {title}", table(rows, peak)]
    return "\n\n".join(lines) + "\n"


def summary(row: Row) -> str:
    """Return a row in one line."""
    case = {k: v for k, v in row["case"].items() if k not in ("shape", "runs", "tokens")}
    result = row.get("error") or f"{row['seconds']:.4f} s"
    return f"{row['part']}, {row['system']}, {case}: {result}"
