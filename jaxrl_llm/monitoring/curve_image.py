"""Curves as an SVG image: a few lines of text, which browsers and the Hugging Face hub draw."""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 40
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
CHARACTER = 6.6  # pixels of a legend's character, about

Number = float | int
Curve = tuple[Sequence[Number], Sequence[Number]]


def draw_curves(curves: Mapping[str, Curve]) -> str:
    """Draw curves over steps as an SVG image.

    Args:
        curves: steps and values by name; at least one has a point, and all values are finite.

    Returns:
        The image's text.

    >>> image = draw_curves({"score": ([0, 10], [0.25, 0.75])})
    >>> image.splitlines()[-2]
    '<polyline points="64.0,260.0 704.0,60.0" fill="none" stroke="#1f77b4" stroke-width="1.8"/>'
    """
    xs = [x for steps, _ in curves.values() for x in steps]
    ys = [y for _, values in curves.values() for y in values]
    x_range, y_range = _padded(xs, 0.0), _padded(ys, 0.1)

    def place(x: Number, y: Number) -> tuple[float, float]:
        across = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (y - y_range[0]) / (y_range[1] - y_range[0])
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#444">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',  # also on a dark page
    ]
    for y in nice_ticks(*y_range):
        _, down = place(x_range[0], y)
        lines.append(f'<path d="M{LEFT},{down:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(_text(LEFT - 8, down + 4, f"{y:g}", "end"))
    for x in filter(float.is_integer, nice_ticks(*x_range)):  # there are no half steps
        across, _ = place(x, y_range[0])
        lines.append(_text(across, HEIGHT - BOTTOM + 18, f"{x:.0f}", "middle"))
    lines.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle"))
    across = float(LEFT)
    for index, (name, (steps, values)) in enumerate(curves.items()):
        color = COLORS[index % len(COLORS)]
        points = [place(x, y) for x, y in zip(steps, values, strict=True)]
        lines.append(f'<rect x="{across:.1f}" y="15" width="12" height="4" fill="{color}"/>')
        lines.append(_text(across + 17, 21, name, "start"))
        across += 17 + CHARACTER * len(name) + 18
        if len(points) == 1:
            [(x, y)] = points
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
        else:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            lines.append(
                f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="1.8"/>'
            )
    return "\n".join([*lines, "</svg>", ""])


def nice_ticks(low: Number, high: Number) -> list[float]:
    """Return about five round numbers from low to high.

    >>> nice_ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    digits = max(0, -math.floor(math.log10(width)))
    return [round(n * width, digits) for n in range(first, last + 1)]


def _padded(values: Sequence[Number], share: float) -> tuple[float, float]:
    """Return the range of some values, a little larger and never empty."""
    low, high = min(values), max(values)
    if low == high:
        width = max(0.5, 1e-3 * abs(low))
        return low - width, high + width
    return low - share * (high - low), high + share * (high - low)


def _text(x: Number, y: Number, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
