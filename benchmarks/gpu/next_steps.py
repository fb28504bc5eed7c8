"""What the rows of `benchmarks.gpu.quarter_hour` say to do next: sentences with their figures."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.gpu.decode_probe import TIMED
from benchmarks.gpu.jobs import Row

MOST_HOST = 0.05  # of a chunk's time on the device
MOST_PREFILL = 0.15  # of a call
MOST_ATTENTION = 0.45  # of the kernels' time
MOST_OTHER = 0.15
LEAST_BUSY = 0.9
MOST_OUTSIDE = 0.25  # of an update
GAIN = 0.02  # that is worth a change


def next_steps(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each thing that can be said of the rows, those of errors last."""
    steps = []
    for rule in RULES:
        try:
            steps += rule(rows)
        except (KeyError, ZeroDivisionError) as error:
            steps.append(f"No sentence from {rule.__name__}: {error!r} in its rows.")
    errors = [f"{row['phase']}: {row['error']}" for row in rows if row.get("error")]
    return steps + [f"Not measured: {error}." for error in errors]


def _find(rows: Sequence[Row], phase: str, what: str | None = None) -> Row | None:
    """Return the first row of a phase with results, of one thing that it measured if it is named.

    >>> _find([{"phase": "a", "error": "-"}, {"phase": "a", "seconds": 1}], "a")
    {'phase': 'a', 'seconds': 1}
    """
    for row in rows:
        named = what is None or row.get("what") == what
        if row["phase"] == phase and named and not row.keys() & {"error", "ended"}:
            return row
    return None


def _decode(rows: Sequence[Row]) -> Iterator[str]:
    timed, plain = _find(rows, "decode", TIMED), _find(rows, "decode", "fresh prompts")
    if plain:
        yield f"Decoding: {plain['tokens_per_second']:.0f} tokens/s with prefill."
    if not timed:
        return
    token, host = timed["decode_ms_a_token"], timed["host_ms_a_chunk"]
    chunk = token * timed["tokens_a_chunk"]
    yield f"A token takes {token:.2f} ms; reading memory alone takes {timed['of_floor']:.0%} of it."
    if host > MOST_HOST * chunk:
        yield (
            f"The host takes {host:.1f} ms between chunks of {chunk:.1f} ms ({host / chunk:.0%}): "
            "give the next chunk to the device before the last one is read."
        )
    else:
        yield f"The host takes {host / chunk:.1%} of a chunk: leave it."
    prefill = timed["prefill_seconds"] / timed["seconds"]
    if prefill > MOST_PREFILL:
        yield (
            f"Prefill takes {prefill:.0%} of a call ({timed['prefill_programs']} programs, "
            f"{timed['prefill_seconds']:.2f} s): pack prompts into full rows."
        )


def _trace(rows: Sequence[Row]) -> Iterator[str]:
    trace = _find(rows, "decode", "trace")
    if not trace:
        return
    shares = {"attention": 0.0, "matrix products": 0.0, "other": 0.0, "copies": 0.0}
    shares |= trace["shares"]
    if shares["attention"] > MOST_ATTENTION:
        yield f"Attention takes {shares['attention']:.0%} of the kernels' time: its kernel is next."
    else:
        yield (
            f"Matrix products take {shares['matrix products']:.0%} of the kernels' time, "
            f"attention {shares['attention']:.0%}."
        )
    if (small := shares["other"] + shares["copies"]) > MOST_OTHER:
        yield (
            f"Small kernels and copies take {small:.0%} ({trace['kernels_a_token']:.0f} kernels a "
            "token in all): fuse norms, rotation, cache writes and the sampler."
        )
    if trace["device_busy"] < LEAST_BUSY:
        yield (
            f"The device is busy {trace['device_busy']:.0%} of the traced call: look for gaps "
            "between kernels and between chunks (a trace itself costs some)."
        )


def _versus(phase: str, good: str, bad: str) -> Callable[[Sequence[Row]], Iterator[str]]:
    """Return a rule that compares a token's time in a phase with that of `decode`."""

    def rule(rows: Sequence[Row]) -> Iterator[str]:
        plain, other = _find(rows, "decode", TIMED), _find(rows, phase, TIMED)
        if plain and other:
            before, after = plain["decode_ms_a_token"], other["decode_ms_a_token"]
            verdict = good if after < before * (1 - GAIN) else bad
            yield f"{phase}: {after:.2f} ms a token instead of {before:.2f}: {verdict}."

    return rule


def _torch(rows: Sequence[Row]) -> Iterator[str]:
    plain, other = _find(rows, "decode", "fresh prompts"), _find(rows, "decode-torch")
    if plain and other:
        yield (
            f"torch's generate takes {other['seconds']:.2f} s for the same requests, we "
            f"{plain['seconds']:.2f} s: {other['seconds'] / plain['seconds']:.1f} times as long."
        )


def _kernel(rows: Sequence[Row]) -> Iterator[str]:
    found = [r for r in rows if r["phase"] == "kernel" and "microseconds" in r]
    variants = [r for r in found if "stages" in r]
    if variants:
        first, best = found[0], min(variants, key=lambda r: r["microseconds"])
        gain = 1 - best["microseconds"] / first["microseconds"]
        how = (
            f"{best['stages']} stages, {best['tokens_at_once']} tokens at once, "
            f"{best['warps']} warps"
        )
        verdict = f"take them: {gain:.0%} less time" if gain > GAIN else "not worth a change"
        yield (
            f"attend_pages reads {first['terabytes_a_second']:.2f} TB/s; the best variant has "
            f"{how} ({best['terabytes_a_second']:.2f} TB/s): {verdict}."
        )
    tables = [r for r in found if "table_tokens" in r]
    if len(tables) > 1:
        extra = tables[-1]["microseconds"] - tables[0]["microseconds"]
        yield (
            f"A table of {tables[-1]['table_tokens']} tokens costs {extra:.0f} us a layer more "
            f"than one of {tables[0]['table_tokens']} for the same sequences: "
            + ("start no programs for parts past a sequence's end." if extra > 20 else "leave it.")
        )


def _updates(rows: Sequence[Row]) -> Iterator[str]:
    done = [r for r in rows if r["phase"] == "updates" and "seconds" in r]
    found = [r for r in done if r["case"]["do"] == "update"]
    profiles = [r for r in done if r["case"]["do"] == "profile"]
    for profile in profiles:
        outside = profile["outside_matrix_products_and_attention"]
        yield (
            f"Of an update {outside:.0%} is outside of matrix products and attention"
            + (": look at its copies and casts first." if outside > MOST_OUTSIDE else ".")
        )
    if not found:
        return
    best = min(found, key=lambda r: r["seconds"])
    times = ", ".join(f"{r['case']['logprob_chunk']}: {r['seconds']:.3f} s" for r in found)
    yield f"Log-prob chunks {times}: {best['case']['logprob_chunk']} is the fastest."
    if "mfu" in best:
        yield (
            f"MFU is {best['mfu']:.1%}, {best['mfu_scored']:.1%} with the head counted for scored "
            "tokens only."
        )


def _push(rows: Sequence[Row]) -> Iterator[str]:
    found = {
        r["what"]: r["gigabytes_a_second"]
        for r in rows
        if r["phase"] == "push" and "gigabytes_a_second" in r
    }
    right = _find(rows, "push", "CUDA IPC: the sum is right")
    if right:
        rate = found.get("CUDA IPC: copy in torch's process", 0.0)
        yield (
            f"CUDA IPC works, {rate:.0f} GB/s: push weights by handles on one GPU."
            if right["right"]
            else "CUDA IPC gave a wrong sum: do not push weights by it."
        )
    today = next((rate for what, rate in found.items() if "written for vLLM" in what), None)
    on_host, on_device = (found.get(f"transposed copy on the {at}") for at in ("host", "device"))
    if today and on_host and on_device:
        yield (
            f"A push over the host writes {today:.2f} GB/s; transposing runs at {on_host:.2f} GB/s "
            f"there and at {on_device:.0f} GB/s on the device"
            + (": transpose there." if on_device > 2 * on_host else ".")
        )


RULES: tuple[Callable[[Sequence[Row]], Iterator[str]], ...] = (
    _decode,
    _trace,
    _versus("decode-while", "make it the default", "leave the option alone"),
    _torch,
    _kernel,
    _updates,
    _push,
    _versus("decode-long", "no cost of long tables", "long tables cost that"),
    _versus("decode-int8", "an int8 cache pays", "an int8 cache does not pay here"),
    _versus("decode-fp8", "float8 weights pay", "float8 weights do not pay here"),
)
"""In the order of the phases."""
